package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
	"capstan.dev/capstan/internal/testenv"
)

// settings are common to all sizes.
type settings struct {
	workers int
	pprof   string
}

// measureClaims measures n claims: the floor without a manager, then the manager, then a restart. The floor and the manager
// use separate API servers, because objects of the one would slow down the other.
func measureClaims(ctx context.Context, s settings, n int) (result, error) {
	r := result{claims: n}
	if err := withServer(ctx, s, func(b *bench) error { return b.floor(ctx, n, &r) }); err != nil {
		return r, fmt.Errorf("floor: %w", err)
	}
	err := withServer(ctx, s, func(b *bench) error { return b.provider(ctx, n, &r) })
	return r, err
}

// bench is an API server with a pool.
type bench struct {
	settings
	client     client.WithWatch
	kubeconfig string
	namespace  string
	manager    *process
}

func withServer(ctx context.Context, s settings, f func(*bench) error) error {
	env, err := testenv.Start(testenv.Options{AddToScheme: []func(*runtime.Scheme) error{ipamv1.AddToScheme}})
	if err != nil {
		return err
	}
	defer func() { _ = env.Stop() }()
	config := *env.Config
	config.QPS = -1
	b := &bench{settings: s, namespace: "bench"}
	if b.client, err = client.NewWithWatch(&config, client.Options{Scheme: env.Scheme}); err != nil {
		return err
	}
	file, err := os.CreateTemp("", "bench-ipam-*.kubeconfig")
	if err != nil {
		return err
	}
	b.kubeconfig = file.Name()
	defer func() { _ = os.Remove(b.kubeconfig) }()
	if _, err := file.Write(env.Kubeconfig); err != nil {
		return err
	}
	if err := file.Close(); err != nil {
		return err
	}
	if err := b.pool(ctx); err != nil {
		return err
	}
	return f(b)
}

// pool creates the namespace and the pool of the benchmark.
func (b *bench) pool(ctx context.Context) error {
	if err := b.client.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: b.namespace}}); err != nil {
		return err
	}
	return b.client.Create(ctx, &ipamv1.CapstanIPPool{
		ObjectMeta: metav1.ObjectMeta{Namespace: b.namespace, Name: "pool"},
		Spec:       ipamv1.CapstanIPPoolSpec{Subnets: []ipamv1.Subnet{{CIDR: "10.0.0.0/8", Gateway: "10.0.0.1"}}},
	})
}

// provider measures Capstan's manager.
func (b *bench) provider(ctx context.Context, n int, r *result) error {
	var err error
	if b.manager, err = b.start(); err != nil {
		return err
	}
	defer func() { b.manager.stop() }() // the manager at the end of the benchmark
	if _, err := b.one(ctx, "first"); err != nil {
		return err
	}
	if err := b.claims(ctx, n, r); err != nil {
		return err
	}
	if r.lone, err = b.lone(ctx); err != nil {
		return err
	}
	return b.restart(ctx, r)
}

func (b *bench) start() (*process, error) {
	return startProcess(b.kubeconfig, "-workers", fmt.Sprint(b.workers), "-pprof", b.pprof, "-namespace", b.namespace)
}

func newClaim(ns, name, group string) *capiipamv1.IPAddressClaim {
	return &capiipamv1.IPAddressClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name},
		Spec:       capiipamv1.IPAddressClaimSpec{PoolRef: capiipamv1.IPPoolReference{APIGroup: group, Kind: ipamv1.CapstanIPPoolKind, Name: "pool"}},
	}
}

// each calls f for 0 to n-1 with the benchmark's concurrency.
func (b *bench) each(n int, f func(int) error) error {
	var next atomic.Int64
	var wg sync.WaitGroup
	errs := make(chan error, b.workers)
	for range b.workers {
		wg.Go(func() {
			for i := int(next.Add(1)) - 1; i < n; i = int(next.Add(1)) - 1 {
				if err := f(i); err != nil {
					errs <- err
					return
				}
			}
		})
	}
	wg.Wait()
	close(errs)
	return <-errs
}

// floor does the manager's writes for every claim: the claim, its finalizer, the IPAddress, the claim's status.
func (b *bench) floor(ctx context.Context, n int, r *result) error {
	before, start := cpuTime(), time.Now()
	err := b.each(n, func(i int) error { return b.floorOne(ctx, b.namespace, i) })
	r.floor = float64(n) / time.Since(start).Seconds()
	r.floorCPU = (cpuTime() - before) / time.Duration(n)
	return err
}

