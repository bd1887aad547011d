package provision

import (
	"os"
	"path/filepath"
	"testing"

	"capstan.dev/capstan/internal/testenv/expect"
)

// TestInterruptedRenewal: the restart of the kubelet with its new certificate is due until it is done, and its key does not stay for the
// next request, if the agent is killed after any of its steps.
func TestInterruptedRenewal(t *testing.T) {
	dir, trusted := t.TempDir(), []byte("authorities")
	record := restartRecord(filepath.Join(dir, "authorities.pem"))
	due := func(want bool) {
		t.Helper()
		if got, err := record.due(trusted); err != nil || got != want {
			t.Errorf("a restart is due: %v, %v, want %v", got, err, want)
		}
	}
	due(true) // a new machine
	expect.NoError(t, record.done(trusted))
	due(false)

	pair := kubeletPair{dir: dir, name: "kubelet-server"}
	expect.NoError(t, pair.forgetKey()) // There is no key yet.
	if err := pair.replace([]byte("certificate\n"), record); err == nil {
		t.Error("a certificate without a key replaces the former one")
	}
	expect.NoError(t, os.WriteFile(pair.nextKey(), []byte("key\n"), 0o600))
	expect.NoError(t, record.done(trusted))
	expect.NoError(t, pair.replace([]byte("certificate\n"), record))
	due(true) // for the next agent as well
	if data, err := os.ReadFile(pair.current()); err != nil || string(data) != "certificate\nkey\n" {
		t.Errorf("got %q, %v", data, err)
	}
	expect.NoError(t, pair.forgetKey())
	if _, err := os.Stat(pair.nextKey()); !os.IsNotExist(err) {
		t.Errorf("the key remains: %v", err)
	}
	expect.NoError(t, record.done(trusted))
	due(false)
}
