package images

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// maxArchives bounds the archives of a folder that machines import.
const maxArchives = 64

// Archives returns the paths of the archives NAME.tar in a folder, in their order. Names that begin with a dot are ignored. A missing
// folder is empty.
func Archives(dir string) ([]string, error) {
	files, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("listing the archives of container images: %w", err)
	}
	var out []string
	for _, file := range files {
		name := file.Name()
		if file.Type().IsRegular() && strings.HasSuffix(name, ".tar") && !strings.HasPrefix(name, ".") {
			out = append(out, filepath.Join(dir, name))
		}
	}
	if len(out) > maxArchives {
		return out[:maxArchives], fmt.Errorf("expected at most %d archives in %s, found %d: the first ones by name are imported", maxArchives, dir, len(out))
	}
	return out, nil
}

// ImportFile imports the archive at a path.
func ImportFile(ctx context.Context, socket, path string) (names []string, err error) {
	archive, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("opening an archive of container images: %w", err)
	}
	defer func() { _ = archive.Close() }()
	return Import(ctx, socket, archive)
}
