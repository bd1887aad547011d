package machineimage

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"
	"github.com/opencontainers/go-digest"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/testenv/expect"
)

func write(t *testing.T, path, content string, mode os.FileMode) {
	t.Helper()
	expect.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
	expect.NoError(t, os.WriteFile(path, []byte(content), mode))
	expect.NoError(t, os.Chmod(path, mode))
}

// file is an entry of a layer.
type file struct {
	name, content string
	kind          byte // a regular file if 0
	mode          int64
	link          string
}

// good are the programs that an image must have, as scripts.
func good() (out []file) {
	out = append(out, file{name: "bin", kind: tar.TypeSymlink, link: "usr/bin"}, file{name: "usr/bin/sh", content: "#!/bin/sh\n", mode: 0o755})
	for _, p := range programs {
		out = append(out, file{name: "usr/bin/" + p.name, content: "#!/bin/sh\n", mode: 0o755})
	}
	return out
}

func tarOf(t *testing.T, files []file) []byte {
	t.Helper()
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	for _, f := range files {
		h := &tar.Header{Name: f.name, Typeflag: f.kind, Mode: f.mode, Size: int64(len(f.content)), Linkname: f.link}
		if f.kind == 0 {
			h.Typeflag = tar.TypeReg
		}
		expect.NoError(t, w.WriteHeader(h))
		_, err := w.Write([]byte(f.content))
		expect.NoError(t, err)
	}
	expect.NoError(t, w.Close())
	return out.Bytes()
}

func gzipped(t *testing.T, data []byte) []byte {
	t.Helper()
	var out bytes.Buffer
	w := gzip.NewWriter(&out)
	_, err := w.Write(data)
	expect.NoError(t, err)
	expect.NoError(t, w.Close())
	return out.Bytes()
}

// archiveOf returns an OCI archive with the layers. damage changes the blobs after their digests are known.
func archiveOf(t *testing.T, damage func(blobs map[string][]byte), layers ...[]byte) []byte {
	t.Helper()
	blobs := map[string][]byte{}
	add := func(data []byte, kind string) v1.Descriptor {
		d := digest.FromBytes(data)
		blobs["blobs/sha256/"+d.Encoded()] = data
		return v1.Descriptor{MediaType: kind, Digest: d, Size: int64(len(data))}
	}
	marshal := func(v any) []byte {
		data, err := json.Marshal(v)
		expect.NoError(t, err)
		return data
	}
	manifest := v1.Manifest{MediaType: v1.MediaTypeImageManifest}
	for _, l := range layers {
		manifest.Layers = append(manifest.Layers, add(l, v1.MediaTypeImageLayer))
	}
	described := add(marshal(manifest), v1.MediaTypeImageManifest)
	described.Platform = &v1.Platform{OS: "linux", Architecture: runtime.GOARCH}
	foreign := v1.Descriptor{MediaType: v1.MediaTypeImageManifest, Digest: described.Digest, Platform: &v1.Platform{OS: "linux", Architecture: "s390x"}}
	inner := add(marshal(v1.Index{Manifests: []v1.Descriptor{foreign, described}}), v1.MediaTypeImageIndex)
	blobs["index.json"] = marshal(v1.Index{Manifests: []v1.Descriptor{inner}})
	if damage != nil {
		damage(blobs)
	}
	var files []file
	for name, data := range blobs {
		files = append(files, file{name: "./" + name, content: string(data), mode: 0o644})
	}
	return tarOf(t, files)
}

func newStore(t *testing.T) *Store {
	t.Helper()
	dir := t.TempDir()
	s := &Store{Dir: filepath.Join(dir, "images"), Unpacked: filepath.Join(dir, "unpacked"), Reserved: []string{"host"}}
	expect.NoError(t, os.Mkdir(s.Dir, 0o700))
	return s
}

func nobody(string) bool { return false }

func (s *Store) scan(t *testing.T) []Image {
	t.Helper()
	_, err := s.Scan(t.Context(), nobody)
	expect.NoError(t, err)
	return s.List()
}

