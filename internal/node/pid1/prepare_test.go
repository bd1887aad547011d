package pid1

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/machineapi"
	"capstan.dev/capstan/internal/node/machine"
	"capstan.dev/capstan/internal/testenv/expect"
)

func TestHostsFile(t *testing.T) {
	m := machine.Metadata{Addresses: []machine.Address{{Address: "10.0.0.2"}}}
	own := partBegin + "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n10.0.0.2 a\n" + partEnd
	for name, tt := range map[string]struct{ old, want string }{
		"none":          {"", own},
		"the user's":    {"10.9.9.9 db\n", own + "10.9.9.9 db\n"},
		"again":         {own, own},
		"changed":       {"1.1.1.1 x\n" + partBegin + "old\n" + partEnd + "2.2.2.2 y\n", "1.1.1.1 x\n" + own + "2.2.2.2 y\n"},
		"broken in two": {partBegin + "old\n", own},
	} {
		if got := string(hostsFile([]byte(tt.old), "a", m)); got != tt.want {
			t.Errorf("%s: %q", name, got)
		}
	}
}

// At each start, the machine gets the host's current name servers and keeps the user's lines.
func TestCopyResolvConf(t *testing.T) {
	host := "# host\nnameserver 127.0.0.53\nnameserver ::1\nnameserver 10.1.1.1\nsearch example.org"
	part := partBegin + "# host\nnameserver 10.1.1.1\nsearch example.org\n" + partEnd
	before := partBegin + "nameserver 10.9.9.9\n" + partEnd
	const none = "-"
	for name, tt := range map[string]struct{ host, old, want string }{
		"the first start":                    {host, none, part},
		"an empty file":                      {host, "\n", "\n" + part},
		"changed servers of the host":        {host, before, part},
		"options of the user":                {host, before + "options ndots:2\n", part + "options ndots:2\n"},
		"servers of the user":                {host, "nameserver 10.2.2.2\n", "nameserver 10.2.2.2\n"},
		"no file from capstand":              {none, before, before},
		"no file from capstand at any start": {none, none, ""},
	} {
		from, to := filepath.Join(t.TempDir(), "from"), filepath.Join(t.TempDir(), "to")
		for path, content := range map[string]string{from: tt.host, to: tt.old} {
			if content == none {
				continue
			}
			if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		err := copyResolvConf(from, to)
		if got, _ := os.ReadFile(to); err != nil || string(got) != tt.want {
			t.Errorf("%s: %q, %v, want %q", name, got, err, tt.want)
		}
	}
}

// TestRewrite: a file is replaced by another one, so that a crash leaves the old or the new content. One that has the content, a link, and a
// mount stay.
func TestRewrite(t *testing.T) {
	for name, test := range map[string]struct {
		create  func(path string) error
		content string
		same    bool
	}{
		"no file":  {func(string) error { return nil }, "new", false},
		"other":    {func(path string) error { return os.WriteFile(path, []byte("old"), 0o644) }, "new", false},
		"the same": {func(path string) error { return os.WriteFile(path, []byte("new"), 0o644) }, "new", true},
		"empty":    {func(path string) error { return os.WriteFile(path, nil, 0o644) }, "", true},
		"a link": {func(path string) error {
			return errors.Join(os.WriteFile(path+"-target", nil, 0o644), os.Symlink(path+"-target", path))
		}, "new", true},
		"a lost link":  {func(path string) error { return os.Symlink(path+"-gone/file", path) }, "new", false},
		"a mount":      {func(path string) error { return bindFile(t, path) }, "new", true},
		"nothing, yet": {func(string) error { return nil }, "", false},
	} {
		path := filepath.Join(t.TempDir(), "file")
		if err := test.create(path); err != nil {
			t.Fatal(err)
		}
		before, _ := os.Lstat(path)
		old, err := readIfThere(path)
		if err == nil {
			err = rewrite(path, old, []byte(test.content))
		}
		after, e := os.Lstat(path)
		if got, _ := os.ReadFile(path); err != nil || e != nil || string(got) != test.content {
			t.Errorf("%s: %q, %v, %v", name, got, err, e)
		}
		if same := os.SameFile(before, after); same != test.same {
			t.Errorf("%s: the same file: %v, want %v", name, same, test.same)
		}
	}
}

// A machine whose machine-id is lost gets the one that capstand has written to its disk. Another one stays.
func TestWriteMachineID(t *testing.T) {
	path, chosen := filepath.Join(t.TempDir(), "machine-id"), strings.Repeat("a", 32)+"\n"
	for _, test := range []struct{ before, want string }{{"", machineapi.MachineID("m-1")}, {"half", machineapi.MachineID("m-1")}, {chosen, chosen}} {
		if test.before != "" {
			expect.NoError(t, os.WriteFile(path, []byte(test.before), 0o644))
		}
		expect.NoError(t, writeMachineID(path, machine.Metadata{ID: "m-1", Name: "one"}))
		if got, err := os.ReadFile(path); err != nil || string(got) != test.want {
			t.Errorf("%q became %q, %v, want %q", test.before, got, err, test.want)
		}
	}
}

// TestWriteTables: an empty table, which a crash has left, is written again. A file of the image stays.
func TestWriteTables(t *testing.T) {
	dir := t.TempDir()
	missing, empty, present := filepath.Join(dir, "missing"), filepath.Join(dir, "empty"), filepath.Join(dir, "present")
	for path, content := range map[string]string{empty: "", present: "of the image\n"} {
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := writeTables(map[string]string{missing: "a\n", empty: "b\n", present: "c\n"}); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{missing: "a\n", empty: "b\n", present: "of the image\n"} {
		if got, err := os.ReadFile(path); err != nil || string(got) != want {
			t.Errorf("%s: %q, %v", path, got, err)
		}
	}
}

// TestRewriteOnAFullDisk: a file gets a content that fits into its place. Without room for the content, it keeps the former one.
func TestRewriteOnAFullDisk(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=16k"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	path, old, content := filepath.Join(dir, "file"), []byte("a longer content"), []byte("new")
	if err := os.WriteFile(path, old, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "filler"), make([]byte, 1<<20), 0o644); !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("the disk is not full: %v", err)
	}
	if err := rewrite(path, old, content); err != nil {
		t.Fatal(err)
	}
	if err := rewrite(path, content, make([]byte, 6000)); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("a content without room: %v", err)
	}
	if got, err := os.ReadFile(path); !bytes.Equal(got, content) || err != nil {
		t.Errorf("the file has %.40q, %v", got, err)
	}
}

