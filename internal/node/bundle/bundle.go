// Package bundle changes the specification of a container before runc reads it.
//
// Layer: node. Allowed imports: api, library, contract.
package bundle

import (
	"bytes"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Dir returns the folder with the specification of the container that the arguments of runc create, or "".
func Dir(args []string) string {
	create := slices.Index(args, "create")
	if create < 0 {
		return ""
	}
	for i, arg := range args[create:] {
		if dir, found := strings.CutPrefix(arg, "--bundle="); found {
			return dir
		}
		if rest := args[create+i+1:]; (arg == "--bundle" || arg == "-b") && len(rest) > 0 {
			return rest[0]
		}
	}
	return "."
}

// Change changes the specification in a bundle. It keeps the file if the result is the same.
func Change(bundle string, change func(spec []byte) ([]byte, error)) error {
	path := filepath.Join(bundle, "config.json")
	data, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	changed, err := change(data)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	if bytes.Equal(changed, data) {
		return nil
	}
	return replace(path, changed)
}

// replace writes a file so that an interruption leaves the old or the new content.
func replace(path string, data []byte) error {
	mode := fs.FileMode(0o600)
	if info, err := os.Stat(path); err == nil {
		mode = info.Mode().Perm()
	}
	next := path + ".capstan"
	if err := os.WriteFile(next, data, mode); err != nil {
		return err
	}
	return os.Rename(next, path)
}
