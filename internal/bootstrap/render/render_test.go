package render_test

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"encoding/base64"
	"errors"
	"flag"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	"capstan.dev/capstan/internal/bootstrap/render"
	"capstan.dev/capstan/internal/node/cloudconfig"
	"capstan.dev/capstan/internal/node/nodeconfig"
)

var update = flag.Bool("update", false, "write the golden files")

func network(t *testing.T, config bootstrapv1.ClusterConfiguration) nodeconfig.Network {
	t.Helper()
	out, err := render.Network(&clusterv1.Cluster{}, config)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func worker(t *testing.T) render.Input {
	return render.Input{
		ClusterName: "demo", KubernetesVersion: "v1.36.3", Role: nodeconfig.RoleWorker,
		Endpoint: "10.200.0.1:6443", APIServerPort: 6443, Token: "abcdef.0123456789abcdef",
		Network:      network(t, render.WithDefaults(bootstrapv1.ClusterConfiguration{})),
		Certificates: []render.File{{Path: "/etc/kubernetes/pki/ca.crt", Permissions: "0644", Content: []byte("CA\n")}},
	}
}

func controlPlane(t *testing.T) render.Input {
	in := worker(t)
	in.Role, in.Token = nodeconfig.RoleInit, ""
	in.Certificates = append(in.Certificates, render.File{Path: "/etc/kubernetes/pki/ca.key", Permissions: "0600", Content: []byte("KEY\n")})
	in.EncryptionKey = []byte(strings.Repeat("k", render.EncryptionKeySize))
	return in
}

// everything sets every field.
func everything(t *testing.T) render.Input {
	in := controlPlane(t)
	secret := func(name, key string) bootstrapv1.SecretKeyReference {
		return bootstrapv1.SecretKeyReference{Name: name, Key: key}
	}
	in.Spec = bootstrapv1.CapstanConfigSpec{
		Cluster: bootstrapv1.ClusterConfiguration{
			APIServer: bootstrapv1.APIServerSpec{
				ExtraArgs:      []bootstrapv1.Arg{{Name: "v", Value: "2"}},
				Env:            []bootstrapv1.EnvVar{{Name: "GOGC", Value: "1"}},
				CertSANs:       []string{"api.example.com"},
				AuditPolicy:    bootstrapv1.Document{Content: "apiVersion: audit.k8s.io/v1\nkind: Policy\nrules: [{level: Metadata}]\n"},
				Authentication: bootstrapv1.Document{ContentFrom: bootstrapv1.ContentSource{Secret: secret("oidc", "config")}},
			},
			ControllerManager:       bootstrapv1.ComponentSpec{ExtraArgs: []bootstrapv1.Arg{{Name: "node-monitor-period", Value: "2s"}}, Env: []bootstrapv1.EnvVar{{Name: "GOGC", Value: "2"}}},
			Scheduler:               bootstrapv1.ComponentSpec{ExtraArgs: []bootstrapv1.Arg{{Name: "v", Value: "3"}}, Env: []bootstrapv1.EnvVar{{Name: "GOGC", Value: "3"}}},
			Etcd:                    bootstrapv1.EtcdSpec{ExtraArgs: []bootstrapv1.Arg{{Name: "quota-backend-bytes", Value: "8589934592"}}, Env: []bootstrapv1.EnvVar{{Name: "GOGC", Value: "4"}}},
			Encryption:              bootstrapv1.EncryptionSpec{Mode: bootstrapv1.EncryptionAESGCM, Resources: []string{"secrets", "configmaps"}},
			PodNetwork:              bootstrapv1.PodNetworkNone,
			CertificateValidityDays: 90,
			EncryptionAlgorithm:     "RSA-3072",
			CoreDNS: bootstrapv1.CoreDNSSpec{
				Upstreams:   []string{"10.0.0.53", "[fd00::53]:5353"},
				StubDomains: []bootstrapv1.StubDomain{{Domain: "corp.example.com", Servers: []string{"10.0.0.54:53"}}},
			},
		},
		Kubelet: bootstrapv1.KubeletSpec{
			ExtraArgs:     []bootstrapv1.Arg{{Name: "max-pods", Value: "50"}},
			Env:           []bootstrapv1.EnvVar{{Name: "GOGC", Value: "5"}},
			Configuration: runtime.RawExtension{Raw: []byte(`{"evictionHard":{"nodefs.available":"2Gi"},"containerLogMaxFiles":3}`)},
		},
		Node: bootstrapv1.NodeSpec{
			Labels: map[string]string{"disk": "ssd"},
			Taints: &[]bootstrapv1.Taint{{Key: "a", Value: "b", Effect: corev1.TaintEffectNoExecute}},
		},
		Files: []bootstrapv1.File{
			{Path: "/etc/motd", Content: "hello: \"world\"\n\ttab # no comment\n", Append: ptr.To(true)},
			{Path: "/etc/secret", ContentFrom: bootstrapv1.ContentSource{Secret: secret("files", "binary")}, Owner: "nobody:nogroup"},
			{Path: "/etc/encoded", Content: "aGVsbG8=", Encoding: bootstrapv1.EncodingBase64, Permissions: "0700"},
			{Path: "/home/ann/notes", Content: "of ann", Owner: "ann:ann"},
			{Path: "/etc/compressed", ContentFrom: bootstrapv1.ContentSource{Secret: secret("files", "gzip")}, Encoding: bootstrapv1.EncodingGzip},
		},
		Users: []bootstrapv1.User{
			{Name: "ann", Gecos: "Ann Example", PrimaryGroup: "staff", Groups: []string{"adm"}, HomeDir: "/home/ann", Shell: "/bin/bash",
				PasswdFrom: bootstrapv1.PasswdSource{Secret: secret("ann", "hash")}, LockPassword: ptr.To(false), Sudo: "ALL=(ALL) NOPASSWD:ALL",
				SSHAuthorizedKeys: []string{"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIB ann: #1"}},
			{Name: "bob"},
		},
		PreCommands:  []string{"echo before"},
		PostCommands: []string{"echo 'after: all' # done"},
		Registries: []bootstrapv1.Registry{{
			Host: "registry.example.com:5000", Mirrors: []string{"https://mirror.example.com/proxy/v2"}, OverridePath: ptr.To(true),
			CA:          bootstrapv1.Document{ContentFrom: bootstrapv1.ContentSource{ConfigMap: bootstrapv1.ConfigMapKeyReference{Name: "registry", Key: "ca.crt"}}},
			Credentials: bootstrapv1.SecretReference{Name: "registry"},
		}},
		Images:    []string{"registry.example.com:5000/team/app:v1"},
		Proxy:     bootstrapv1.ProxySpec{HTTPS: "http://proxy.example.com:3128", NoProxy: []string{".example.com"}, ControlPlane: ptr.To(true)},
		KubeProxy: bootstrapv1.KubeProxySpec{Env: []bootstrapv1.EnvVar{{Name: "GOGC", Value: "6"}}, Configuration: runtime.RawExtension{Raw: []byte(`{"nftables":{"syncPeriod":"1m"}}`)}},
	}
	in.Network = network(t, render.WithDefaults(in.Spec.Cluster))
	in.Secrets = map[bootstrapv1.SecretKeyReference][]byte{
		secret("oidc", "config"):       []byte("apiVersion: apiserver.config.k8s.io/v1\nkind: AuthenticationConfiguration\n"),
		secret("files", "binary"):      {0xff, 0x00, 0xfe},
		secret("files", "gzip"):        {0x1f, 0x8b, 0x08, 0x00, 0x00, 0x00, 0x00, 0x00, 0x02, 0xff, 0x2b, 0xcd, 0x2b, 0x48, 0x4c, 0xce, 0x4e, 0x4d, 0x01, 0x00, 0x96, 0x62, 0x2f, 0xca, 0x08, 0x00, 0x00, 0x00},
		secret("ann", "hash"):          []byte(passwordHash + "\n"),
		secret("registry", "username"): []byte("me"),
		secret("registry", "password"): []byte("p: 'w\"\n"),
	}
	in.ConfigMaps = map[bootstrapv1.ConfigMapKeyReference][]byte{{Name: "registry", Key: "ca.crt"}: []byte(registryCA)}
	return in
}

// passwordHash has the form of a hash. It belongs to no password.
const passwordHash = "$6$saltsalt$hunter2hunter2"

// registryCA is a certificate. No test needs its key.
const registryCA = `-----BEGIN CERTIFICATE-----
MIIBfTCCASOgAwIBAgIUb0ZL32DG9ZIjAF24gh35DTqiR/UwCgYIKoZIzj0EAwIw
EzERMA8GA1UEAwwIcmVnaXN0cnkwIBcNMjYxMTIzMTUyMzI0WhgPMjEyNjEwMzAx
NTIzMjRaMBMxETAPBgNVBAMMCHJlZ2lzdHJ5MFkwEwYHKoZIzj0CAQYIKoZIzj0D
AQcDQgAEUG/emyjdWzWcFnYMohwTeHYJBFup5Bc8UkPDzmw7wR6QXJKC+4c0Wora
6FwEJWzIWQW2X0tyzPkcXmhSTnbDNqNTMFEwHQYDVR0OBBYEFLv7Xng1vQSyUqOq
9ZTWcsE0/jXHMB8GA1UdIwQYMBaAFLv7Xng1vQSyUqOq9ZTWcsE0/jXHMA8GA1Ud
EwEB/wQFMAMBAf8wCgYIKoZIzj0EAwIDSAAwRQIgLh2oFmGbVo/3OXeTbsX91Q7C
VPKgfuQMZuiDjGY18I8CIQCJTyMUo5i8TOCGoitQw2bOaLjzwKA4jfKS09JIqzA3
2Q==
-----END CERTIFICATE-----
`

// TestGolden compares the data of machines with files (BC-05, BC-06). `go test -update` writes the files.
func TestGolden(t *testing.T) {
	for name, in := range map[string]render.Input{
		"worker": worker(t), "control-plane": controlPlane(t), "everything": everything(t),
	} {
		t.Run(name, func(t *testing.T) {
			got, err := render.CloudConfig(in)
			if err != nil {
				t.Fatal(err)
			}
			golden := filepath.Join("testdata", name+".yaml")
			if *update {
				if err := os.WriteFile(golden, got, 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(got, want) {
				t.Errorf("differs from %s:\n%s", golden, got)
			}
		})
	}
}

// TestSentinel_BC05: the file that means success exists after all commands, and not if one of them failed.
func TestSentinel_BC05(t *testing.T) {
	if nodeconfig.SentinelPath != "/run/cluster-api/bootstrap-success.complete" {
		t.Errorf("the file is %s, which Cluster API does not know", nodeconfig.SentinelPath)
	}
	for _, failing := range []string{"", "before", "up", "after"} {
		in := worker(t)
		in.Spec.PreCommands, in.Spec.PostCommands = []string{"[ $FAILING != before ]"}, []string{"[ $FAILING != after ]"}
		config := parsed(t, in)
		script, folder := "", t.TempDir()
		for _, c := range config.RunCommands {
			script += strings.NewReplacer(nodeconfig.UpCommand, "[ $FAILING != up ]", filepath.Dir(nodeconfig.SentinelPath), folder).Replace(c.String()) + "\n"
		}
		run := exec.Command("sh")
		run.Stdin, run.Env = strings.NewReader(script), append(os.Environ(), "FAILING="+cmp.Or(failing, "nothing"))
		runErr := run.Run()
		_, err := os.Stat(filepath.Join(folder, filepath.Base(nodeconfig.SentinelPath)))
		if (runErr == nil) != (failing == "") || (err == nil) != (failing == "") {
			t.Errorf("%q fails: the script: %v, the file: %v", failing, runErr, err)
		}
	}
}

// TestMachineReadsIt: a machine parses the rendered data without an error.
func TestMachineReadsIt(t *testing.T) {
	for name, in := range map[string]render.Input{
		"worker": worker(t), "control-plane": controlPlane(t), "everything": everything(t),
	} {
		t.Run(name, func(t *testing.T) {
			config := parsed(t, in)
			if n := len(config.RunCommands); n != 3+len(in.Spec.PreCommands)+len(in.Spec.PostCommands) {
				t.Errorf("the data has %d commands", n)
			}
			files := map[string]string{}
			for _, f := range config.Files {
				files[f.Path] = string(f.Content)
			}
			node, err := nodeconfig.Parse([]byte(files[nodeconfig.Path]))
			if err != nil {
				t.Fatal(err)
			}
			if node.Role != in.Role || node.BootstrapToken != in.Token {
				t.Errorf("role %q, token %q", node.Role, node.BootstrapToken)
			}
			if name == "everything" && (files["/etc/secret"] != "\xff\x00\xfe" || files["/etc/encoded"] != "hello" || files["/etc/compressed"] != "unpacked" || node.Registries[0].Password != "p: 'w\"\n") {
				t.Errorf("contents differ: %q %q %q", files["/etc/secret"], files["/etc/encoded"], node.Registries[0].Password)
			}
		})
	}
}

// TestWorkerGetsNoKeys (CP-23): the data of a worker contains the certificate of the cluster's authority and no key.
func TestWorkerGetsNoKeys(t *testing.T) {
	in := worker(t)
	in.EncryptionKey = []byte(strings.Repeat("k", render.EncryptionKeySize))
	data, err := render.CloudConfig(in)
	if err != nil {
		t.Fatal(err)
	}
	for _, no := range []string{".key", "encryption", "audit-policy"} {
		if strings.Contains(string(data), no) {
			t.Errorf("a worker's data contains %q", no)
		}
	}
}

// The data of a joining control plane machine differs from that of the first one only in its role. It signs its own certificates,
// so it needs the authorities and no token (CP-01, CP-23).
func TestJoiningControlPlane(t *testing.T) {
	first := everything(t)
	joining := first
	joining.Role = nodeconfig.RoleControlPlane
	want, err := render.CloudConfig(first)
	if err != nil {
		t.Fatal(err)
	}
	got, err := render.CloudConfig(joining)
	if err != nil {
		t.Fatal(err)
	}
	if bytes.Equal(got, want) {
		t.Error("the role is the same")
	}
	if text := strings.Replace(string(want), "role: init\n", "role: control-plane\n", 1); string(got) != text {
		t.Errorf("the data differs in more than its role:\n%s", got)
	}
	if token, err := render.Token(got); err != nil || token != "" {
		t.Errorf("token %q, %v", token, err)
	}
}

func TestTaints(t *testing.T) {
	taint := []bootstrapv1.Taint{{Key: "a", Effect: corev1.TaintEffectNoSchedule}}
	for name, c := range map[string]struct {
		role nodeconfig.Role
		in   *[]bootstrapv1.Taint
		want string
	}{
		"BC-06 worker":            {nodeconfig.RoleWorker, nil, "node.cluster.x-k8s.io/uninitialized:NoSchedule"},
		"BC-06 worker with more":  {nodeconfig.RoleWorker, &taint, "node.cluster.x-k8s.io/uninitialized:NoSchedule,a:NoSchedule"},
		"control plane":           {nodeconfig.RoleInit, nil, "node-role.kubernetes.io/control-plane:NoSchedule"},
		"control plane, replaced": {nodeconfig.RoleControlPlane, &taint, "a:NoSchedule"},
		"control plane, none":     {nodeconfig.RoleInit, &[]bootstrapv1.Taint{}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			in := controlPlane(t)
			in.Role, in.Spec.Node.Taints = c.role, c.in
			if got := strings.Join(node(t, in).Node.Taints, ","); got != c.want {
				t.Errorf("got %q, want %q", got, c.want)
			}
		})
	}
}

// parsed renders the data of a machine, and returns it as the machine reads it.
func parsed(t *testing.T, in render.Input) *cloudconfig.Config {
	t.Helper()
	data, err := render.CloudConfig(in)
	if err != nil {
		t.Fatal(err)
	}
	config, err := cloudconfig.Parse(data, nil)
	if err != nil {
		t.Fatal(err)
	}
	return config
}

func node(t *testing.T, in render.Input) *nodeconfig.NodeConfiguration {
	t.Helper()
	for _, f := range parsed(t, in).Files {
		if f.Path == nodeconfig.Path {
			out, err := nodeconfig.Parse(f.Content)
			if err != nil {
				t.Fatal(err)
			}
			return out
		}
	}
	t.Fatal("no " + nodeconfig.Path)
	return nil
}

// TestContentBehindTheCheck: only the machine checks the content behind MaxUnpacked, and it accepts each of these files.
func TestContentBehindTheCheck(t *testing.T) {
	in, zeros := worker(t), &bytes.Buffer{}
	w := gzip.NewWriter(zeros)
	_, err := w.Write(make([]byte, render.MaxUnpacked/2+1))
	if err := errors.Join(err, w.Close()); err != nil {
		t.Fatal(err)
	}
	file := bootstrapv1.File{Content: base64.StdEncoding.EncodeToString(zeros.Bytes()), Encoding: bootstrapv1.EncodingGzipBase64}
	for _, file.Path = range []string{"/one", "/with a\ttab", "/three"} {
		in.Spec.Files = append(in.Spec.Files, file)
	}
	node(t, in)
}

func TestRefused(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*render.Input)
		want   string
	}{
		"a path that is not clean": {func(in *render.Input) { in.Spec.Files = []bootstrapv1.File{{Path: "/etc/../x", Content: "x"}} }, "shortest form"},
		"Capstan's own folder": {func(in *render.Input) {
			in.Spec.Files = []bootstrapv1.File{{Path: "/etc/capstan/node.yaml", Content: "x"}}
		}, "which only Capstan writes"},
		"not base64": {func(in *render.Input) {
			in.Spec.Files = []bootstrapv1.File{{Path: "/x", Content: "%", Encoding: bootstrapv1.EncodingBase64}}
		}, "not base64"},
		"a short key": {func(in *render.Input) { in.EncryptionKey = []byte("short") }, "5 bytes"},
		"a key as authority": {func(in *render.Input) {
			in.Spec.Registries = []bootstrapv1.Registry{{Host: "a", CA: bootstrapv1.Document{Content: "-----BEGIN PRIVATE KEY-----\naHVudGVyMg==\n-----END PRIVATE KEY-----\n"}}}
		}, `a PEM block of the type "PRIVATE KEY"`},
		"an authority that is no certificate": {func(in *render.Input) {
			in.Spec.Registries = []bootstrapv1.Registry{{Host: "a", CA: bootstrapv1.Document{Content: "hunter2"}}}
		}, "spec.registries[a].ca: expected certificates as PEM"},
		"credentials that are no text": {func(in *render.Input) {
			in.Spec.Registries = []bootstrapv1.Registry{{Host: "a", Credentials: bootstrapv1.SecretReference{Name: "s"}}}
			in.Secrets = map[bootstrapv1.SecretKeyReference][]byte{{Name: "s", Key: "username"}: []byte("ann"), {Name: "s", Key: "password"}: []byte("hunter2\xff")}
		}, "the key password of the Secret s is empty or no text"},
		"a proxy with credentials": {func(in *render.Input) { in.Spec.Proxy.HTTP = "http://me:hunter2@proxy:1" }, "must not contain credentials"},
		"a proxy that is no URL":   {func(in *render.Input) { in.Spec.Proxy.HTTPS = "hunter2" }, "spec.proxy: https: expected the URL of a proxy"},
		"Capstan's field of the kubelet": {func(in *render.Input) { in.Spec.Kubelet.Configuration.Raw = []byte(`{"staticPodPath":"/x"}`) },
			"spec.kubelet.configuration: staticPodPath: Capstan sets this field"},
		"clusterDNS beside CoreDNS": {func(in *render.Input) { in.Spec.Kubelet.Configuration.Raw = []byte(`{"clusterDNS":["10.0.0.1"]}`) }, "clusterDNS: Capstan sets"},
		"kube-proxy without kube-proxy": {func(in *render.Input) {
			in.Network.KubeProxy = nodeconfig.None
			in.Spec.KubeProxy.Configuration.Raw = []byte(`{"nftables":{"syncPeriod":"1m"}}`)
		}, "runs no kube-proxy"},
		"a stub domain of the cluster": {func(in *render.Input) {
			in.Spec.Cluster.CoreDNS.StubDomains = []bootstrapv1.StubDomain{{Domain: "local", Servers: []string{"10.0.0.1"}}}
		}, `"local" would answer for names of the cluster`},
		"the DNS server as its own upstream": {func(in *render.Input) { in.Spec.Cluster.CoreDNS.Upstreams = []string{"10.96.0.10"} }, "is the address of this DNS server itself"},
		"a policy that is no YAML":           {func(in *render.Input) { in.Spec.Cluster.APIServer.AuditPolicy.Content = "{hunter2" }, "auditPolicy is not a YAML document"},
		"a policy with many aliases":         {func(in *render.Input) { in.Spec.Cluster.APIServer.AuditPolicy.Content = manyAliases }, "without many aliases"},
		"a configuration of the encryption with many aliases": {func(in *render.Input) {
			in.Spec.Cluster.Encryption.Configuration.Secret = bootstrapv1.SecretKeyReference{Name: "s", Key: "x"}
			in.Secrets = map[bootstrapv1.SecretKeyReference][]byte{{Name: "s", Key: "x"}: []byte(manyAliases)}
		}, "encryption.configuration is not a YAML document"},
	} {
		t.Run(name, func(t *testing.T) {
			in := controlPlane(t)
			c.change(&in)
			_, err := render.CloudConfig(in)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want %q", err, c.want)
			}
			if err != nil && strings.Contains(err.Error(), "hunter2") {
				t.Errorf("the error quotes the content: %v", err)
			}
		})
	}
}

