// Package blockvolume gives pods block volumes: it attaches the file of a volume to a loop device, and it holds a device for the
// kubelet while a pod uses it.
//
// The kernel has one set of loop devices for the host and all machines, and gives each free one to anybody. So a machine has no node of
// a loop device without a file of its own. PID 1 makes the node after it has attached the file, and removes it after the kernel has
// released the device. PID 1 has the device open, and the kernel releases it with its last user. So a machine that ends anywhere
// leaves no device behind.
//
// Layer: node. Allowed imports: api, library, contract.
package blockvolume

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/backoff"
	"capstan.dev/capstan/internal/loopdevice"
	"capstan.dev/capstan/internal/machineapi"
	"capstan.dev/capstan/internal/node/localvolume"
)

const (
	// Programs is a folder in the search path of a machine with block volumes. It contains Program.
	Programs = "/run/programs"
	// Program is the name under which the kubelet calls capstan-init to hold a device.
	Program = "losetup"

	// most is the largest number of volumes of a machine, and of devices that its kubelet holds: one for each volume of a pod.
	most = 64
	// blockSize of volumes, in bytes. It is that of the machine's disk, so that the device can use direct I/O.
	blockSize = 4096
	// patience is the time in which other programs of the host close a device that they examine.
	patience = 2 * time.Second
	// Pauses between two attempts to attach a volume.
	firstPause, longestPause = time.Second, time.Minute
)

// Devices are the loop devices of a machine. Only PID 1 has them.
type Devices struct {
	// Control is the device that creates loop devices. Only a machine with it has block volumes.
	Control string
	// Dir is a folder for device nodes, which only root can enter. It is empty at the start of the machine.
	Dir string
	// Folders of the volumes.
	Folders localvolume.Folders

	mu sync.Mutex
	// volumes by their names, and holds by the paths of the devices that are held.
	volumes, holds map[string]*device
	// waiting are the volumes that the machine had before its start and that have no device yet.
	waiting []string
}

// device is a loop device with a file.
type device struct {
	loop *os.File
	// number of the loop device, for example 7 of /dev/loop7.
	number int
	// id of the loop device, and of the device that is its file.
	id, file uint64
	// The identity of the file.
	dev, inode uint64
}

// OfMachine returns the devices of this machine.
func OfMachine() *Devices {
	return &Devices{Control: "/dev/loop-control", Dir: localvolume.Devices, Folders: localvolume.Blocks}
}

// Prepare creates the folders of a machine with block volumes, and attaches the volumes that it has. Nothing may use them before.
// The nodes have a file system of their own, because that of /run has no devices, and containerd copies the nodes in /dev into
// privileged containers. Volumes that cannot be attached now are left to Follow.
func (d *Devices) Prepare() error {
	if _, err := os.Stat(d.Control); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	for _, dir := range []string{d.Dir, Programs} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	if err := unix.Mount("tmpfs", d.Dir, "tmpfs", unix.MS_NOSUID|unix.MS_NOEXEC, "mode=700,size=64k"); err != nil {
		return fmt.Errorf("mounting a file system for the nodes of block volumes at %s: %w", d.Dir, err)
	}
	if err := os.Symlink(machineapi.InitPath, filepath.Join(Programs, Program)); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return d.restore()
}

// restore attaches the volumes that the machine had before.
func (d *Devices) restore() error {
	names, err := d.Folders.Images()
	d.mu.Lock()
	d.waiting = names
	d.mu.Unlock()
	return errors.Join(err, d.attachWaiting())
}

func (d *Devices) attachWaiting() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	var errs []error
	for _, name := range slices.Clone(d.waiting) {
		if err := d.attachVolume(name); err != nil {
			errs = append(errs, fmt.Errorf("the block volume %s: %w", name, err))
		}
	}
	return errors.Join(errs...)
}

