//go:build e2e

package rack

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"capstan.dev/capstan/test/e2e/harness"
)

// Writer creates ConfigMaps through the endpoint of a cluster, one after another. After an error it connects again, as kubectl
// does.
type Writer struct {
	client       client.Client
	acknowledged []string
	number       int
}

// Trust makes the writer use the client of another one, for example after the rotation of the certificate authority.
func (w *Writer) Trust(other *Writer) { w.client = other.client }

// Writes describes the writes of a time.
type Writes struct {
	Acknowledged, Failed int
	// Longest is the longest time without an acknowledged write.
	Longest time.Duration
}

func (w Writes) String() string {
	return fmt.Sprintf("%d writes, %d failed, the longest time without one was %s", w.Acknowledged, w.Failed, w.Longest.Round(time.Millisecond))
}

// NewWriter returns a writer that has written nothing.
func NewWriter(config *rest.Config) (*Writer, error) {
	config = rest.CopyConfig(config)
	config.NextProtos = []string{"http/1.1"} // A connection whose request was given up is closed.
	c, err := harness.NewClient(config)
	return &Writer{client: c}, err
}

// Write writes for a time, and until one more write succeeds. It fails after Patience without a write.
func (w *Writer) Write(ctx context.Context, d time.Duration) (Writes, error) {
	end := time.Now().Add(d)
	return w.WriteUntil(ctx, func() bool { return time.Now().After(end) })
}

// WriteUntil writes until done returns true, and until one more write succeeds. It fails after Patience without a write.
func (w *Writer) WriteUntil(ctx context.Context, done func() bool) (out Writes, err error) {
	last, succeeded := time.Now(), false
	for ; !succeeded || !done(); w.number++ {
		name := fmt.Sprint("write-", w.number)
		err := w.create(ctx, name)
		out.Longest = max(out.Longest, time.Since(last))
		if succeeded = err == nil; succeeded {
			last, w.acknowledged = time.Now(), append(w.acknowledged, name)
			out.Acknowledged++
			continue
		}
		out.Failed++
		if ctx.Err() != nil {
			return out, context.Cause(ctx)
		}
		if out.Longest > Patience {
			return out, fmt.Errorf("no write succeeds: %w", err)
		}
	}
	return out, nil
}

func (w *Writer) create(ctx context.Context, name string) error {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	return w.client.Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}})
}

// Lost returns the acknowledged writes that the cluster does not have.
func (w *Writer) Lost(ctx context.Context) (lost []string, err error) {
	stored := &corev1.ConfigMapList{}
	if err := w.client.List(ctx, stored, client.InNamespace("default")); err != nil {
		return nil, err
	}
	names := map[string]bool{}
	for i := range stored.Items {
		names[stored.Items[i].Name] = true
	}
	for _, name := range w.acknowledged {
		if !names[name] {
			lost = append(lost, name)
		}
	}
	return lost, nil
}
