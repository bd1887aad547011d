package integration

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/manager"

	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
	"capstan.dev/capstan/internal/ipam"
	"capstan.dev/capstan/internal/ipam/pool"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/internal/testenv/testmanager"
)

// The chaos test starts this test binary again as a manager. If this variable is set to a kubeconfig, TestMain runs a
// manager instead of the tests.
const chaosManagerEnv = "CAPSTAN_IPAM_CHAOS_MANAGER"

// chaosQuarantine is the quarantine of these managers. It is much shorter than in operation, so that the test needs
// minutes instead of hours. An overloaded API server can therefore execute a request later than the provider expects.
const chaosQuarantine = 4 * time.Second

func runChaosManager() int {
	if err := chaosManager(); err != nil {
		fmt.Fprintln(os.Stderr, "chaos manager:", err)
		return 1
	}
	return 0
}

func chaosManager() error {
	config, err := clientcmd.BuildConfigFromFlags("", os.Getenv(chaosManagerEnv))
	if err != nil {
		return err
	}
	config.QPS = -1
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clientgoscheme.AddToScheme, clusterv1.AddToScheme, capiipamv1.AddToScheme, ipamv1.AddToScheme} {
		if err := add(scheme); err != nil {
			return err
		}
	}
	mgr, err := ctrl.NewManager(config, managerOptions(scheme))
	if err != nil {
		return err
	}
	opts := options()
	opts.Concurrency = map[string]int{"IPAddressClaim": 16}
	opts.Quarantine = chaosQuarantine
	ctx := ctrl.SetupSignalHandler()
	if err := ipam.SetupWithManager(ctx, mgr, opts); err != nil {
		return err
	}
	// The watch starts with the controllers, after the caches are full.
	if err := mgr.Add(manager.RunnableFunc(func(context.Context) error {
		_, err := fmt.Println("working")
		return err
	})); err != nil {
		return err
	}
	return mgr.Start(ctx)
}

func kubeconfig(t *testing.T) string {
	t.Helper()
	c := env.Config
	file := t.TempDir() + "/kubeconfig"
	expect.NoError(t, clientcmd.WriteToFile(clientcmdapi.Config{
		Clusters:       map[string]*clientcmdapi.Cluster{"c": {Server: c.Host, CertificateAuthorityData: c.CAData}},
		AuthInfos:      map[string]*clientcmdapi.AuthInfo{"u": {Token: c.BearerToken, Impersonate: testmanager.User}},
		Contexts:       map[string]*clientcmdapi.Context{"x": {Cluster: "c", AuthInfo: "u"}},
		CurrentContext: "x",
	}, file))
	return file
}

// No address is allocated twice: two managers run without leader election. SIGKILL ends them at random moments. Claims
// of several namespaces are created and deleted in two pools. One of the pools is always full. The test watches every
// IPAddress and every claim all the time. A manager is also paused once. TestNoDuplicatesHeavy of `make soak` does the same
// with thousands of claims.
func TestNoDuplicatesWithTwoKilledManagers(t *testing.T) {
	testNoDuplicates(t, &churn{names: 45, claims: 150, kills: 3, pauses: 1})
}

// testNoDuplicates runs until the given numbers of claims have been served, and of managers have been killed at work and
// paused.
func testNoDuplicates(t *testing.T, c *churn) {
	w := startWitness(t)
	nsA, nsB := env.Namespace(t), env.Namespace(t)
	// The global pool allocates the lowest address first, so it allocates a released address again at once. The other
	// pool has a third fewer addresses than claims, so some claims always wait. With two managers, a released address
	// stays used until the quarantine of the manager that allocated it is over.
	global := newGlobal("chaos-"+nsA, subnet("10.66.0.0/24", fmt.Sprintf("10.66.0.10-10.66.0.%d", 9+c.names*2)))
	local := newPool(nsA, "chaos", subnet("10.67.0.0/24", fmt.Sprintf("10.67.0.10-10.67.0.%d", 9+c.names*2/9)))
	local.Spec.Order = ipamv1.RandomOrder
	create(t, global, local)

	c.t, c.follower, c.stop = t, startFollower(t), make(chan struct{})
	c.run(kubeconfig(t), []target{{nsA, global}, {nsB, global}, {nsA, local}})

	wantNothingLeft(t, global, local)
	seen := w.finish(t, global, local)
	t.Logf("%d claims served, %d IPAddresses seen, %d managers killed at work and %d while they started, %d paused, %d requests sent twice by the client",
		c.served.Load(), seen, c.killed.Load(), c.killedEarly.Load(), c.paused.Load(), c.repeated.Load())
	if !c.enough() || seen < int(c.claims) {
		t.Error("the test has not done enough work: want more of each number")
	}
}

