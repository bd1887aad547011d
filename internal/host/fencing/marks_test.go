package fencing

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/boottime"
	"capstan.dev/capstan/internal/host/cgroup"
	"capstan.dev/capstan/internal/testenv/expect"
)

// The disk of the state hangs, and a process of the first machine waits for it uninterruptibly. The guard kills both machines at once.
// The marks in memory are there at once, those on the disk as soon as it works again.
func TestGuardWithHangingDisk(t *testing.T) {
	root := fileSystem(t)
	path := filepath.Join(t.TempDir(), "memory.json")
	m, _ := ReadMemory(path)
	m.Root, m.Cgroup = root, "/capstan-test-guard-"+strconv.Itoa(os.Getpid())
	for _, id := range []string{"a", "b"} {
		m.Leases = append(m.Leases, Lease{id, boottime.Now() - time.Hour})
		if err := write(filepath.Join(root, "machines", id, "spec.json")); err != nil {
			t.Fatal(err)
		}
	}
	if err := atomicfile.WriteJSON(path, m, 0o600); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cgroup.Group(m.Cgroup).Remove(context.Background()) })
	thaw := freeze(t, root)
	stuck := process(t, m, "a", "echo >"+filepath.Join(root, "stuck"))
	expect.True(t, "a process waits for the disk", func() bool { return uninterruptible(stuck.Process.Pid) })
	sleeper := process(t, m, "b", "exec sleep 600")
	ended := make(chan error, 1)
	go func() { ended <- sleeper.Wait() }()

	go func() { _ = Guard(t.Context(), path, slog.New(slog.DiscardHandler)) }()
	select {
	case <-ended:
	case <-time.After(killTimeout - time.Second): // The guard waits that long for the processes of one machine.
		t.Error("the second machine still runs")
	}
	marks := marks(root, path)
	for _, id := range []string{"a", "b"} {
		if !atomicfile.Exists(marks.inMemory(id)) {
			t.Errorf("machine %s is not marked: a capstand starts it again", id)
		}
	}
	thaw()
	_ = stuck.Wait()
	expect.True(t, "the machines are marked on the disk", func() bool {
		return atomicfile.Exists(marks.onDisk("a")) && atomicfile.Exists(marks.onDisk("b"))
	})
}

// A manager confirms a machine while its mark is still being written to a slow disk. The mark does not stay.
func TestConfirmedBeforeTheRecord(t *testing.T) {
	dir := t.TempDir()
	marks := marks(dir, filepath.Join(dir, "memory.json"))
	if err := errors.Join(write(filepath.Join(dir, "machines/m/spec.json")), marks.remember("m")); err != nil {
		t.Fatal(err)
	}
	if !marks.marked("m") {
		t.Error("a mark in memory is not seen")
	}
	if err := errors.Join(marks.unmark("m"), marks.record("m", true)); err != nil || marks.marked("m") {
		t.Errorf("the confirmed machine is marked again: %v", err)
	}
	// Without memory for the mark, the record on the disk counts alone.
	if err := marks.record("m", false); err != nil || !marks.marked("m") {
		t.Errorf("the machine is not marked: %v", err)
	}
}

// fileSystem mounts a file system of its own.
func fileSystem(t *testing.T) string {
	t.Helper()
	image, dir := filepath.Join(t.TempDir(), "image"), t.TempDir()
	for _, command := range [][]string{{"truncate", "-s", "16M", image}, {"mkfs.ext4", "-q", image}, {"mount", "-o", "loop", image, dir}} {
		if out, err := exec.CommandContext(t.Context(), command[0], command[1:]...).CombinedOutput(); err != nil {
			t.Skipf("no file system can be mounted here: %v: %v: %s", command, err, out)
		}
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// freeze lets all writes of a file system wait until thaw is called, like a disk that hangs.
func freeze(t *testing.T, dir string) (thaw func()) {
	t.Helper()
	const fiFreeze, fiThaw = 0xc0045877, 0xc0045878
	f, err := os.Open(dir)
	if err == nil {
		err = unix.IoctlSetInt(int(f.Fd()), fiFreeze, 0)
	}
	if err != nil {
		t.Fatal(err)
	}
	thaw = func() { _ = unix.IoctlSetInt(int(f.Fd()), fiThaw, 0) }
	t.Cleanup(func() { thaw(); _ = f.Close() })
	return thaw
}

// process starts a shell in the group of a machine.
func process(t *testing.T, m Memory, machine, script string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command("sh", "-c", "read go; "+script)
	stdin, err := cmd.StdinPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	if err := cgroup.Group(filepath.Join(m.Cgroup, machine)).Add(cmd.Process.Pid); err != nil {
		t.Skipf("no group can be made here: %v", err)
	}
	if _, err := stdin.Write([]byte("\n")); err != nil {
		t.Fatal(err)
	}
	return cmd
}

// uninterruptible returns whether a process is in state D.
func uninterruptible(pid int) bool {
	stat, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	_, state, found := bytes.Cut(stat, []byte(") "))
	return err == nil && found && state[0] == 'D'
}
