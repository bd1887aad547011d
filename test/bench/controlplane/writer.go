package main

import (
	"context"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
)

// tries is for how long an ordinary client tries one write again.
const tries = 15 * time.Second

// writer writes all the while, and takes the time between acknowledged writes.
type writer struct {
	client *kubernetes.Clientset
	stop   context.CancelFunc
	done   sync.WaitGroup

	acknowledged, failed int // to be read after end

	mu   sync.Mutex
	gap  time.Duration
	last time.Time
}

func startWriter(ctx context.Context, kubeconfig []byte) (*writer, error) {
	config, err := clientcmd.RESTConfigFromKubeConfig(kubeconfig)
	if err != nil {
		return nil, err
	}
	config.QPS, config.Timeout = -1, 3*time.Second
	ctx, cancel := context.WithCancel(ctx)
	w := &writer{stop: cancel, last: time.Now()}
	if w.client, err = kubernetes.NewForConfig(config); err != nil {
		cancel()
		return nil, err
	}
	w.done.Go(func() {
		for n := 0; ctx.Err() == nil; n++ {
			w.write(ctx, fmt.Sprintf("written-%06d", n))
		}
	})
	return w, nil
}

func (w *writer) write(ctx context.Context, name string) {
	for end := time.Now().Add(tries); time.Now().Before(end) && ctx.Err() == nil; pause(ctx, 50*time.Millisecond) {
		_, err := w.client.CoreV1().ConfigMaps(metav1.NamespaceDefault).Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
		if err == nil || apierrors.IsAlreadyExists(err) {
			w.mu.Lock()
			w.acknowledged++
			w.gap, w.last = max(w.gap, time.Since(w.last)), time.Now()
			w.mu.Unlock()
			pause(ctx, 20*time.Millisecond)
			return
		}
	}
	if ctx.Err() == nil {
		w.failed++
	}
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

func (w *writer) end() {
	w.stop()
	w.done.Wait()
}
