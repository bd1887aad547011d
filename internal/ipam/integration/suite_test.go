package integration

import (
	"context"
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"
	clusterctlv1 "sigs.k8s.io/cluster-api/cmd/clusterctl/api/v1alpha3"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/config"
	"sigs.k8s.io/controller-runtime/pkg/metrics/server"
	"sigs.k8s.io/controller-runtime/pkg/webhook"

	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
	"capstan.dev/capstan/internal/ipam"
	ipamwebhook "capstan.dev/capstan/internal/ipam/webhook"
	"capstan.dev/capstan/internal/testenv"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/internal/testenv/testmanager"

	"k8s.io/apimachinery/pkg/runtime"
)

var (
	env *testenv.Env
	ctx = context.Background()
	// second is the API server to which tests move objects, after the first of them.
	second *testenv.Env
	// marks are the labels that clusterctl init sets on the CRDs that it installs.
	marks = map[string]string{clusterctlv1.ClusterctlLabel: ""}
)

// The webhooks run in one separate manager for all tests, like in a replica that does not lead.
func TestMain(m *testing.M) {
	if os.Getenv(chaosManagerEnv) != "" {
		os.Exit(runChaosManager())
	}
	os.Exit(testenv.RunWith(m, testenv.Options{
		AddToScheme: []func(*runtime.Scheme) error{ipamv1.AddToScheme},
		Webhooks:    []string{"config/ipam/webhook"},
		CRDLabels:   marks,
	}, &env, prepare))
}

func prepare() (end func(), err error) {
	if err := install(env.Client); err != nil {
		return nil, err
	}
	serve, stop := context.WithCancel(ctx)
	end = func() {
		stop()
		if second != nil {
			_ = second.Stop()
		}
	}
	return end, startWebhooks(serve)
}

// install creates what a manager needs in an API server.
func install(c client.Client) error {
	return errors.Join(testmanager.Bind(c, "ipam", "role.yaml"), protectRecord(c))
}

// moveTarget returns the API server to which tests move objects. The managers of a test end with it, and names of objects differ.
func moveTarget(t *testing.T) *testenv.Env {
	t.Helper()
	if second == nil {
		target, err := testenv.Start(testenv.Options{AddToScheme: []func(*runtime.Scheme) error{ipamv1.AddToScheme}, CRDLabels: marks})
		expect.NoError(t, err)
		second = target
		expect.NoError(t, install(target.Client))
	}
	return second
}

func startWebhooks(ctx context.Context) error {
	o := managerOptions(env.Scheme)
	w := env.Webhooks
	o.WebhookServer = webhook.NewServer(webhook.Options{Host: w.LocalServingHost, Port: w.LocalServingPort, CertDir: w.LocalServingCertDir})
	mgr, err := ctrl.NewManager(env.Config, o)
	if err != nil {
		return err
	}
	if err := ipamwebhook.Setup(mgr); err != nil {
		return err
	}
	_, err = testmanager.Run(ctx, mgr)
	return err
}

// options returns the options of a test's manager, with short time limits.
func options() ipam.Options {
	return ipam.Options{Quarantine: 2 * time.Second, MoveSettle: 2 * time.Second, OrphanAge: 2 * time.Second}
}

func managerOptions(scheme *runtime.Scheme) ctrl.Options {
	o := ctrl.Options{Scheme: scheme, Metrics: server.Options{BindAddress: "0"}}
	o.Controller = config.Controller{SkipNameValidation: ptr.To(true)}
	o.GracefulShutdownTimeout = ptr.To(5 * time.Second)
	return o
}

// startManager starts a manager. It stops at the end of the test, or when the returned function is called.
func startManager(t testing.TB, cfg *rest.Config, opts ipam.Options) (stop func()) {
	t.Helper()
	_, stop = runManager(t, cfg, opts)
	return stop
}

// runManager is startManager for tests that read the manager's cache.
func runManager(t testing.TB, cfg *rest.Config, opts ipam.Options) (cached client.Reader, stop func()) {
	t.Helper()
	o := managerOptions(env.Scheme)
	if opts.WatchNamespace != "" {
		o.Cache.DefaultNamespaces = map[string]cache.Config{opts.WatchNamespace: {}}
	}
	mgr, err := ctrl.NewManager(testmanager.As(cfg), o)
	expect.NoError(t, err)
	expect.NoError(t, ipam.SetupWithManager(ctx, mgr, opts))
	run, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		// controller-runtime's queue can hang if it is shut down with items (kubernetes-sigs/controller-runtime#3538).
		// The tests do not cover this.
		if err := mgr.Start(run); err != nil && run.Err() == nil {
			t.Errorf("manager: %v", err)
		}
	}()
	stop = func() { cancel(); <-done }
	t.Cleanup(stop)
	return mgr.GetClient(), stop
}

func subnet(cidr string, ranges ...string) ipamv1.Subnet {
	s := ipamv1.Subnet{CIDR: cidr}
	for _, r := range ranges {
		s.Ranges = append(s.Ranges, ipamv1.AddressRange(r))
	}
	return s
}

func newPool(ns, name string, subnets ...ipamv1.Subnet) *ipamv1.CapstanIPPool {
	return &ipamv1.CapstanIPPool{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name},
		Spec:       ipamv1.CapstanIPPoolSpec{Subnets: subnets},
	}
}