// The layers of an archive are applied in order. Files of later layers replace and remove those of earlier ones.
func TestArchive(t *testing.T) {
	s := newStore(t)
	lower := append(good(), file{name: "usr/", kind: tar.TypeDir, mode: 0o755}, file{name: "bin", kind: tar.TypeSymlink, link: "usr/bin"},
		file{name: "usr/bin/su", content: "root", mode: 0o6755}, file{name: "usr/a", content: "1", mode: 0o644}, file{name: "usr/gone", mode: 0o644},
		file{name: "usr/d/old", mode: 0o644}, file{name: "usr/hard", kind: tar.TypeLink, link: "usr/a"},
		file{name: "usr/pipe", kind: tar.TypeFifo}, file{name: "usr/dev", kind: tar.TypeChar}, file{name: "var/data", content: "x", mode: 0o644})
	upper := []file{{name: "usr/d/sub/new", mode: 0o644}, {name: "usr/d/.wh..wh..opq"}, {name: "usr/.wh.gone"}, {name: "usr/a", content: "2", mode: 0o600}, {name: "bin/late", mode: 0o755}}
	z, err := zstd.NewWriter(nil)
	expect.NoError(t, err)
	write(t, filepath.Join(s.Dir, "debian.tar"), string(archiveOf(t, nil, gzipped(t, tarOf(t, lower)), z.EncodeAll(tarOf(t, upper), nil))), 0o600)
	images := s.scan(t)
	if len(images) != 1 || images[0].Problem != "" || !validDigest.MatchString(images[0].Digest) {
		t.Fatalf("%+v", images)
	}
	dir := images[0].Dir
	for name, want := range map[string]string{"usr/a": "2", "usr/hard": "1", "usr/d/sub/new": "", "usr/bin/late": ""} {
		if data, err := os.ReadFile(filepath.Join(dir, name)); err != nil || string(data) != want {
			t.Errorf("%s: %q, %v", name, data, err)
		}
	}
	for _, name := range []string{"usr/gone", "usr/d/old", "usr/pipe", "usr/dev", "var"} {
		if _, err := os.Lstat(filepath.Join(dir, name)); err == nil {
			t.Errorf("%s exists", name)
		}
	}
	if info, err := os.Stat(filepath.Join(dir, "usr/bin/su")); err != nil || info.Mode() != 0o755 {
		t.Errorf("a setuid program: %v, %v", info.Mode(), err)
	}
	if info, err := os.Stat(s.Unpacked); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("users of the host can enter %s: %v", s.Unpacked, info.Mode())
	}
	marker := filepath.Join(dir, "usr", "unpacked-once")
	write(t, marker, "", 0o600)
	again := &Store{Dir: s.Dir, Unpacked: s.Unpacked}
	if images := again.scan(t); len(images) != 1 || images[0].Dir != dir {
		t.Errorf("%+v", images)
	}
	if _, err := os.Stat(marker); err != nil {
		t.Error("the archive was unpacked again")
	}
}

