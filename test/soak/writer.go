//go:build e2e

package main

import (
	"context"
	"fmt"
	"strconv"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

const (
	writerKeys   = 20
	writerPause  = 100 * time.Millisecond
	writeTimeout = 5 * time.Second
	writerLabel  = "soak.capstan.dev/writer"
)

// writer writes to one cluster all the time and stores the acknowledged values. It writes ascending values under a few
// keys, so its memory does not grow.
type writer struct {
	client *kubernetes.Clientset
	stop   context.CancelFunc
	done   sync.WaitGroup

	mu           sync.Mutex
	keys         map[string]written
	lost         []string
	acknowledged int
}

func startWriter(ctx context.Context, config *rest.Config) (*writer, error) {
	config = rest.CopyConfig(config)
	config.QPS, config.Timeout = -1, writeTimeout
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	w := &writer{client: client, stop: cancel, keys: map[string]written{}}
	w.done.Go(func() {
		for n := 1; ctx.Err() == nil; n++ {
			w.write(ctx, fmt.Sprintf("written-%02d", n%writerKeys), n)
			pause(ctx, writerPause)
		}
	})
	return w, nil
}

func (w *writer) end() {
	w.stop()
	w.done.Wait()
}

// write sends one value once. Without a response, the value may be stored or not.
func (w *writer) write(ctx context.Context, key string, value int) {
	state := w.sending(key, value)
	object := &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: key, Labels: map[string]string{writerLabel: ""}},
		Data:       map[string]string{"value": strconv.Itoa(value)},
	}
	maps := w.client.CoreV1().ConfigMaps(metav1.NamespaceDefault)
	var answer *corev1.ConfigMap
	var err error
	if state.Revision == 0 {
		answer, err = maps.Create(ctx, object, metav1.CreateOptions{})
	} else {
		// Update from the acknowledged revision: a write must not hide a loss by overwriting an older revision.
		object.ResourceVersion = strconv.Itoa(state.Revision)
		answer, err = maps.Update(ctx, object, metav1.UpdateOptions{})
	}
	switch {
	case err == nil:
		w.acknowledge(key, answer, nil)
	case apierrors.IsConflict(err), apierrors.IsAlreadyExists(err), apierrors.IsNotFound(err):
		w.resolve(ctx, key)
	}
}

// sending records that a value is about to be sent, and returns the key's state.
func (w *writer) sending(key string, value int) written {
	w.mu.Lock()
	defer w.mu.Unlock()
	state := w.keys[key]
	state.Tried = value
	w.keys[key] = state
	return state
}

// resolve reads the result of a write without a response.
func (w *writer) resolve(ctx context.Context, key string) {
	object, err := w.client.CoreV1().ConfigMaps(metav1.NamespaceDefault).Get(ctx, key, metav1.GetOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		return
	}
	var found stored
	if err == nil {
		if found, err = storedIn(object); err != nil {
			return
		}
	}
	w.acknowledge(key, object, lostWrites(map[string]written{key: w.snapshot()[key]}, map[string]stored{key: found}))
}

// acknowledge records the stored value, and a detected loss.
func (w *writer) acknowledge(key string, object *corev1.ConfigMap, lost []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.lost = append(w.lost, lost...)
	found, err := storedIn(object)
	if err != nil {
		return
	}
	w.keys[key] = written{Acknowledged: found.Value, Revision: found.Revision, Tried: w.keys[key].Tried}
	w.acknowledged++
}

func storedIn(m *corev1.ConfigMap) (out stored, err error) {
	if out.Value, err = strconv.Atoi(m.Data["value"]); err != nil {
		return stored{}, err
	}
	out.Revision, err = strconv.Atoi(m.ResourceVersion)
	return out, err
}

// check reads all values. They must contain the values that were acknowledged before the read. The error means that the
// read failed.
func (w *writer) check(ctx context.Context) (lost []string, err error) {
	before := w.snapshot()
	list, err := w.client.CoreV1().ConfigMaps(metav1.NamespaceDefault).List(ctx, metav1.ListOptions{LabelSelector: writerLabel})
	if err != nil {
		return nil, err
	}
	found := map[string]stored{}
	for _, m := range list.Items {
		if found[m.Name], err = storedIn(&m); err != nil {
			return nil, err
		}
	}
	// The writer continues meanwhile: the read values may include all values that it has sent until now.
	after := w.snapshot()
	for key, state := range before {
		state.Tried = after[key].Tried
		before[key] = state
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return append(lostWrites(before, found), w.lost...), nil
}

func (w *writer) snapshot() map[string]written {
	w.mu.Lock()
	defer w.mu.Unlock()
	out := map[string]written{}
	for key, state := range w.keys {
		out[key] = state
	}
	return out
}

func (w *writer) count() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.acknowledged
}

func pause(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}