// manyAliases has 6 KB, and 10 MB for a decoder that replaces the aliases.
var manyAliases = "a: &a " + strings.Repeat("x", 4000) + "\nb: [" + strings.Repeat("*a, ", 2500) + "]\n"

func TestToken(t *testing.T) {
	for name, in := range map[string]render.Input{"worker": worker(t), "control plane": controlPlane(t)} {
		data, err := render.CloudConfig(in)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := render.Token(data); err != nil || got != in.Token {
			t.Errorf("%s: got %q, %v", name, got, err)
		}
	}
	if _, err := render.Token([]byte("- not: [a cloud-config")); err == nil {
		t.Error("no error for data of another provider")
	}
	if _, err := render.Token([]byte(manyAliases)); err == nil {
		t.Error("no error for data with many aliases")
	}
}

// TestWithCertificates: other certificates change nothing else.
func TestWithCertificates(t *testing.T) {
	for name, in := range map[string]render.Input{"worker": worker(t), "everything": everything(t)} {
		before, err := render.CloudConfig(in)
		if err != nil {
			t.Fatal(err)
		}
		in.Certificates = slices.Clone(in.Certificates)
		in.Certificates[0].Content = []byte("CA\nNEW: CA\n")
		want, err := render.CloudConfig(in)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := render.WithCertificates(before, in.Certificates[:1]); err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s: %v, got\n%s", name, err, got)
		}
		if _, err := render.WithCertificates(before, []render.File{{Path: "/etc/other.crt"}}); err == nil {
			t.Errorf("%s: no error for a certificate that the data does not have", name)
		}
	}
}

