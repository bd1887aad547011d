//go:build e2e

package controlplane

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"capstan.dev/capstan/test/e2e/harness"
)

// patience is for how long an ordinary client tries one write again before it gives up.
const patience = time.Minute

// writer writes all the while, as a client with ordinary retries does, and remembers what was acknowledged.
type writer struct {
	client *kubernetes.Clientset
	// reader asks in the end, when there is much to read and a cluster may just have come back.
	reader *kubernetes.Clientset
	// patience is for how long one write is tried again.
	patience time.Duration
	stop     context.CancelFunc
	done     sync.WaitGroup

	mu           sync.Mutex
	acknowledged []string
	failed       []string
	gap          time.Duration // the longest time without an acknowledged write
	last         time.Time
}

func startWriter(t *testing.T, c *harness.Cluster) *writer {
	t.Helper()
	return startPatientWriter(t, c, patience)
}

func startPatientWriter(t *testing.T, c *harness.Cluster, patience time.Duration) *writer {
	t.Helper()
	config, err := clientcmd.BuildConfigFromFlags("", c.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	slow := rest.CopyConfig(config)
	config.QPS, config.Timeout = -1, 3*time.Second
	slow.Timeout = 30 * time.Second
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	w := &writer{patience: patience, stop: cancel, last: time.Now()}
	if w.client, err = kubernetes.NewForConfig(config); err != nil {
		t.Fatal(err)
	}
	if w.reader, err = kubernetes.NewForConfig(slow); err != nil {
		t.Fatal(err)
	}
	w.done.Go(func() {
		for n := 0; ctx.Err() == nil; n++ {
			w.write(ctx, fmt.Sprintf("written-%06d", n))
		}
	})
	t.Cleanup(func() { w.stop(); w.done.Wait() })
	return w
}

// write makes a ConfigMap, and tries until it is there or patience is over.
func (w *writer) write(ctx context.Context, name string) {
	var err error
	for end := time.Now().Add(w.patience); time.Now().Before(end) && ctx.Err() == nil; {
		_, err = w.client.CoreV1().ConfigMaps("default").Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
		if err == nil || apierrors.IsAlreadyExists(err) {
			w.acknowledge(name)
			pause(ctx, 50*time.Millisecond)
			return
		}
		pause(ctx, 100*time.Millisecond)
	}
	if ctx.Err() == nil {
		w.mu.Lock()
		w.failed = append(w.failed, fmt.Sprintf("%s: %v", name, err))
		w.mu.Unlock()
	}
}

func (w *writer) acknowledge(name string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.acknowledged = append(w.acknowledged, name)
	w.gap = max(w.gap, time.Since(w.last))
	w.last = time.Now()
}

func pause(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// longestGap since it was last asked.
func (w *writer) longestGap() time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	out := w.gap
	w.gap = 0
	return out
}

// check ends the writing: every acknowledged write is found, and none failed in spite of retries.
func (w *writer) check(t *testing.T) {
	t.Helper()
	w.stop()
	w.done.Wait()
	var list *corev1.ConfigMapList
	harness.Eventually(t, "what was written is read", limit, func(ctx context.Context) (err error) {
		list, err = w.reader.CoreV1().ConfigMaps("default").List(ctx, metav1.ListOptions{})
		return err
	})
	there := map[string]bool{}
	for _, m := range list.Items {
		there[m.Name] = true
	}
	for _, name := range w.acknowledged {
		if !there[name] {
			t.Errorf("the acknowledged write %s is lost", name)
		}
	}
	for _, failed := range w.failed {
		t.Errorf("a write failed for %v: %s", w.patience, failed)
	}
	t.Logf("%d writes acknowledged and found", len(w.acknowledged))
}