func newGlobal(name string, subnets ...ipamv1.Subnet) *ipamv1.GlobalCapstanIPPool {
	return &ipamv1.GlobalCapstanIPPool{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       ipamv1.GlobalCapstanIPPoolSpec{CapstanIPPoolSpec: ipamv1.CapstanIPPoolSpec{Subnets: subnets}},
	}
}

func refTo(p ipamv1.Pool) capiipamv1.IPPoolReference {
	return capiipamv1.IPPoolReference{APIGroup: ipamv1.GroupVersion.Group, Kind: p.PoolKind(), Name: p.GetName()}
}

func newClaim(ns, name string, p ipamv1.Pool) *capiipamv1.IPAddressClaim {
	return &capiipamv1.IPAddressClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name},
		Spec:       capiipamv1.IPAddressClaimSpec{PoolRef: refTo(p)},
	}
}

func newCluster(ns, name string, paused bool) *clusterv1.Cluster {
	return &clusterv1.Cluster{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name},
		Spec: clusterv1.ClusterSpec{
			Paused:            ptr.To(paused),
			InfrastructureRef: clusterv1.ContractVersionedObjectReference{APIGroup: "infrastructure.capstan.dev", Kind: "CapstanCluster", Name: name},
		},
	}
}

func create(t testing.TB, objs ...client.Object) {
	t.Helper()
	for _, o := range objs {
		expect.NoError(t, env.Client.Create(ctx, o))
	}
}

func get[T client.Object](o T) (T, error) {
	err := env.Client.Get(ctx, client.ObjectKeyFromObject(o), o)
	return o, err
}

// addressOf waits for a claim's address.
func addressOf(t testing.TB, claim *capiipamv1.IPAddressClaim) *capiipamv1.IPAddress {
	t.Helper()
	ip := &capiipamv1.IPAddress{}
	expect.Eventually(t, "the address of claim "+claim.Name, func() error {
		if _, err := get(claim); err != nil {
			return err
		}
		if claim.Status.AddressRef.Name == "" {
			return fmt.Errorf("no addressRef; conditions %v", claim.Status.Conditions)
		}
		return env.Client.Get(ctx, client.ObjectKey{Namespace: claim.Namespace, Name: claim.Status.AddressRef.Name}, ip)
	})
	return ip
}

func wantAddress(t testing.TB, claim *capiipamv1.IPAddressClaim, address string) *capiipamv1.IPAddress {
	t.Helper()
	ip := addressOf(t, claim)
	if ip.Spec.Address != address {
		t.Fatalf("claim %s: want %s, got %s", claim.Name, address, ip.Spec.Address)
	}
	return ip
}

// wantReason waits until a claim is not ready for a reason.
func wantReason(t testing.TB, claim *capiipamv1.IPAddressClaim, reason string) string {
	t.Helper()
	message := ""
	expect.Eventually(t, "claim "+claim.Name+" to have the reason "+reason, func() error {
		if _, err := get(claim); err != nil {
			return err
		}
		c := apimeta.FindStatusCondition(claim.Status.Conditions, "Ready")
		if c == nil || c.Reason != reason || c.ObservedGeneration != claim.Generation {
			return fmt.Errorf("conditions are %v", claim.Status.Conditions)
		}
		message = c.Message
		return nil
	})
	return message
}

// wantCondition waits until a pool has a condition.
func wantCondition[P ipamv1.Pool](t testing.TB, p P, kind, reason string) metav1.Condition {
	t.Helper()
	var found metav1.Condition
	expect.Eventually(t, fmt.Sprintf("pool %s to have %s=%s", p.GetName(), kind, reason), func() error {
		if _, err := get(p); err != nil {
			return err
		}
		c := apimeta.FindStatusCondition(p.GetConditions(), kind)
		if c == nil || c.Reason != reason || c.ObservedGeneration != p.GetGeneration() || p.PoolStatus().ObservedGeneration != p.GetGeneration() {
			return fmt.Errorf("conditions are %v", p.GetConditions())
		}
		found = *c
		return nil
	})
	return found
}

// wantGone waits until an object does not exist.
func wantGone(t testing.TB, o client.Object) {
	t.Helper()
	expect.Eventually(t, fmt.Sprintf("%T %s to be removed", o, o.GetName()), func() error {
		err := env.Client.Get(ctx, client.ObjectKeyFromObject(o), o)
		if client.IgnoreNotFound(err) != nil {
			return err
		}
		if err == nil {
			return fmt.Errorf("it exists with finalizers %v", o.GetFinalizers())
		}
		return nil
	})
}

// update changes an object. It repeats the change after a conflict.
func update[T client.Object](t testing.TB, o T, change func(T)) {
	t.Helper()
	expect.Eventually(t, "to update "+o.GetName(), func() error {
		if _, err := get(o); err != nil {
			return err
		}
		change(o)
		return env.Client.Update(ctx, o)
	})
}

// remove deletes an object as soon as the cache of its webhook shows that it is not in use.
func remove(t testing.TB, o client.Object) {
	t.Helper()
	expect.Eventually(t, "to delete "+o.GetName(), func() error { return client.IgnoreNotFound(env.Client.Delete(ctx, o)) })
}

func errOr(err error, format string, args ...any) error {
	if err != nil {
		return err
	}
	return fmt.Errorf(format, args...)
}