// TestForUpdate: the data of an update in place needs no Secret of a part that a machine uses once.
func TestForUpdate(t *testing.T) {
	in := everything(t)
	for i := range in.Spec.Files {
		in.Spec.Files[i].Repeatable = ptr.To(in.Spec.Files[i].Path != "/etc/secret" && in.Spec.Files[i].Path != "/etc/compressed")
	}
	want, err := render.Update(in)
	if err != nil {
		t.Fatal(err)
	}
	secrets, configMaps := render.References(render.ForUpdate(in.Spec))
	if len(secrets) != 3 || len(configMaps) != 1 {
		t.Errorf("the update needs the Secrets %v and the ConfigMaps %v, want those of the authentication and the registry", secrets, configMaps)
	}
	maps.DeleteFunc(in.Secrets, func(key bootstrapv1.SecretKeyReference, _ []byte) bool { return !slices.Contains(secrets, key) })
	if got, err := render.Update(in); err != nil || !bytes.Equal(got, want) {
		t.Errorf("%v, got\n%s\nwant\n%s", err, got, want)
	}
}

func TestNetwork(t *testing.T) {
	for name, c := range map[string]struct {
		pods, services []string
		dns, want      string
	}{
		"defaults":          {nil, nil, "10.96.0.10", ""},
		"dual stack":        {[]string{"10.1.0.0/16", "fd00:1::/56"}, []string{"10.2.0.0/16", "fd00:2::/112"}, "10.2.0.10", ""},
		"IPv6 only":         {[]string{"fd00:1::/56"}, []string{"fd00:2::/112"}, "fd00:2::a", ""},
		"overlap":           {[]string{"10.0.0.0/8"}, []string{"10.96.0.0/16"}, "", "overlap"},
		"malformed":         {[]string{"10.1.0.0"}, nil, "", "pods.cidrBlocks[0]"},
		"host bits":         {nil, []string{"10.2.0.1/16"}, "", "services.cidrBlocks[0]"},
		"two of one family": {[]string{"10.1.0.0/16", "10.3.0.0/16"}, nil, "", "one IPv4 and one IPv6"},
		"three":             {[]string{"10.1.0.0/16", "10.3.0.0/16", "fd00::/64"}, nil, "", "3 networks"},
		"large IPv6":        {[]string{"fd00:1::/56"}, []string{"fd00:2::/48"}, "", "/64 or smaller"},
		"large second IPv6": {nil, []string{"10.96.0.0/16", "fd00:2::/48"}, "", "services.cidrBlocks[1] is fd00:2::/48"},
		"largest IPv6":      {[]string{"fd00:1::/56"}, []string{"fd00:2::/64"}, "fd00:2::a", ""},
		"too few for DNS":   {nil, []string{"10.2.0.0/29"}, "", "too small"},
	} {
		t.Run(name, func(t *testing.T) {
			cluster := &clusterv1.Cluster{}
			cluster.Spec.ClusterNetwork.Pods.CIDRBlocks = c.pods
			cluster.Spec.ClusterNetwork.Services.CIDRBlocks = c.services
			got, err := render.Network(cluster, render.Foreign())
			if c.want == "" && (err != nil || got.DNSServiceIP != c.dns) {
				t.Errorf("got %q, %v", got.DNSServiceIP, err)
			}
			if c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
				t.Errorf("got %v, want %q", err, c.want)
			}
		})
	}
}

