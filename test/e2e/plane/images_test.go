//go:build e2e

package plane

import (
	"archive/tar"
	"context"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"capstan.dev/capstan/test/e2e/harness"
)

const echoImage = "registry.capstan.dev/echo:v1"

// ctr runs containerd's client in a machine.
func (w *workstation) ctr(machine string, args ...string) string {
	w.i.t.Helper()
	return w.capstan(append([]string{"shell", machine, "--", "ctr", "--address", "/run/containerd/containerd.sock", "-n", "k8s.io"}, args...)...)
}

// publicFile is a file that the user of the workstation can read.
func (w *workstation) publicFile(name string) string {
	w.i.t.Helper()
	dir, err := os.MkdirTemp("", "capstan-images-")
	if err != nil {
		w.i.t.Fatal(err)
	}
	w.i.t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		w.i.t.Fatal(err)
	}
	return filepath.Join(dir, name)
}

// The same command loads an image through the management cluster and on the box.
func (w *workstation) testImages(machine string) {
	t, archive := w.i.t, filepath.Join(w.i.bin, "images", "echo.tar")
	if out := w.capstan("load", "image", archive, "--cluster", "demo"); !strings.Contains(out, "✓ Machine "+machine) || !strings.HasSuffix(out, echoImage+"\n") {
		t.Errorf("the output is %q", out)
	}
	if images := w.ctr(machine, "images", "ls", "-q"); !strings.Contains(images, echoImage) {
		t.Errorf("containerd has %q", images)
	}
	for _, out := range []string{
		w.capstan("load", "image", archive, "--cluster", "demo", "-o", "json"), w.i.capstan("load", "image", archive, "--cluster", "demo", "-n", "team-a", "-o", "json"),
	} {
		var loaded struct{ Images []string }
		if err := json.Unmarshal([]byte(out), &loaded); err != nil || !slices.Equal(loaded.Images, []string{echoImage}) {
			t.Errorf("%q: %v", out, err)
		}
	}
	w.refused("found none", "load", "image", archive, "--cluster", "another")
	w.refused("no such file", "load", "image", archive+"x", "--cluster", "demo")
}

