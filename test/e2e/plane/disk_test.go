//go:build e2e

package plane

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"capstan.dev/capstan/internal/embedded"
	"capstan.dev/capstan/test/e2e/harness"
)

// The disk of the management etcd fails during writes. The status of the plane reports it. The plane recovers with the
// disk, and no acknowledged write is lost.
func TestEtcdDiskFails(t *testing.T) {
	for name, disk := range harness.Disks {
		t.Run(name, func(t *testing.T) {
			t.Parallel() // The test mostly waits for the start of planes and for the detection of the fault.
			dir, fail, mend := disk(t, "256")
			i := newInstallation(t)
			etcd := embedded.Layout{Root: i.root}.Etcd()
			must := func(name string, args ...string) {
				t.Helper()
				if _, err := run(name, args...); err != nil {
					t.Fatalf("%s %v: %v", name, args, err)
				}
			}
			must("mkdir", "-p", etcd)
			must("touch", filepath.Join(i.root, ".capstan")) // as after an interrupted `capstan up`
			must("mount", "--bind", dir, etcd)
			t.Cleanup(func() { _ = exec.Command("umount", etcd).Run() })
			i.capstan("up", "--no-hosts")

			fail()
			written := i.writeUntilItFails()
			t.Logf("%d writes were acknowledged before the first one failed", len(written))
			harness.True(t, "the status reports the failure of etcd or the API server", 3*time.Minute, func() bool {
				for _, c := range i.status().Components {
					if (c.Name == "etcd" || c.Name == "kube-apiserver") && c.State != embedded.ProcessReady {
						return true
					}
				}
				return false
			})
			mend()
			harness.True(t, "the plane accepts writes again", 3*time.Minute, func() bool {
				_, err := i.tryKubectl("create", "configmap", "after")
				return err == nil || strings.Contains(err.Error(), "AlreadyExists")
			})
			found := i.kubectl("get", "configmaps", "-o", "name")
			for _, name := range written {
				if !strings.Contains(found, "configmap/"+name+"\n") {
					t.Errorf("the acknowledged write %s is lost", name)
				}
			}
			i.capstan("down", "--keep-state")
			must("umount", etcd) // `capstan down` removes the folder after this.
		})
	}
}

// writeUntilItFails creates large ConfigMaps and returns the names of those that were acknowledged.
func (i *installation) writeUntilItFails() (acknowledged []string) {
	i.t.Helper()
	value := filepath.Join(i.t.TempDir(), "value")
	if out, err := exec.Command("sh", "-c", "head -c 700000 /dev/urandom | base64 -w0 | head -c 900000 > "+value).CombinedOutput(); err != nil {
		i.t.Fatalf("%v: %s", err, out)
	}
	for n := range 1000 {
		name := fmt.Sprintf("write-%03d", n)
		if _, err := i.tryKubectl("create", "configmap", name, "--from-file="+value, "--request-timeout=20s"); err != nil {
			i.t.Log(err)
			return acknowledged
		}
		acknowledged = append(acknowledged, name)
	}
	i.t.Fatal("1000 large writes were acknowledged on a full disk")
	return nil
}