func (b *bench) floorOne(ctx context.Context, ns string, i int) error {
	claim := newClaim(ns, fmt.Sprintf("floor-%06d", i), "floor.example.com")
	if err := b.client.Create(ctx, claim); err != nil {
		return err
	}
	mark := fmt.Sprintf(`{"metadata":{"uid":%q,"resourceVersion":%q,"finalizers":["example.com/floor"],"annotations":{"example.com/uid":%q},"labels":{"example.com/move":""}}}`,
		claim.UID, claim.ResourceVersion, claim.UID)
	if err := b.client.Patch(ctx, claim, client.RawPatch(types.MergePatchType, []byte(mark))); err != nil {
		return err
	}
	addr := netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)})
	ip := &capiipamv1.IPAddress{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: ns, Name: claim.Name, Finalizers: []string{"example.com/floor"}, Labels: map[string]string{"example.com/move": ""},
			OwnerReferences: []metav1.OwnerReference{
				{APIVersion: capiipamv1.GroupVersion.String(), Kind: "IPAddressClaim", Name: claim.Name, UID: claim.UID, Controller: ptr.To(true), BlockOwnerDeletion: ptr.To(true)},
				{APIVersion: ipamv1.GroupVersion.String(), Kind: ipamv1.CapstanIPPoolKind, Name: "pool", UID: claim.UID, Controller: ptr.To(false), BlockOwnerDeletion: ptr.To(true)},
			},
		},
		Spec: capiipamv1.IPAddressSpec{
			ClaimRef: capiipamv1.IPAddressClaimReference{Name: claim.Name}, PoolRef: claim.Spec.PoolRef,
			Address: addr.String(), Prefix: ptr.To[int32](8), Gateway: "10.0.0.1",
		},
	}
	if err := b.client.Create(ctx, ip); err != nil {
		return err
	}
	status, err := json.Marshal(map[string]any{"metadata": map[string]any{"uid": claim.UID}, "status": map[string]any{
		"addressRef": map[string]any{"name": claim.Name},
		"conditions": []metav1.Condition{{Type: "Ready", Status: metav1.ConditionTrue, Reason: "AddressAllocated", ObservedGeneration: 1, LastTransitionTime: metav1.Now()}},
	}})
	if err != nil {
		return err
	}
	return b.client.Status().Patch(ctx, claim, client.RawPatch(types.MergePatchType, status))
}

// claims measures n claims, and the manager that serves them.
func (b *bench) claims(ctx context.Context, n int, r *result) error {
	before, err := b.manager.stats()
	if err != nil {
		return err
	}
	cpu, managerCPU := cpuTime(), b.manager.cpuTime()
	if err := b.serve(ctx, n, r); err != nil {
		return err
	}
	after, err := b.manager.stats()
	if err != nil {
		return err
	}
	r.cpu = (cpuTime() - cpu) / time.Duration(n)
	r.managerCPU = (b.manager.cpuTime() - managerCPU) / time.Duration(n)
	r.claimWrites = float64(after.claimWrites()-before.claimWrites()) / float64(n)
	r.recordCount = after.Record - before.Record
	r.memory, r.serverMemory = after.RSS, serverMemory()
	return nil
}

// serve creates n claims with the benchmark's concurrency and waits until all of them have an address.
func (b *bench) serve(ctx context.Context, n int, r *result) error {
	ready, stop, err := b.watch(ctx, b.namespace, n)
	if err != nil {
		return err
	}
	defer stop()
	created := make([]time.Time, n)
	start := time.Now()
	if err := b.each(n, func(i int) error {
		created[i] = time.Now()
		return b.client.Create(ctx, newClaim(b.namespace, fmt.Sprintf("claim-%06d", i), ipamv1.GroupVersion.Group))
	}); err != nil {
		return err
	}
	served, err := ready()
	if err != nil {
		return err
	}
	latencies := make([]time.Duration, n)
	last := start
	for i := range n {
		at := served[fmt.Sprintf("claim-%06d", i)]
		latencies[i] = at.Sub(created[i])
		if at.After(last) {
			last = at
		}
	}
	slices.Sort(latencies)
	r.perSecond = float64(n) / last.Sub(start).Seconds()
	r.p50, r.p99 = latencies[n/2], latencies[min(n-1, n*99/100)]
	return nil
}

