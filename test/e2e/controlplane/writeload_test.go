//go:build e2e

package controlplane

import (
	"context"
	"testing"
	"time"

	"k8s.io/client-go/tools/clientcmd"

	"capstan.dev/capstan/test/e2e/harness"
	"capstan.dev/capstan/test/writeload"
)

// patience is the time for which a client repeats one write: with two members, etcd has no majority while one of them restarts.
const patience = time.Minute

// writer writes to a cluster all the time. It stops at the end of the test.
type writer struct{ *writeload.Writer }

func startWriter(t *testing.T, c *harness.Cluster) *writer {
	t.Helper()
	config, err := clientcmd.BuildConfigFromFlags("", c.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	w, err := writeload.Start(context.WithoutCancel(t.Context()), config, patience)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.Stop)
	return &writer{w}
}

// check stops the writer. It fails the test if an acknowledged write is lost, or if a write failed in spite of retries.
func (w *writer) check(t *testing.T) {
	t.Helper()
	w.Stop()
	var lost []string
	harness.Eventually(t, "the writes are read", limit, func(ctx context.Context) (err error) {
		lost, err = w.Lost(ctx)
		return err
	})
	for _, name := range lost {
		t.Errorf("the acknowledged write %s is lost", name)
	}
	for _, failed := range w.Failed() {
		t.Errorf("a write failed for %v: %s", patience, failed)
	}
	t.Logf("%d writes acknowledged, %d lost", w.Acknowledged(), len(lost))
}
