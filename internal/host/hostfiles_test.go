package host

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/refusal"
	"capstan.dev/capstan/internal/testenv/expect"
)

// A machine is refused after a while when a file system with its files hangs. Further calls for the same files begin no further look, and
// those for other files begin a limited number. When the file system answers again, the files are found.
func TestHungHostFiles(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, hang, begun := looks{byFiles: map[string]*look{}}, make(chan struct{}), 0
		find := func() error { begun++; <-hang; return nil }
		start := time.Now()
		for range 2 {
			if err := l.await(t.Context(), "/srv/nfs", find); err == nil || !strings.Contains(err.Error(), "/srv/nfs to answer within 5s") {
				t.Errorf("a file system that hangs: %v", err)
			}
		}
		if begun != 1 || time.Since(start) != 2*hostFilesWait {
			t.Errorf("%d looks in %s", begun, time.Since(start))
		}
		for i := range maxLooks {
			err := l.await(t.Context(), fmt.Sprint("/srv/", i), func() error { <-hang; return nil })
			if full := i == maxLooks-1; err == nil || full != strings.Contains(err.Error(), "found 16 looks") {
				t.Errorf("look %d: %v", i, err)
			}
		}
		close(hang)
		synctest.Wait()
		expect.NoError(t, l.await(t.Context(), "/srv/nfs", find))
		if err := l.await(t.Context(), "/srv/nfs", func() error { return errors.New("none") }); err == nil || err.Error() != "none" {
			t.Errorf("a missing file: %v", err)
		}
	})
}

// A machine does not open its host files while their file system hangs: nothing would end this, and its deletion would wait.
func TestStartWithHungHostFiles(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h, hang := recorded(t), make(chan struct{})
		m := onDisk(t, h)
		m.spec.HostMounts = []*hostpb.HostMount{{Source: t.TempDir(), Path: "/mnt/x"}}
		h.findHostFiles = func(*hostpb.MachineSpec) error { <-hang; return nil }
		mounts, err := m.stageHostMounts(t.Context())
		m.unstage()
		if err == nil || !strings.Contains(err.Error(), "to answer within 5s") {
			t.Errorf("%v, %v", mounts, err)
		}
		for i := range maxLooks {
			h.looks.byFiles[fmt.Sprint("/srv/", i)] = &look{ended: hang}
		}
		h.config.ContainerImages = t.TempDir()
		if dir, err := m.containerImages(); err != nil || dir != h.config.ContainerImages {
			t.Errorf("the folder of container images while files of machines hang: %q, %v", dir, err)
		}
		h.imageFolders.byFiles[h.config.ContainerImages] = &look{ended: hang}
		if dir, err := m.containerImages(); err == nil || !strings.Contains(err.Error(), "to answer within 5s") {
			t.Errorf("the first start with a folder of container images that hangs: %q, %v", dir, err)
		}
		m.state.StartedAt = time.Now()
		if dir, err := m.containerImages(); err != nil || dir != "" {
			t.Errorf("a later start with a folder of container images that hangs: %q, %v", dir, err)
		}
		h.config.Backups, m.spec.Cluster, m.spec.ControlPlane = t.TempDir(), "demo", true
		h.backupFolders.byFiles[filepath.Join(h.config.Backups, "default", "demo")] = &look{ended: hang}
		if dir, err := h.backups(m.spec); err == nil || !strings.Contains(err.Error(), "to answer within 5s") {
			t.Errorf("the folder of the backups: %s, %v", dir, err)
		}
		close(hang)
	})
}

// capstand looks for the files of a new machine without the lock of all objects: a file system that hangs must not stop other calls and
// fencing. A machine that exists, or that is refused for another reason, needs no look.
func TestHostFilesNeedNoLock(t *testing.T) {
	h, looked := onBox(t), 0
	h.machines.findHostFiles = func(*hostpb.MachineSpec) error {
		looked++
		if !h.mu.TryLock() {
			return errors.New("the lock of all objects is held")
		}
		h.mu.Unlock()
		return errors.New("no file")
	}
	ensure := func(change func(*hostpb.MachineSpec)) error {
		spec := goodSpec()
		spec.HostMounts = []*hostpb.HostMount{{Source: "/srv/nfs", Path: "/mnt/x"}}
		change(spec)
		_, err := h.EnsureMachine(t.Context(), &hostpb.EnsureMachineRequest{Spec: spec})
		return err
	}
	if err := ensure(func(*hostpb.MachineSpec) {}); refusal.Of(err).GetReason() != hostpb.Refusal_NOT_PROVIDED || !strings.HasSuffix(err.Error(), ": no file") {
		t.Errorf("a machine without its files: %v", err)
	}
	if err := ensure(func(s *hostpb.MachineSpec) { s.MemoryBytes = 1 << 50 }); refusal.Of(err).GetReason() != hostpb.Refusal_OUT_OF_MEMORY {
		t.Errorf("a machine that is too large: %v", err)
	}
	existing := goodSpec()
	existing.HostMounts = []*hostpb.HostMount{{Source: "/srv/nfs", Path: "/mnt/x"}}
	h.machines.add(existing)
	expect.NoError(t, ensure(func(*hostpb.MachineSpec) {}))
	if looked != 1 {
		t.Errorf("%d looks for files, want 1", looked)
	}
}
