// Package writeload writes to a cluster all the time, like an ordinary client with retries. It records the acknowledged
// writes and the longest time between them.
//
// Layer: test. Allowed imports: api, library, contract, reconciler, manager, host, node, tool.
package writeload

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/rand"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

const (
	// Interval is the pause between two writes. Gaps in the writes last for seconds, and more writes load the processors of the
	// test.
	Interval = 100 * time.Millisecond
	// retryInterval is the pause between two attempts of one write.
	retryInterval = 50 * time.Millisecond
)

// Writer creates ConfigMaps in the namespace default.
type Writer struct {
	client *kubernetes.Clientset
	// reader has a longer timeout, because it reads all writes at once, possibly from a cluster that has just recovered.
	reader   *kubernetes.Clientset
	patience time.Duration
	// prefix of the names of this writer. Another writer of the cluster has another one.
	prefix string
	stop   context.CancelFunc
	done   sync.WaitGroup

	mu           sync.Mutex
	acknowledged []string
	failed       []string
	gap          time.Duration
	last         time.Time
}

// FromKubeconfig starts a writer with the rights of a kubeconfig; see Start.
func FromKubeconfig(ctx context.Context, kubeconfig []byte, patience time.Duration) (*Writer, error) {
	config, err := clientcmd.RESTConfigFromKubeConfig(kubeconfig)
	if err != nil {
		return nil, err
	}
	return Start(ctx, config, patience)
}

// Start starts a writer. It repeats a write for the time patience before the write counts as failed. The writer stops
// with ctx or Stop.
func Start(ctx context.Context, config *rest.Config, patience time.Duration) (*Writer, error) {
	fast, slow := rest.CopyConfig(config), rest.CopyConfig(config)
	fast.QPS, fast.Timeout = -1, 3*time.Second
	slow.Timeout = 30 * time.Second
	w := &Writer{patience: patience, prefix: "written-" + rand.String(5), last: time.Now()}
	var err error
	if w.client, err = kubernetes.NewForConfig(fast); err != nil {
		return nil, err
	}
	if w.reader, err = kubernetes.NewForConfig(slow); err != nil {
		return nil, err
	}
	ctx, w.stop = context.WithCancel(ctx)
	w.done.Go(func() {
		for n := 0; ctx.Err() == nil; n++ {
			w.write(ctx, fmt.Sprintf("%s-%06d", w.prefix, n))
		}
	})
	return w, nil
}

// write creates a ConfigMap. It retries until the ConfigMap exists or the time patience is over.
func (w *Writer) write(ctx context.Context, name string) {
	var err error
	for end := time.Now().Add(w.patience); time.Now().Before(end) && ctx.Err() == nil; pause(ctx, retryInterval) {
		_, err = w.client.CoreV1().ConfigMaps(metav1.NamespaceDefault).Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
		if err == nil || apierrors.IsAlreadyExists(err) {
			w.acknowledge(name)
			pause(ctx, Interval)
			return
		}
	}
	if ctx.Err() == nil {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.failed = append(w.failed, fmt.Sprintf("%s: %v", name, err))
	}
}

func (w *Writer) acknowledge(name string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.acknowledged = append(w.acknowledged, name)
	w.gap, w.last = max(w.gap, time.Since(w.last)), time.Now()
}

func pause(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// LongestGap returns the longest time between two acknowledged writes since its last call.
func (w *Writer) LongestGap() time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	out := w.gap
	w.gap = 0
	return out
}

// Acknowledged returns the number of acknowledged writes.
func (w *Writer) Acknowledged() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.acknowledged)
}

// Failed returns the failed writes with their errors.
func (w *Writer) Failed() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.failed)
}

// Stop stops the writer and waits for its end.
func (w *Writer) Stop() {
	w.stop()
	w.done.Wait()
}

// Lost returns the acknowledged writes that the cluster does not contain.
func (w *Writer) Lost(ctx context.Context) ([]string, error) {
	list, err := w.reader.CoreV1().ConfigMaps(metav1.NamespaceDefault).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	exists := map[string]bool{}
	for _, m := range list.Items {
		exists[m.Name] = true
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(w.acknowledged), func(name string) bool { return exists[name] }), nil
}
