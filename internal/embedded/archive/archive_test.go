package archive

import (
	"bytes"
	"compress/gzip"
	"crypto/rand"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"capstan.dev/capstan/internal/testenv/expect"
)

// example returns an archive of two files.
func example(t *testing.T) (path string, content []byte) {
	t.Helper()
	dir := t.TempDir()
	content = make([]byte, 100_000)
	_, _ = rand.Read(content)
	expect.NoError(t, os.MkdirAll(filepath.Join(dir, "pki"), 0o700))
	expect.NoError(t, os.WriteFile(filepath.Join(dir, "etcd.db"), content, 0o644))
	expect.NoError(t, os.WriteFile(filepath.Join(dir, "pki", "ca.key"), []byte("secret"), 0o644))
	path = filepath.Join(dir, "archive")
	expect.NoError(t, Write(path, Manifest{Installation: "abc", Time: time.Now().UTC().Truncate(time.Second), Revision: 7}, dir, []string{"etcd.db", "pki/ca.key"}))
	return path, content
}

func TestRoundTrip(t *testing.T) {
	path, content := example(t)
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the archive has mode %v, %v", info.Mode(), err)
	}
	if err := Write(path, Manifest{}, t.TempDir(), nil); err == nil {
		t.Error("an existing archive was overwritten")
	}
	dir := t.TempDir()
	m, err := Extract(path, dir)
	expect.NoError(t, err)
	if m.Format != Format || m.Installation != "abc" || m.Revision != 7 || !m.Has("pki/ca.key") || m.Has("pki") || m.SizeBytes() != 100_006 {
		t.Errorf("the manifest is %+v", m)
	}
	for name, want := range map[string][]byte{"etcd.db": content, "pki/ca.key": []byte("secret")} {
		file := filepath.Join(dir, name)
		have, err := os.ReadFile(file)
		expect.NoError(t, err)
		if info, err := os.Stat(file); !bytes.Equal(have, want) || err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%s: %d bytes, mode %v, %v", name, len(have), info.Mode(), err)
		}
	}
}

// Each flipped byte and each truncation is detected.
func TestDamage(t *testing.T) {
	path, _ := example(t)
	whole, err := os.ReadFile(path)
	expect.NoError(t, err)
	broken := filepath.Join(t.TempDir(), "broken")
	for at := 20; at < len(whole); at += len(whole)/40 + 1 {
		for name, data := range map[string][]byte{"flipped": bytes.Clone(whole), "cut": whole[:at]} {
			if name == "flipped" {
				data[at] ^= 0x10
			}
			expect.NoError(t, os.WriteFile(broken, data, 0o600))
			if _, err := Extract(broken, t.TempDir()); err == nil {
				t.Errorf("byte %d of %d %s, but the archive is accepted", at, len(whole), name)
			}
		}
	}
}

// Files that the manifest does not contain, and paths outside of the folder, are refused.
func TestRefused(t *testing.T) {
	dir := t.TempDir()
	expect.NoError(t, os.WriteFile(filepath.Join(dir, "a"), []byte("x"), 0o600))
	outside := filepath.Join(filepath.Dir(dir), "outside")
	expect.NoError(t, os.WriteFile(outside, []byte("x"), 0o600))
	leaving := filepath.Join(t.TempDir(), "archive")
	expect.NoError(t, Write(leaving, Manifest{}, dir, []string{"a", "../outside"}))
	expect.NoError(t, os.Remove(outside))
	if _, err := Extract(leaving, dir+"/b"); err == nil || !strings.Contains(err.Error(), "../outside") {
		t.Errorf("a file outside of the folder: %v", err)
	}
	if _, err := os.Stat(outside); err == nil {
		t.Error("a file was written outside of the folder")
	}
	path, content := example(t)
	expect.NoError(t, os.WriteFile(path, repacked(t, path, content[:100], make([]byte, 100)), 0o600))
	if _, err := Extract(path, t.TempDir()); err == nil || !strings.Contains(err.Error(), "etcd.db is damaged: its SHA-256 is") {
		t.Errorf("a file that differs from the manifest: %v", err)
	}
	expect.NoError(t, os.WriteFile(path, []byte("no archive"), 0o600))
	if _, err := Read(path); err == nil || !strings.Contains(err.Error(), "expected a complete backup") {
		t.Errorf("no archive: %v", err)
	}
}

// repacked returns an archive in which some bytes differ, with a valid checksum of gzip.
func repacked(t *testing.T, path string, before, after []byte) []byte {
	t.Helper()
	f, err := os.Open(path)
	expect.NoError(t, err)
	defer f.Close()
	r, err := gzip.NewReader(f)
	expect.NoError(t, err)
	data, err := io.ReadAll(r)
	expect.NoError(t, err)
	if bytes.Count(data, before) != 1 {
		t.Fatal("the archive does not contain the bytes to replace")
	}
	var out bytes.Buffer
	w := gzip.NewWriter(&out)
	_, err = w.Write(bytes.Replace(data, before, after, 1))
	expect.NoError(t, errors.Join(err, w.Close()))
	return out.Bytes()
}
