package podseccomp

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/projectquota"
	"capstan.dev/capstan/internal/testenv/expect"
)

const (
	// programs are in the guest of test/vm/kernel.sh. escape32 is this test for 32-bit processors.
	programs = "/bin"
	escape32 = "escape32"

	insideContainer = "CAPSTAN_INSIDE_CONTAINER"
	inheritFlag     = 0x20000000 // FS_PROJINHERIT_FL
	getFlags        = 0x80086601 // FS_IOC_GETFLAGS
	getFlags32      = 0x80046601
)

// TestEscape is run in a container. It fails if its user can leave the project of /data.
func TestEscape(t *testing.T) {
	if os.Getenv(insideContainer) == "" {
		t.Skip("this test is a program of TestContainer")
	}
	folder, err := os.MkdirTemp("/data", "folder-")
	expect.NoError(t, err)
	f, err := os.Open(folder)
	expect.NoError(t, err)
	id, err := projectquota.ID(f)
	expect.NoError(t, err)
	if id == 0 {
		t.Fatal("the volume has no project")
	}
	attributes := [28]byte{} // struct fsxattr with the project 0
	for _, high := range []uint64{0, 1 << 32, 1 << 63} {
		try(t, f, uint64(projectquota.SetAttributes)|high, unsafe.Pointer(&attributes))
	}
	for get, set := range map[uint64]uint64{getFlags: 0x40086602, getFlags32: 0x40046602} {
		var flags uint64
		if err := command(f, get, unsafe.Pointer(&flags)); err == nil {
			flags &^= inheritFlag
		}
		try(t, f, set, unsafe.Pointer(&flags))
		try(t, f, set|1<<32, unsafe.Pointer(&flags))
	}
	// Other commands work: the kernel answers, and not the profile.
	var terminal [64]byte
	if err := command(f, unix.TCGETS, unsafe.Pointer(&terminal)); !errors.Is(err, unix.ENOTTY) {
		t.Errorf("TCGETS of a folder: %v", err)
	}
	if after, err := projectquota.ID(f); err != nil || after != id {
		t.Errorf("escaped to the project %d, %v", after, err)
	}
}

// try runs a forbidden command.
func try(t *testing.T, f *os.File, number uint64, data unsafe.Pointer) {
	t.Helper()
	err := command(f, number, data)
	if err == nil {
		t.Errorf("escaped with %#x", number)
	} else if !errors.Is(err, unix.EPERM) {
		t.Errorf("the kernel answers %#x with: %v", number, err)
	}
}

func command(f *os.File, number uint64, data unsafe.Pointer) error {
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), uintptr(number), uintptr(data)); errno != 0 {
		return errno
	}
	return nil
}

// TestContainer: a container that containerd creates with its default profile cannot leave the project of its volume, as root and as
// another user, with 64 and 32 bits. Without capstan-runc it can.
func TestContainer(t *testing.T) {
	if os.Getenv("CAPSTAN_KERNEL") == "" || os.Getenv(insideContainer) != "" {
		t.Skip("this test needs a kernel with project quotas: run make test-quota")
	}
	top := machine(t)
	containerd(t, top)
	for program, setFlags := range map[string]string{"escape": "0x40086602", escape32: "0x40046602"} {
		for _, user := range []string{"0", "1000"} {
			name := program + "-" + user
			out, err := container(t, top, name, "/bin/capstan-runc", user, "/"+program)
			if err != nil || !strings.Contains(out, "--- PASS: TestEscape") {
				t.Errorf("%s: %v\n%s", name, err, out)
			}
			out, err = container(t, top, name+"-runc", "/bin/runc", user, "/"+program)
			for _, want := range []string{"escaped with 0x401c5820", "escaped with " + setFlags, "escaped to the project 0"} {
				if err == nil || !strings.Contains(out, want) {
					t.Errorf("%s without the rules: %v, want %q\n%s", name, err, want, out)
				}
			}
		}
	}
}

