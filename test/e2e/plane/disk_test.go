//go:build e2e

package plane

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"capstan.dev/capstan/internal/embedded"
	"capstan.dev/capstan/test/e2e/harness"
)

// The disk of the management etcd is full, and then has I/O errors, during writes. The status of the plane reports it. The plane
// recovers with the disk, and no acknowledged write is lost.
func TestEtcdDiskFails(t *testing.T) {
	dir, breakDisk, mendDisk := harness.Disks["I/O errors"](t, "256")
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

	filler := filepath.Join(dir, "filler")
	t.Run("no space", func(t *testing.T) {
		i.at(t).testDisk("full", func() { fill(t, filler) }, func() { _ = os.Remove(filler) })
	})
	t.Run("I/O errors", func(t *testing.T) { i.at(t).testDisk("broken", breakDisk, mendDisk) })
	i.capstan("down", "--keep-state")
	must("umount", etcd)
	// A plane without its file system does not begin anew, and continues when it is mounted again.
	if out, err := i.try("up", "--no-hosts", "--timeout", "20s"); err == nil || !strings.Contains(fmt.Sprint(out, err), "expected the data of etcd in "+etcd) {
		t.Errorf("without the file system: %s, %v", out, err)
	}
	must("mount", "--bind", dir, etcd)
	i.capstan("up", "--no-hosts")
	i.capstan("down", "--keep-state")
	must("umount", etcd) // `capstan down` removes the folder after this.
}

// testDisk writes, lets writes to the disk of etcd fail, and mends the disk.
func (i *installation) testDisk(state string, fail, mend func()) {
	config, err := clientcmd.BuildConfigFromFlags("", filepath.Join(i.root, "admin.kubeconfig"))
	if err != nil {
		i.t.Fatal(err)
	}
	c, err := harness.NewClient(config)
	if err != nil {
		i.t.Fatal(err)
	}
	write := func(name string) error {
		ctx, cancel := context.WithTimeout(i.t.Context(), 20*time.Second)
		defer cancel()
		value := make([]byte, 450_000)
		_, _ = rand.Read(value)
		meta := metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: state + name}
		return c.Create(ctx, &corev1.ConfigMap{ObjectMeta: meta, Data: map[string]string{"value": hex.EncodeToString(value)}})
	}
	if err := write("-before"); err != nil {
		i.t.Fatal(err)
	}
	fail()
	written := i.writeUntilItFails(write)
	i.t.Logf("%d writes were acknowledged before the first one failed", len(written))
	harness.True(i.t, "the status reports the failure of etcd or the API server", 3*time.Minute, func() bool {
		for _, c := range i.status().Components {
			if (c.Name == "etcd" || c.Name == "kube-apiserver") && c.State != embedded.ProcessReady {
				return true
			}
		}
		return false
	})
	mend()
	harness.Wait(i.t, "the plane accepts writes again", 3*time.Minute, func() error {
		err := write("-after")
		if apierrors.IsAlreadyExists(err) {
			return nil
		}
		return err
	})
	for _, name := range append(written, "-before") {
		meta := &metav1.PartialObjectMetadata{}
		meta.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("ConfigMap"))
		if err := c.Get(i.t.Context(), client.ObjectKey{Namespace: metav1.NamespaceDefault, Name: state + name}, meta); err != nil {
			i.t.Errorf("the acknowledged write %s is lost: %v", state+name, err)
		}
	}
}

// writeUntilItFails creates large ConfigMaps and returns the names of those that were acknowledged.
func (i *installation) writeUntilItFails(write func(name string) error) (acknowledged []string) {
	i.t.Helper()
	for n := range 1000 {
		name := fmt.Sprintf("-%03d", n)
		if err := write(name); err != nil {
			i.t.Log(err)
			return acknowledged
		}
		acknowledged = append(acknowledged, name)
	}
	i.t.Fatal("1000 large writes were acknowledged on a full disk")
	return nil
}

// fill takes the free blocks of a file system. It does not write them, because a write would take space of the disk below.
func fill(t *testing.T, path string) {
	t.Helper()
	file, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	for at, size := int64(0), int64(64<<20); size >= 4096; {
		if err := unix.Fallocate(int(file.Fd()), 0, at, size); err != nil {
			size /= 4
			continue
		}
		at += size
	}
}
