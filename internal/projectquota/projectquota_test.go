package projectquota

import (
	"errors"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// Only an answer about the disk means that it has no limits.
func TestEnforces(t *testing.T) {
	for name, tc := range map[string]struct {
		flags uint16
		err   error
		none  bool
	}{
		"a kernel without quotas":                  {err: unix.ENOSYS, none: true},
		"a file system without quotas of projects": {err: unix.EINVAL, none: true},
		"quotas that are off":                      {err: unix.ESRCH, none: true},
		"a count without limits":                   {flags: 1 << 4, none: true},
		"too many open files of the box":           {err: unix.ENFILE},
		"a forbidden system call":                  {err: unix.EPERM},
		"no memory":                                {err: unix.ENOMEM},
	} {
		if err := enforces(tc.flags, tc.err); err == nil || errors.Is(err, ErrNone) != tc.none {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := enforces(enforced, nil); err != nil {
		t.Error(err)
	}
}

func TestOwn(t *testing.T) {
	dir := t.TempDir()
	if err := Own(dir, dir); !errors.Is(err, ErrNone) {
		t.Errorf("a folder on a larger disk: %v", err)
	}
	if err := Own("/proc", "/proc"); !errors.Is(err, ErrNone) {
		t.Errorf("a file system without quotas: %v", err)
	}
	f, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	if err := Enforced(int(f.Fd())); err != nil && !errors.Is(err, ErrNone) {
		t.Errorf("the disk of this box: %v", err)
	}
	var before unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &before); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &before); err != nil {
			t.Error(err)
		}
	}()
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Max: before.Max}); err != nil {
		t.Fatal(err)
	}
	if err := Own("/", "/"); !errors.Is(err, unix.EMFILE) || errors.Is(err, ErrNone) {
		t.Errorf("without a free file: %v", err)
	}
}