// Follow attaches the volumes that Prepare could not attach, until all have a device or ctx ends. The kernel has no event for a free
// device. The kubelet tries again itself.
func (d *Devices) Follow(ctx context.Context, log *slog.Logger) {
	for pauses := backoff.Doubling(firstPause, longestPause); d.waits(); {
		select {
		case <-ctx.Done():
			return
		case <-time.After(pauses.Step()):
		}
		if err := d.attachWaiting(); err != nil {
			log.Error("Cannot attach block volumes; trying again", "error", err)
		}
	}
}

func (d *Devices) waits() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.waiting) > 0
}

// Provide makes a volume of size bytes and its device. It can be repeated. After an error, nothing of a new volume is left, and all of one
// that the machine had before.
func (d *Devices) Provide(name string, size int64) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.volumes[name] != nil {
		return nil
	}
	if _, err := os.Stat(d.Control); errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("expected the device %s in the machine, found none: block volumes need it; name it in spec.devices of the CapstanMachine, "+
			"or use volumeMode Filesystem", d.Control)
	}
	others := slices.DeleteFunc(slices.Clone(d.waiting), func(other string) bool { return other == name })
	if err := room(len(d.volumes)+len(others), "block volumes"); err != nil {
		return err
	}
	err := d.Folders.CreateImage(name, (size+blockSize-1)/blockSize*blockSize)
	if err == nil {
		err = d.attachVolume(name)
	}
	if err != nil && !slices.Contains(d.waiting, name) {
		err = errors.Join(err, d.Folders.Remove(name))
	}
	return err
}

func room(devices int, of string) error {
	if devices >= most {
		return fmt.Errorf("expected at most %d %s on this machine, found a request for another one: delete one, or use another machine", most, of)
	}
	return nil
}

// attachVolume attaches the file of a volume and makes the node of its device. Pods of every user can have it; mu is held.
func (d *Devices) attachVolume(name string) error {
	image, err := d.Folders.OpenImage(name)
	if err != nil {
		return err
	}
	defer func() { _ = image.Close() }()
	// Direct I/O keeps data out of a second page cache. The kernel falls back to buffered I/O where it is not possible.
	made, err := d.attach(image, unix.LoopConfig{Size: blockSize, Info: unix.LoopInfo64{Flags: unix.LO_FLAGS_AUTOCLEAR | unix.LO_FLAGS_DIRECT_IO}})
	if err != nil {
		return err
	}
	if err := d.node(name, 0o666, made.id); err != nil {
		return errors.Join(err, made.loop.Close())
	}
	if d.volumes == nil {
		d.volumes = map[string]*device{}
	}
	d.volumes[name] = made
	d.forget(name)
	return nil
}

// forget makes a volume wait for a device no longer; mu is held.
func (d *Devices) forget(name string) {
	d.waiting = slices.DeleteFunc(d.waiting, func(other string) bool { return other == name })
}

// Withdraw releases the device of a volume, whose folder goes then. It fails while a pod has the device: the kubelet holds it until the
// containers of the pod have ended, and a process that got the open device from a pod has it open. Otherwise the next volume
// could have the same device. It can be repeated.
func (d *Devices) Withdraw(name string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	volume := d.volumes[name]
	if volume == nil {
		d.forget(name)
		return nil
	}
	for path, hold := range d.holds {
		if hold.file == volume.id {
			return fmt.Errorf("expected no pod with the device of the volume, found one: the kubelet holds it at %s until the containers of the pod have ended", path)
		}
	}
	path := filepath.Join(d.Dir, name)
	if err := volume.release(path); err != nil {
		return err
	}
	delete(d.volumes, name)
	return os.Remove(path)
}

