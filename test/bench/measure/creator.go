// Package measure creates clusters on a management plane and measures the times of their steps.
package measure

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/kubeconfig"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"capstan.dev/capstan/test/plane"
)

// timeout bounds each wait. A cluster that takes longer fails.
const timeout = 5 * time.Minute

// Timeline contains the times of the steps, from the start of the command that creates the cluster.
type Timeline struct {
	Cluster     string
	Began       time.Time
	Initialized time.Duration // Cluster.status.initialization.controlPlaneInitialized
	FirstNode   time.Duration // one Node Ready
	AllNodes    time.Duration // The number of Ready Nodes equals the number of desired Machines.
	Running     time.Duration // every Machine in phase Running
}

// Creator creates clusters on a management plane, in namespace default.
type Creator struct {
	Plane *plane.Plane
	// Flags are further arguments of `capstan create cluster`, with which the clusters are created.
	Flags []string
}

// Up starts a management plane; see plane.Start. The caller must take it down, also after an interruption.
func Up(ctx context.Context, bin, root string, args ...string) (*plane.Plane, error) {
	p, err := plane.Start(ctx, bin, root, args...)
	if err != nil && p != nil {
		err = errors.Join(fmt.Errorf("capstan up: %w", err), p.Down(ctx))
	}
	return p, err
}

// Create creates clusters with these names at once and returns when all are complete.
func (c *Creator) Create(ctx context.Context, names []string) ([]Timeline, error) {
	timelines := make([]Timeline, len(names))
	errs := make([]error, len(names))
	var wg sync.WaitGroup
	for i, name := range names {
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(ctx, timeout)
			defer cancel()
			timelines[i], errs[i] = c.createOne(ctx, name)
		})
	}
	wg.Wait()
	return timelines, errors.Join(errs...)
}

func (c *Creator) createOne(ctx context.Context, name string) (Timeline, error) {
	start := time.Now()
	t := Timeline{Cluster: name, Began: start}
	if _, err := c.Plane.Capstan(ctx, append([]string{"create", "cluster", name, "--wait=false"}, c.Flags...)...); err != nil {
		return t, fmt.Errorf("cluster %s: %w", name, err)
	}
	var errs [2]error
	var wg sync.WaitGroup
	wg.Go(func() {
		// Tries to connect to the API server before would delay its start.
		if t.Initialized, errs[0] = c.untilInitialized(ctx, name, start); errs[0] == nil {
			t.FirstNode, t.AllNodes, errs[0] = c.untilNodes(ctx, name, start)
		}
	})
	wg.Go(func() { t.Running, errs[1] = c.untilRunning(ctx, name, start) })
	wg.Wait()
	if err := errors.Join(errs[:]...); err != nil {
		return t, fmt.Errorf("cluster %s: %w", name, err)
	}
	return t, nil
}

