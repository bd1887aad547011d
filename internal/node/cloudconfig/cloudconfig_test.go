package cloudconfig

import (
	"bytes"
	"compress/gzip"
	"encoding/base64"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	kubeadmv1 "sigs.k8s.io/cluster-api/api/bootstrap/kubeadm/v1beta2"
	"sigs.k8s.io/cluster-api/bootstrap/kubeadm/pkg/cloudinit"
)

var metadata = map[string]string{"local_hostname": "m-1", "instance_id": "i-1", "provider_id": "capstan:///c/m-1"}

func zipped(text string) []byte {
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	_, _ = w.Write([]byte(text))
	_ = w.Close()
	return b.Bytes()
}

func b64(data []byte) string { return base64.StdEncoding.EncodeToString(data) }

// IM-08: supported settings have the same meaning as in cloud-init.
func TestParse(t *testing.T) {
	tests := map[string]struct {
		data string
		want Config
	}{
		"no settings":      {"#cloud-config\n", Config{}},
		"null":             {"#cloud-config\n~\n", Config{}},
		"carriage returns": {"#cloud-config\r\nhostname: a\r\n", Config{Hostname: "a"}},
		"commands": {
			"#cloud-config\nbootcmd: [echo a]\nruncmd:\n- echo b\n- [echo, 'it''s', 3]\n",
			Config{BootCommands: []Command{{Shell: "echo a"}}, RunCommands: []Command{{Shell: "echo b"}, {Args: []string{"echo", "it's", "3"}}}},
		},
		"host name": {
			"#cloud-config\nhostname: a\nfqdn: b.example.org\npreserve_hostname: yes\n",
			Config{Hostname: "a", FQDN: "b.example.org", PreserveHostname: true},
		},
		"files": {
			"#cloud-config\nwrite_files:\n" +
				"- {path: /a, content: \"x\\n\", permissions: '0600', owner: 'root:root'}\n" +
				"- {path: /b, content: x, permissions: 0640, append: true}\n" +
				"- {path: /c, content: x, permissions: 416, defer: true}\n" +
				"- {path: /d, permissions: '4755'}\n",
			Config{Files: []File{
				{Path: "/a", Content: []byte("x\n"), Mode: 0o600, Owner: "root:root"},
				{Path: "/b", Content: []byte("x"), Mode: 0o640, Append: true},
				{Path: "/c", Content: []byte("x"), Mode: 0o640, Defer: true},
				{Path: "/d", Content: []byte{}, Mode: 0o755 | os.ModeSetuid},
			}},
		},
		"users": {
			"#cloud-config\nusers:\n- {name: ann, groups: 'a, b', sudo: 'ALL=(ALL) NOPASSWD:ALL', lock_passwd: false, ssh_authorized_keys: [k]}\n- {name: bob, groups: [c], sudo: false}\n",
			Config{Users: []User{
				{Name: "ann", Groups: []string{"a, b"}, Sudo: []string{"ALL=(ALL) NOPASSWD:ALL"}, LockPasswd: new(bool), SSHAuthorizedKeys: []string{"k"}},
				{Name: "bob", Groups: []string{"c"}},
			}},
		},
		"template": {
			"## template: jinja\n#cloud-config\nhostname: {{ ds.meta_data.local_hostname }}\nruncmd: ['{{v1.instance_id}} {{- ds.meta_data.provider_id -}} x']\n",
			Config{Hostname: "m-1", RunCommands: []Command{{Shell: "i-1 capstan:///c/m-1 x"}}},
		},
		"no template":    {"#cloud-config\nruncmd: ['echo {{ x }} {% y']\n", Config{RunCommands: []Command{{Shell: "echo {{ x }} {% y"}}}},
		"anchors":        {"#cloud-config\nruncmd: &c [a]\nbootcmd: *c\n", Config{RunCommands: []Command{{Shell: "a"}}, BootCommands: []Command{{Shell: "a"}}}},
		"ntp off":        {"#cloud-config\nntp: {enabled: false}\n", Config{NTP: &NTP{Enabled: new(bool)}}},
		"empty lists":    {"#cloud-config\nmounts: []\ndisk_setup: {}\nfs_setup: []\n", Config{}},
		"document start": {"#cloud-config\n---\nhostname: a\n", Config{Hostname: "a"}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			got, err := Parse([]byte(tt.data), metadata)
			if err != nil {
				t.Fatal(err)
			}
			options := cmp.Options{
				cmpopts.IgnoreUnexported(File{}), cmpopts.EquateEmpty(), cmpopts.IgnoreFields(Config{}, "DiskSetup"),
			}
			if diff := cmp.Diff(tt.want, *got, options); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestEncodings(t *testing.T) {
	plain := "content\n"
	for encoding, content := range map[string]string{
		"":           plain,
		"text/plain": plain,
		"b64":        b64([]byte(plain)), "base64": b64([]byte(plain))[:4] + "\n" + b64([]byte(plain))[4:] + "\n",
		"gz": string(zipped(plain)), "gzip": string(zipped(plain)),
		"gz+b64": b64(zipped(plain)), "gz+base64": b64(zipped(plain)), "gzip+b64": b64(zipped(plain)), "gzip+base64": b64(zipped(plain)) + "\n",
		"GZip+Base64": b64(zipped(plain)),
	} {
		got, err := decodeContent(content, encoding)
		if err != nil || string(got) != plain {
			t.Errorf("%q: %q, %v", encoding, got, err)
		}
	}
	// gzip without base64 is YAML's !!binary.
	config, err := Parse([]byte("#cloud-config\nwrite_files: [{path: /a, encoding: gzip, content: !!binary "+b64(zipped(plain))+"}]\n"), nil)
	if err != nil || string(config.Files[0].Content) != plain {
		t.Errorf("!!binary: %v", err)
	}
}

// Errors name the unsupported key and do not quote the data.
func TestRefused(t *testing.T) {
	const secret = "hunter2hunter2"
	tests := map[string]struct {
		data string
		want []string
	}{
		"script":            {"#!/bin/sh\necho " + secret, []string{"only cloud-config is supported"}},
		"empty":             {"", []string{"only cloud-config is supported"}},
		"not yaml":          {"#cloud-config\nruncmd: [" + secret, []string{"line"}},
		"list":              {"#cloud-config\n- a\n", []string{"not a YAML mapping"}},
		"documents":         {"#cloud-config\nhostname: a\n---\nhostname: b\n", []string{"several YAML documents"}},
		"unknown keys":      {"#cloud-config\npackages: [" + secret + "]\nswap: {}\n", []string{"packages is not supported", "swap is not supported"}},
		"data as a key":     {"#cloud-config\n\"" + secret + " x\": 1\n", []string{"a key that is not a name is not supported"}},
		"duplicate key":     {"#cloud-config\nruncmd: [a]\nruncmd: [b]\n", []string{"runcmd occurs twice"}},
		"unknown file key":  {"#cloud-config\nwrite_files: [{path: /a, source: {uri: x}}]\n", []string{"write_files[0].source is not supported"}},
		"file key by alias": {"#cloud-config\nusers: []\nwrite_files: [&f {path: /a, secret: x}, *f]\n", []string{"write_files[1].secret"}},
		"unknown user key":  {"#cloud-config\nusers: [{name: a, uid: 7}]\n", []string{"users[0].uid is not supported"}},
		"default user":      {"#cloud-config\nusers: [default]\n", []string{"users[0]", "default"}},
		"bad files": {
			"#cloud-config\nwrite_files:\n- {path: a}\n- {path: /a/../b}\n- {path: /c, encoding: rot13}\n- {path: /d, encoding: b64, content: '" + secret + "!'}\n- {path: /e, permissions: '0999'}\n- {path: /f, encoding: gz, content: x}\n- {path: /g, owner: 'a b'}\n",
			[]string{"write_files[0]: path", "write_files[1]: path", "write_files[2]: encoding: rot13", "write_files[3]: content: is not base64", "write_files[4]: permissions", "write_files[5]: content: is not gzip", "write_files[6]: owner"},
		},
		"clock":           {"#cloud-config\nntp: {enabled: true, servers: [a]}\n", []string{"ntp is not supported: a machine has its host's clock"}},
		"disks":           {"#cloud-config\ndisk_setup: {a: {}}\nfs_setup: [{label: x}]\nmounts: [[a, b]]\n", []string{"disk_setup", "fs_setup", "mounts"}},
		"hostname":        {"#cloud-config\nhostname: 'a b'\n", []string{"hostname"}},
		"empty command":   {"#cloud-config\nruncmd: [[]]\n", []string{"the command is empty"}},
		"nested command":  {"#cloud-config\nruncmd: [[a, [b]]]\n", []string{"not a string"}},
		"mapping command": {"#cloud-config\nruncmd: [{a: " + secret + "}]\n", []string{"a command is"}},
		"wrong type":      {"#cloud-config\nruncmd: " + secret + "\n", []string{"line 2"}},
		"wrong bool":      {"#cloud-config\npreserve_hostname: " + secret + "\n", []string{"line 2"}},
		"other template":  {"## template: mako\n#cloud-config\n", []string{"jinja"}},
		"unknown variable": {
			"## template: jinja\n#cloud-config\nhostname: {{ ds.meta_data.nope }}\nfqdn: {{ x }}\n",
			[]string{"ds.meta_data.nope is unknown", "template variable x is unknown", "local_hostname"},
		},
		"statement":  {"## template: jinja\n#cloud-config\n{% if a %}\n", []string{"{%"}},
		"filter":     {"## template: jinja\n#cloud-config\nhostname: {{ ds.meta_data.local_hostname | upper }}\n", []string{"{{"}},
		"user colon": {"#cloud-config\nusers: [{name: a, passwd: 'x:y'}]\n", []string{"passwd"}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			_, err := Parse([]byte(tt.data), metadata)
			if err == nil {
				t.Fatal("Parse accepted the data")
			}
			for _, want := range tt.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("want %q in: %v", want, err)
				}
			}
			if strings.Contains(err.Error(), "hunter2") {
				t.Errorf("the error quotes the data: %v", err)
			}
		})
	}
}

