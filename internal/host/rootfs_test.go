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
// removal of the machine: many folders in each other, and folders that cannot be changed.
func TestRunDirOfMachine(t *testing.T) {
	s := newStore(t)
	dir := s.path(runDir, "m-1")
	renew := func() {
		t.Helper()
		if err := s.makeRunDir("m-1", metadata(goodSpec(), 0), nil, nil); err != nil {
			t.Fatal(err)
		}
	}
	renew()
	root, err := os.OpenRoot(dir)
	for range 700 {
		if err == nil {
			err = root.Mkdir("x", 0o700)
		}
		if err != nil {
			t.Fatal(err)
		}
		inner, errOpen := root.OpenRoot("x")
		err = errors.Join(errOpen, root.Close())
		root = inner
	}
	if err := errors.Join(err, root.Close()); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.CommandContext(t.Context(), "chattr", "+i", dir).CombinedOutput(); err != nil {
		t.Logf("without a folder that cannot be changed: %s", out)
	}
	renew()
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 1 {
		t.Errorf("the folder of the next start contains %v, %v", entries, err)
	}
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 300, Max: limit.Max}); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Setrlimit(unix.RLIMIT_NOFILE, &limit) }()
	if err := errors.Join(s.discard(dir), s.emptyTrash(t.Context())); err != nil {
		t.Fatal(err)
	}
	if left, err := os.ReadDir(s.path(trashDir)); err != nil || len(left) != 0 {
		t.Errorf("the trash contains %v, %v", left, err)
	}
}

// capstan-init has the logs of capstand.
func TestMetadataHasFlagsOfLogs(t *testing.T) {
	flags := []string{"--logging-format=json", "--v=4"}
	m := &machine{spec: goodSpec(), host: &platform{config: Config{Logging: flags}, store: store{t.TempDir()}}}
	if got := m.metadata(goodSpec()).Logging; !slices.Equal(got, flags) {
		t.Errorf("found %q", got)
	}
}
