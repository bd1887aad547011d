package runc

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"

	"capstan.dev/capstan/internal/foreignfile"
)

// Update changes the limits of a running container, on cgroup v1 and v2. A memory limit below the present use is refused, and
// changes nothing: the kernel would kill processes of the machine.
func (r Runc) Update(ctx context.Context, id string, p Params) error {
	reclaim(p)
	limits := resources(p)
	limits.Devices = nil
	check := true
	limits.Memory.CheckBeforeUpdate = &check
	if p.CPUs == 0 {
		quota, period := int64(-1), uint64(cpuPeriod)
		limits.CPU.Quota, limits.CPU.Period = &quota, &period
	}
	data, err := json.Marshal(limits)
	if err != nil {
		return err
	}
	out, in, err := os.Pipe()
	if err != nil {
		return err
	}
	defer func() { _ = out.Close() }()
	_, err = in.Write(data) // It is smaller than the pipe.
	if err := errors.Join(err, in.Close()); err != nil {
		return err
	}
	_, err = r.run(ctx, out, "update", "--resources", "-", id)
	return err
}

// reclaim makes cgroup v2 drop caches that a smaller limit has no space for. runc counts them as use. Older kernels, and v1,
// which reclaims by itself, do not have the file.
func reclaim(p Params) {
	dir := filepath.Join("/sys/fs/cgroup", string(p.Cgroup))
	data, err := os.ReadFile(filepath.Join(dir, "memory.current"))
	if err != nil {
		return
	}
	var used int64
	if _, err := fmt.Sscan(string(data), &used); err != nil || used <= p.MemoryBytes {
		return
	}
	// The kernel returns an error if it reclaims less. runc then refuses the limit with the numbers.
	_ = os.WriteFile(filepath.Join(dir, "memory.reclaim"), fmt.Appendf(nil, "%d", used-p.MemoryBytes), 0)
}

// UpdateViews changes the views of a running machine to other limits. It keeps the files, because they are bound into the machine.
// A machine that started without a CPU limit has only the view of its memory until it starts again. Root in the machine can make the views
// writable, and put links and pipes into their folders.
func UpdateViews(p Params, cpuinfo string) error {
	cpus, dir := p.CPUs, p.Views
	if cpus == 0 {
		cpus = int32(runtime.NumCPU())
	}
	files := map[string]string{viewMeminfo: meminfo(p), viewCPUInfo: limitCPUInfo(cpuinfo, cpus)}
	cpuTree(files, cpus, p.MemoryBytes)
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }()
	for name, content := range files {
		if now, err := foreignfile.Read(dir, name, int64(len(content))); err == nil && string(now) == content {
			continue
		}
		if err := foreignfile.Write(root, name, []byte(content), 0o444); err != nil {
			return err
		}
	}
	return removeProcessors(root, files)
}

// removeProcessors removes the folders of processors that the machine does not have any more.
func removeProcessors(root *os.Root, files map[string]string) error {
	for _, parent := range []string{viewCPUs, filepath.Join(viewNodes, "node0")} {
		folders, err := fs.Glob(root.FS(), filepath.Join(parent, "cpu[0-9]*"))
		if err != nil {
			return err
		}
		for _, folder := range folders {
			if _, wanted := files[filepath.Join(folder, "topology", "core_id")]; wanted {
				continue
			}
			if err := root.RemoveAll(folder); err != nil {
				return err
			}
		}
	}
	return nil
}
