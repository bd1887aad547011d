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

	"capstan.dev/capstan/internal/manifest"
	"capstan.dev/capstan/test/plane"
)

// timeout bounds each wait. A cluster that takes longer fails.
const timeout = 5 * time.Minute

// Timeline contains the times of the steps, from the moment at which the cluster was applied.
type Timeline struct {
	Cluster     string
	Began       time.Time
	Initialized time.Duration // Cluster.status.initialization.controlPlaneInitialized
	FirstNode   time.Duration // one Node Ready
	AllNodes    time.Duration // The number of Ready Nodes equals the number of desired Machines.
	Running     time.Duration // every Machine in phase Running
}

// Creator creates clusters on a management plane.
type Creator struct {
	Client client.WithWatch
	// Template returns the YAML of a cluster with a name in namespace default.
	Template func(ctx context.Context, cluster string) (string, error)
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
	manifests := make([]string, len(names))
	for i, name := range names {
		var err error
		if manifests[i], err = c.Template(ctx, name); err != nil {
			return nil, err
		}
	}
	timelines := make([]Timeline, len(names))
	errs := make([]error, len(names))
	var wg sync.WaitGroup
	for i, name := range names {
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(ctx, timeout)
			defer cancel()
			timelines[i], errs[i] = c.createOne(ctx, name, manifests[i])
		})
	}
	wg.Wait()
	return timelines, errors.Join(errs...)
}

func (c *Creator) createOne(ctx context.Context, name, manifest string) (Timeline, error) {
	start := time.Now()
	t := Timeline{Cluster: name, Began: start}
	if err := c.apply(ctx, manifest); err != nil {
		return t, fmt.Errorf("cluster %s: %w", name, err)
	}
	var errs [3]error
	var wg sync.WaitGroup
	wg.Go(func() { t.Initialized, errs[0] = c.untilInitialized(ctx, name, start) })
	wg.Go(func() { t.FirstNode, t.AllNodes, errs[1] = c.untilNodes(ctx, name, start) })
	wg.Go(func() { t.Running, errs[2] = c.untilRunning(ctx, name, start) })
	wg.Wait()
	if err := errors.Join(errs[:]...); err != nil {
		return t, fmt.Errorf("cluster %s: %w", name, err)
	}
	return t, nil
}

func (c *Creator) apply(ctx context.Context, data string) error {
	objects, err := manifest.Parse([]byte(data))
	if err != nil {
		return err
	}
	for _, obj := range objects {
		if obj.GetNamespace() == "" {
			obj.SetNamespace(metav1.NamespaceDefault)
		}
		if err := c.Client.Create(ctx, obj); err != nil {
			return err
		}
	}
	return nil
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
	err = until(ctx, c.Client, &clusterv1.ClusterList{}, func(e watch.Event) bool {
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
	if err := c.Client.List(ctx, mds, client.InNamespace(metav1.NamespaceDefault), client.MatchingLabels{clusterv1.ClusterNameLabel: name}); err != nil {
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
	err = until(ctx, c.Client, &clusterv1.MachineList{}, func(e watch.Event) bool {
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
	workload, err := c.workloadClient(ctx, name)
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

// workloadClient waits for the kubeconfig Secret and for a response of the API server.
func (c *Creator) workloadClient(ctx context.Context, name string) (client.WithWatch, error) {
	err := until(ctx, c.Client, &corev1.SecretList{}, func(e watch.Event) bool { return e.Type == watch.Added },
		client.InNamespace(metav1.NamespaceDefault),
		client.MatchingFieldsSelector{Selector: fields.OneTermEqualSelector("metadata.name", name+"-kubeconfig")})
	if err != nil {
		return nil, fmt.Errorf("waiting for the kubeconfig: %w", err)
	}
	config, err := kubeconfig.FromSecret(ctx, c.Client, client.ObjectKey{Namespace: metav1.NamespaceDefault, Name: name})
	if err != nil {
		return nil, err
	}
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		workload, err := plane.ClientOf(config)
		if err == nil {
			if err = workload.List(ctx, &corev1.NodeList{}, client.Limit(1)); err == nil {
				return workload, nil
			}
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("the API server of %s does not answer: %w", name, err)
		case <-tick.C:
		}
	}
}

// Delete removes clusters and returns when their objects are removed.
func (c *Creator) Delete(ctx context.Context, timelines []Timeline) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	for _, t := range timelines {
		cluster := &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: t.Cluster}}
		if err := c.Client.Delete(ctx, cluster); client.IgnoreNotFound(err) != nil {
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
		err := c.Client.Get(ctx, client.ObjectKey{Namespace: metav1.NamespaceDefault, Name: name}, &clusterv1.Cluster{})
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