// release closes the device, and opens it again if the kernel does not release it, because others have it open.
func (v *device) release(path string) error {
	for deadline := time.Now().Add(patience); ; {
		_ = v.loop.Close()
		loop, err := os.OpenFile(path, os.O_RDONLY, 0)
		if err != nil {
			return nil // A device without a file can be gone.
		}
		// The device can have the file of another program of the host by now.
		if info, err := unix.IoctlLoopGetStatus64(int(loop.Fd())); err != nil || info.Device != v.dev || info.Inode != v.inode {
			return loop.Close()
		}
		v.loop = loop
		if time.Now().After(deadline) {
			return fmt.Errorf("expected no process with the open device loop%d of the volume, found one: end the pod that has it", v.number)
		}
		time.Sleep(10 * time.Millisecond) // The kernel has no event for it.
	}
}

// Hold keeps the block device at a path open in the kernel with a loop device, by which the kubelet finds it. It can be repeated. The
// loop device is empty: programs of the host that examine each new device find nothing.
func (d *Devices) Hold(path string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.holds[path] != nil {
		return nil
	}
	if err := room(len(d.holds), "block volumes in pods"); err != nil {
		return err
	}
	file, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }()
	var st unix.Stat_t
	if err := unix.Fstat(int(file.Fd()), &st); err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFBLK {
		return fmt.Errorf("expected a block device, found another kind of file at %s", path)
	}
	made, err := d.attach(file, unix.LoopConfig{Info: unix.LoopInfo64{Flags: unix.LO_FLAGS_AUTOCLEAR | unix.LO_FLAGS_READ_ONLY, Offset: 1 << 62}})
	if err != nil {
		return err
	}
	if d.holds == nil {
		d.holds = map[string]*device{}
	}
	d.holds[path] = made
	return nil
}

// Release ends the hold that has a loop device, for example /dev/loop7.
func (d *Devices) Release(loop string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	for path, hold := range d.holds {
		if loop == fmt.Sprintf("/dev/loop%d", hold.number) {
			delete(d.holds, path)
			return hold.loop.Close()
		}
	}
	return fmt.Errorf("expected a device that this machine holds, found %s", loop)
}

// attach attaches a file to a free loop device; mu is held.
func (d *Devices) attach(file *os.File, config unix.LoopConfig) (*device, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(file.Fd()), &st); err != nil {
		return nil, err
	}
	control, err := os.OpenFile(d.Control, os.O_RDWR, 0)
	if err != nil {
		return nil, fmt.Errorf("the machine cannot have loop devices: %w", err)
	}
	defer func() { _ = control.Close() }()
	made := &device{file: st.Rdev, dev: st.Dev, inode: st.Ino}
	made.loop, made.number, err = loopdevice.Attach(control, file, config, func(number int) (loop *os.File, err error) {
		loop, made.id, err = d.open(number)
		return loop, err
	})
	if err != nil {
		return nil, err
	}
	return made, nil
}

// open opens a loop device by a node that is gone then.
func (d *Devices) open(number int) (*os.File, uint64, error) {
	text, err := os.ReadFile(fmt.Sprintf("/sys/block/loop%d/dev", number))
	if err != nil {
		return nil, 0, err
	}
	var major, minor uint32
	if _, err := fmt.Sscanf(strings.TrimSpace(string(text)), "%d:%d", &major, &minor); err != nil {
		return nil, 0, fmt.Errorf("the number of the device loop%d is %q: %w", number, text, err)
	}
	id, name := unix.Mkdev(major, minor), "free"
	if err := d.node(name, 0o600, id); err != nil {
		return nil, 0, err
	}
	path := filepath.Join(d.Dir, name)
	loop, err := os.OpenFile(path, os.O_RDWR, 0)
	return loop, id, errors.Join(err, os.Remove(path))
}

// node makes the node of a device, in place of an old one.
func (d *Devices) node(name string, mode uint32, id uint64) error {
	path := filepath.Join(d.Dir, name)
	if err := atomicfile.Remove(path); err != nil {
		return err
	}
	if err := unix.Mknod(path, unix.S_IFBLK|mode, int(id)); err != nil {
		return fmt.Errorf("making the device node %s: %w", path, err)
	}
	return os.Chmod(path, os.FileMode(mode)) // the process has a umask
}