// TestServiceDomain: the domain is part of the configuration of CoreDNS.
func TestServiceDomain(t *testing.T) {
	for domain, ok := range map[string]bool{"": true, "cluster.local": true, "Corp.Example": true, "corp local": false, "a\nb": false, "a {": false} {
		cluster := &clusterv1.Cluster{}
		cluster.Spec.ClusterNetwork.ServiceDomain = domain
		if _, err := render.Network(cluster, render.Foreign()); (err == nil) != ok {
			t.Errorf("%q: %v", domain, err)
		}
	}
}

// TestNodeNetworks checks the sizes of pod networks.
func TestNodeNetworks(t *testing.T) {
	arg := func(name, value string) []bootstrapv1.Arg { return []bootstrapv1.Arg{{Name: name, Value: value}} }
	for _, c := range []struct {
		pods string
		args []bootstrapv1.Arg
		own  bool
		ok   bool
	}{
		{pods: "11.0.0.0/8", ok: true},
		{pods: "10.1.2.0/24", ok: true}, // one node
		{pods: "10.1.2.0/25"},
		{pods: "8.0.0.0/7", ok: true},
		{pods: "fd00::/48", ok: true},
		{pods: "fd00::/64", ok: true},
		{pods: "fd00::/47"},
		{pods: "fd00::/80"},
		{pods: "fd00::/80", args: arg("node-cidr-mask-size-ipv6", "96"), ok: true},
		{pods: "10.1.2.0/25", args: arg("node-cidr-mask-size", "26"), ok: true},
		{pods: "10.1.2.0/25", args: arg("cluster-cidr", "10.1.0.0/16"), ok: true},
		{pods: "10.1.2.0/25", args: arg("v", "4")},
		{pods: "10.1.2.0/25", own: true, ok: true}, // the user's own pod network
	} {
		cluster := &clusterv1.Cluster{}
		cluster.Spec.ClusterNetwork.Pods.CIDRBlocks = []string{c.pods}
		config := render.WithDefaults(bootstrapv1.ClusterConfiguration{ControllerManager: bootstrapv1.ComponentSpec{ExtraArgs: c.args}})
		if c.own {
			config.PodNetwork = bootstrapv1.PodNetworkNone
		}
		if _, err := render.Network(cluster, config); (err == nil) != c.ok {
			t.Errorf("%s %v: %v", c.pods, c.args, err)
		}
	}
}

