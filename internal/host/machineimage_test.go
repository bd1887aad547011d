package host

import (
	"bytes"
	"encoding/json"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	oci "github.com/opencontainers/runtime-spec/specs-go"

	"capstan.dev/capstan/internal/host/machineimage"
)

// withImage returns a host with the image debian, and a machine that uses it.
func withImage(t *testing.T) (*Host, *machine, string) {
	t.Helper()
	h := recorded(t)
	dir := t.TempDir()
	h.images = &machineimage.Store{Dir: dir, Unpacked: h.store.path(unpackedDir)}
	if err := os.Chmod(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	image := filepath.Join(dir, "debian")
	for name, content := range map[string]string{
		"usr/bin/sh": "", "usr/bin/mount": "", "usr/bin/umount": "", "usr/sbin/nft": "", "usr/sbin/conntrack": "",
		"usr/lib/os-release": "PRETTY_NAME=\"An image\"\n", "etc/services": "of the image\n", "etc/passwd": "of the image\n", "lib64/x": "",
	} {
		path := filepath.Join(image, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		write(t, path, content)
		if err := os.Chmod(path, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for name, target := range map[string]string{"bin": "usr/bin", "etc/os-release": "/usr/lib/os-release", "etc/protocols": "/../../../../etc/hostname"} {
		if err := os.Symlink(target, filepath.Join(image, name)); err != nil {
			t.Fatal(err)
		}
	}
	m := onDisk(t, h)
	m.spec.Image = "debian"
	return h, m, image
}

// A machine gets the programs and tables of its image, and none of the host's. Files with privileges have none in the machine.
func TestMachineOfAnImage(t *testing.T) {
	h, m, image := withImage(t)
	if _, err := m.chooseImage(t.Context()); err == nil || !strings.Contains(err.Error(), "expected the image debian") {
		t.Errorf("before the registration: %v", err)
	}
	if _, err := h.images.Scan(t.Context(), h.machines.usesImage); err != nil {
		t.Fatal(err)
	}
	if info := h.machines.info(); !slices.Equal(info.Images, []string{"host", "debian"}) || len(info.MachineImages) != 1 || info.MachineImages[0].Digest == "" {
		t.Errorf("the host reports %v", info.MachineImages)
	}
	system, err := m.chooseImage(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := m.ensureDisk(t.Context(), system); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"etc/os-release": "PRETTY_NAME=\"An image\"\n", "etc/services": "of the image\n"} {
		if got := read(t, filepath.Join(m.rootfs(), name)); got != want {
			t.Errorf("%s: %q", name, got)
		}
	}
	if got := read(t, filepath.Join(m.rootfs(), "etc/passwd")); got == "of the image\n" {
		t.Error("the users are those of the image")
	}
	if target, err := os.Readlink(filepath.Join(m.rootfs(), "bin")); err != nil || target != "usr/bin" {
		t.Errorf("bin: %q, %v", target, err)
	}
	if _, err := os.Stat(filepath.Join(m.rootfs(), "etc/protocols")); err == nil {
		t.Error("a link of the image led to a file of the host")
	}
	h.config.Assets = t.TempDir()
	bundle, err := m.prepare(system, nil)
	if err != nil {
		t.Fatal(err)
	}
	var spec oci.Spec
	if err := json.Unmarshal([]byte(read(t, filepath.Join(bundle, "config.json"))), &spec); err != nil {
		t.Fatal(err)
	}
	bound := map[string]oci.Mount{}
	for _, mount := range spec.Mounts {
		bound[mount.Destination] = mount
	}
	for _, folder := range []string{"/usr", "/lib64"} {
		b := bound[folder]
		if b.Source != filepath.Join(image, folder) || !slices.Contains(b.Options, "ro") || !slices.Contains(b.Options, "nosuid") || !slices.Contains(b.Options, "nodev") {
			t.Errorf("%s: %+v", folder, b)
		}
	}
	if _, ok := bound["/lib"]; ok {
		t.Error("the machine has /lib of the host")
	}
}

// A machine never gets another image than that of its first start, also after a restart of capstand.
func TestMachineKeepsItsImage(t *testing.T) {
	h, m, image := withImage(t)
	if _, err := h.images.Scan(t.Context(), h.machines.usesImage); err != nil {
		t.Fatal(err)
	}
	if _, err := m.chooseImage(t.Context()); err != nil {
		t.Fatal(err)
	}
	h.machines.byID[m.spec.Id] = m
	digest := h.images.List()[0].Digest
	if !h.machines.usesImage(digest) || h.machines.usesImage("sha256:other") {
		t.Error("the machine does not use its image, or uses another one")
	}
	write(t, filepath.Join(image, "etc/services"), "changed\n")
	later := filepath.Join(filepath.Dir(image), ".later")
	for _, rename := range [][2]string{{image, later}, {later, image}} { // as an administrator replaces a folder
		if err := os.Rename(rename[0], rename[1]); err != nil {
			t.Fatal(err)
		}
	}
	if changed, err := h.images.Scan(t.Context(), h.machines.usesImage); err != nil || !changed {
		t.Fatal(changed, err)
	}
	next := onDisk(t, h)
	next.spec.Image = "debian"
	if next.state.ImageDigest != digest {
		t.Errorf("recorded: %q", next.state.ImageDigest)
	}
	if _, err := next.chooseImage(t.Context()); err == nil || !strings.Contains(err.Error(), "put the former image back, or replace the machine") {
		t.Errorf("with another image: %v", err)
	}
}

// An image that machines cannot have is reported with its problem, and logged.
func TestBadImage(t *testing.T) {
	h, m, image := withImage(t)
	var log bytes.Buffer
	h.log = slog.New(slog.NewTextHandler(&log, nil))
	if err := os.Remove(filepath.Join(image, "usr/sbin/nft")); err != nil {
		t.Fatal(err)
	}
	if _, err := h.images.Scan(t.Context(), h.machines.usesImage); err != nil {
		t.Fatal(err)
	}
	h.machines.announceImages()
	info := h.machines.info()
	if !slices.Equal(info.Images, []string{"host"}) || !strings.Contains(info.MachineImages[0].Problem, "expected the program nft") || !strings.Contains(log.String(), "program nft") {
		t.Errorf("%v, log %s", info.MachineImages, log.String())
	}
	if _, err := m.chooseImage(t.Context()); err == nil || !strings.Contains(err.Error(), "nft") {
		t.Errorf("a machine got the image: %v", err)
	}
}

// The lock of a machine is free while its image is read: fencing and all calls wait for it.
func TestHungImage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h, m, image := withImage(t)
		if _, err := h.images.Scan(t.Context(), h.machines.usesImage); err != nil {
			t.Fatal(err)
		}
		hang, chosen := make(chan struct{}), make(chan error)
		h.imageFolders.byFiles[image] = &look{ended: hang}
		go func() {
			_, err := m.chooseImage(t.Context())
			chosen <- err
		}()
		synctest.Wait() // Until the image is read.
		if !m.mu.TryLock() {
			t.Fatal("the lock of the machine is held")
		}
		m.mu.Unlock()
		if err := <-chosen; err == nil || !strings.Contains(err.Error(), "to answer within 5s") {
			t.Errorf("an image that hangs: %v", err)
		}
		close(hang)
	})
}

// A machine does not begin with an image that was replaced after its check: a scan may be removing the unpacked files.
func TestImageReplacedDuringStart(t *testing.T) {
	h, m, _ := withImage(t)
	if _, err := h.images.Scan(t.Context(), h.machines.usesImage); err != nil {
		t.Fatal(err)
	}
	former := strings.Repeat("a", 64)
	if err := os.Mkdir(filepath.Join(h.images.Unpacked, former), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := m.recordImage("sha256:" + former); err == nil || !strings.Contains(err.Error(), "the image was replaced meanwhile") || m.state.ImageDigest != "" {
		t.Errorf("recorded %q, %v", m.state.ImageDigest, err)
	}
}