// A hostile or damaged archive changes nothing outside of its folder, and leaves nothing.
func TestBadArchives(t *testing.T) {
	outside := filepath.Join(t.TempDir(), "outside")
	expect.NoError(t, os.Mkdir(outside, 0o755))
	layer := func(files ...file) []byte { return archiveOf(t, nil, tarOf(t, append(files, good()...))) }
	for name, test := range map[string]struct {
		content []byte
		want    string // a part of the problem; empty is none
	}{
		"no archive":          {[]byte("text"), "OCI archive"},
		"another archive":     {tarOf(t, []file{{name: "usr/bin/sh"}}), "index.json"},
		"a file outside":      {layer(file{name: "../../usr/../../outside/f"}), ""}, // It becomes a part that machines do not get.
		"through a link":      {layer(file{name: "usr/l", kind: tar.TypeSymlink, link: outside}, file{name: "usr/l/f"}), "escapes"},
		"through a relative":  {layer(file{name: "usr/l", kind: tar.TypeSymlink, link: "../../../../../../.." + outside}, file{name: "usr/l/f"}), "escapes"},
		"a hard link outside": {layer(file{name: "usr/l", kind: tar.TypeSymlink, link: outside}, file{name: "usr/h", kind: tar.TypeLink, link: "usr/l/f"}), "escapes"},
		"a hard link to var":  {layer(file{name: "usr/h", kind: tar.TypeLink, link: "/var/x"}), "hard link"},
		"a bad whiteout":      {layer(file{name: "usr/.wh..."}), `after ".wh."`},
		"a whiteout of ..":    {layer(file{name: "usr/.wh..", kind: 0}), `after ".wh."`},
		"a whiteout outside":  {layer(file{name: "usr/l", kind: tar.TypeSymlink, link: filepath.Dir(outside)}, file{name: "usr/l/.wh.outside"}), "escapes"},
		"too many files":      {layer(slices.Repeat([]file{{name: "usr/x"}}, 200)...), "at most"},
		"too large":           {layer(file{name: "var/x", content: strings.Repeat("x", 100<<10)}), "at most"},
		"a bomb":              {archiveOf(t, nil, gzipped(t, tarOf(t, []file{{name: "usr/x", content: strings.Repeat("x", 10<<20)}}))), "at most"},
		"no layers":           {archiveOf(t, nil), "layers"},
		"a damaged layer": {archiveOf(t, func(blobs map[string][]byte) {
			for name, data := range blobs {
				if bytes.Contains(data, []byte("#!/bin/sh")) {
					blobs[name] = bytes.ReplaceAll(data, []byte("#!/bin/sh"), []byte("#!/bin/ev"))
				}
			}
		}, tarOf(t, good())), "damaged"},
		"a missing layer": {archiveOf(t, func(blobs map[string][]byte) {
			for name, data := range blobs {
				if bytes.Contains(data, []byte("#!/bin/sh")) {
					delete(blobs, name)
				}
			}
		}, tarOf(t, good())), "incomplete"},
		"half an archive": {layer()[:3000], ""},
	} {
		s := newStore(t)
		s.Limits = Limits{Bytes: 64 << 10, Files: 100}
		write(t, filepath.Join(s.Dir, "bad.tar"), string(test.content), 0o600)
		images := s.scan(t)
		half := name == "half an archive" && images[0].Problem != ""
		if len(images) != 1 || !half && (test.want == "") != (images[0].Problem == "") || !strings.Contains(images[0].Problem, test.want) {
			t.Errorf("%s: %+v", name, images)
		}
		left, err := os.ReadDir(s.Unpacked)
		if err != nil || images[0].Problem != "" && len(left) > 0 {
			t.Errorf("%s: it has left %v, %v", name, left, err)
		}
		if files, err := os.ReadDir(outside); err != nil || len(files) > 0 {
			t.Fatalf("%s: it wrote %v outside, %v", name, files, err)
		}
	}
}

// folder creates an image as a folder.
func (s *Store) folder(t *testing.T, name string) string {
	t.Helper()
	dir := filepath.Join(s.Dir, name)
	for _, f := range good() {
		if f.link != "" {
			expect.NoError(t, os.MkdirAll(dir, 0o755))
			expect.NoError(t, os.Symlink(f.link, filepath.Join(dir, f.name)))
			continue
		}
		write(t, filepath.Join(dir, f.name), f.content, 0o755)
	}
	return dir
}