// wantNothingLeft starts one more manager. It must clean up everything that the killed managers have left behind.
func wantNothingLeft(t *testing.T, pools ...ipamv1.Pool) {
	t.Helper()
	startManager(t, env.Config, options())
	expect.Eventually(t, "the new manager to repair all objects", func() error {
		for _, p := range pools {
			if _, err := get(p); err != nil {
				return err
			}
			used, err := pool.Uses(ctx, env.Client, p)
			if err != nil || len(used) > 0 {
				return errOr(err, "%s has %d IPAddresses", p.GetName(), len(used))
			}
			s := p.PoolStatus()
			if s.Addresses == nil || s.Addresses.Used != 0 || s.Addresses.Free != s.Addresses.Total || len(s.Allocator.Pending) > 0 {
				return fmt.Errorf("%s has %+v and %+v", p.GetName(), s.Addresses, s.Allocator)
			}
		}
		return nil
	})
}

// follower records the progress of claims.
type follower struct {
	mu    sync.Mutex
	known map[types.UID]*progress
}

// progress contains the progress of one claim. A channel is closed when the claim reaches that step.
type progress struct {
	served, gone chan struct{}
	isServed     bool
}

func startFollower(t *testing.T) *follower {
	t.Helper()
	f := &follower{known: map[types.UID]*progress{}}
	follow(t, &capiipamv1.IPAddressClaimList{}, func(kind watch.EventType, obj runtime.Object) {
		claim := obj.(*capiipamv1.IPAddressClaim) //nolint:forcetypeassert // the watch is typed.
		p := f.of(claim.UID)
		if claim.Status.AddressRef.Name != "" && !p.isServed {
			p.isServed = true
			close(p.served)
		}
		if kind == watch.Deleted {
			close(p.gone)
		}
	})
	return f
}

func (f *follower) of(uid types.UID) *progress {
	f.mu.Lock()
	defer f.mu.Unlock()
	p, ok := f.known[uid]
	if !ok {
		p = &progress{served: make(chan struct{}), gone: make(chan struct{})}
		f.known[uid] = p
	}
	return p
}

// follow calls note for every object of a list's kind and for every change of such an object, until the test ends. The
// calls are sequential.
func follow(t *testing.T, list client.ObjectList, note func(watch.EventType, runtime.Object)) {
	t.Helper()
	c, err := client.NewWithWatch(env.Config, client.Options{Scheme: env.Scheme})
	expect.NoError(t, err)
	expect.NoError(t, c.List(ctx, list))
	expect.NoError(t, apimeta.EachListItem(list, func(o runtime.Object) error { note(watch.Added, o); return nil }))
	run, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	t.Cleanup(func() { cancel(); <-done })
	go func() {
		defer close(done)
		for version := list.GetResourceVersion(); run.Err() == nil; {
			var err error
			if version, err = followFrom(run, c, list, version, note); err != nil && run.Err() == nil {
				t.Errorf("the watch of the test failed: %v", err)
				return
			}
		}
	}()
}

// followFrom watches from a resourceVersion and returns the last one that it has received.
func followFrom(ctx context.Context, c client.WithWatch, list client.ObjectList, version string, note func(watch.EventType, runtime.Object)) (string, error) {
	events, err := c.Watch(ctx, list, &client.ListOptions{Raw: &metav1.ListOptions{ResourceVersion: version}})
	if err != nil {
		return version, err
	}
	defer events.Stop()
	for e := range events.ResultChan() {
		if e.Type == watch.Error {
			return version, apierrors.FromObject(e.Object)
		}
		note(e.Type, e.Object)
		version = e.Object.(metav1.Object).GetResourceVersion() //nolint:forcetypeassert // the watch is typed.
	}
	return version, nil
}

type target struct {
	ns   string
	pool ipamv1.Pool
}

// churn creates and deletes claims while managers are killed.
type churn struct {
	t        *testing.T
	follower *follower
	names    int
	// claims, kills and pauses are the numbers that must be reached before churn ends.
	claims, kills, pauses int64
	stop                  chan struct{}

	served, killed, killedEarly, paused, repeated atomic.Int64
}

// run works on many claims at a time. Each goroutine has its own names.
func (c *churn) run(kubeconfig string, targets []target) {
	var managers, claims sync.WaitGroup
	for range 2 {
		managers.Go(func() {
			for c.keepManager(kubeconfig) {
			}
		})
	}
	for i := range c.names {
		claims.Go(func() {
			for turn := 0; !c.enough(); turn++ {
				if err := c.createAndDelete(targets[i%len(targets)], fmt.Sprintf("chaos-%d", i), turn); err != nil {
					c.t.Error(err)
					return
				}
			}
		})
	}
	claims.Wait()
	close(c.stop)
	managers.Wait()
}

func (c *churn) enough() bool {
	return c.t.Failed() || c.served.Load() >= c.claims && c.killed.Load() >= c.kills && c.paused.Load() >= c.pauses
}

