package fencing

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"time"

	"capstan.dev/capstan/internal/atomicfile"
)

// Marker is the file in a machine's folder of a machine that fencing has stopped. It starts when a manager confirms it.
const Marker = "fenced"

// markWait is the time in which a disk that works records a mark. The end of a machine does not wait longer.
const markWait = 2 * time.Second

// recording has the path of each mark that this process is writing to a disk.
var recording sync.Map

// Marks are those of the machines that fencing has stopped. Each mark is in two places: in a folder in memory, and in the folder of the
// machine on a disk, which outlives the boot but can hang. A mark that is only on the disk counts: it is of an earlier boot, or of a guard
// of an earlier version.
type Marks struct{ machines, memory string }

// marks returns the marks of a host, from the folder of its state and the path of its memory.
func marks(root, memory string) Marks {
	return Marks{machines: filepath.Join(root, "machines"), memory: memory + ".fenced"}
}

func (m Marks) onDisk(machine string) string   { return filepath.Join(m.machines, machine, Marker) }
func (m Marks) inMemory(machine string) string { return filepath.Join(m.memory, machine) }

// stop marks a machine and then kills it. A capstand that starts in between must not start it again. unmarked is the error of the mark,
// alive that of kill.
func (m Marks) stop(ctx context.Context, machine string, kill func(context.Context) error) (unmarked, alive error) {
	marked := make(chan error, 1)
	unmarked = m.remember(machine)
	remembered := unmarked == nil
	// While a disk hangs, each attempt to stop the machine would leave another thread that waits for it.
	if _, waits := recording.LoadOrStore(m.onDisk(machine), true); !waits {
		go func() {
			defer recording.Delete(m.onDisk(machine))
			marked <- m.record(machine, remembered)
		}()
	}
	select {
	case err := <-marked:
		unmarked = errors.Join(unmarked, err)
	case <-time.After(markWait): // The record is made as soon as the disk works again.
	}
	return unmarked, kill(ctx)
}

// remember marks a machine in memory.
func (m Marks) remember(machine string) error {
	if err := os.MkdirAll(m.memory, 0o700); err != nil {
		return err
	}
	return os.WriteFile(m.inMemory(machine), nil, 0o600)
}

// record marks a machine on its disk. It does not create the folder of a machine that is gone. If the disk was slow, a manager may have
// confirmed the machine meanwhile.
func (m Marks) record(machine string, remembered bool) error {
	err := atomicfile.WriteFile(m.onDisk(machine), nil, 0o600)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil && remembered && !atomicfile.Exists(m.inMemory(machine)) {
		return atomicfile.Remove(m.onDisk(machine))
	}
	return err
}

func (m Marks) marked(machine string) bool {
	return atomicfile.Exists(m.inMemory(machine)) || atomicfile.Exists(m.onDisk(machine))
}

// unmark removes the mark in memory first: record looks for it after a slow write.
func (m Marks) unmark(machine string) error {
	return errors.Join(atomicfile.Remove(m.inMemory(machine)), atomicfile.Remove(m.onDisk(machine)))
}
