package host

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/refusal"
)

const (
	// hostFilesWait is the time in which the file systems of the host must show the files of a machine.
	hostFilesWait = 5 * time.Second
	// maxLooks is the largest number of looks for host files at the same time: nothing ends one in a file system that hangs, and it occupies
	// a thread.
	maxLooks = 16
)

// looks are the looks for files of the host that have not ended yet, by the paths of the files.
type looks struct {
	mu      sync.Mutex
	byFiles map[string]*look
}

// look is a look for files; err is valid when ended is closed.
type look struct {
	ended chan struct{}
	err   error
}

// errNoAnswer is the end of the errors of file systems that hang.
var errNoAnswer = errors.New("check the servers of the network file systems of the host")

// await returns the result of find, or an error if find does not end in time. Calls for the same files share one look.
func (l *looks) await(ctx context.Context, files string, find func() error) error {
	begun := l.begin(files, find)
	if begun == nil {
		return fmt.Errorf("expected file systems of the host that answer, found %d looks for files without an answer: %w", maxLooks, errNoAnswer)
	}
	ctx, cancel := context.WithTimeout(ctx, hostFilesWait)
	defer cancel()
	select {
	case <-begun.ended:
		return begun.err
	case <-ctx.Done():
		return fmt.Errorf("expected the file systems with %s to answer within %s, found no answer: %w", files, hostFilesWait, errNoAnswer)
	}
}

// begin returns the look for the files, or nil if too many others have not ended.
func (l *looks) begin(files string, find func() error) *look {
	l.mu.Lock()
	defer l.mu.Unlock()
	if running := l.byFiles[files]; running != nil {
		return running
	}
	if len(l.byFiles) == maxLooks {
		return nil
	}
	begun := &look{ended: make(chan struct{})}
	l.byFiles[files] = begun
	go func() {
		begun.err = find()
		l.mu.Lock()
		defer l.mu.Unlock()
		delete(l.byFiles, files)
		close(begun.ended)
	}()
	return begun
}

// hasHostFiles refuses a machine whose mounts and device nodes the host does not have (NOT_PROVIDED).
func (ms *machines) hasHostFiles(ctx context.Context, spec *hostpb.MachineSpec) error {
	if err := ms.awaitHostFiles(ctx, spec); err != nil {
		return refusal.Errorf(hostpb.Refusal_NOT_PROVIDED, "machine %s/%s: %v", spec.Namespace, spec.Name, err)
	}
	return nil
}

// awaitHostFiles returns an error if the host does not have the mounts and device nodes of a machine, or if their file systems do not answer.
func (p *platform) awaitHostFiles(ctx context.Context, spec *hostpb.MachineSpec) error {
	files := hostFiles(spec)
	if len(files) == 0 {
		return nil
	}
	return p.looks.await(ctx, strings.Join(files, ", "), func() error { return p.findHostFiles(spec) })
}

// hostFiles lists the mounts and device nodes of a machine.
func hostFiles(spec *hostpb.MachineSpec) (paths []string) {
	for _, m := range spec.HostMounts {
		paths = append(paths, m.Source)
	}
	for _, d := range spec.Devices {
		if d.IsNode() {
			paths = append(paths, d.Name)
		}
	}
	return paths
}

// openHostFiles returns an error if the host does not have the mounts and device nodes of a machine.
func (p *platform) openHostFiles(spec *hostpb.MachineSpec) error {
	files, err := openHostMounts(spec, p.config)
	closeAll(files)
	if err == nil {
		_, err = deviceNodes(spec, nil)
	}
	return err
}