// until watches a list until done returns true.
func until(ctx context.Context, c client.WithWatch, list client.ObjectList, done func(watch.Event) bool, opts ...client.ListOption) error {
	for {
		w, err := c.Watch(ctx, list, opts...)
		if err != nil {
			return err
		}
		for event := range w.ResultChan() {
			if done(event) {
				w.Stop()
				return nil
			}
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
}

func (c *Creator) untilInitialized(ctx context.Context, name string, start time.Time) (took time.Duration, err error) {
	err = until(ctx, c.Plane.Client, &clusterv1.ClusterList{}, func(e watch.Event) bool {
		cluster, ok := e.Object.(*clusterv1.Cluster)
		took = time.Since(start)
		return ok && ptr.Deref(cluster.Status.Initialization.ControlPlaneInitialized, false)
	}, client.InNamespace(metav1.NamespaceDefault), client.MatchingFieldsSelector{Selector: fields.OneTermEqualSelector("metadata.name", name)})
	if err != nil {
		err = fmt.Errorf("waiting for controlPlaneInitialized: %w", err)
	}
	return took, err
}

// wanted returns the number of desired Machines of the cluster. The objects with the replicas were applied before.
func (c *Creator) wanted(ctx context.Context, name string) (int, error) {
	mds := &clusterv1.MachineDeploymentList{}
	if err := c.Plane.Client.List(ctx, mds, client.InNamespace(metav1.NamespaceDefault), client.MatchingLabels{clusterv1.ClusterNameLabel: name}); err != nil {
		return 0, err
	}
	n := 1
	for _, md := range mds.Items {
		if md.Spec.ClusterName == name {
			n += int(ptr.Deref(md.Spec.Replicas, 1))
		}
	}
	return n, nil
}

func (c *Creator) untilRunning(ctx context.Context, name string, start time.Time) (took time.Duration, err error) {
	wanted, err := c.wanted(ctx, name)
	if err != nil {
		return 0, err
	}
	running := map[string]bool{}
	err = until(ctx, c.Plane.Client, &clusterv1.MachineList{}, func(e watch.Event) bool {
		if m, ok := e.Object.(*clusterv1.Machine); ok {
			running[m.Name] = m.Status.Phase == string(clusterv1.MachinePhaseRunning) && e.Type != watch.Deleted
		}
		took = time.Since(start)
		return count(running) >= wanted
	}, client.InNamespace(metav1.NamespaceDefault), client.MatchingLabels{clusterv1.ClusterNameLabel: name})
	if err != nil {
		err = fmt.Errorf("waiting for %d Machines Running, have %v: %w", wanted, running, err)
	}
	return took, err
}

func (c *Creator) untilNodes(ctx context.Context, name string, start time.Time) (first, all time.Duration, err error) {
	wanted, err := c.wanted(ctx, name)
	if err != nil {
		return 0, 0, err
	}
	config, err := kubeconfig.FromSecret(ctx, c.Plane.Client, client.ObjectKey{Namespace: metav1.NamespaceDefault, Name: name})
	if err != nil {
		return 0, 0, err
	}
	workload, err := plane.ClientOf(config)
	if err != nil {
		return 0, 0, err
	}
	ready := map[string]bool{}
	err = until(ctx, workload, &corev1.NodeList{}, func(e watch.Event) bool {
		if n, ok := e.Object.(*corev1.Node); ok {
			ready[n.Name] = nodeReady(n) && e.Type != watch.Deleted
		}
		all = time.Since(start)
		if first == 0 && count(ready) > 0 {
			first = all
		}
		return count(ready) >= wanted
	})
	if err != nil {
		err = fmt.Errorf("waiting for %d Nodes Ready, have %v: %w", wanted, ready, err)
	}
	return first, all, err
}

// Delete removes clusters and returns when their objects are removed.
func (c *Creator) Delete(ctx context.Context, timelines []Timeline) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	for _, t := range timelines {
		cluster := &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: t.Cluster}}
		if err := c.Plane.Client.Delete(ctx, cluster); client.IgnoreNotFound(err) != nil {
			return err
		}
	}
	for _, t := range timelines {
		if err := c.untilGone(ctx, t.Cluster); err != nil {
			return fmt.Errorf("deleting cluster %s: %w", t.Cluster, err)
		}
	}
	return nil
}

func (c *Creator) untilGone(ctx context.Context, name string) error {
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	for {
		err := c.Plane.Client.Get(ctx, client.ObjectKey{Namespace: metav1.NamespaceDefault, Name: name}, &clusterv1.Cluster{})
		if apierrors.IsNotFound(err) {
			return nil
		}
		select {
		case <-ctx.Done():
			return errors.Join(ctx.Err(), err)
		case <-tick.C:
		}
	}
}

func nodeReady(n *corev1.Node) bool {
	for _, c := range n.Status.Conditions {
		if c.Type == corev1.NodeReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}

func count(m map[string]bool) (n int) {
	for _, v := range m {
		if v {
			n++
		}
	}
	return n
}
