package host

import (
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/machineapi"
)

// udevFolder exists on hosts with udev.
const udevFolder = "/run/udev"

// udevRules keep udev from the content of block volumes, because pods write it: otherwise a pod could have its device activated as a
// part of LVM or RAID, or found in place of a disk of the host with the same UUID.
const udevRules = `# capstand writes this file.
SUBSYSTEM=="block", KERNEL=="loop*", ATTR{loop/backing_file}=="` + machineapi.BlockVolumesFolder + `/pvc-*", ENV{UDEV_DISABLE_PERSISTENT_STORAGE_RULES_FLAG}="1", ENV{UDISKS_IGNORE}="1", ENV{SYSTEMD_READY}="0"
`

// writeUdevRules writes the rules, before those of the distribution for disks (60-persistent-storage.rules). udev reads them by itself.
func writeUdevRules(folder string, log *slog.Logger) {
	_, err := os.Stat(folder)
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	rules := filepath.Join(folder, "rules.d")
	if err == nil {
		err = os.MkdirAll(rules, 0o755)
	}
	if err == nil {
		err = atomicfile.WriteFile(filepath.Join(rules, "59-capstan.rules"), []byte(udevRules), 0o644)
	}
	if err != nil {
		log.Error("Cannot write the rules of udev: the host examines the content of block volumes", "error", err)
	}
}
