package main

import (
	"os"
	"os/exec"
	"strings"
	"testing"

	"go.etcd.io/etcd/api/v3/version"
)

// TestMain runs a command instead of the tests if the process was started under its name.
func TestMain(m *testing.M) {
	if _, ok := commands()[os.Args[0]]; ok {
		main()
	}
	os.Exit(m.Run())
}

// Each program starts by its name and reports the pinned version.
func TestPrograms(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for name, args := range map[string][]string{"etcd": {"--version"}, "etcdctl": {"version"}, "etcdutl": {"version"}} {
		out, err := (&exec.Cmd{Path: self, Args: append([]string{name}, args...)}).CombinedOutput()
		if err != nil || !strings.Contains(strings.ToLower(string(out)), strings.ToLower(name)+" version: "+version.Version) {
			t.Errorf("%s: expected version %s, found %v\n%s", name, version.Version, err, out)
		}
	}
}
