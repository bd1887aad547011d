package machinedisk

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/projectquota"
)

// Options with which mkfs.ext4 creates project quotas, and none of users and groups.
const (
	quotaFeatures = "quota,project"
	quotaType     = "quotatype=prjquota"
)

// probeBytes is the size of the file system of ProbeQuotas, which has no journal.
const probeBytes = 1 << 20

// ProbeQuotas returns nil if the kernel can enforce the project quotas of disks, otherwise an error. It creates a small disk in
// the folder dir and removes it. The file system has no mount point, so only its file remains if the process ends in between, and the
// next probe removes it.
func ProbeQuotas(ctx context.Context, dir string) error {
	file, err := os.OpenFile(filepath.Join(dir, "quota-probe"), os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer func() { _ = os.Remove(file.Name()) }()
	if err := errors.Join(file.Truncate(probeBytes), file.Close()); err != nil {
		return err
	}
	err = run(ctx, "mkfs.ext4", "-q", "-F", "-b", fmt.Sprint(blockSize), "-O", "^has_journal,"+quotaFeatures, "-E", quotaType, file.Name())
	if err != nil {
		return err
	}
	loop, err := newLoop(file.Name())
	if err != nil {
		return err
	}
	defer func() { _ = loop.Close() }()
	return enforcedOn(loop.Name())
}

// enforcedOn returns nil if the kernel enforces the project quotas of the ext4 file system on a device.
func enforcedOn(device string) error {
	fs, err := unix.Fsopen("ext4", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return fmt.Errorf("opening an ext4 file system: %w", err)
	}
	defer func() { _ = unix.Close(fs) }()
	err = errors.Join(unix.FsconfigSetString(fs, "source", device), unix.FsconfigSetFlag(fs, "prjquota"))
	if err == nil {
		err = unix.FsconfigCreate(fs)
	}
	if err != nil {
		return fmt.Errorf("the kernel does not mount ext4 with project quotas: %w; it needs CONFIG_QUOTA and CONFIG_QFMT_V2 (module quota_v2)", err)
	}
	mount, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(mount) }()
	return projectquota.Enforced(mount)
}

// Fields of the superblock of ext4, as offsets in the file.
const (
	readOnlyFeatures = 1024 + 0x64
	featureProject   = 0x2000
)

// hasQuotas reports whether the file system was made with project quotas.
func (d Disk) hasQuotas() (bool, error) {
	f, err := os.Open(d.Image)
	if err != nil {
		return false, err
	}
	defer func() { _ = f.Close() }()
	var features [4]byte
	if _, err := f.ReadAt(features[:], readOnlyFeatures); err != nil {
		return false, fmt.Errorf("reading the features of %s: %w", filepath.Base(d.Image), err)
	}
	return binary.LittleEndian.Uint32(features[:])&featureProject != 0, nil
}
