//go:build e2e

package host_test

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/test/e2e/harness"
)

// Other builds of capstand and capstan-init replace the running ones. The machine and its processes continue, with the
// same process ids. The machine runs the new capstan-init from its next start.
func TestUpgradeInPlace(t *testing.T) {
	leavesNothing(t)
	next := t.TempDir()
	expect.NoError(t, harness.GoBuild(filepath.Join(next, "capstand"), "capstan.dev/capstan/cmd/capstand", "-ldflags=-X capstan.dev/capstan/internal/version.Version=v99.0.0"))
	expect.NoError(t, harness.GoBuild(filepath.Join(next, "capstan-init"), harness.TestInit, "-ldflags=-X main.version=second"))
	c := newCapstand(t)
	was := c.make(blue.machine(10))
	service := inside(t, blue.address(10), "setsid sleep 1000 >/dev/null 2>&1 & echo $!")

	c.end(syscall.SIGTERM)
	copyFile(t, filepath.Join(next, "capstan-init"), filepath.Join(c.assets, "capstan-init.new"))
	expect.NoError(t, os.Rename(filepath.Join(c.assets, "capstan-init.new"), filepath.Join(c.assets, "capstan-init")))
	c.binary = filepath.Join(next, "capstand")
	c.start()

	info, err := c.GetInfo(c.ctx(), &hostpb.GetInfoRequest{})
	expect.NoError(t, err)
	if info.CapstandVersion != "v99.0.0" {
		t.Errorf("capstand %s runs, want the new build", info.CapstandVersion)
	}
	now := c.await(was.Spec.Id, running(0))
	if now.Status.Pid != was.Status.Pid || now.Status.Restarts != 0 {
		t.Errorf("PID 1 changed from %d to %d after %d restarts", was.Status.Pid, now.Status.Pid, now.Status.Restarts)
	}
	if got := inside(t, blue.address(10), "cat /proc/"+service+"/comm"); got != "sleep" {
		t.Errorf("process %s of the machine is %q, want the same sleep", service, got)
	}
	version := func() string {
		_, got, err := get(blue.address(10), "/version")
		expect.NoError(t, err)
		return got
	}
	if got := version(); got != "first" {
		t.Errorf("the %s capstan-init runs before a restart", got)
	}
	expect.NoError(t, syscall.Kill(int(now.Status.Pid), syscall.SIGKILL))
	c.await(was.Spec.Id, running(now.Status.Pid))
	if got := version(); got != "second" {
		t.Errorf("the %s capstan-init runs after a restart", got)
	}
}
