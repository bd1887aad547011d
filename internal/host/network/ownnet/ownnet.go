// Package ownnet gives tests a network of their own, in which they may do as root what they like.
package ownnet

import (
	"os"
	"os/exec"
	"syscall"
	"testing"
)

const marker = "CAPSTAN_TEST_OWN_NETWORK"

// Run runs the test, from its start, in a process with a network namespace of its own, and takes over how it ended. It returns
// true there, and false in the process that has only waited for it:
//
//	if !ownnet.Run(t) {
//		return
//	}
func Run(t *testing.T) bool {
	t.Helper()
	if os.Getenv(marker) == t.Name() {
		return true
	}
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe", "-test.run=^"+t.Name()+"$")
	cmd.Env = append(os.Environ(), marker+"="+t.Name())
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("in a network namespace: %v\n%s", err, out)
	}
	return false
}