// keepManager runs a manager and kills it with SIGKILL at a random moment: most of them at work, some during their
// start. It pauses the first ones before. It returns false at the end.
func (c *churn) keepManager(kubeconfig string) bool {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), chaosManagerEnv+"="+kubeconfig)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} // The manager ends with the test process.
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		c.t.Errorf("starting a manager: %v", err)
		return false
	}
	defer func() {
		_ = cmd.Process.Kill() // SIGKILL
		_ = cmd.Wait()
	}()
	count := &c.killedEarly
	if rand.IntN(5) > 0 {
		count = &c.killed
		works := make(chan struct{})
		go func() { _, _ = io.ReadFull(out, make([]byte, 1)); close(works) }()
		select {
		case <-works:
		case <-c.stop:
			return false
		}
	}
	if !c.someWork() {
		return false
	}
	if count == &c.killed && c.paused.Load() < c.pauses && (!c.pause(cmd.Process) || !c.someWork()) {
		return false
	}
	count.Add(1)
	return true
}

// pause stops a manager at a random place in its code, and continues it when the deadline of each address that it has
// chosen is over. The other manager works meanwhile. It returns false at the end.
func (c *churn) pause(manager *os.Process) bool {
	if err := manager.Signal(syscall.SIGSTOP); err != nil {
		c.t.Errorf("pausing a manager: %v", err)
		return false
	}
	select {
	case <-time.After(chaosQuarantine + 2*time.Second): // Deadlines are times, so no event shows their end.
	case <-c.stop:
		return false
	}
	if err := manager.Signal(syscall.SIGCONT); err != nil {
		c.t.Errorf("continuing a manager: %v", err)
		return false
	}
	c.paused.Add(1)
	return true
}

// someWork waits until some more claims have been served, by any manager, and then for a random time. It waits at most
// 20 seconds. The measure is the work and not the time, so that the managers get equally far on busy and idle machines.
// It returns false at the end.
func (c *churn) someWork() bool {
	until := c.served.Load() + rand.Int64N(2*c.claims/c.kills)
	late := time.After(20 * time.Second)
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for c.served.Load() < until {
		select {
		case <-tick.C:
		case <-late:
			return true
		case <-c.stop:
			return false
		}
	}
	time.Sleep(rand.N(100 * time.Millisecond)) // Not for secrets, and not a wait for an event.
	return true
}

// createAndDelete creates a claim, waits for its address and deletes it. The next claim of the same name is created at
// once, or after the deletion.
func (c *churn) createAndDelete(to target, name string, turn int) error {
	claim := newClaim(to.ns, name, to.pool)
	claim.Labels = map[string]string{"turn": fmt.Sprint(turn)}
	if err := c.create(claim); err != nil {
		return fmt.Errorf("creating claim %s: %w", name, err)
	}
	p := c.follower.of(claim.UID)
	select {
	case <-p.served:
		c.served.Add(1)
	case <-p.gone:
		return fmt.Errorf("claim %s of %s was removed although the test had not deleted it", name, to.pool.GetName())
	case <-time.After(expect.Patience):
		_, err := get(claim)
		return fmt.Errorf("claim %s of %s got no address: %v, %w", name, to.pool.GetName(), claim.Status.Conditions, err)
	}
	err := env.Client.Delete(ctx, claim, client.Preconditions{UID: &claim.UID})
	if c.sentTwice(apierrors.IsNotFound(err)) {
		err = nil
	}
	if err != nil {
		return fmt.Errorf("deleting claim %s: %w", name, err)
	}
	if turn%2 == 0 {
		return nil
	}
	select {
	case <-p.gone:
		return nil
	case <-time.After(expect.Patience):
		_, err := get(claim)
		return fmt.Errorf("claim %s of %s is not removed: %+v %+v, %w", name, to.pool.GetName(), claim.ObjectMeta, claim.Status, err)
	}
}

// sentTwice counts the responses that show a repeated request. If the API server is overloaded, the client sends a
// request again, although the first one may have been executed.
func (c *churn) sentTwice(was bool) bool {
	if was {
		c.repeated.Add(1)
	}
	return was
}

// create creates a claim as soon as the previous claim of this name is removed.
func (c *churn) create(claim *capiipamv1.IPAddressClaim) error {
	turn := claim.Labels["turn"]
	for deadline := time.Now().Add(expect.Patience); ; {
		err := env.Client.Create(ctx, claim)
		if !apierrors.IsAlreadyExists(err) {
			return err
		}
		other, err := get(&capiipamv1.IPAddressClaim{ObjectMeta: metav1.ObjectMeta{Namespace: claim.Namespace, Name: claim.Name}})
		switch {
		case apierrors.IsNotFound(err):
			continue // The previous claim has just been removed.
		case err != nil:
			return err
		case c.sentTwice(other.Labels["turn"] == turn):
			*claim = *other
			return nil
		}
		select {
		case <-c.follower.of(other.UID).gone:
		case <-time.After(time.Until(deadline)):
			return fmt.Errorf("the previous claim is not removed: %v", other.ObjectMeta)
		}
	}
}
