// Package testnetns runs a test in a new network namespace, and connects network namespaces with each other.
package testnetns

import (
	"os"
	"os/exec"
	"syscall"
	"testing"
)

const marker = "CAPSTAN_TEST_NETWORK_NAMESPACE"

// Run runs the test again in a child process with a new network namespace, and reports the failure of the child. It returns
// true in the child, and false in the parent, which only waits:
//
//	if !testnetns.Run(t) {
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