// machine is a disk with project quotas, as that of a machine: with the programs, a root file system for containers, and a volume.
func machine(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	image, top := filepath.Join(dir, "disk.img"), filepath.Join(dir, "top")
	expect.NoError(t, os.WriteFile(image, nil, 0o600))
	expect.NoError(t, os.Truncate(image, 512<<20))
	expect.NoError(t, os.Mkdir(top, 0o755))
	run(t, "mkfs.ext4", "-q", "-F", "-b", "4096", "-O", "quota,project", "-E", "quotatype=prjquota", image)
	run(t, "mount", "-t", "ext4", "-o", "loop,prjquota", image, top)
	t.Cleanup(func() { _ = unix.Unmount(top, unix.MNT_DETACH) })
	for _, folder := range []string{"bin", "proc", "sys", "dev", "run", "tmp", "etc", "volume", "rootfs/data"} {
		expect.NoError(t, os.MkdirAll(filepath.Join(top, folder), 0o755))
	}
	expect.NoError(t, os.Chmod(filepath.Join(top, "volume"), 0o777))
	for _, program := range []string{"containerd", "containerd-shim-runc-v2", "ctr", "runc", "capstan-runc"} {
		install(t, filepath.Join(programs, program), filepath.Join(top, "bin", program))
	}
	self, err := os.Executable()
	expect.NoError(t, err)
	install(t, self, filepath.Join(top, "rootfs/escape"))
	install(t, filepath.Join(programs, escape32), filepath.Join(top, "rootfs", escape32))
	volume, err := os.Open(filepath.Join(top, "volume"))
	expect.NoError(t, err)
	defer func() { _ = volume.Close() }()
	expect.NoError(t, projectquota.SetID(volume, 7))
	for _, m := range [][2]string{{"proc", "proc"}, {"sysfs", "sys"}, {"cgroup2", "sys/fs/cgroup"}, {"devtmpfs", "dev"}, {"tmpfs", "run"}, {"tmpfs", "tmp"}} {
		expect.NoError(t, unix.Mount(m[0], filepath.Join(top, m[1]), m[0], 0, ""))
	}
	return top
}

// containerd runs with the disk as its root.
func containerd(t *testing.T, top string) {
	t.Helper()
	expect.NoError(t, os.WriteFile(filepath.Join(top, "etc/containerd.toml"), []byte("version = 3\ndisabled_plugins = ['io.containerd.grpc.v1.cri']\n"), 0o600))
	var log bytes.Buffer
	cmd := inside(top, "containerd", "--config", "/etc/containerd.toml", "--log-level", "warn")
	cmd.Stdout, cmd.Stderr = &log, &log
	expect.NoError(t, cmd.Start())
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		<-ended
		if t.Failed() {
			t.Log(log.String())
		}
	})
	for deadline := time.Now().Add(5 * time.Minute); ; {
		if err := inside(top, "ctr", "version").Run(); err == nil {
			return
		}
		if time.Now().After(deadline) || len(ended) > 0 {
			t.Fatal("containerd does not run")
		}
	}
}

func container(t *testing.T, top, name, runtime, user, program string) (string, error) {
	t.Helper()
	out, err := inside(top, "ctr", "run", "--rm", "--rootfs", "--seccomp", "--runc-binary", runtime, "--user", user, "--env", insideContainer+"=1",
		"--mount", "type=bind,src=/volume,dst=/data,options=rbind:rw", "/rootfs", name, program, "-test.v", "-test.run", "TestEscape").CombinedOutput()
	return string(out), err
}

func inside(top string, args ...string) *exec.Cmd {
	cmd := exec.Command("/bin/"+args[0], args[1:]...)
	cmd.Dir, cmd.Env = "/", []string{"PATH=/bin"}
	cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: top}
	return cmd
}

func run(t *testing.T, args ...string) {
	t.Helper()
	if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
		t.Fatalf("%v: %v: %s", args, err, out)
	}
}

func install(t *testing.T, from, to string) {
	t.Helper()
	data, err := os.ReadFile(from)
	expect.NoError(t, err)
	expect.NoError(t, os.WriteFile(to, data, 0o755))
}
