package main

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
)

const (
	namespace   = "default"
	cluster     = "pools"
	hollowLabel = "hollow"
	// limit of one step.
	limit = 30 * time.Minute
)

var (
	onlyHollow = &metav1.LabelSelector{MatchLabels: map[string]string{hollowLabel: "true"}}
	notHollow  = &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: hollowLabel, Operator: metav1.LabelSelectorOpDoesNotExist}}}
)

type bench struct {
	o      options
	client client.Client
	raw    kubernetes.Interface
}

func newBench(kubeconfig []byte, o options) (*bench, error) {
	config, err := clientcmd.RESTConfigFromKubeConfig(kubeconfig)
	if err != nil {
		return nil, err
	}
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clusterv1.AddToScheme, infrav1.AddToScheme, bootstrapv1.AddToScheme} {
		if err := add(scheme); err != nil {
			return nil, err
		}
	}
	b := &bench{o: o}
	if b.client, err = client.New(config, client.Options{Scheme: scheme}); err != nil {
		return nil, err
	}
	b.raw, err = kubernetes.NewForConfig(config)
	return b, err
}

// addPool makes a pool of no machines.
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

// settled says that the pool is n machines, all available and up to date.
func settled(p *infrav1.CapstanMachinePool, n int) bool {
	s := p.Status
	return ptr.Deref(s.Replicas, -1) == int32(n) && ptr.Deref(s.ReadyReplicas, -1) == int32(n) && ptr.Deref(s.UpToDateReplicas, -1) == int32(n) &&
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

// cost is what a step took.
type cost struct {
	seconds      float64
	writes, ours int64
	cpu          time.Duration
	rss          int64
}

func (c cost) print(what string, n int) {
	per := float64(n)
	fmt.Printf("%-20s %8.1f %12.1f %16.1f %14.1f %14.1f %12d\n", what, c.seconds, per/c.seconds,
		float64(c.writes)/per, float64(c.ours)/per, c.cpu.Seconds()*1000/per, c.rss>>20)
}

// timed scales a pool and waits until it is as it should be.
func (b *bench) timed(ctx context.Context, p *infrav1.CapstanMachinePool, n int) (cost, error) {
	before, err := b.sample(ctx)
	if err != nil {
		return cost{}, err
	}
	start := time.Now()
	mp := &clusterv1.MachinePool{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: p.Name}}
	patch := fmt.Appendf(nil, `{"spec":{"replicas":%d}}`, n)
	if err := b.client.Patch(ctx, mp, client.RawPatch("application/merge-patch+json", patch)); err != nil {
		return cost{}, err
	}
	if err := b.until(ctx, p, func() bool { return settled(p, n) }); err != nil {
		return cost{}, err
	}
	took := time.Since(start)
	after, err := b.sample(ctx)
	return cost{
		seconds: took.Seconds(), writes: after.writes - before.writes, ours: after.ours - before.ours,
		cpu: after.cpu - before.cpu, rss: after.rss,
	}, err
}

// roll changes the machines' spec and waits until all were replaced.
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

// rest is how long it took until the last write, and what was written after that.
type rest struct {
	settled, quiet time.Duration
	writes, ours   int64
}

// steady waits until the writes to Cluster API's and our objects end, and counts those that come all the
// same. Core goes on for a while after the last machine: it looks at each Node once more.
func (b *bench) steady(ctx context.Context) (rest, error) {
	const still, quiet, patience = 10 * time.Second, 30 * time.Second, 5 * time.Minute
	r := rest{quiet: quiet}
	start := time.Now()
	last, err := b.sample(ctx)
	for since := start; err == nil && time.Since(since) < still && time.Since(start) < patience; {
		if err = sleep(ctx, time.Second); err != nil {
			break
		}
		var now sample
		if now, err = b.sample(ctx); now.writes != last.writes {
			since = time.Now()
			r.settled = since.Sub(start)
		}
		last = now
	}
	if err == nil {
		err = sleep(ctx, quiet)
	}
	if err != nil {
		return r, err
	}
	after, err := b.sample(ctx)
	r.writes, r.ours = after.writes-last.writes, after.ours-last.ours
	return r, err
}

func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

// sample is what the API server and the manager have used so far.
type sample struct {
	writes, ours int64
	cpu          time.Duration
	rss          int64
}

func (b *bench) sample(ctx context.Context) (sample, error) {
	metrics, err := b.raw.Discovery().RESTClient().Get().AbsPath("/metrics").DoRaw(ctx)
	if err != nil {
		return sample{}, err
	}
	var s sample
	lines := bufio.NewScanner(bytes.NewReader(metrics))
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		labels, value, ok := strings.Cut(strings.TrimPrefix(lines.Text(), "apiserver_request_total{"), "} ")
		if !ok || !strings.HasPrefix(lines.Text(), "apiserver_request_total{") || !isWrite(labels) {
			continue
		}
		n, err := strconv.ParseFloat(value, 64)
		if err != nil {
			return s, err
		}
		switch {
		case strings.Contains(labels, `group="infrastructure.capstan.dev"`):
			s.ours += int64(n)
			s.writes += int64(n)
		case strings.Contains(labels, `group="cluster.x-k8s.io"`), strings.Contains(labels, `group="bootstrap.capstan.dev"`):
			s.writes += int64(n)
		}
	}
	s.cpu, s.rss, err = b.manager()
	return s, err
}

func isWrite(labels string) bool {
	for _, verb := range []string{"POST", "PUT", "PATCH", "APPLY", "DELETE"} {
		if strings.Contains(labels, `verb="`+verb+`"`) {
			return true
		}
	}
	return false
}

// manager reads what the manager of this plane has used.
func (b *bench) manager() (cpu time.Duration, rss int64, err error) {
	dirs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return 0, 0, err
	}
	for _, dir := range dirs {
		cmdline, err := os.ReadFile(filepath.Join(dir, "cmdline"))
		args := strings.Split(string(cmdline), "\x00")
		if err != nil || filepath.Base(args[0]) != "manager" || !strings.Contains(string(cmdline), b.o.root) {
			continue
		}
		stat, err := os.ReadFile(filepath.Join(dir, "stat"))
		if err != nil {
			return 0, 0, err
		}
		_, rest, _ := strings.Cut(string(stat), ") ")
		fields := strings.Fields(rest)
		user, _ := strconv.ParseInt(fields[11], 10, 64)
		system, _ := strconv.ParseInt(fields[12], 10, 64)
		pages, _ := strconv.ParseInt(fields[21], 10, 64)
		const ticks = 100 // USER_HZ, the same on every Linux
		return time.Duration(user+system) * time.Second / ticks, pages * int64(os.Getpagesize()), nil
	}
	return 0, 0, fmt.Errorf("no manager with --root %s", b.o.root)
}

// startHollow starts a hollow host and makes it known.
func (b *bench) startHollow(ctx context.Context) (stop func(), err error) {
	root := filepath.Join(b.o.root, "hollow")
	// Where the plane has its own sockets, and of the same owner: the manager is no root.
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
