package embedded

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

const (
	// purgeStarts is how often a capstand that is to remove things is started: five quick ends take six seconds. In a
	// plane it is started for ever, since what it lacks may come; here somebody waits for it.
	purgeStarts = 5
	// purgePatience is how long it may take until it serves.
	purgePatience = 2 * time.Minute
)

// Down ends the management plane of o.Root. Unless keepState is set it also removes every machine, load balancer
// and network of the installation, and then the root folder. step is called with what is being done, by several
// goroutines. o.Assets are needed only when those that the installation was started with are gone.
func Down(ctx context.Context, o Options, keepState bool, step func(string)) error {
	l, assets, err := o.complete()
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
	if err := purgeHosts(ctx, l, assets, step); err != nil {
		return err
	}
	step("remove " + l.Root)
	return removeRoot(l)
}

// purgeHosts removes what capstand made, through capstand: only it knows all of it. The managers are
// gone by now, so nothing is made again.
func purgeHosts(ctx context.Context, l Layout, assets string, step func(string)) error {
	state, err := LoadState(l)
	if errors.Is(err, os.ErrNotExist) {
		return nil // it never came to making anything
	}
	if err != nil {
		return err
	}
	if state.Assets, err = purgeAssets(state.Assets, assets); err != nil {
		return err
	}
	state.Listen = "" // nobody else is to make anything meanwhile
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
			return withCapstand(ctx, capstandComponent(l, state, host, owner, memory), l.Log(capstandName(host)), spawner, step, func(ctx context.Context) error {
				step("remove the machines of host " + host)
				return purgeHost(ctx, l, host)
			})
		})
	}
	return g.Wait()
}

// purgeAssets is the folder whose capstand removes the machines: the one that made them, or, when that is gone, the other.
func purgeAssets(recorded, other string) (string, error) {
	for _, dir := range []string{recorded, other} {
		if _, err := os.Stat(Assets{dir}.Capstand()); err == nil {
			return dir, nil
		}
	}
	return "", fmt.Errorf("wanted capstand, which alone can remove the machines, in %s, where this installation was started from, or in %s, and found it in neither: "+
		"run `make build`, or name the folder of another build with --assets", recorded, other)
}

// withCapstand does something while a capstand runs. One that ends again and again, or never serves, is an error.
func withCapstand(ctx context.Context, c component, log string, spawner *spawner, step func(string), do func(context.Context) error) error {
	ctx, giveUp := context.WithCancelCause(ctx)
	defer giveUp(nil)
	process := newProcess(c, log, user{}, spawner, func(s ProcessStatus) {
		if s.State != ProcessBackoff {
			return
		}
		step(s.Name + ": " + s.Message)
		if s.Restarts >= purgeStarts {
			giveUp(errors.New(s.Message))
		}
	})
	process.begin()
	defer process.Stop()
	late := time.AfterFunc(purgePatience, func() { giveUp(fmt.Errorf("it does not serve after %s", purgePatience)) })
	defer late.Stop()
	if err := process.waitReady(ctx); err != nil {
		return fmt.Errorf("wanted %s to remove machines, and it does not start: %w; mend what its log %s says, or name the folder of another build with --assets, and repeat `capstan down`", c.name, err, log)
	}
	late.Stop()
	return do(ctx)
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