// Names, owners and contents of images are checked when they are registered.
func TestRegister(t *testing.T) {
	for name, test := range map[string]struct {
		prepare func(t *testing.T, s *Store)
		want    string // the list; a problem is shortened to its first words
	}{
		"none":     {func(*testing.T, *Store) {}, ""},
		"a folder": {func(t *testing.T, s *Store) { s.folder(t, "debian-13.1") }, "debian-13.1 ok"},
		"bad names": {func(t *testing.T, s *Store) {
			s.folder(t, ".new")
			s.folder(t, "A")
			s.folder(t, "a b")
			write(t, filepath.Join(s.Dir, "notes"), "", 0o600)
		}, ""},
		"reserved": {func(t *testing.T, s *Store) { s.folder(t, "host") }, "host the name is reserved"},
		"both":     {func(t *testing.T, s *Store) { s.folder(t, "a"); write(t, filepath.Join(s.Dir, "a.tar"), "", 0o600) }, "a both the folder"},
		"a link": {func(t *testing.T, s *Store) {
			expect.NoError(t, os.Symlink(s.folder(t, ".a"), filepath.Join(s.Dir, "a")))
		}, ""},
		"writable":  {func(t *testing.T, s *Store) { expect.NoError(t, os.Chmod(s.folder(t, "a"), 0o777)) }, "a expected that only root"},
		"of a user": {func(t *testing.T, s *Store) { expect.NoError(t, os.Chown(s.folder(t, "a"), 1000, 0)) }, "a expected that only root"},
		"no usr": {func(t *testing.T, s *Store) {
			expect.NoError(t, os.Rename(filepath.Join(s.folder(t, "a"), "usr"), filepath.Join(s.Dir, "a", "sbin")))
		}, "a expected a root file system"},
		"usr is a link": {func(t *testing.T, s *Store) {
			expect.NoError(t, os.Rename(filepath.Join(s.folder(t, "a"), "usr"), filepath.Join(s.Dir, "a", "x")))
			expect.NoError(t, os.Symlink("/usr", filepath.Join(s.Dir, "a", "usr")))
		}, "a expected a root file system"},
		"no nft": {func(t *testing.T, s *Store) {
			expect.NoError(t, os.Remove(filepath.Join(s.folder(t, "a"), "usr/bin/nft")))
		}, "a expected the program nft"},
		"a device": {func(t *testing.T, s *Store) {
			expect.NoError(t, unix.Mkfifo(filepath.Join(s.folder(t, "a"), "usr/pipe"), 0o600))
		}, "a expected files, folders"},
		"programs behind absolute links": {func(t *testing.T, s *Store) {
			bin := filepath.Join(s.folder(t, "a"), "usr/bin")
			expect.NoError(t, os.Rename(bin, filepath.Join(s.Dir, "a", "usr/sbin")))
			expect.NoError(t, os.Symlink("/usr/sbin", bin))
		}, "a ok"},
		"programs of the host": {func(t *testing.T, s *Store) {
			sh := filepath.Join(s.folder(t, "a"), "usr/bin/sh")
			expect.NoError(t, os.Remove(sh))
			expect.NoError(t, os.Symlink("../../../../../../../../../../usr/bin/env", sh))
		}, "a expected a shell in /bin/sh"},
		"no bin": {func(t *testing.T, s *Store) { expect.NoError(t, os.Remove(filepath.Join(s.folder(t, "a"), "bin"))) }, "a expected a shell in /bin/sh"},
	} {
		s := newStore(t)
		test.prepare(t, s)
		got := ""
		for _, i := range s.scan(t) {
			got += i.Name + " " + i.Problem
			if i.Problem == "" {
				got += "ok"
			}
		}
		if !strings.HasPrefix(got, test.want) || test.want == "" && got != "" {
			t.Errorf("%s: %q", name, got)
		}
	}
}

// A program without its dynamic linker or a library is found before a machine needs it.
func TestCheckProgram(t *testing.T) {
	data, err := os.ReadFile("/usr/bin/mount")
	expect.NoError(t, err)
	s := newStore(t)
	dir := s.folder(t, "a")
	write(t, filepath.Join(dir, "usr/bin/mount"), string(data), 0o755)
	if err := Check(dir); err == nil || !strings.Contains(err.Error(), "usr/bin/mount: expected its dynamic linker /lib64/ld-linux") {
		t.Errorf("without the linker: %v", err)
	}
	write(t, filepath.Join(dir, "lib64/ld-linux-x86-64.so.2"), "", 0o755)
	if err := Check(dir); err == nil || !strings.Contains(err.Error(), "expected the library lib") {
		t.Errorf("without libraries: %v", err)
	}
	if err := Check("/"); err != nil && !strings.Contains(err.Error(), "conntrack") && !strings.Contains(err.Error(), "nft") {
		t.Errorf("this system: %v", err)
	}
}

