//go:build e2e

package cluster

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"capstan.dev/capstan/test/e2e/harness"
)

// checkPrivateKeys: CP-23. Private keys are only in Secrets of Cluster API's type and in files that only their owner can
// read. The keys of the cluster's authorities are not on workers. No private key is in a log or an argument.
func checkPrivateKeys(t *testing.T, c *harness.Cluster) {
	authorities := authorityKeys(t, c)
	checkObjects(t, c.Namespace, authorities)
	for _, m := range c.Machines(t) {
		_, controlPlane := m.Labels[clusterv1.MachineControlPlaneLabel]
		root := fmt.Sprintf("/proc/%d/root", plane.FindRunning(t, m.Name, "kubelet", 1)[0].PID)
		keys := 0
		eachFile(t, root, func(path string, mode fs.FileMode, content []byte) {
			log := strings.HasPrefix(path, "/var/log/")
			if bytes.Contains(content, []byte("PRIVATE KEY-----")) || bytes.Contains(content, []byte("client-key-data:")) {
				if keys++; mode&0o077 != 0 || log {
					t.Errorf("%s: the private key in %s has mode %s", m.Name, path, mode)
				}
			}
			if found := keyIn(content, authorities); found != "" && (log || !controlPlane) {
				t.Errorf("%s: the key of Secret %s is in %s", m.Name, found, path)
			}
		})
		if keys == 0 {
			t.Errorf("%s: no private key was found, not even the kubelet's: the test looks in the wrong place", m.Name)
		}
	}
	for _, p := range plane.Processes(t) {
		if found := keyIn([]byte(strings.Join(p.Args, " ")), authorities); found != "" || strings.Contains(strings.Join(p.Args, " "), "PRIVATE KEY") {
			t.Errorf("the arguments of %s have a key %s", p.Name, found)
		}
	}
	eachFile(t, filepath.Join(plane.Root, "logs"), func(path string, _ fs.FileMode, content []byte) {
		if found := keyIn(content, authorities); found != "" {
			t.Errorf("the key of Secret %s is in the log %s", found, path)
		}
	})
}

// checkObjects searches all objects of a namespace of the management plane, of any kind, for private keys. Only Secrets
// of Cluster API's type may contain any.
func checkObjects(t *testing.T, namespace string, authorities map[string][]byte) {
	t.Helper()
	kinds := strings.Join(strings.Fields(plane.MustKubectl(t, "api-resources", "--namespaced", "--verbs=list", "-o", "name")), ",")
	var list struct {
		Items []unstructured.Unstructured `json:"items"`
	}
	if err := json.Unmarshal([]byte(plane.MustKubectl(t, "get", kinds, "--namespace", namespace, "--show-managed-fields", "-o", "json")), &list); err != nil {
		t.Fatal(err)
	}
	found, searched := map[string]bool{}, map[string]bool{}
	for _, o := range list.Items {
		searched[o.GetKind()] = true
		for _, text := range texts(o.Object) {
			key := keyIn(text, authorities)
			if key == "" && !bytes.Contains(text, []byte("PRIVATE KEY-----")) && !bytes.Contains(text, []byte("client-key-data:")) {
				continue
			}
			if kind, _, _ := unstructured.NestedString(o.Object, "type"); o.GetKind() != "Secret" || kind != string(clusterv1.ClusterSecretType) {
				t.Errorf("%s %s of type %q has a private key %s", o.GetKind(), o.GetName(), kind, key)
			}
			found[key] = true
		}
	}
	for name := range authorities {
		if !found[name] {
			t.Errorf("the key of Secret %s was not found in it: the test looks in the wrong place", name)
		}
	}
	for _, kind := range []string{"Cluster", "Machine", "CapstanMachine", "CapstanControlPlane", "CapstanConfig", "Event"} {
		if !searched[kind] {
			t.Errorf("no %s was searched, only %v", kind, slices.Sorted(maps.Keys(searched)))
		}
	}
}

// texts returns all strings of an object, and the decoded form of base64 strings.
func texts(value any) (out [][]byte) {
	switch v := value.(type) {
	case map[string]any:
		for _, inner := range v {
			out = append(out, texts(inner)...)
		}
	case []any:
		for _, inner := range v {
			out = append(out, texts(inner)...)
		}
	case string:
		out = append(out, []byte(v))
		if decoded, err := base64.StdEncoding.DecodeString(v); err == nil {
			out = append(out, decoded)
		}
	}
	return out
}

// authorityKeys returns one line of the private key in each of the cluster's Secrets with certificates, by the Secret's
// name.
func authorityKeys(t *testing.T, c *harness.Cluster) map[string][]byte {
	t.Helper()
	secrets := &corev1.SecretList{}
	if err := plane.Client.List(t.Context(), secrets, client.InNamespace(c.Namespace), client.MatchingLabels{clusterv1.ClusterNameLabel: c.Name}); err != nil {
		t.Fatal(err)
	}
	lines := map[string][]byte{}
	for _, s := range secrets.Items {
		key, ok := s.Data["tls.key"]
		if !ok {
			continue
		}
		if s.Type != clusterv1.ClusterSecretType {
			t.Errorf("Secret %s has the type %s", s.Name, s.Type)
		}
		if all := bytes.Split(key, []byte("\n")); len(all) > 2 {
			lines[s.Name] = all[len(all)/2]
		}
	}
	if len(lines) < 3 {
		t.Fatalf("keys of %d authorities", len(lines))
	}
	return lines
}

func keyIn(content []byte, lines map[string][]byte) string {
	for name, line := range lines {
		if bytes.Contains(content, line) {
			return name
		}
	}
	return ""
}

// eachFile reads the files of a machine, except images and databases.
func eachFile(t *testing.T, root string, visit func(path string, mode fs.FileMode, content []byte)) {
	t.Helper()
	const large = 8 << 20
	folders := []string{"."}
	if strings.HasPrefix(root, "/proc/") {
		folders = []string{"etc", "run", "root", "tmp", "var"}
	}
	for _, folder := range folders {
		err := filepath.WalkDir(filepath.Join(root, folder), func(path string, d fs.DirEntry, err error) error {
			if errors.Is(err, fs.ErrNotExist) {
				return nil // The file was removed meanwhile.
			}
			if err != nil {
				return err
			}
			if d.IsDir() && strings.HasPrefix(path, filepath.Join(root, "run/visible")) {
				return fs.SkipDir // /proc and sysfs contain files of the kernel. Some of them have no end.
			}
			if d.IsDir() && (d.Name() == "io.containerd.content.v1.content" || d.Name() == "io.containerd.snapshotter.v1.overlayfs" || d.Name() == "rootfs") {
				return fs.SkipDir
			}
			info, err := d.Info()
			if err != nil || !info.Mode().IsRegular() || info.Size() > large {
				return nil
			}
			content, err := os.ReadFile(path)
			if err == nil {
				visit(strings.TrimPrefix(path, root), info.Mode(), content)
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
	}
}