// bindFile mounts a file over another one.
func bindFile(t *testing.T, path string) error {
	source := path + "-source"
	err := errors.Join(os.WriteFile(source, []byte("old"), 0o644), os.WriteFile(path, nil, 0o644))
	if err == nil {
		err = unix.Mount(source, path, "", unix.MS_BIND, "")
	}
	t.Cleanup(func() { _ = unix.Unmount(path, 0) })
	return err
}

// On cgroup v2, the machine's processes leave the root, and every controller is enabled below it. On v1, nothing changes.
// Folders replace the hierarchy: the test checks the content of the files.
func TestLeaveRootCgroup(t *testing.T) {
	root := t.TempDir()
	if err := leaveRootCgroup(root); err != nil {
		t.Fatal(err)
	}
	if entries, _ := os.ReadDir(root); len(entries) != 0 {
		t.Errorf("files changed on v1: %v", entries)
	}
	for name, content := range map[string]string{
		"cgroup.controllers": "cpu memory\n", "cgroup.procs": "1\n", "cgroup.subtree_control": "", "capstan/cgroup.procs": "",
	} {
		_ = os.MkdirAll(filepath.Dir(filepath.Join(root, name)), 0o755)
		if err := os.WriteFile(filepath.Join(root, name), []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := leaveRootCgroup(root); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"capstan/cgroup.procs": "1", "cgroup.subtree_control": "+memory"} {
		if got, _ := os.ReadFile(filepath.Join(root, name)); string(got) != want {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
}
