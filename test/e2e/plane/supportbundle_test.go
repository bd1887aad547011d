//go:build e2e

package plane

import (
	"archive/tar"
	"compress/gzip"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
)

// planted begins each text that must not be in a support bundle.
const planted = "hunter2planted"

// A support bundle contains objects and logs, and no secret from Secrets, configs, annotations, the environment or logs.
func (i *installation) testSupportBundle() {
	dir := i.t.TempDir()
	manifest := filepath.Join(dir, "config.yaml")
	if err := os.WriteFile(manifest, []byte(`apiVersion: bootstrap.capstan.dev/v1beta2
kind: CapstanConfig
metadata: {name: planted, namespace: default}
spec:
  files: [{path: /etc/planted, content: `+planted+`-content}]
  preCommands: [echo `+planted+`-command]
`), 0o600); err != nil {
		i.t.Fatal(err)
	}
	i.kubectl("create", "secret", "generic", "planted", "--from-literal", "password="+planted+"-secret")
	i.kubectl("annotate", "cluster", "one", "example.com/planted="+planted+"-annotation")
	i.kubectl("apply", "-f", manifest)
	for name := range i.machines() {
		i.capstan("shell", name, "--", "sh", "-c", "echo the password is "+planted+"-secret >>/var/log/capstan/kubelet.log")
	}
	file := filepath.Join(dir, "bundle.tar.gz")
	i.capstan("support-bundle", "--file", file)
	// A box without a host: the logs of machines come through the management plane.
	far := filepath.Join(dir, "far.tar.gz")
	if out, err := run(filepath.Join(i.bin, "capstan"), "--root", dir, "--kubeconfig", filepath.Join(i.root, "admin.kubeconfig"), "support-bundle", "--file", far); err != nil {
		i.t.Fatalf("support-bundle through the management plane: %v\n%s", err, out)
	}
	i.kubectl("delete", "-f", manifest)
	i.kubectl("delete", "secret", "planted")
	i.checkBundle(i.untar(file), "plane-status.json", "logs/manager.log")
	i.checkBundle(i.untar(far))
}

// checkBundle checks that a bundle has objects, events, the logs of the kubelets and some other files, and no secret.
func (i *installation) checkBundle(contents map[string]string, more ...string) {
	i.t.Helper()
	for _, name := range append([]string{
		"objects/cluster.cluster.x-k8s.io.yaml", "objects/capstanhost.infrastructure.capstan.dev.yaml", "objects/capstanconfig.bootstrap.capstan.dev.yaml",
		"events.txt", "waiting.json", "version.txt",
	}, more...) {
		if contents[name] == "" {
			i.t.Errorf("the bundle has no %s, or it is empty; errors: %s", name, contents["errors.txt"])
		}
	}
	kubelet := ""
	for name, text := range contents {
		if at := strings.Index(text, planted); at >= 0 {
			i.t.Errorf("%s contains a secret: %s", name, text[max(0, at-80):min(len(text), at+80)])
		}
		if strings.Contains(text, "PRIVATE KEY") {
			i.t.Errorf("%s contains a private key", name)
		}
		if strings.HasSuffix(name, "/kubelet.log") {
			kubelet += text
		}
	}
	if !strings.Contains(kubelet, "the password is (removed:default/planted)") {
		i.t.Error("the bundle does not have the end of the kubelets' logs")
	}
}

// untar returns the files of a support bundle by name.
func (i *installation) untar(file string) map[string]string {
	i.t.Helper()
	f, err := os.Open(file)
	if err != nil {
		i.t.Fatal(err)
	}
	defer f.Close()
	compressed, err := gzip.NewReader(f)
	if err != nil {
		i.t.Fatal(err)
	}
	contents := map[string]string{}
	for archive := tar.NewReader(compressed); ; {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return contents
		}
		if err != nil {
			i.t.Fatal(err)
		}
		data, err := io.ReadAll(archive)
		if err != nil {
			i.t.Fatal(err)
		}
		contents[strings.TrimPrefix(header.Name, "capstan-support/")] = string(data)
	}
}