func TestTooLarge(t *testing.T) {
	bomb := b64(zipped(strings.Repeat("\x00", MaxFileBytes+1)))
	if _, err := decodeContent(bomb, "gz+b64"); err == nil || !strings.Contains(err.Error(), "more than") {
		t.Errorf("got %v", err)
	}
}

// Parse accepts everything that KubeadmConfig generates. The test uses the templates of Cluster API.
func TestKubeadmConfig(t *testing.T) {
	data, err := cloudinit.NewNode(&cloudinit.NodeInput{
		BaseUserData: cloudinit.BaseUserData{
			BootCommands:        []string{"echo boot"},
			PreKubeadmCommands:  []string{`echo "{{ ds.meta_data.local_hostname }}"`},
			PostKubeadmCommands: []string{"echo post"},
			AdditionalFiles: []kubeadmv1.File{
				{Path: "/etc/a", Owner: "root:root", Permissions: "0600", Content: "a: b\n", Append: new(true)},
				{Path: "/etc/b", Encoding: kubeadmv1.GzipBase64, Content: b64(zipped("b"))},
			},
			Users: []kubeadmv1.User{{
				Name: "ann", Gecos: "Ann", Groups: "wheel", Shell: "/bin/sh", HomeDir: "/home/ann", PrimaryGroup: "users",
				Sudo: "ALL=(ALL) NOPASSWD:ALL", LockPassword: new(true), SSHAuthorizedKeys: []string{"ssh-ed25519 AAAA"},
			}},
			SentinelFileCommand: "echo success > /run/cluster-api/bootstrap-success.complete",
		},
		JoinConfiguration: "kind: JoinConfiguration\nname: '{{ ds.meta_data.local_hostname }}'\n",
	})
	if err != nil {
		t.Fatal(err)
	}
	config, err := Parse(data, metadata)
	if err != nil {
		t.Fatalf("%v\n%s", err, data)
	}
	files := map[string]string{}
	for _, f := range config.Files {
		files[f.Path] = string(f.Content)
	}
	if files["/etc/b"] != "b" || !strings.Contains(files["/run/kubeadm/kubeadm-join-config.yaml"], "name: 'm-1'") {
		t.Errorf("files: %q", files)
	}
	if len(config.RunCommands) != 3 || config.RunCommands[0].Shell != `echo "m-1"` || !strings.Contains(config.RunCommands[1].Shell, "bootstrap-success.complete") {
		t.Errorf("runcmd: %+v", config.RunCommands)
	}
	if len(config.BootCommands) != 1 || len(config.Users) != 1 || config.Users[0].PrimaryGroup != "users" {
		t.Errorf("%+v", config)
	}
}

func TestCommandString(t *testing.T) {
	if got := (Command{Args: []string{"a b", "it's"}}).String(); got != `'a b' 'it'\''s'` {
		t.Error(got)
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte("#cloud-config\nwrite_files: [{path: /a, content: x, encoding: gz+b64, permissions: 0644}]\n"))
	f.Add([]byte("## template: jinja\n#cloud-config\nhostname: {{ ds.meta_data.local_hostname }}\n"))
	f.Add([]byte("#cloud-config\nusers: [&a {name: a, groups: [b], sudo: false}, *a]\nruncmd: [[a, b], c]\n"))
	f.Add([]byte("#cloud-config\na: &a [*a]\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		config, err := Parse(data, metadata)
		if err != nil {
			return
		}
		for _, file := range config.Files {
			if !strings.HasPrefix(file.Path, "/") || strings.Contains(file.Path, "/../") {
				t.Errorf("path %q was accepted", file.Path)
			}
		}
		for _, c := range append(config.BootCommands, config.RunCommands...) {
			if c.Args != nil && len(c.Args) == 0 {
				t.Error("a command without a program was accepted")
			}
		}
	})
}
