package localvolume

import (
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/projectquota"
)

const (
	// firstProject is the smallest project id of a volume. The kubelet gives out smaller ones, from 1048577.
	firstProject = 1 << 30
	// bytesPerFile is the size of a disk for each of its inodes: the default of mkfs.ext4. A volume has the same part of both.
	bytesPerFile = 16 << 10
	// leastFiles is the number of files of the smallest volumes.
	leastFiles = 128
)

// limiting makes a process give out one project id at a time. PID 1 is the only process that does, and a request of an agent that has ended
// can still run when its successor sends one.
var limiting sync.Mutex

// Enforced returns nil if this machine enforces the sizes of its volumes.
func (f Folders) Enforced() error {
	if err := os.MkdirAll(f.Dir, 0o700); err != nil {
		return err
	}
	return projectquota.Own(f.Top, f.Dir)
}

// Limit gives the folder of a volume a project id of its own, and the id the limits of a volume of size bytes. The folder is the only
// record of the id, so a process that ends in between finds it. The limits are on the disk when Limit returns. It needs
// CAP_SYS_ADMIN.
func (f Folders) Limit(name string, size int64) error {
	if size <= 0 {
		return fmt.Errorf("expected a size larger than 0, found %d", size)
	}
	limiting.Lock()
	defer limiting.Unlock()
	root, folder, err := f.openVolume(name)
	if err != nil {
		return err
	}
	defer func() { _, _ = root.Close(), folder.Close() }()
	id, err := projectquota.ID(folder)
	if err != nil {
		return err
	}
	if id == 0 {
		if id, err = freeProject(root, folder); err != nil {
			return err
		}
		if err := projectquota.SetID(folder, id); err != nil {
			return err
		}
	}
	if err := projectquota.Limit(folder, id, uint64(size), maxFiles(size)); err != nil {
		return err
	}
	return unix.Syncfs(int(folder.Fd()))
}

// Unlimit removes the limits of an empty volume that goes. It needs CAP_SYS_ADMIN.
func (f Folders) Unlimit(name string) error {
	limiting.Lock()
	defer limiting.Unlock()
	root, folder, err := f.openVolume(name)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer func() { _, _ = root.Close(), folder.Close() }()
	id, err := projectquota.ID(folder)
	if err != nil {
		return err
	}
	used, err := projects(root)
	if err != nil || !clears(id, used) {
		return err
	}
	return projectquota.Limit(folder, id, 0, 0)
}

// openVolume opens the folder of all volumes and that of one.
func (f Folders) openVolume(name string) (root *os.Root, folder *os.File, err error) {
	if root, err = f.open(name); err != nil {
		return nil, nil, err
	}
	if folder, err = root.OpenFile(name, unix.O_DIRECTORY|unix.O_NOFOLLOW, 0); err != nil {
		return nil, nil, errors.Join(err, root.Close())
	}
	return root, folder, nil
}

func maxFiles(size int64) uint64 { return uint64(max(leastFiles, size/bytesPerFile)) }

// freeProject returns a project id that no folder of a volume has, and no other file: a process can still have a deleted file of a
// volume that is gone.
func freeProject(root *os.Root, folder *os.File) (uint32, error) {
	used, err := projects(root)
	if err != nil {
		return 0, err
	}
	for id := uint32(firstProject); id < math.MaxInt32; id++ {
		if slices.Contains(used, id) {
			continue
		}
		quota, err := projectquota.Get(folder, id)
		if err != nil {
			return 0, err
		}
		if quota.Bytes == 0 && quota.Files == 0 {
			return id, nil
		}
	}
	return 0, errors.New("all project ids are in use")
}

// projects returns the project ids of the folders of volumes.
func projects(root *os.Root) ([]uint32, error) {
	dir, err := root.Open(".")
	if err != nil {
		return nil, err
	}
	defer func() { _ = dir.Close() }()
	entries, err := dir.ReadDir(-1)
	if err != nil {
		return nil, err
	}
	var ids []uint32
	for _, entry := range entries {
		if !entry.IsDir() {
			continue
		}
		id, err := projectOf(root, entry.Name())
		if err != nil {
			return nil, err
		}
		ids = append(ids, id)
	}
	return ids, nil
}

func projectOf(root *os.Root, name string) (uint32, error) {
	folder, err := root.Open(name)
	if err != nil {
		return 0, err
	}
	defer func() { _ = folder.Close() }()
	return projectquota.ID(folder)
}

// clears returns whether the limits of a project id go with a volume. A pod without a seccomp profile can give its volume the id of another
// volume, or one that is not for volumes. used contains the ids of all volumes, with this one.
func clears(id uint32, used []uint32) bool {
	folders := 0
	for _, other := range used {
		if other == id {
			folders++
		}
	}
	return id >= firstProject && folders == 1
}