// The digest of a folder is that of its content. The number of images is bounded.
func TestDigestAndBounds(t *testing.T) {
	s := newStore(t)
	s.folder(t, "a")
	s.folder(t, "b")
	c := s.folder(t, "c")
	write(t, filepath.Join(c, "usr/more"), "", 0o644)
	write(t, filepath.Join(s.folder(t, "d"), "var/ignored"), "", 0o644)
	images := s.scan(t)
	if len(images) != 4 || images[0].Digest != images[1].Digest || images[0].Digest == images[2].Digest || images[0].Digest != images[3].Digest {
		t.Errorf("%+v", images)
	}
	for i := range MaxImages + 5 {
		expect.NoError(t, os.Mkdir(filepath.Join(s.Dir, fmt.Sprint("n", i)), 0o755))
	}
	if images := s.scan(t); len(images) != MaxImages {
		t.Errorf("%d images", len(images))
	}
	if _, err := (&Store{Dir: s.Dir, Unpacked: s.Unpacked, Limits: Limits{Files: 3}}).folderDigest(t.Context(), c); err == nil {
		t.Error("a folder with more files than the limit has a digest")
	}
}

// A machine keeps the archive with which it was made. A folder that was replaced is another image.
func TestGet(t *testing.T) {
	s := newStore(t)
	archive := filepath.Join(s.Dir, "a.tar")
	write(t, archive, string(archiveOf(t, nil, tarOf(t, good()))), 0o600)
	first := s.scan(t)[0]
	write(t, archive, string(archiveOf(t, nil, tarOf(t, append(good(), file{name: "usr/x"})))), 0o600)
	if changed, err := s.Scan(t.Context(), func(digest string) bool { return digest == first.Digest }); !changed || err != nil {
		t.Fatal(changed, err)
	}
	second, err := s.Get("a", "")
	if err != nil || second.Digest == first.Digest {
		t.Errorf("a new machine: %+v, %v", second, err)
	}
	if got, err := s.Get("a", first.Digest); err != nil || got.Dir != first.Dir {
		t.Errorf("a machine of the first archive: %+v, %v", got, err)
	}
	if changed, err := s.Scan(t.Context(), nobody); changed || err != nil {
		t.Error(changed, err)
	}
	for digest, want := range map[string]string{first.Digest: "put the former image back", "../../etc": "put the former image back"} {
		if _, err := s.Get("a", digest); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", digest, err)
		}
	}
	expect.NoError(t, os.Remove(archive))
	s.scan(t)
	if _, err := s.Get("a", ""); err == nil || !strings.Contains(err.Error(), "found none") {
		t.Error(err)
	}
	if left, err := os.ReadDir(s.Unpacked); err != nil || len(left) > 0 {
		t.Errorf("%v, %v", left, err)
	}
}

// endsLater is a context that ends after a number of looks at it.
type endsLater struct {
	context.Context
	looks int
}

func (c *endsLater) Err() error {
	if c.looks--; c.looks < 0 {
		return context.Canceled
	}
	return nil
}

// The end of capstand ends the reading of a large file or layer. The list stays, and nothing remains of the unpacked part.
func TestEndWhileReading(t *testing.T) {
	large := append(good(), file{name: "usr/large", content: strings.Repeat("x", 1<<20), mode: 0o644})
	for name, fill := range map[string]func(t *testing.T, dir string){
		"archive": func(t *testing.T, dir string) {
			write(t, filepath.Join(dir, "a.tar"), string(archiveOf(t, nil, tarOf(t, large))), 0o600)
		},
		"folder": func(t *testing.T, dir string) {
			for _, f := range large {
				if f.kind == 0 {
					write(t, filepath.Join(dir, "a", f.name), f.content, 0o755)
				}
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStore(t)
			fill(t, s.Dir)
			ends := &endsLater{t.Context(), 5} // A look at each part of some KiB.
			if changed, err := s.Scan(ends, nobody); changed || !errors.Is(err, context.Canceled) {
				t.Errorf("changed %v, %v", changed, err)
			}
			if left, err := os.ReadDir(s.Unpacked); err != nil || len(left)+len(s.List()) > 0 {
				t.Errorf("%v, %v, %v", left, s.List(), err)
			}
		})
	}
}
