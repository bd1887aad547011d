package main

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
)

func TestArchive(t *testing.T) {
	folder := t.TempDir()
	binary := filepath.Join(folder, "hello")
	if err := os.WriteFile(binary, []byte("a binary"), 0o755); err != nil {
		t.Fatal(err)
	}
	extra := filepath.Join(folder, "ca")
	if err := os.WriteFile(extra, []byte("roots"), 0o600); err != nil {
		t.Fatal(err)
	}

	var archives [2][]byte
	for i := range archives {
		out := filepath.Join(folder, "image.tar")
		o := options{names: []string{"registry.example.org/hello:v1"}, out: out, user: "1:2", files: []string{extra + ":/etc/ssl/ca.pem"}}
		if err := run(o, []string{binary, "serve"}); err != nil {
			t.Fatal(err)
		}
		var err error
		if archives[i], err = os.ReadFile(out); err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(archives[0], archives[1]) {
		t.Error("the same input gave two different archives")
	}
	if left, _ := filepath.Glob(filepath.Join(folder, ".mkimage-*")); len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}

	files := untar(t, archives[0])
	if _, ok := files["oci-layout"]; !ok {
		t.Error("not an OCI layout")
	}
	var index v1.IndexManifest
	decode(t, files["index.json"], &index)
	if len(index.Manifests) != 1 || index.Manifests[0].Annotations["io.containerd.image.name"] != "registry.example.org/hello:v1" {
		t.Fatalf("index: %+v", index.Manifests)
	}
	blob := func(h v1.Hash) []byte { return files["blobs/"+h.Algorithm+"/"+h.Hex] }
	var manifest v1.Manifest
	decode(t, blob(index.Manifests[0].Digest), &manifest)
	var config v1.ConfigFile
	decode(t, blob(manifest.Config.Digest), &config)
	if !slices.Equal(config.Config.Entrypoint, []string{"/hello"}) || !slices.Equal(config.Config.Cmd, []string{"serve"}) ||
		config.Config.User != "1:2" || config.OS != "linux" {
		t.Errorf("config: %+v", config)
	}
}

// An image with many programs: two names, symbolic links, a folder that every user can write, a program that changes the user, and no
// entrypoint.
func TestManyPrograms(t *testing.T) {
	folder := t.TempDir()
	binary := filepath.Join(folder, "busybox")
	if err := os.WriteFile(binary, []byte("a binary"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(binary, 0o755|os.ModeSetuid); err != nil {
		t.Fatal(err)
	}
	o := options{names: []string{"r.example.org/a:v1", "r.example.org/b:v2"}, noEntrypoint: true,
		links: []string{"/busybox:/bin/ls"}, folders: []string{"/tmp"}}
	image, err := build(o, binary, []string{"sh"})
	if err != nil {
		t.Fatal(err)
	}
	config, err := image.ConfigFile()
	if err != nil || config.Config.Entrypoint != nil || !slices.Equal(config.Config.Cmd, []string{"sh"}) {
		t.Errorf("config: %+v, %v", config, err)
	}
	layers, err := image.Layers()
	if err != nil || len(layers) != 1 {
		t.Fatalf("%d layers, %v", len(layers), err)
	}
	content, err := layers[0].Uncompressed()
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for r := tar.NewReader(content); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, fmt.Sprintf("%s %o %s", h.Name, h.Mode, h.Linkname))
	}
	if want := []string{"tmp/ 1777 ", "busybox 4755 ", "bin/ 755 ", "bin/ls 777 /busybox"}; !slices.Equal(got, want) {
		t.Errorf("the layer contains %q, expected %q", got, want)
	}

	o.out = filepath.Join(folder, "image.tar")
	if err := run(o, []string{binary, "sh"}); err != nil {
		t.Fatal(err)
	}
	archive, err := os.ReadFile(o.out)
	if err != nil {
		t.Fatal(err)
	}
	var index v1.IndexManifest
	decode(t, untar(t, archive)["index.json"], &index)
	if len(index.Manifests) != 2 || index.Manifests[0].Digest != index.Manifests[1].Digest ||
		index.Manifests[1].Annotations["io.containerd.image.name"] != "r.example.org/b:v2" {
		t.Errorf("index: %+v", index.Manifests)
	}
}

func TestBadInput(t *testing.T) {
	out := filepath.Join(t.TempDir(), "x.tar")
	for name, tc := range map[string]struct {
		o    options
		args []string
	}{
		"no binary":     {options{names: []string{"r.example.org/a:v1"}, out: out}, nil},
		"no tag":        {options{names: []string{"r.example.org/a"}, out: out}, []string{"/bin/true"}},
		"missing":       {options{names: []string{"r.example.org/a:v1"}, out: out}, []string{"/nowhere/at/all"}},
		"no name":       {options{out: out}, []string{"/bin/true"}},
		"relative link": {options{names: []string{"r.example.org/a:v1"}, out: out, links: []string{"/x:y"}}, []string{"/bin/true"}},
		"relative tmp":  {options{names: []string{"r.example.org/a:v1"}, out: out, folders: []string{"tmp"}}, []string{"/bin/true"}},
		"relative file": {options{names: []string{"r.example.org/a:v1"}, out: out, files: []string{"/bin/true:x"}}, []string{"/bin/true"}},
	} {
		if err := run(tc.o, tc.args); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

func untar(t *testing.T, archive []byte) map[string][]byte {
	t.Helper()
	files := map[string][]byte{}
	for r := tar.NewReader(bytes.NewReader(archive)); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		if err != nil {
			t.Fatal(err)
		}
		if files[h.Name], err = io.ReadAll(r); err != nil {
			t.Fatal(err)
		}
	}
}

func decode(t *testing.T, from []byte, to any) {
	t.Helper()
	if err := json.Unmarshal(from, to); err != nil {
		t.Fatal(err)
	}
}
