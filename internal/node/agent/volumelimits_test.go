package agent

import (
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/node/initapi"
	"capstan.dev/capstan/internal/node/localvolume"
	"capstan.dev/capstan/internal/node/pid1"
	"capstan.dev/capstan/internal/projectquota"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/internal/thread"
)

const onQuotaDisk = "CAPSTAN_ON_QUOTA_DISK"

// TestVolumeLimits: on a machine whose disk has project quotas, the agent creates a volume with limits and removes both, without the
// capability CAP_SYS_ADMIN. It repeats each step.
func TestVolumeLimits(t *testing.T) {
	if os.Getenv(onQuotaDisk) != "" {
		volumeLimits(t)
		return
	}
	if os.Getenv("CAPSTAN_KERNEL") == "" {
		t.Skip("this test needs a kernel with project quotas: run make test-quota")
	}
	dir := t.TempDir()
	image, top := filepath.Join(dir, "disk.img"), filepath.Join(dir, "top")
	self, err := os.Executable()
	expect.NoError(t, err)
	data, err := os.ReadFile(self)
	expect.NoError(t, err)
	expect.NoError(t, os.WriteFile(image, nil, 0o600))
	expect.NoError(t, os.Truncate(image, 256<<20))
	expect.NoError(t, os.Mkdir(top, 0o755))
	for _, args := range [][]string{
		{"mkfs.ext4", "-q", "-F", "-b", "4096", "-O", "quota,project", "-E", "quotatype=prjquota", image},
		{"mount", "-t", "ext4", "-o", "loop,prjquota", image, top},
	} {
		if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %v: %s", args, err, out)
		}
	}
	defer func() { expect.NoError(t, unix.Unmount(top, unix.MNT_DETACH)) }()
	expect.NoError(t, os.MkdirAll(filepath.Join(top, "proc"), 0o755))
	expect.NoError(t, unix.Mount("proc", filepath.Join(top, "proc"), "proc", 0, ""))
	expect.NoError(t, os.WriteFile(filepath.Join(top, "test"), data, 0o755))
	cmd := exec.Command("/test", "-test.v", "-test.run", "TestVolumeLimits")
	cmd.Dir, cmd.Env, cmd.SysProcAttr = "/", []string{onQuotaDisk + "=1", "TMPDIR=/"}, &syscall.SysProcAttr{Chroot: top}
	out, err := cmd.CombinedOutput()
	t.Logf("%s", out)
	expect.NoError(t, err)
}

// volumeLimits runs with the disk as its root.
func volumeLimits(t *testing.T) {
	listener, err := net.Listen("unix", "/init.sock")
	expect.NoError(t, err)
	mux := http.NewServeMux()
	pid1.VolumeRoutes(mux)
	server := &http.Server{Handler: mux}
	go func() { _ = server.Serve(listener) }()
	defer func() { _ = server.Close() }()
	v := &volumes{folders: localvolume.OfMachine, init: initapi.NewClient("/init.sock")}
	expect.NoError(t, v.folders.Enforced())
	const name, size = "pvc-01234567-89ab-cdef-0123-456789abcdef", 8 << 20
	path := filepath.Join(localvolume.Root, name)
	for range 2 {
		expect.NoError(t, asAgent(func() error { return v.create(t.Context(), name, size) }))
	}
	folder, err := os.Open(path)
	expect.NoError(t, err)
	id, err := projectquota.ID(folder)
	expect.NoError(t, err)
	expect.NoError(t, folder.Close())
	if q := quotaOf(t, id); id == 0 || q.MaxBytes != size || q.MaxFiles == 0 {
		t.Errorf("the project %d has %+v", id, q)
	}
	expect.NoError(t, os.WriteFile(filepath.Join(path, "file"), make([]byte, size/2), 0o600))
	for range 2 {
		expect.NoError(t, asAgent(func() error { return v.removeFolder(t.Context(), name) }))
	}
	if _, err := os.Stat(path); !os.IsNotExist(err) {
		t.Errorf("the folder remains: %v", err)
	}
	if q := quotaOf(t, id); q != (projectquota.Quota{}) {
		t.Errorf("the project of a volume that is gone has %+v", q)
	}
}

func quotaOf(t *testing.T, id uint32) projectquota.Quota {
	t.Helper()
	dir, err := os.Open(localvolume.Root)
	expect.NoError(t, err)
	defer func() { _ = dir.Close() }()
	q, err := projectquota.Get(dir, id)
	expect.NoError(t, err)
	return q
}

// asAgent runs f in a thread with the capabilities of the node agent.
func asAgent(f func() error) (err error) {
	thread.Throwaway(func() {
		header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		agent := uint32(1<<unix.CAP_CHOWN | 1<<unix.CAP_DAC_OVERRIDE | 1<<unix.CAP_FOWNER | 1<<unix.CAP_NET_ADMIN)
		data := [2]unix.CapUserData{{Effective: agent, Permitted: agent}}
		if err = unix.Capset(&header, &data[0]); err == nil {
			err = f()
		}
	})
	return err
}
