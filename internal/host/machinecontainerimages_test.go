package host

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	oci "github.com/opencontainers/runtime-spec/specs-go"

	"capstan.dev/capstan/internal/host/runc"
	"capstan.dev/capstan/internal/imagearchive"
)

// A machine sees the container images of the host read-only, if only root can change them.
func TestContainerImages(t *testing.T) {
	h := recorded(t)
	m := onDisk(t, h)
	dir := filepath.Join(t.TempDir(), "container-images")
	h.config.ContainerImages = dir
	if err := os.MkdirAll(filepath.Dir(m.runDir()), 0o700); err != nil {
		t.Fatal(err)
	}
	check := func(when string, want bool) {
		t.Helper()
		bundle, err := m.prepare(runc.System{Root: "/"}, nil)
		if err != nil {
			t.Fatal(err)
		}
		var config oci.Spec
		if err := json.Unmarshal([]byte(read(t, filepath.Join(bundle, "config.json"))), &config); err != nil {
			t.Fatal(err)
		}
		i := slices.IndexFunc(config.Mounts, func(m oci.Mount) bool { return m.Destination == "/run/capstan/images" })
		if (i >= 0) != want || i >= 0 && (config.Mounts[i].Source != dir || !slices.Contains(config.Mounts[i].Options, "ro")) {
			t.Errorf("%s: mounts %v", when, config.Mounts)
		}
	}
	check("without a folder", false)
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	archive := filepath.Join(dir, "a.tar")
	write(t, archive, "x")
	check("a private folder", true)
	if err := os.Chmod(archive, 0o666); err != nil {
		t.Fatal(err)
	}
	check("an archive that others can change", false)
}

// dockerArchive is an archive of images with the names.
func dockerArchive(t *testing.T, names ...string) string {
	t.Helper()
	list, err := json.Marshal([]map[string][]string{{"RepoTags": names}})
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	if err := w.WriteHeader(&tar.Header{Name: "manifest.json", Typeflag: tar.TypeReg, Size: int64(len(list)), Mode: 0o600}); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write(list); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

// The host reports the images of each archive, and why machines do not get those of others. It reads an archive again after a change.
func TestReportedContainerImages(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "container-images")
	folder := archiveFolder{dir: dir}
	look := func(wrong string, want ...string) {
		t.Helper()
		archives, err := folder.look()
		if (err != nil) != (wrong != "") || err != nil && !strings.Contains(err.Error(), wrong) {
			t.Errorf("want the error %q, got %v", wrong, err)
		}
		var got []string
		for _, a := range archives {
			problem, _, _ := strings.Cut(a.Problem, ":")
			got = append(got, fmt.Sprint(a.Name, a.Images, problem))
		}
		if !slices.Equal(got, want) {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	look("")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	a, b := filepath.Join(dir, "a.tar"), filepath.Join(dir, "b.tar")
	write(t, a, "no archive")
	write(t, b, dockerArchive(t, "registry.example.org/b:v1"))
	look("", "a.tar[]expected an uncompressed tar archive of images", "b.tar[registry.example.org/b:v1]")
	write(t, a, dockerArchive(t, "registry.example.org/a:v1", "registry.example.org/a:v2"))
	look("", "a.tar[registry.example.org/a:v1 registry.example.org/a:v2]", "b.tar[registry.example.org/b:v1]")
	if err := os.Chmod(b, 0o666); err != nil {
		t.Fatal(err)
	}
	look("expected that only root can change "+b, "a.tar[]expected that only root can change "+b+", found user 0 and mode -rw-rw-rw-", "b.tar[]expected that only root can change "+b+", found user 0 and mode -rw-rw-rw-")
	if err := os.Remove(b); err != nil {
		t.Fatal(err)
	}
	look("", "a.tar[registry.example.org/a:v1 registry.example.org/a:v2]")
	var many []string
	for i := range 100 {
		many = append(many, fmt.Sprintf("registry.example.org/many:%02d", i))
	}
	write(t, a, dockerArchive(t, many...))
	look("", "a.tar"+fmt.Sprint(many[:maxReportedNames]))
	for i := range imagearchive.MaxArchives {
		write(t, filepath.Join(dir, fmt.Sprintf("x%02d.tar", i)), "")
	}
	if archives, err := folder.look(); len(archives) != imagearchive.MaxArchives || err == nil {
		t.Errorf("%d archives, %v", len(archives), err)
	}
}

// The report of the host contains the container images at the next look.
func TestContainerImagesArePublished(t *testing.T) {
	h := recorded(t)
	h.config.ContainerImages = t.TempDir()
	if err := os.Chmod(h.config.ContainerImages, 0o700); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(h.config.ContainerImages, "a.tar"), dockerArchive(t, "registry.example.org/a:v1"))
	watcher, end := h.broadcaster.Subscribe()
	defer end()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	ended := make(chan struct{})
	go func() { defer close(ended); h.machines.keepContainerImages(ctx) }()
	published, err := watcher.Take(ctx)
	cancel()
	<-ended
	if err != nil || len(published) != 1 {
		t.Fatalf("%v, %v", published, err)
	}
	if got := published[0].GetHost().GetContainerArchives(); len(got) != 1 || got[0].Name != "a.tar" || !slices.Equal(got[0].Images, []string{"registry.example.org/a:v1"}) {
		t.Errorf("the host reports %v", got)
	}
}
