package pid1

import (
	"os"
	"path/filepath"
	"testing"

	"capstan.dev/capstan/internal/node/machine"
)

func TestHostsFile(t *testing.T) {
	m := machine.Metadata{Addresses: []machine.Address{{Address: "10.0.0.2"}}}
	own := hostsBegin + "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n10.0.0.2 a\n" + hostsEnd
	for name, tt := range map[string]struct{ old, want string }{
		"none":          {"", own},
		"the user's":    {"10.9.9.9 db\n", own + "10.9.9.9 db\n"},
		"again":         {own, own},
		"changed":       {"1.1.1.1 x\n" + hostsBegin + "old\n" + hostsEnd + "2.2.2.2 y\n", "1.1.1.1 x\n" + own + "2.2.2.2 y\n"},
		"broken in two": {hostsBegin + "old\n", own},
	} {
		if got := string(hostsFile([]byte(tt.old), "a", m)); got != tt.want {
			t.Errorf("%s: %q", name, got)
		}
	}
}

func TestResolvConf(t *testing.T) {
	got := string(resolvConf([]byte("# host\nnameserver 127.0.0.53\nnameserver ::1\nnameserver 10.1.1.1\nsearch example.org\noptions edns0")))
	if got != "# host\nnameserver 10.1.1.1\nsearch example.org\noptions edns0" {
		t.Errorf("%q", got)
	}
}

// On cgroup v2 the machine's processes leave the root and every controller is enabled below it; on v1
// nothing is touched. Folders stand for the hierarchy: this only shows what is written where.
func TestLeaveRootCgroup(t *testing.T) {
	root := t.TempDir()
	if err := leaveRootCgroup(root); err != nil {
		t.Fatal(err)
	}
	if entries, _ := os.ReadDir(root); len(entries) != 0 {
		t.Errorf("v1 was touched: %v", entries)
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
