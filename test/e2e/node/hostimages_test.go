//go:build e2e

package node

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path"
	"path/filepath"
	"strings"
	"testing"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"capstan.dev/capstan/internal/testenv/expect"
)

// hostImages returns a folder with an archive, with one as skopeo makes it, and with one that is damaged.
func hostImages(t *testing.T, w *testNetwork) string {
	t.Helper()
	archive, err := os.ReadFile(filepath.Join(w.assets, "images/echo.tar"))
	expect.NoError(t, err)
	dir := filepath.Join(w.dir, "container-images")
	expect.NoError(t, os.Mkdir(dir, 0o700))
	expect.NoError(t, os.WriteFile(filepath.Join(dir, "a-damaged.tar"), archive[:len(archive)/2], 0o600))
	expect.NoError(t, os.WriteFile(filepath.Join(dir, "echo.tar"), archive, 0o600))
	expect.NoError(t, os.WriteFile(filepath.Join(dir, "skopeo.tar"), bySkopeo(t, archive), 0o600))
	return dir
}

// bySkopeo returns an OCI archive with the same image, whose name is in the annotation of OCI only.
func bySkopeo(t *testing.T, archive []byte) []byte {
	t.Helper()
	var out bytes.Buffer
	from, to := tar.NewReader(bytes.NewReader(archive)), tar.NewWriter(&out)
	for {
		header, err := from.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		expect.NoError(t, err)
		content, err := io.ReadAll(from)
		expect.NoError(t, err)
		if path.Clean(header.Name) == "index.json" {
			var index ocispec.Index
			expect.NoError(t, json.Unmarshal(content, &index))
			for i := range index.Manifests {
				index.Manifests[i].Annotations = map[string]string{ocispec.AnnotationRefName: "registry.capstan.dev/echo:skopeo"}
			}
			content, err = json.Marshal(index)
			expect.NoError(t, err)
			header.Size = int64(len(content))
		}
		expect.NoError(t, to.WriteHeader(header))
		_, err = to.Write(content)
		expect.NoError(t, err)
	}
	expect.NoError(t, to.Close())
	return out.Bytes()
}

// testHostImages: the worker has the image of its host without a pull, although another archive is damaged. The control plane machine,
// whose host has none, has no such image. A machine cannot change the archives.
func testHostImages(t *testing.T, cp, worker *host) {
	for h, want := range map[*host]bool{worker: true, cp: false} {
		out, err := h.exec("/opt/capstan/node/bin/ctr", "-n", "k8s.io", "images", "list", "-q")
		for _, image := range []string{"registry.capstan.dev/echo:v1", "registry.capstan.dev/echo:skopeo"} {
			if err != nil || strings.Contains(out, image) != want {
				t.Errorf("%s has %q, %v, want the image %s: %t", h.name, out, err, image, want)
			}
		}
	}
	cp.apply(strings.Replace(pullPod("of-the-host", "worker", "registry.capstan.dev/echo:v1"), "Always", "Never", 1))
	cp.mustKubectl("wait", "--for=condition=Ready", "pod/of-the-host", "--timeout=1m")
	cp.mustKubectl("delete", "pod", "--wait", "--grace-period=1", "of-the-host")
	if log, err := os.ReadFile(filepath.Join(worker.root, "var/log/capstan/bootstrap.log")); err != nil || !strings.Contains(string(log), "a-damaged.tar") {
		t.Errorf("nothing reports the damaged archive: %s, %v", log, err)
	}
	if out, err := worker.exec("/bin/sh", "-c", "echo x > /run/capstan/images/echo.tar"); err == nil {
		t.Errorf("the machine can change the archives of its host: %s", out)
	}
}
