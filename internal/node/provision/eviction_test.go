package provision

import (
	"os"
	"path/filepath"
	"testing"
)

// The kubelet evicts pods at the first threshold of the disk that is met: that is the largest one.
func TestEvictionSpace(t *testing.T) {
	for name, test := range map[string]struct {
		file    string
		want    int64
		refused bool
	}{
		"no file":      {"", 0, false},
		"no threshold": {"evictionHard: {memory.available: 64Mi}", 0, false},
		"hard":         {"evictionHard: {nodefs.available: 5Gi, imagefs.available: 1Gi}", 5 << 30, false},
		"of images":    {"evictionHard: {nodefs.available: 1Gi, imagefs.available: 6Gi}", 6 << 30, false},
		"soft":         {"evictionHard: {nodefs.available: 1Gi}\nevictionSoft: {nodefs.available: 7Gi}", 7 << 30, false},
		"a percentage": {"evictionHard: {nodefs.available: 15%, imagefs.available: 1Gi}", 15 << 30, false},
		"off":          {"evictionHard: {nodefs.available: 0%, imagefs.available: 100%}", 0, false},
		"no number":    {"evictionHard: {nodefs.available: much}", 0, true},
		"no share":     {"evictionHard: {nodefs.available: much%}", 0, true},
		"no YAML":      {"{", 0, true},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "config.yaml")
			if test.file != "" {
				if err := os.WriteFile(path, []byte(test.file), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			got, err := evictionSpace(path, 100<<30)
			if got != test.want || (err != nil) != test.refused {
				t.Errorf("got %d, %v; want %d", got, err, test.want)
			}
		})
	}
}
