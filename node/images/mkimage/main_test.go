package main

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
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
		o := options{name: "registry.example.org/hello:v1", out: out, user: "1:2", files: []string{extra + ":/etc/ssl/ca.pem"}}
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

func TestBadInput(t *testing.T) {
	out := filepath.Join(t.TempDir(), "x.tar")
	for name, tc := range map[string]struct {
		o    options
		args []string
	}{
		"no binary":     {options{name: "r.example.org/a:v1", out: out}, nil},
		"no tag":        {options{name: "r.example.org/a", out: out}, []string{"/bin/true"}},
		"missing":       {options{name: "r.example.org/a:v1", out: out}, []string{"/nowhere/at/all"}},
		"relative file": {options{name: "r.example.org/a:v1", out: out, files: []string{"/bin/true:x"}}, []string{"/bin/true"}},
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
