package host

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Hosts of one box have one id, which does not give the box's own away; without machine-id(5) the boot's does.
func TestBoxID(t *testing.T) {
	const machine, boot = "0123456789abcdef0123456789abcdef", "11111111-2222-3333-4444-555555555555"
	root := t.TempDir()
	write := func(file, content string) {
		path := filepath.Join(root, file)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if id := boxID(root); id != "" {
		t.Errorf("without any: %q", id)
	}
	write("proc/sys/kernel/random/boot_id", boot+"\n")
	byBoot := boxID(root)
	write("etc/machine-id", "\n") // as in an image that was never started
	if id := boxID(root); id != byBoot || id == "" {
		t.Errorf("an empty machine-id: %q, wanted %q", id, byBoot)
	}
	write("etc/machine-id", machine+"\n")
	id := boxID(root)
	if id == byBoot || len(id) != 32 || strings.Contains(id, machine) || id != boxID(root) {
		t.Errorf("got %q", id)
	}
}
