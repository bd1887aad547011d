package joining

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// All hosts of a box have the same id, which does not disclose the box's machine id. Without machine-id(5), the boot id is used.
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
	if id := BoxID(root); id != "" {
		t.Errorf("without both ids: %q", id)
	}
	write("proc/sys/kernel/random/boot_id", boot+"\n")
	byBoot := BoxID(root)
	write("etc/machine-id", "\n") // as in an image before its first boot
	if id := BoxID(root); id != byBoot || id == "" {
		t.Errorf("an empty machine-id: %q, want %q", id, byBoot)
	}
	write("etc/machine-id", machine+"\n")
	id := BoxID(root)
	if id == byBoot || len(id) != 32 || strings.Contains(id, machine) || id != BoxID(root) {
		t.Errorf("got %q", id)
	}
}
