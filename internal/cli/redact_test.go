package cli

import (
	"archive/tar"
	"compress/gzip"
	"encoding/base64"
	"errors"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"
)

// planted is in each place of the objects and logs that can be secret.
const planted = "hunter2-planted"

func TestRedactObject(t *testing.T) {
	o := parseObject(t, `apiVersion: bootstrap.capstan.dev/v1beta2
kind: CapstanConfig
metadata:
  name: a-1
  namespace: team
  labels: {cluster.x-k8s.io/cluster-name: a}
  annotations:
    cluster.x-k8s.io/cloned-from-name: a-md-0
    bootstrap.capstan.dev/record: '{"files":[{"content":"hunter2-planted"}]}'
    kubectl.kubernetes.io/last-applied-configuration: 'hunter2-planted'
    example.com/token: hunter2-planted
  managedFields: [{manager: hunter2-planted}]
spec:
  files: [{path: /etc/x, content: hunter2-planted, owner: root}]
  preCommands: [echo hunter2-planted]
  users: [{name: ada, passwd: hunter2-planted}]
  environment: [{name: KEY, value: hunter2-planted}]
  extraArgs: {token: hunter2-planted}
  unknownFieldOfTheFuture: hunter2-planted
  replicas: 3
  version: v1.36.3
status:
  conditions: [{type: Ready, status: 'False', reason: NotReady, message: no host}]
  ready: true
`)
	before := o.DeepCopy()
	data, err := yaml.Marshal(redactObject(o, nil).Object)
	if err != nil {
		t.Fatal(err)
	}
	text := string(data)
	if strings.Contains(text, planted) {
		t.Errorf("a secret is left:\n%s", text)
	}
	for _, kept := range []string{"name: a-1", "cluster-name: a", "cloned-from-name: a-md-0", "path: /etc/x", "replicas: 3", "version: v1.36.3", "message: no host", "ready: true", "content: (15 characters removed)", "name: ada"} {
		if !strings.Contains(text, kept) {
			t.Errorf("%q is missing:\n%s", kept, text)
		}
	}
	if after, _ := yaml.Marshal(o.Object); len(after) == 0 || o.GetAnnotations()["example.com/token"] != before.GetAnnotations()["example.com/token"] {
		t.Error("the original object was changed")
	}
}

func TestRedactText(t *testing.T) {
	long := "LS0tLS1CRUdJTiBDRVJUSUZJQ0FURS0tLS0tCk1JSUJkekNDQVIyZ0F3SUJBZ0lCQURBS0Jn"
	known := knownSecrets([]corev1.Secret{{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "x"}, Data: map[string][]byte{
		"password": []byte(planted), "key": []byte("line one is text\n" + long + "\n"), "short": []byte("yes"), "prefix": []byte("hunter2-"),
		"special": []byte(`p&ss"<w\rd`),
		"host":    []byte("rack-one-1"),
	}}, {ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "words"}, Data: map[string][]byte{"x": []byte("controller")}}},
		map[string]bool{"rack-one-1": true}, []string{"team/words"})
	for text, want := range map[string]string{
		"the value is hunter2-planted here":                                 "the value is (removed:team/x) here",
		"as base64: " + base64.StdEncoding.EncodeToString([]byte(planted)):  "as base64: (removed:team/x)",
		"a line of a longer value: " + long:                                 "a line of a longer value: (removed:team/x)",
		"host rack-one-1 has a public name":                                 "host rack-one-1 has a public name",
		"the controller is a word to keep":                                  "the controller is a word to keep",
		"yes, short words stay":                                             "yes, short words stay",
		"line one is text":                                                  "line one is text",
		"join with abcdef.0123456789abcdef now":                             "join with (removed) now",
		"Authorization: Bearer abcdefgh12345":                               "Authorization: Bearer (removed)",
		"curl -H 'bearer abcdefgh12345'":                                    "curl -H 'bearer (removed)'",
		"https://ada:s3cret@example.org/x":                                  "https://ada:(removed)example.org/x",
		`{"password":"s3cretvalue","a":"b"}`:                                `{"password":"(removed)","a":"b"}`,
		"AWS_SECRET_ACCESS_KEY=abcd1234 x":                                  "AWS_SECRET_ACCESS_KEY=(removed) x",
		`msg="answer {\"password\":\"s3cretvalue\",\"a\":1}"`:               `msg="answer {\"password\":\"(removed)",\"a\":1}"`,
		`{"message":"refused p\u0026ss\"\u003cw\\rd"}`:                      `{"message":"refused (removed:team/x)"}`,
		`err="refused p&ss\"<w\\rd"`:                                        `err="refused (removed:team/x)"`,
		"--token=abcd1234 --v=2":                                            "--token=(removed) --v=2",
		"-----BEGIN EC PRIVATE KEY-----\nabc\n-----END EC PRIVATE KEY-----": "(removed)",
		"eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJ4In0.c2ln":                         "(removed)",
		"machine team/a-1 runs, version v1.36.3, 10.0.0.1:6443":             "machine team/a-1 runs, version v1.36.3, 10.0.0.1:6443",
	} {
		if got := redactText(text, known); got != want {
			t.Errorf("%q: got %q, want %q", text, got, want)
		}
	}
}