// An API server ends most requests after a minute. An upload can last longer.
func (w *workstation) testSlowUpload(machine string) {
	t := w.i.t
	w.ctr(machine, "images", "rm", echoImage)
	data, err := os.ReadFile(filepath.Join(w.i.bin, "images", "echo.tar"))
	if err != nil {
		t.Fatal(err)
	}
	fifo := w.publicFile("fifo")
	if err := syscall.Mkfifo(fifo, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(fifo, 0o644); err != nil {
		t.Fatal(err)
	}
	go func() {
		in, err := os.OpenFile(fifo, os.O_WRONLY, 0)
		if err != nil {
			return
		}
		defer in.Close()
		for part := range slices.Chunk(data, len(data)/8+1) {
			time.Sleep(10 * time.Second) // the subject of the test: 80 seconds in all
			_, _ = in.Write(part)
		}
	}()
	began := time.Now()
	if out := w.capstan("load", "image", fifo, "--cluster", "demo"); !strings.HasSuffix(out, echoImage+"\n") || time.Since(began) < 70*time.Second {
		t.Errorf("after %s: %q", time.Since(began), out)
	}
}

// A cancelled upload leaves neither an image nor a part of it, in containerd and on the host.
func (w *workstation) testCancelledUpload(machine string) {
	t, archive := w.i.t, w.publicFile("large.tar")
	w.writeArchive(archive, member{"blobs/sha256/" + strings.Repeat("a", 64), zeros{}, 1 << 30})
	// The end of a lease makes containerd collect garbage, and ctr waits for it. Otherwise containerd removes the content of earlier
	// uploads at any time.
	w.ctr(machine, "leases", "create", "--id", "garbage")
	w.ctr(machine, "leases", "delete", "--sync", "garbage")
	before, leases := w.ctr(machine, "content", "ls", "-q"), w.ctr(machine, "leases", "ls", "-q")
	active := func() string { return w.ctr(machine, "content", "active") }
	for name, end := range map[string]func(cancel func()){
		"the client": func(cancel func()) { cancel() },
		"the manager": func(func()) {
			if err := syscall.Kill(w.i.component("manager").PID, syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
		},
		"capstand": func(func()) {
			if err := syscall.Kill(w.i.component("capstand").PID, syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
		},
	} {
		ctx, cancel := context.WithCancel(t.Context())
		load := w.program(ctx, "load", "image", archive, "--cluster", "demo")
		if err := load.Start(); err != nil {
			t.Fatal(err)
		}
		harness.True(t, "a part of the archive arrives", time.Minute, func() bool { return strings.Contains(active(), "tar-blobs") })
		end(cancel)
		_ = load.Wait()
		cancel()
		harness.True(t, "nothing is left after the end of "+name, 2*time.Minute, func() bool {
			out, err := w.program(t.Context(), "shell", machine, "--", "ctr", "--address", "/run/containerd/containerd.sock", "-n", "k8s.io", "content", "active").Output()
			return err == nil && !strings.Contains(string(out), "tar-blobs")
		})
		if after := w.ctr(machine, "content", "ls", "-q"); after != before {
			t.Errorf("%s: the content was %s, and is %s", name, before, after)
		}
		if left, err := filepath.Glob(filepath.Join(w.i.root, "hosts", "*", "new", "*")); err != nil || len(left) > 0 {
			t.Errorf("%s: the host has %v, %v", name, left, err)
		}
	}
	if after := w.ctr(machine, "leases", "ls", "-q"); after != leases {
		t.Errorf("the leases were %q, and are %q", leases, after)
	}
}

// Archives that are none are refused with the reason, and leave no image. An image keeps its name if another one with this name
// cannot be unpacked.
func (w *workstation) testHostileArchives(machine string) {
	before := w.ctr(machine, "images", "ls")
	garbage, traversal, empty, layer := w.publicFile("garbage.tar"), w.publicFile("traversal.tar"), w.publicFile("empty.tar"), w.publicFile("layer.tar")
	if err := os.WriteFile(garbage, []byte(strings.Repeat("garbage ", 10_000)), 0o644); err != nil {
		w.i.t.Fatal(err)
	}
	w.writeArchive(traversal, text("../../etc/cron.d/evil", "evil"))
	w.writeArchive(empty)
	w.writeArchive(layer, text("manifest.json", `[{"Config": "config.json", "RepoTags": ["registry.capstan.dev/evil:v1", "`+echoImage+`"], "Layers": ["layer.tar"]}]`),
		text("config.json", `{"architecture": "`+runtime.GOARCH+`", "os": "linux", "rootfs": {"type": "layers", "diff_ids": ["sha256:`+strings.Repeat("a", 64)+`"]}}`),
		text("layer.tar", strings.Repeat("garbage ", 1000)))
	w.refused("expected a tar archive", "load", "image", garbage, "--cluster", "demo")
	w.refused("expected names inside of the archive", "load", "image", traversal, "--cluster", "demo")
	w.refused("unrecognized image format", "load", "image", empty, "--cluster", "demo")
	w.refused("unpacking image", "load", "image", layer, "--cluster", "demo")
	if after := w.ctr(machine, "images", "ls"); after != before {
		w.i.t.Errorf("the images were %s, and are %s", before, after)
	}
}

// member is a file of an archive.
type member struct {
	name    string
	content io.Reader
	size    int64
}

func text(name, content string) member {
	return member{name, strings.NewReader(content), int64(len(content))}
}

func (w *workstation) writeArchive(path string, members ...member) {
	w.i.t.Helper()
	file, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		w.i.t.Fatal(err)
	}
	defer file.Close()
	archive := tar.NewWriter(file)
	for _, m := range members {
		if err := archive.WriteHeader(&tar.Header{Name: m.name, Size: m.size, Mode: 0o644}); err != nil {
			w.i.t.Fatal(err)
		}
		if _, err := io.CopyN(archive, m.content, m.size); err != nil {
			w.i.t.Fatal(err)
		}
	}
	if err := archive.Close(); err != nil {
		w.i.t.Fatal(err)
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}
