package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/test/bench/measure"
	"capstan.dev/capstan/test/plane"
)

const (
	namespace   = "default"
	cluster     = "pools"
	hollowLabel = "hollow"
	// limit is the timeout of one step.
	limit = 30 * time.Minute
)

var (
	onlyHollow = &metav1.LabelSelector{MatchLabels: map[string]string{hollowLabel: "true"}}
	notHollow  = &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: hollowLabel, Operator: metav1.LabelSelectorOpDoesNotExist}}}
)

type bench struct {
	o      options
	client client.Client
	meter  measure.Meter
}

func newBench(p *plane.Plane, o options) (*bench, error) {
	meter, err := measure.NewMeter(p)
	return &bench{o: o, client: p.Client, meter: meter}, err
}

// addPool creates a pool without machines.
func (b *bench) addPool(ctx context.Context, name string, hosts *metav1.LabelSelector) (*infrav1.CapstanMachinePool, error) {
	meta := metav1.ObjectMeta{Namespace: namespace, Name: name}
	pool := &infrav1.CapstanMachinePool{ObjectMeta: meta}
	pool.Spec.MachineTemplate.Spec = infrav1.CapstanMachineSpec{CPUs: 1, Memory: ptr.To(resource.MustParse("1Gi")), HostSelector: hosts}
	mp := &clusterv1.MachinePool{ObjectMeta: meta, Spec: clusterv1.MachinePoolSpec{ClusterName: cluster, Replicas: ptr.To[int32](0)}}
	mp.Spec.Template.Spec = clusterv1.MachineSpec{
		ClusterName: cluster, Version: b.o.version,
		Bootstrap:         clusterv1.Bootstrap{ConfigRef: clusterv1.ContractVersionedObjectReference{APIGroup: bootstrapv1.GroupVersion.Group, Kind: "CapstanConfig", Name: name}},
		InfrastructureRef: clusterv1.ContractVersionedObjectReference{APIGroup: infrav1.GroupVersion.Group, Kind: "CapstanMachinePool", Name: name},
	}
	for _, o := range []client.Object{pool, &bootstrapv1.CapstanConfig{ObjectMeta: meta}, mp} {
		if err := b.client.Create(ctx, o); err != nil {
			return nil, err
		}
	}
	return pool, b.until(ctx, pool, func() bool { return settled(pool, 0) })
}

func (b *bench) remove(ctx context.Context, pool *infrav1.CapstanMachinePool) error {
	mp := &clusterv1.MachinePool{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: pool.Name}}
	if err := b.client.Delete(ctx, mp); err != nil {
		return err
	}
	return wait.PollUntilContextTimeout(ctx, 100*time.Millisecond, limit, true, func(ctx context.Context) (bool, error) {
		err := b.client.Get(ctx, client.ObjectKeyFromObject(mp), mp)
		return err != nil, client.IgnoreNotFound(err)
	})
}

// settled reports whether the pool has n machines, all available and up to date.
func settled(p *infrav1.CapstanMachinePool, n int) bool {
	s := p.Status
	return ptr.Deref(s.Replicas, -1) == int32(n) && ptr.Deref(s.AvailableReplicas, -1) == int32(n) && ptr.Deref(s.UpToDateReplicas, -1) == int32(n) &&
		len(s.Instances) == min(n, infrav1.MaxPoolInstances) && conditions.IsTrue(p, clusterv1.ReadyCondition) && conditions.IsFalse(p, clusterv1.RollingOutCondition)
}

func (b *bench) until(ctx context.Context, p *infrav1.CapstanMachinePool, done func() bool) error {
	err := wait.PollUntilContextTimeout(ctx, 100*time.Millisecond, limit, true, func(ctx context.Context) (bool, error) {
		if err := b.client.Get(ctx, client.ObjectKeyFromObject(p), p); err != nil {
			return false, err
		}
		return done(), nil
	})
	if err != nil {
		return fmt.Errorf("%s: %w; conditions %v", p.Name, err, p.Status.Conditions)
	}
	return nil
}

func printStep(what string, s measure.Step, n int) {
	per := float64(n)
	fmt.Printf("%-20s %8.1f %12.1f %16.1f %14.1f %14.1f %12d\n", what, s.Seconds, per/s.Seconds,
		float64(s.Writes)/per, float64(s.Ours)/per, s.CPU.Seconds()*1000/per, s.RSS>>20)
}

// timed scales a pool and waits until it is settled.
func (b *bench) timed(ctx context.Context, p *infrav1.CapstanMachinePool, n int) (measure.Step, error) {
	return b.meter.Timed(ctx, func(ctx context.Context) error {
		mp := &clusterv1.MachinePool{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: p.Name}}
		patch := fmt.Appendf(nil, `{"spec":{"replicas":%d}}`, n)
		if err := b.client.Patch(ctx, mp, client.RawPatch("application/merge-patch+json", patch)); err != nil {
			return err
		}
		return b.until(ctx, p, func() bool { return settled(p, n) })
	})
}

// roll changes the spec of the machines and waits until all are replaced.
func (b *bench) roll(ctx context.Context, p *infrav1.CapstanMachinePool) (time.Duration, error) {
	before := p.DeepCopy()
	p.Spec.MachineTemplate.Spec.CPUs++
	n := int(ptr.Deref(p.Status.Replicas, 0))
	start := time.Now()
	if err := b.client.Patch(ctx, p, client.MergeFrom(before)); err != nil {
		return 0, err
	}
	generation := p.Generation
	err := b.until(ctx, p, func() bool { return p.Status.ObservedGeneration >= generation && settled(p, n) })
	return time.Since(start), err
}

// startHollow starts a hollow host and creates its CapstanHost.
func (b *bench) startHollow(ctx context.Context) (stop func(), err error) {
	root := filepath.Join(b.o.root, "hollow")
	// The socket is in the folder of the plane's own sockets, and has the same owner, because the manager does not run
	// as root.
	sockets := filepath.Join(b.o.root, "sockets")
	info, err := os.Stat(sockets)
	if err != nil {
		return nil, err
	}
	uid := fmt.Sprint(info.Sys().(*syscall.Stat_t).Uid)
	socket := filepath.Join(sockets, "hollow.sock")
	cmd := exec.Command(filepath.Join(b.o.bin, "capstand"), "hollow", "--root", root, "--socket", socket, "--versions", b.o.version, "--socket-uid", uid)
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	stop = func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}
	host := &infrav1.CapstanHost{
		ObjectMeta: metav1.ObjectMeta{Name: "hollow", Labels: map[string]string{hollowLabel: "true"}},
		Spec:       infrav1.CapstanHostSpec{Address: "unix://" + socket, ControlPlane: ptr.To(false)},
	}
	if err := b.client.Create(ctx, host); err != nil {
		stop()
		return nil, err
	}
	err = wait.PollUntilContextTimeout(ctx, 100*time.Millisecond, time.Minute, true, func(ctx context.Context) (bool, error) {
		err := b.client.Get(ctx, client.ObjectKeyFromObject(host), host)
		return conditions.IsTrue(host, clusterv1.ReadyCondition), err
	})
	if err != nil {
		stop()
		return nil, fmt.Errorf("the hollow host is not connected: %w: %v", err, host.Status.Conditions)
	}
	return stop, nil
}