// A tenant who fills a Secret with words of logs does not hide objects and their names, and the reader sees which Secret it is.
func TestWordsInASecret(t *testing.T) {
	o := parseObject(t, `apiVersion: infrastructure.capstan.dev/v1beta2
kind: CapstanMachine
metadata: {name: a-1, namespace: production}
spec: {hostName: rack-one-1, files: [{content: `+planted+`}]}
status:
  conditions: [{type: MachineRunning, status: 'False', reason: MachineStarting, message: "the password of production is `+planted+` here"}]
`)
	public := map[string]bool{}
	publicTexts("", o.Object, public)
	known := knownSecrets([]corev1.Secret{{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "poison"}, Data: map[string][]byte{"words": []byte(strings.Join([]string{
		"metadata", "conditions", "MachineRunning", "MachineStarting", "rack-one-1", "production", "namespace", "hostName", "password", planted}, "\n"))}}}, public, nil)
	data, err := yaml.Marshal(redactObject(o, known).Object)
	if err != nil {
		t.Fatal(err)
	}
	text := string(data)
	for _, kept := range []string{"metadata:", "namespace: production", "hostName: rack-one-1", "type: MachineRunning", "reason: MachineStarting",
		"the (removed:team/poison) of production is (removed:team/poison) here"} {
		if !strings.Contains(text, kept) {
			t.Errorf("%q is missing:\n%s", kept, text)
		}
	}
	if strings.Contains(text, planted) {
		t.Errorf("a secret is left:\n%s", text)
	}
	log := map[string][]byte{"logs/x": []byte(redactText("a password, the metadata (removed:other/forged)", known))}
	if got := known.frequent(log, 2); len(got) != 1 || got["team/poison"] != 2 {
		t.Errorf("often removed: %v", got)
	}
}

func TestBundle(t *testing.T) {
	dir := t.TempDir()
	log, err := os.Create(filepath.Join(dir, "a.log"))
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	if _, err := log.WriteString("first line\nsecond line\nthird line\n"); err != nil {
		t.Fatal(err)
	}
	end, err := endOf(log, 16)
	if err != nil || string(end) != "(the first 23 bytes are left out)\nthird line\n" {
		t.Errorf("end of the log: %q, %v", end, err)
	}
	if whole, err := endOf(log, 100); err != nil || string(whole) != "first line\nsecond line\nthird line\n" {
		t.Errorf("whole log: %q, %v", whole, err)
	}
	path := filepath.Join(dir, "b.tar.gz")
	if err := writeBundle(path, map[string][]byte{"logs/a.log": end, "version.txt": []byte("v1")}, time.Now()); err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	if err := writeBundle(path, nil, time.Now()); !errors.Is(err, os.ErrExist) {
		t.Errorf("an existing file: %v", err)
	}
	names := slices.Sorted(maps.Keys(untar(t, path)))
	if strings.Join(names, " ") != "logs/a.log version.txt" {
		t.Errorf("entries %q", names)
	}
}

// untar returns the files of a support bundle by name.
func untar(t *testing.T, path string) map[string]string {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	compressed, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	contents := map[string]string{}
	for archive := tar.NewReader(compressed); ; {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return contents
		}
		if err != nil {
			t.Fatal(err)
		}
		data, err := io.ReadAll(archive)
		if err != nil {
			t.Fatal(err)
		}
		name, found := strings.CutPrefix(header.Name, "capstan-support/")
		if !found {
			t.Errorf("entry %s", header.Name)
		}
		contents[name] = string(data)
	}
}
