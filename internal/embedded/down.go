package embedded

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/version"
)

const (
	// purgeStarts limits the starts of a capstand that removes machines. Five failed starts take six seconds. A running
	// plane has no such limit, because the cause can disappear; here a user waits for the result.
	purgeStarts = 5
	// purgePatience is the time limit for its start.
	purgePatience = 2 * time.Minute
)

// Down stops the management plane of o.Root. Unless keepState is set, it also removes each machine, load balancer and
// network of the installation, and then the root folder. Several goroutines call step with the current step. o.Assets is
// needed only if the programs that started the installation no longer exist.
func Down(ctx context.Context, o Options, keepState bool, step func(string)) error {
	l, assets, err := o.complete()
	if err != nil {
		return err
	}
	if os.Getuid() != 0 {
		return ErrNotRoot
	}
	if !Installed(l) {
		step("nothing to do: there is no installation in " + l.Root)
		return nil
	}
	lock, err := lockCommand(ctx, l, o.wait)
	if errors.Is(err, fs.ErrNotExist) {
		step("nothing to do: another command has removed the installation in " + l.Root)
		return nil
	}
	if err != nil {
		return err
	}
	defer lock.Close()
	step("stop the management plane")
	stopUnit(ctx, l, o.Unit, step)
	if err := stopPlane(ctx, l); err != nil {
		return err
	}
	if keepState {
		return forgetUnit(l)
	}
	if err := purgeHosts(ctx, l, assets, step); err != nil {
		return err
	}
	step("remove " + l.Root)
	if err := removeRoot(l); err != nil {
		return err
	}
	entries, err := os.ReadDir(l.Root)
	for _, e := range entries {
		step("keep " + filepath.Join(l.Root, e.Name()) + ", which outlives the management plane")
	}
	return atomicfile.IgnoreMissing(err)
}

// forgetUnit makes the next `capstan up` start the plane without a unit. A damaged state stays for the error of `capstan up`.
func forgetUnit(l Layout) error {
	state, err := LoadState(l)
	if err != nil || state.StoppedUnit == "" {
		return nil
	}
	state.StoppedUnit = ""
	return state.save(l)
}

// Installed reports whether the root folder has an installation, or what an interrupted `capstan down` left of one.
func Installed(l Layout) bool { return atomicfile.Exists(l.commandLock()) }

// HostFolders returns the names of the hosts of this box that have a folder. It needs no state, which can be missing or damaged.
func HostFolders(l Layout) ([]string, error) {
	entries, err := os.ReadDir(filepath.Dir(l.HostRoot("any")))
	if err != nil {
		return nil, atomicfile.IgnoreMissing(err)
	}
	var names []string
	for _, e := range entries {
		root := l.HostRoot(e.Name())
		info, err := os.Stat(root) // It can be a link to another disk.
		if err != nil {
			return nil, fmt.Errorf("expected the folder of a host, found a link to a folder that does not exist: mount its file system, or remove the link if its machines are gone too: %w", err)
		}
		if info.IsDir() {
			names = append(names, e.Name())
		}
	}
	return names, nil
}

// purgeHosts removes machines, load balancers and networks with capstand, which has the list of all of them. The managers
// have stopped, so none is created again.
func purgeHosts(ctx context.Context, l Layout, assets string, step func(string)) error {
	hosts, err := HostFolders(l)
	if err != nil || len(hosts) == 0 {
		return err // no capstand ever ran
	}
	state, err := LoadState(l)
	if err != nil {
		step(fmt.Sprintf("use the folders of the hosts and the programs in %s, without the state of the installation: %v", assets, err))
	}
	state.Hosts = hosts
	if state.Assets, err = purgeAssets(cmp.Or(state.Assets, assets), assets); err != nil {
		return err
	}
	state.Listen = "" // remote managers must not create machines now
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
	for _, host := range hosts {
		g.Go(func() error {
			return withCapstand(ctx, capstandComponent(l, state, host, owner, memory), l.Log(capstandName(host)), spawner, step, func(ctx context.Context) error {
				step("remove the machines of host " + host)
				return purgeHost(ctx, l, host, step)
			})
		})
	}
	return g.Wait()
}

// purgeAssets returns the folder of the capstand that removes the machines: the one that created them, or the other one if
// that no longer exists.
func purgeAssets(recorded, other string) (string, error) {
	for _, dir := range []string{recorded, other} {
		if _, err := os.Stat(Assets{dir}.Capstand()); err == nil {
			return dir, nil
		}
	}
	return "", fmt.Errorf("expected capstand, which removes the machines, in %s (the programs of this installation) or in %s, and found it in neither folder: "+
		"%s", recorded, other, version.InstallPrograms)
}

// withCapstand calls a function while a capstand runs. It is an error if capstand fails repeatedly or does not answer.
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
	late := time.AfterFunc(purgePatience, func() { giveUp(fmt.Errorf("it does not answer after %s", purgePatience)) })
	defer late.Stop()
	if err := process.waitReady(ctx); err != nil {
		return fmt.Errorf("expected %s to remove machines, and it does not start: %w; fix the problem in its log %s, or set --assets to the folder of another build, and repeat `capstan down`", c.name, err, log)
	}
	late.Stop()
	return do(ctx)
}

// removeRoot removes the folder. It unmounts first: the files of other mounts must stay.
func removeRoot(l Layout) error {
	mounts, err := mountinfo.GetMounts(mountinfo.PrefixFilter(l.Root))
	if err != nil {
		return err
	}
	// The deepest mount first.
	slices.SortFunc(mounts, func(a, b *mountinfo.Info) int { return len(b.Mountpoint) - len(a.Mountpoint) })
	for _, m := range mounts {
		if !strings.HasPrefix(m.Mountpoint, l.Root+"/") || l.foreign(m.Mountpoint) {
			continue
		}
		if err := unix.Unmount(m.Mountpoint, unix.UMOUNT_NOFOLLOW); err != nil {
			return fmt.Errorf("expected to remove %s, found %s mounted in it and in use: %w; stop the processes that use it and repeat `capstan down`", l.Root, m.Mountpoint, err)
		}
	}
	entries, err := os.ReadDir(l.Root)
	if err != nil {
		return err
	}
	for _, e := range entries {
		path := filepath.Join(l.Root, e.Name())
		// The state is removed last, so that an interrupted `capstan down` can be repeated.
		if path == l.commandLock() || path == l.State() {
			continue
		}
		remove := os.RemoveAll
		if path == l.Backups() {
			remove = removeEmpty
		} else if l.foreign(path) {
			continue
		}
		if err := remove(path); err != nil {
			return err
		}
	}
	return errors.Join(atomicfile.Remove(l.State()), atomicfile.Remove(l.commandLock()), removeUnused(l.Root))
}

// removeUnused removes a folder unless it has files, or is the root of a file system.
func removeUnused(dir string) error {
	err := os.Remove(dir)
	if errors.Is(err, unix.ENOTEMPTY) || errors.Is(err, unix.EBUSY) {
		return nil
	}
	return err
}

// removeEmpty removes the empty folders of a tree. Backups stay: only users and their schedules remove them.
func removeEmpty(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.IsDir() && e.Name() != lostAndFound {
			if err := removeEmpty(filepath.Join(dir, e.Name())); err != nil {
				return err
			}
		}
	}
	return removeUnused(dir)
}
