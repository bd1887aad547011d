package up

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

// Down ends the management plane. Unless keepState is set it also removes every machine, load balancer
// and network of the installation, and then the root folder. step is called with what is being done.
func Down(ctx context.Context, root string, keepState bool, step func(string)) error {
	l, _, err := Options{Root: root}.complete()
	if err != nil {
		return err
	}
	if os.Getuid() != 0 {
		return ErrNotRoot
	}
	if _, err := os.Stat(l.commandLock()); errors.Is(err, os.ErrNotExist) {
		return nil // nothing was installed here, or all of it is gone
	}
	unlock, err := lockCommand(ctx, l)
	if err != nil {
		return err
	}
	defer unlock()
	step("stop the management plane")
	if err := stopPlane(ctx, l); err != nil {
		return err
	}
	if keepState {
		return nil
	}
	if err := purgeHosts(ctx, l, step); err != nil {
		return err
	}
	step("remove " + l.Root)
	return removeRoot(l)
}

// purgeHosts removes what capstand made, through capstand: only it knows all of it. The managers are
// gone by now, so nothing is made again.
func purgeHosts(ctx context.Context, l Layout, step func(string)) error {
	state, err := LoadState(l)
	if errors.Is(err, os.ErrNotExist) {
		return nil // it never came to making anything
	}
	if err != nil {
		return err
	}
	owner, err := ensureUser()
	if err != nil {
		return err
	}
	if err := ensureDirs(l, owner); err != nil {
		return err
	}
	memory, err := boxMemory()
	if err != nil {
		return err
	}
	spawner := newSpawner()
	var g errgroup.Group
	for _, host := range state.Hosts {
		if !isDir(l.HostRoot(host)) {
			continue
		}
		g.Go(func() error {
			process := newProcess(capstandComponent(l, state, host, owner, memory), l.Log(capstandName(host)), owner, spawner, func(ProcessStatus) {})
			process.begin()
			defer process.Stop()
			if err := process.waitReady(ctx); err != nil {
				return fmt.Errorf("wanted capstand to remove the machines of host %s, and it does not start: %w; see %s", host, err, process.log)
			}
			step("remove the machines of host " + host)
			return purgeHost(ctx, l, host)
		})
	}
	return g.Wait()
}

// removeRoot removes the folder. Never through a mount: behind it are files of others.
func removeRoot(l Layout) error {
	mounts, err := mountinfo.GetMounts(mountinfo.PrefixFilter(l.Root))
	if err != nil {
		return err
	}
	// The deepest first.
	slices.SortFunc(mounts, func(a, b *mountinfo.Info) int { return len(b.Mountpoint) - len(a.Mountpoint) })
	for _, m := range mounts {
		if !strings.HasPrefix(m.Mountpoint, l.Root+"/") {
			continue
		}
		if err := unix.Unmount(m.Mountpoint, unix.UMOUNT_NOFOLLOW); err != nil {
			return fmt.Errorf("wanted to remove %s, found %s mounted in it and in use: %w; end what uses it and repeat `capstan down`", l.Root, m.Mountpoint, err)
		}
	}
	entries, err := os.ReadDir(l.Root)
	if err != nil {
		return err
	}
	for _, e := range entries {
		path := filepath.Join(l.Root, e.Name())
		// The state goes last: a `down` that was killed is repeated.
		if path == l.commandLock() || path == l.State() {
			continue
		}
		if path == l.Backups() {
			if err := removeEmpty(path); err != nil {
				return err
			}
			continue
		}
		if err := os.RemoveAll(path); err != nil {
			return err
		}
	}
	err = errors.Join(ignoreMissing(os.Remove(l.State())), ignoreMissing(os.Remove(l.commandLock())))
	if _, kept := os.Stat(l.Backups()); kept == nil {
		return err
	}
	return errors.Join(err, os.RemoveAll(l.Root))
}

// removeEmpty removes the folders of a tree that hold no file: backups outlive everything, and only who made them removes
// them.
func removeEmpty(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.IsDir() {
			if err := removeEmpty(filepath.Join(dir, e.Name())); err != nil {
				return err
			}
		}
	}
	if entries, err = os.ReadDir(dir); err != nil || len(entries) > 0 {
		return err
	}
	return os.Remove(dir)
}

func ignoreMissing(err error) error {
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}
