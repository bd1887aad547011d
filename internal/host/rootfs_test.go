package host

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/atomicfile"
)

// At each start, machines get the first configuration with a server that they can reach.
func TestResolvConf(t *testing.T) {
	dir := t.TempDir()
	stub, good, s := filepath.Join(dir, "stub"), filepath.Join(dir, "real"), newStore(t)
	const servers = "search example.org\nnameserver\t10.1.1.1\n"
	write(t, stub, "nameserver 127.0.0.53\nnameserver ::1\noptions edns0\n")
	write(t, good, servers)
	for name, test := range map[string]struct {
		files []string
		want  string
	}{
		"systemd's stub":         {[]string{stub, good}, servers},
		"the first that is good": {[]string{good, stub}, servers},
		"only a stub":            {[]string{stub}, ""},
		"none":                   {[]string{filepath.Join(dir, "none")}, ""},
	} {
		conf := resolvConf(test.files)
		if string(conf) != test.want {
			t.Errorf("%s: %q, want %q", name, conf, test.want)
		}
		if err := s.makeRunDir("m-1", metadata(goodSpec(), 0), nil, conf); err != nil {
			t.Fatal(err)
		}
		path := s.path(runDir, "m-1", "resolv.conf")
		if there := atomicfile.Exists(path); there != (test.want != "") || there && read(t, path) != test.want {
			t.Errorf("%s: not passed to the machine", name)
		}
	}
}

// TestRunDirOfMachine: what root in a machine makes of the folder that it shares with capstand prevents neither the next start nor the
// removal of the machine: many folders in each other, and folders that cannot be changed. It fills neither the disk nor the memory of
// the host. All of it holds for the folder of a machine that an earlier version has started, which is on the disk, except for its size.
func TestRunDirOfMachine(t *testing.T) {
	for name, start := range map[string]func(s store) error{
		"in memory":   func(s store) error { return s.makeRunDir("m-1", metadata(goodSpec(), 0), nil, nil) },
		"on the disk": func(s store) error { return os.Mkdir(s.path(runDir, "m-1"), 0o700) },
	} {
		t.Run(name, func(t *testing.T) {
			s := newStore(t)
			dir := s.path(runDir, "m-1")
			if err := start(s); err != nil {
				t.Fatal(err)
			}
			if err := nest(dir, 700); err != nil {
				t.Fatal(err)
			}
			if name == "in memory" {
				if err := os.WriteFile(filepath.Join(dir, "large"), make([]byte, runDirLimits.Bytes+1), 0o600); !errors.Is(err, unix.ENOSPC) {
					t.Errorf("the machine could write more than its limit: %v", err)
				}
			}
			if out, err := exec.CommandContext(t.Context(), "chattr", "+i", dir).CombinedOutput(); err != nil {
				t.Logf("without a folder that cannot be changed: %s", out)
			}
			if err := s.makeRunDir("m-1", metadata(goodSpec(), 0), nil, nil); err != nil {
				t.Fatal(err)
			}
			if entries, err := os.ReadDir(dir); err != nil || len(entries) != 1 {
				t.Errorf("the folder of the next start contains %v, %v", entries, err)
			}
			withoutManyFiles(t)
			if err := errors.Join(s.removeRunDir("m-1"), s.emptyTrash(t.Context())); err != nil {
				t.Fatal(err)
			}
			for _, folder := range []string{s.path(trashDir), s.path(runDir)} {
				if left, err := os.ReadDir(folder); err != nil || len(left) != 0 {
					t.Errorf("%s contains %v, %v", folder, left, err)
				}
			}
		})
	}
}

// nest makes folders in each other.
func nest(dir string, depth int) error {
	root, err := os.OpenRoot(dir)
	for range depth {
		if err == nil {
			err = root.Mkdir("x", 0o700)
		}
		if err != nil {
			return err
		}
		inner, errOpen := root.OpenRoot("x")
		err = errors.Join(errOpen, root.Close())
		root = inner
	}
	return errors.Join(err, root.Close())
}

// withoutManyFiles lets the test open 300 files at most.
func withoutManyFiles(t *testing.T) {
	t.Helper()
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 300, Max: limit.Max}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Setrlimit(unix.RLIMIT_NOFILE, &limit) })
}

// capstan-init has the logs of capstand.
func TestMetadataHasFlagsOfLogs(t *testing.T) {
	flags := []string{"--logging-format=json", "--v=4"}
	m := &machine{spec: goodSpec(), host: &platform{config: Config{Logging: flags}, store: store{t.TempDir()}}}
	if got := m.metadata(goodSpec()).Logging; !slices.Equal(got, flags) {
		t.Errorf("found %q", got)
	}
}
