package imagearchive

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestFolder(t *testing.T) {
	dir := t.TempDir()
	if got, err := Folder(filepath.Join(dir, "missing")); got != nil || err != nil {
		t.Errorf("a missing folder: %v, %v", got, err)
	}
	for _, name := range []string{"b.tar", "a.tar", ".half.tar", "notes.txt", "c.tar.gz"} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(os.Mkdir(filepath.Join(dir, "d.tar"), 0o700), os.Symlink("/etc/passwd", filepath.Join(dir, "e.tar"))); err != nil {
		t.Fatal(err)
	}
	want := []string{filepath.Join(dir, "a.tar"), filepath.Join(dir, "b.tar")}
	if got, err := Folder(dir); err != nil || !slices.Equal(got, want) {
		t.Errorf("%v, %v", got, err)
	}
	for i := range MaxArchives {
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("x%d.tar", i)), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := Folder(dir); len(got) != MaxArchives || err == nil || !strings.Contains(err.Error(), "expected at most 64 archives") {
		t.Errorf("%d, %v", len(got), err)
	}
}
