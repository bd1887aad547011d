package joining

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"os"
	"path/filepath"
)

// BoxID identifies the box, so that hosts on one box report the same value. It is a hash of machine-id(5), which must not be
// published, or else of the kernel's boot id. It is empty if neither can be read.
func BoxID(root string) string {
	for _, file := range []string{"etc/machine-id", "proc/sys/kernel/random/boot_id"} {
		if id, err := os.ReadFile(filepath.Join(root, file)); err == nil && len(bytes.TrimSpace(id)) >= 32 {
			mac := hmac.New(sha256.New, bytes.TrimSpace(id))
			mac.Write([]byte("capstan box"))
			return hex.EncodeToString(mac.Sum(nil)[:16])
		}
	}
	return ""
}
