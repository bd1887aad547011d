package supervisor

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/node/accounts"
	"capstan.dev/capstan/internal/node/process"
	"capstan.dev/capstan/internal/thread"
)

// capabilities that a service can keep, by name.
var capabilities = map[string]uintptr{
	"CHOWN": unix.CAP_CHOWN, "DAC_OVERRIDE": unix.CAP_DAC_OVERRIDE, "FOWNER": unix.CAP_FOWNER,
	"NET_ADMIN": unix.CAP_NET_ADMIN, "NET_BIND_SERVICE": unix.CAP_NET_BIND_SERVICE,
}

// confined returns whether the service has fewer rights than root.
func (s Service) confined() bool { return s.User != "" || len(s.Capabilities) > 0 }

func (s Service) validateRights() error {
	var errs []error
	if _, known := accounts.ID(s.User); s.User != "" && !known {
		errs = append(errs, fmt.Errorf("user %q: expected a user of Capstan, or none for root", s.User))
	}
	if s.User == "" && len(s.Owns)+len(s.Reads) > 0 {
		errs = append(errs, errors.New("owns and reads: expected a user with them; root can read all files"))
	}
	for _, name := range s.Capabilities {
		if _, known := capabilities[name]; !known {
			errs = append(errs, fmt.Errorf("capability %q: a service cannot have this capability", name))
		}
	}
	return errors.Join(errs...)
}

// threads are those that have dropped rights, by the capabilities that they keep. A thread cannot regain rights. It stays for the next start:
// if it ended, PID 1 would soon need another thread, and the kernel refuses one while pods use up the processes of the machine.
var threads struct {
	sync.Mutex
	kept map[string]thread.Kept
}

// threadOf returns the thread that keeps the capabilities.
func threadOf(capabilities []string) thread.Kept {
	key := strings.Join(slices.Sorted(slices.Values(capabilities)), ",")
	threads.Lock()
	defer threads.Unlock()
	kept, found := threads.kept[key]
	if !found {
		if threads.kept == nil {
			threads.kept = map[string]thread.Kept{}
		}
		kept = thread.NewKept()
		threads.kept[key] = kept
	}
	return kept
}

// start starts the command with the rights of the service.
func (s Service) start(starter process.Starter, cmd *exec.Cmd) (done <-chan process.Exit, err error) {
	if !s.confined() {
		return starter.Start(cmd)
	}
	if err := s.HandOver(); err != nil {
		return nil, err
	}
	keep := map[uintptr]bool{}
	for _, name := range s.Capabilities {
		keep[capabilities[name]] = true
	}
	if s.User != "" {
		s.becomeUser(cmd.SysProcAttr, keep)
	}
	threadOf(s.Capabilities).Run(func() {
		if err = limit(keep); err == nil {
			done, err = starter.Start(cmd)
		}
	})
	return done, err
}

func (s Service) becomeUser(attr *syscall.SysProcAttr, keep map[uintptr]bool) {
	id, _ := accounts.ID(s.User)
	attr.Credential = &syscall.Credential{Uid: uint32(id), Gid: uint32(id)}
	if len(s.Reads) > 0 {
		group, _ := accounts.ID(accounts.Config)
		attr.Credential.Groups = []uint32{uint32(group)}
	}
	for capability := range keep {
		attr.AmbientCaps = append(attr.AmbientCaps, capability)
	}
}

// limit drops all other capabilities from this thread and its future children.
func limit(keep map[uintptr]bool) error {
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("no_new_privs: %w", err)
	}
	for capability := uintptr(0); capability <= 63; capability++ {
		if keep[capability] {
			continue
		}
		err := unix.Prctl(unix.PR_CAPBSET_DROP, capability, 0, 0, 0)
		if errors.Is(err, unix.EINVAL) {
			return nil // The kernel has no further capability.
		}
		if err != nil {
			return fmt.Errorf("dropping capability %d: %w", capability, err)
		}
	}
	return nil
}

// HandOver gives the user of the service the files that it needs, because bootstrap data, restores and renewals write files
// as root. It omits missing files; the service reports them itself.
func (s Service) HandOver() error {
	var errs []error
	id, _ := accounts.ID(s.User)
	for _, path := range s.Owns {
		errs = append(errs, own(path, id))
	}
	group, _ := accounts.ID(accounts.Config)
	for _, path := range s.Reads {
		errs = append(errs, share(path, group))
	}
	return errors.Join(errs...)
}

// own gives a file, or a folder with its content, to a user.
func own(path string, id int) error {
	info, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if !info.IsDir() {
		parent, err := os.OpenRoot(filepath.Dir(path))
		if err != nil {
			return err
		}
		defer func() { _ = parent.Close() }()
		return chown(parent, filepath.Base(path), id)
	}
	// Do not follow links: the user can write to the folder, and a link could lead out of it.
	root, err := os.OpenRoot(path)
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }()
	return fs.WalkDir(root.FS(), ".", func(name string, _ fs.DirEntry, err error) error {
		if err == nil {
			err = chown(root, name, id)
		}
		if errors.Is(err, fs.ErrNotExist) {
			return nil // The service runs and has removed the file.
		}
		return err
	})
}

// chown ignores files with several hard links, because they may belong elsewhere. It keeps the group of a file that the user
// already owns, because others may read it through the group.
func chown(root *os.Root, name string, id int) error {
	info, err := root.Lstat(name)
	if err != nil {
		return err
	}
	stat := info.Sys().(*syscall.Stat_t)
	if int(stat.Uid) == id || info.Mode().IsRegular() && stat.Nlink > 1 {
		return nil
	}
	return root.Lchown(name, id, id)
}

// share lets a group read a file of root that is not readable for everybody. It follows no link to the file, and ignores a file with several
// hard links: a service can have made them in a folder of its own.
func share(path string, group int) error {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return &fs.PathError{Op: "open", Path: path, Err: err}
	}
	defer func() { _ = unix.Close(fd) }()
	var stat unix.Stat_t
	if err := unix.Fstat(fd, &stat); err != nil {
		return &fs.PathError{Op: "stat", Path: path, Err: err}
	}
	if stat.Mode&unix.S_IFMT != unix.S_IFREG || stat.Mode&0o004 != 0 || stat.Nlink > 1 || stat.Uid != 0 {
		return nil
	}
	same := fmt.Sprintf("/proc/self/fd/%d", fd)
	return errors.Join(os.Chown(same, -1, group), os.Chmod(same, fs.FileMode(stat.Mode&0o777|0o040)))
}
