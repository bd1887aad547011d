package cli

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// Each machine gets the whole archive. The names of the images are those of all machines, and a failure names its machine.
func TestImageLoads(t *testing.T) {
	archive := filepath.Join(t.TempDir(), "a.tar")
	content := strings.Repeat("0123456789", 100_000)
	if err := os.WriteFile(archive, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	var last []step
	loads := &imageLoads{archive: archive, steps: []step{{name: "Machine a"}, {name: "Machine b"}}, show: func(s []step) { last = s }}
	takes := func(_ context.Context, from io.Reader) ([]string, error) {
		data, err := io.ReadAll(from)
		if string(data) != content {
			t.Errorf("received %d of %d bytes", len(data), len(content))
		}
		return []string{"echo:v1"}, err
	}
	if err := loads.into(t.Context(), 0, imageTarget{"a", takes}); err != nil {
		t.Fatal(err)
	}
	full := errors.New("disk is full")
	err := loads.into(t.Context(), 1, imageTarget{"b", func(_ context.Context, from io.Reader) ([]string, error) {
		_, err := io.CopyN(io.Discard, from, 500_000)
		return nil, errors.Join(err, full)
	}})
	if !errors.Is(err, full) || !strings.Contains(err.Error(), "machine b") {
		t.Errorf("%v", err)
	}
	if !slices.Equal(loads.images, []string{"echo:v1"}) || !last[0].done || last[1].done || !strings.HasPrefix(last[1].note, "5") {
		t.Errorf("images %v, steps %+v", loads.images, last)
	}
}

func TestImageTargetsOnce(t *testing.T) {
	target := func(name string) imageTarget { return imageTarget{machine: name} }
	var names []string
	for _, target := range union([]imageTarget{target("b"), target("a")}, []imageTarget{target("a"), target("b"), target("c")}) {
		names = append(names, target.machine)
	}
	if want := []string{"b", "a", "c"}; !slices.Equal(names, want) {
		t.Errorf("%v, want %v", names, want)
	}
}

// A compressed archive is refused before a machine receives it. A named pipe is not opened: it can be read once.
func TestCheckArchive(t *testing.T) {
	dir := t.TempDir()
	for name, test := range map[string]struct{ content, wrong string }{
		"tar":   {"index.json\x00 and more", ""},
		"short": {"BZ", ""},
		"empty": {"", ""},
		"gzip":  {"\x1f\x8b\x08 and more", "decompress it with `gzip -d`"},
		"zstd":  {"\x28\xb5\x2f\xfd and more", "`zstd -d`"},
		"xz":    {"\xfd7zXZ\x00 and more", "`xz -d`"},
		"bzip2": {"BZh91AY&SY and more", "`bzip2 -d`"},
	} {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(test.content), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := checkArchive(path); (err == nil) != (test.wrong == "") || err != nil && !strings.Contains(err.Error(), test.wrong) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for path, code := range map[string]int{dir: exitUsage, filepath.Join(dir, "missing"): exitNotFound} {
		if err := checkArchive(path); exitCode(err) != code {
			t.Errorf("%s: %v", path, err)
		}
	}
}