func TestCheckEndpoint(t *testing.T) {
	n := network(t, render.WithDefaults(bootstrapv1.ClusterConfiguration{}))
	for host, ok := range map[string]bool{"10.200.0.1": true, "api.example.com": true, "": true, "10.244.3.4": false, "10.96.0.1": false} {
		if err := render.CheckEndpoint(host, n); (err == nil) != ok {
			t.Errorf("%q: %v", host, err)
		}
	}
}

// TestVersion (CP-05).
func TestVersion(t *testing.T) {
	const trailing = "v1.36.3 " // a space
	for in, want := range map[string]string{
		"v1.36.3": "v1.36.3", "1.36.3": "v1.36.3", "v1.37.0-rc.1+build": "v1.37.0-rc.1+build",
		"": "", "v1.36": "", "latest": "", trailing: "", "vv1.36.3": "",
	} {
		if got, err := render.Version(in); got != want || (err == nil) != (want != "") {
			t.Errorf("%q: got %q, %v", in, got, err)
		}
	}
}

// TestPasswords: a value without the form of a hash is refused. The error does not quote the value.
func TestPasswords(t *testing.T) {
	key := bootstrapv1.SecretKeyReference{Name: "ann", Key: "hash"}
	for value, valid := range map[string]bool{
		passwordHash: true, passwordHash + "\n": true, "$y$j9T$saltsalt$hunter2./hunter2": true, "$argon2id$v=19$m=65536,t=3,p=4$hunter2+x": true,
		"hunter2": false, "": false, passwordHash + ":0:0": false, passwordHash + "\nroot:x": false, "!" + passwordHash: false,
	} {
		in := worker(t)
		in.Spec.Users = []bootstrapv1.User{{Name: "ann", PasswdFrom: bootstrapv1.PasswdSource{Secret: key}}}
		in.Secrets = map[bootstrapv1.SecretKeyReference][]byte{key: []byte(value)}
		_, err := render.CloudConfig(in)
		switch {
		case (err == nil) != valid:
			t.Errorf("%q: %v", value, err)
		case err != nil && (!strings.Contains(err.Error(), "spec.users[ann].passwdFrom") || strings.Contains(err.Error(), "hunter2")):
			t.Errorf("%q: %v", value, err)
		}
	}
}
