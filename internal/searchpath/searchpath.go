// Package searchpath completes the search path for programs. `su` of Debian keeps the path of the user, which lacks the folders of
// programs for root, such as nft and mkfs.ext4.
//
// Layer: library. Allowed imports: api.
package searchpath

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Complete appends the folders of programs for root to the search path of this process and of its children, if they are missing.
func Complete() {
	folders := filepath.SplitList(os.Getenv("PATH"))
	for _, folder := range []string{"/usr/local/sbin", "/usr/sbin", "/sbin"} {
		if !slices.Contains(folders, folder) {
			folders = append(folders, folder)
		}
	}
	_ = os.Setenv("PATH", strings.Join(folders, string(os.PathListSeparator))) // no part contains a zero byte
}
