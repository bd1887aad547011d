package images

import (
	"context"
	"fmt"
	"os"
)

// ImportFile imports the archive at a path.
func ImportFile(ctx context.Context, socket, path string) (names []string, err error) {
	archive, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("opening an archive of container images: %w", err)
	}
	defer func() { _ = archive.Close() }()
	return Import(ctx, socket, archive)
}