// watch records the times at which the claims of a namespace get their addressRef.
func (b *bench) watch(ctx context.Context, ns string, n int) (wait func() (map[string]time.Time, error), stop func(), err error) {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Minute)
	served := map[string]time.Time{}
	done := make(chan error, 1)
	note := func(claim *capiipamv1.IPAddressClaim) {
		if _, known := served[claim.Name]; !known && claim.Status.AddressRef.Name != "" && claim.Spec.PoolRef.APIGroup == ipamv1.GroupVersion.Group {
			served[claim.Name] = time.Now()
		}
	}
	started := make(chan error, 1)
	go func() {
		for ctx.Err() == nil && len(served) < n {
			// The API server ends a watch that is too slow, for example when this process gets no processor time.
			if err := b.watchOnce(ctx, ns, func() { trySend(started, nil) }, func(c *capiipamv1.IPAddressClaim) bool { note(c); return len(served) < n }); err != nil {
				trySend(started, err)
				done <- err
				return
			}
		}
		done <- ctx.Err()
	}()
	return func() (map[string]time.Time, error) {
		err := <-done
		if err != nil {
			err = fmt.Errorf("%d of %d claims were served: %w", len(served), n, err)
		}
		return served, err
	}, cancel, <-started
}

func trySend(c chan error, err error) {
	select {
	case c <- err:
	default:
	}
}

// watchOnce calls note for every claim, starting with the existing ones, until note returns false or the watch ends.
func (b *bench) watchOnce(ctx context.Context, ns string, started func(), note func(*capiipamv1.IPAddressClaim) bool) error {
	list := &capiipamv1.IPAddressClaimList{}
	if err := b.client.List(ctx, list, client.InNamespace(ns)); err != nil {
		return err
	}
	for i := range list.Items {
		if !note(&list.Items[i]) {
			return nil
		}
	}
	w, err := b.client.Watch(ctx, list, client.InNamespace(ns), &client.ListOptions{Raw: &metav1.ListOptions{ResourceVersion: list.ResourceVersion}})
	if err != nil {
		return err
	}
	defer w.Stop()
	started()
	for e := range w.ResultChan() {
		if claim, ok := e.Object.(*capiipamv1.IPAddressClaim); ok && !note(claim) {
			return nil
		}
	}
	return nil
}

// lone measures claims that are created one after the other.
func (b *bench) lone(ctx context.Context) (time.Duration, error) {
	const tries = 21
	var took []time.Duration
	for i := range tries {
		d, err := b.one(ctx, fmt.Sprintf("lone-%d", i))
		if err != nil {
			return 0, err
		}
		took = append(took, d)
	}
	slices.Sort(took)
	return took[tries/2], nil
}

func (b *bench) one(ctx context.Context, name string) (time.Duration, error) {
	w, err := b.client.Watch(ctx, &capiipamv1.IPAddressClaimList{}, client.InNamespace(b.namespace), client.MatchingFields{"metadata.name": name})
	if err != nil {
		return 0, err
	}
	defer w.Stop()
	start := time.Now()
	if err := b.client.Create(ctx, newClaim(b.namespace, name, ipamv1.GroupVersion.Group)); err != nil {
		return 0, err
	}
	for e := range w.ResultChan() {
		if c, ok := e.Object.(*capiipamv1.IPAddressClaim); ok && c.Status.AddressRef.Name != "" {
			return time.Since(start), nil
		}
	}
	return 0, fmt.Errorf("the watch of claim %s ended", name)
}

// restart kills the manager. It measures the time until a new manager serves a claim, and the number of its writes for
// claims that are served already.
func (b *bench) restart(ctx context.Context, r *result) error {
	b.manager.stop()
	start := time.Now()
	var err error
	if b.manager, err = b.start(); err != nil {
		return err
	}
	if _, err := b.one(ctx, "restart"); err != nil {
		return err
	}
	r.restart, r.restartCPU = time.Since(start), b.manager.cpuTime()
	s, err := b.manager.stats()
	// The new claim took three writes.
	r.restartWrites = s.claimWrites() - 3
	return err
}
