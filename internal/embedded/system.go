package embedded

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	osuser "os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/thread"
)

// ensureUser returns the system user, and creates it if it does not exist.
func ensureUser() (user, error) {
	found, err := osuser.Lookup(SystemUser)
	if errors.As(err, new(osuser.UnknownUserError)) {
		out, addErr := exec.CommandContext(context.Background(), "useradd", "--system", "--user-group", "--no-create-home", "--home-dir", "/nonexistent", "--shell", "/usr/sbin/nologin", SystemUser).CombinedOutput()
		// Another installation can have created the user at the same time.
		if found, err = osuser.Lookup(SystemUser); err != nil {
			return user{}, fmt.Errorf("expected the system user %s, and useradd failed: %w: %s; create this user yourself, without a home and a shell", SystemUser, addErr, strings.TrimSpace(string(out)))
		}
	}
	if err != nil {
		return user{}, err
	}
	uid, err := strconv.Atoi(found.Uid)
	if err != nil {
		return user{}, err
	}
	gid, err := strconv.Atoi(found.Gid)
	return user{uid, gid}, err
}

// do calls a function with the rights of the user and none of the groups of this process, as a component has them.
func (u user) do(f func() error) (err error) {
	thread.Throwaway(func() {
		// System calls without a wrapper of Go change only this thread.
		for _, set := range []struct{ call, id uintptr }{{unix.SYS_SETGROUPS, 0}, {unix.SYS_SETFSGID, uintptr(u.gid)}, {unix.SYS_SETFSUID, uintptr(u.uid)}} {
			if _, _, code := unix.RawSyscall(set.call, set.id, 0, 0); code != 0 {
				err = code
				return
			}
		}
		err = f()
	})
	return err
}

// lockPlane takes the lock of a root folder and writes the process id into it. The kernel releases it when the process ends.
func lockPlane(l Layout) (*os.File, error) {
	f, err := os.OpenFile(l.Lock(), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, fmt.Errorf("%w in %s; see `capstan status`", errRunning, l.Root)
		}
		return nil, err
	}
	// All contents have the same length, so that a reader never finds an empty file or a part of a number.
	if _, err := f.WriteAt(fmt.Appendf(nil, "%10d\n", os.Getpid()), 0); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// planeProcess returns the process id of the running plane; 0 when none runs.
func planeProcess(l Layout) (int, error) {
	f, err := os.OpenFile(l.Lock(), os.O_RDWR, 0)
	if errors.Is(err, os.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	defer f.Close()
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if err == nil {
		return 0, nil // no process has the lock
	}
	if !errors.Is(err, unix.EWOULDBLOCK) {
		return 0, err
	}
	data, err := io.ReadAll(f)
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(strings.TrimSpace(string(data)))
}

// Enterable returns an error if the system user cannot enter a folder, which is an absolute path. Each parent folder must be
// executable for other users.
func Enterable(dir string) error {
	for d := filepath.Dir(dir); ; d = filepath.Dir(d) {
		info, err := os.Stat(d)
		if errors.Is(err, os.ErrNotExist) {
			continue // MkdirAll creates it with a suitable mode
		}
		if err != nil {
			return err
		}
		if info.Mode().Perm()&0o001 == 0 {
			return fmt.Errorf("expected a root folder that the system user %s can enter, found %s with mode %s: choose another --root, or run `chmod o+x %s`", SystemUser, d, info.Mode().Perm(), d)
		}
		if d == filepath.Dir(d) {
			return nil
		}
	}
}

// copyFile copies a program for other users, with any umask.
func copyFile(source, target string, info os.FileInfo) (err error) {
	in, err := os.Open(source)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(target, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o755)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	return errors.Join(err, out.Chmod(0o755), out.Close(), os.Chtimes(target, info.ModTime(), info.ModTime()))
}

func hash(s string) string {
	sum := sha256.Sum256([]byte(s))
	return hex.EncodeToString(sum[:8])
}

// notifyFD is the descriptor of the notification file in a daemon.
const notifyFD = 3

// daemonize starts a program that outlives this process and its terminal.
func daemonize(log string, notify *os.File, name string, args ...string) error {
	out, err := os.OpenFile(log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer out.Close()
	cmd := exec.Command(name, args...) // it outlives this process
	cmd.Stdout, cmd.Stderr, cmd.Dir = out, out, "/"
	cmd.ExtraFiles = []*os.File{notify}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return err
	}
	return cmd.Process.Release()
}

// boxMemory is the memory of the box in bytes.
func boxMemory() (int64, error) {
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return 0, err
	}
	return int64(info.Totalram) * int64(info.Unit), nil
}

// trimLogs copies each log above the limit to <log>.1 and empties it. The writer keeps the file open and appends, so the file
// itself stays. A line that is written at this moment can be lost.
func trimLogs(dir string, limit int64) error {
	logs, err := filepath.Glob(filepath.Join(dir, "*.log"))
	if err != nil {
		return err
	}
	for _, log := range logs {
		info, err := os.Stat(log)
		if err != nil || info.Size() <= limit {
			continue
		}
		data, err := os.ReadFile(log)
		if err != nil {
			return err
		}
		if err := atomicfile.WriteFile(log+".1", data, 0o600); err != nil {
			return err // The log keeps its content, for example while the disk is full.
		}
		if err := os.Truncate(log, 0); err != nil {
			return err
		}
	}
	return nil
}
