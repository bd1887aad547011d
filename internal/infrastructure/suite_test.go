package infrastructure_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	infrav1beta1 "capstan.dev/capstan/api/infrastructure/v1beta1"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/infrastructure/connections/fakehost"
	"capstan.dev/capstan/internal/testenv"

	"capstan.dev/capstan/internal/infrastructure"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/internal/testenv/testmanager"
)

var (
	env *testenv.Env
	ctx = context.Background()
)

// TestMain starts one API server and one manager for all tests. Each test has its own namespace and hosts. Row IC-13.
func TestMain(m *testing.M) {
	// Each object is reconciled at most once a second, so tests mostly wait. These are not parallel: tests of the events of clusters and of
	// machines without a host, because the hosts of other tests are events for all of them; tests of published Services, because each of their
	// clusters sees the Services of all tests; and tests that change CRDs.
	testenv.Parallel(4)
	os.Exit(testenv.RunWith(m, testenv.Options{
		AddToScheme: []func(*runtime.Scheme) error{infrav1.AddToScheme, infrav1beta1.AddToScheme, bootstrapv1.AddToScheme, apiextensionsv1.AddToScheme},
		Webhooks:    []string{"config/infrastructure/webhook"},
	}, &env, startManager))
}

// startManager runs the provider with the roles of an installed one (IC-13).
func startManager() (stop func(), err error) {
	provider := infrastructure.Provider()
	if err := testmanager.Bind(env.Client, provider.Name, "host_credentials_role.yaml"); err != nil {
		return nil, err
	}
	return testmanager.Start(env, provider, writes.wrap, "--machine-network-pool="+networkPool.String())
}

// providerNamespace is the namespace of the provider and of the credentials of hosts.
const providerNamespace = "capstan-infrastructure-system"

// writeCounter counts the writes of the manager by the name of the object, and makes chosen writes fail.
type writeCounter struct {
	mu     sync.Mutex
	counts map[string]int
	faults map[string]fault
}

// fault makes the next writes fail whose body contains a text.
type fault struct {
	text string
	left int
}

var writes = &writeCounter{counts: map[string]int{}, faults: map[string]fault{}}

// fail makes the next n writes of an object fail whose body contains text.
func (w *writeCounter) fail(name, text string, n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.faults[name] = fault{text, n}
}

// failed returns whether all of these writes have failed.
func (w *writeCounter) failed(name string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.faults[name].left == 0
}

// count counts a write and returns whether it must fail.
func (w *writeCounter) count(name string, body []byte) (fails bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.counts[name]++
	f := w.faults[name]
	if f.left == 0 || !bytes.Contains(body, []byte(f.text)) {
		return false
	}
	f.left--
	w.faults[name] = f
	return true
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func (w *writeCounter) wrap(next http.RoundTripper) http.RoundTripper {
	return roundTripper(func(r *http.Request) (*http.Response, error) {
		if r.Method == http.MethodGet {
			return next.RoundTrip(r)
		}
		var body []byte
		if r.Body != nil {
			var err error
			if body, err = io.ReadAll(r.Body); err != nil {
				return nil, err
			}
			r = r.Clone(r.Context())
			r.Body = io.NopCloser(bytes.NewReader(body))
		}
		path := strings.TrimSuffix(r.URL.Path, "/status")
		if w.count(path[strings.LastIndex(path, "/")+1:], body) {
			return nil, errors.New("the test lets this write fail")
		}
		return next.RoundTrip(r)
	})
}

// of returns the number of writes of objects, including writes without a change.
func (w *writeCounter) of(objs ...client.Object) (n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, o := range objs {
		n += w.counts[o.GetName()]
	}
	return n
}

var networkPool = netip.MustParsePrefix("10.200.0.0/13")

// box is a namespace with one host and one cluster in it.
type box struct {
	*WithT
	t         *testing.T
	namespace string
	host      *infrav1.CapstanHost
	fake      *fakehost.Host
	cluster   *clusterv1.Cluster
	capstan   *infrav1.CapstanCluster
}

var names atomic.Int32

func unique(prefix string) string { return fmt.Sprintf("%s-%d", prefix, names.Add(1)) }

// newNamespace returns a box without a host and without a cluster.
func newNamespace(t *testing.T) *box {
	t.Helper()
	g := NewWithT(t)
	g.SetDefaultEventuallyTimeout(expect.Patience)
	g.SetDefaultEventuallyPollingInterval(200 * time.Millisecond)
	g.SetDefaultConsistentlyPollingInterval(50 * time.Millisecond)
	g.SetDefaultConsistentlyDuration(3 * time.Second) // An object is reconciled at most once a second.
	return &box{WithT: g, t: t, namespace: env.Namespace(t)}
}

// newBox returns a box with a connected host and an unprovisioned cluster.
func newBox(t *testing.T) *box {
	t.Helper()
	b := newNamespace(t)
	b.host, b.fake = b.addHost(nil)
	b.addCluster(nil, nil)
	return b
}

// newPausedBox is newBox with a CapstanCluster that is paused, so that nothing provisions it before resume.
func newPausedBox(t *testing.T) *box {
	t.Helper()
	b := newNamespace(t)
	b.host, b.fake = b.addHost(nil)
	b.addCluster(nil, func(c *infrav1.CapstanCluster) { c.Annotations = map[string]string{clusterv1.PausedAnnotation: ""} })
	return b
}

// resume ends the pause, and waits until the CapstanCluster is provisioned. The Cluster does not show that yet.
func (b *box) resume() {
	b.t.Helper()
	update(b, b.capstan, func(c *infrav1.CapstanCluster) { c.Annotations = nil })
	b.waitProvisioned()
}

// provisioned waits until the cluster is provisioned, and then sets the status of the Cluster as core does.
func (b *box) provisioned() *box {
	b.t.Helper()
	b.waitProvisioned()
	before := b.cluster.DeepCopy()
	b.cluster.Status.Initialization.InfrastructureProvisioned = ptr.To(true)
	b.Expect(env.Client.Status().Patch(ctx, b.cluster, client.MergeFrom(before))).To(Succeed())
	return b
}

func (b *box) waitProvisioned() {
	b.t.Helper()
	b.Eventually(func() bool {
		b.get(b.capstan)
		return ptr.Deref(b.capstan.Status.Initialization.Provisioned, false)
	}).Should(BeTrue(), "provisioned: %+v", b.capstan.Status)
}

// hostAt creates a host for this namespace only, with the credentials of a Secret.
func (b *box) hostAt(address, secretNamespace, secretName string) *infrav1.CapstanHost {
	b.t.Helper()
	host := &infrav1.CapstanHost{
		ObjectMeta: metav1.ObjectMeta{Name: unique("host")},
		Spec: infrav1.CapstanHostSpec{
			Address: address, CredentialsRef: infrav1.SecretReference{Namespace: secretNamespace, Name: secretName},
			AllowedNamespaces: &infrav1.AllowedNamespaces{Names: []string{b.namespace}},
		},
	}
	b.create(host)
	return host
}

// addHost adds a host for this namespace only, and waits until it is connected.
func (b *box) addHost(change func(*infrav1.CapstanHost)) (*infrav1.CapstanHost, *fakehost.Host) {
	b.t.Helper()
	fake := fakehost.New(b.t)
	fake.AddTenant(b.namespace)
	host := &infrav1.CapstanHost{
		ObjectMeta: metav1.ObjectMeta{Name: unique("host")},
		Spec:       infrav1.CapstanHostSpec{Address: fake.Address(), AllowedNamespaces: &infrav1.AllowedNamespaces{Names: []string{b.namespace}}},
	}
	if change != nil {
		change(host)
	}
	b.create(host)
	b.Eventually(func() bool {
		b.get(host)
		return conditions.IsTrue(host, clusterv1.ReadyCondition) && len(host.Status.Versions) > 0
	}).Should(BeTrue(), "host connected: %+v", host.Status)
	return host, fake
}

// addCluster adds a Cluster and its CapstanCluster, and links them as core does.
func (b *box) addCluster(changeCluster func(*clusterv1.Cluster), change func(*infrav1.CapstanCluster)) {
	b.t.Helper()
	name := unique("c")
	b.cluster = &clusterv1.Cluster{
		ObjectMeta: metav1.ObjectMeta{Namespace: b.namespace, Name: name},
		Spec: clusterv1.ClusterSpec{
			InfrastructureRef: clusterv1.ContractVersionedObjectReference{APIGroup: infrav1.GroupVersion.Group, Kind: "CapstanCluster", Name: name},
			ClusterNetwork: clusterv1.ClusterNetwork{
				Pods:     clusterv1.NetworkRanges{CIDRBlocks: []string{"192.168.0.0/16"}},
				Services: clusterv1.NetworkRanges{CIDRBlocks: []string{"10.96.0.0/16"}},
			},
		},
	}
	if changeCluster != nil {
		changeCluster(b.cluster)
	}
	b.create(b.cluster)
	b.capstan = &infrav1.CapstanCluster{ObjectMeta: metav1.ObjectMeta{Namespace: b.namespace, Name: name}}
	if change != nil {
		change(b.capstan)
	}
	b.create(b.capstan)
	b.own(b.capstan, b.cluster, "Cluster")
}

// own sets the owner of an object that a Cluster or Machine refers to, as core does.
func (b *box) own(obj, owner client.Object, kind string) {
	b.t.Helper()
	before := obj.DeepCopyObject().(client.Object)
	obj.SetOwnerReferences([]metav1.OwnerReference{{
		APIVersion: clusterv1.GroupVersion.String(), Kind: kind, Name: owner.GetName(), UID: owner.GetUID(), Controller: ptr.To(true), BlockOwnerDeletion: ptr.To(true),
	}})
	labels := obj.GetLabels()
	if labels == nil {
		labels = map[string]string{}
	}
	labels[clusterv1.ClusterNameLabel] = b.cluster.Name
	obj.SetLabels(labels)
	b.Expect(env.Client.Patch(ctx, obj, client.MergeFrom(before))).To(Succeed())
}

// addMachine adds a Machine with bootstrap data and its CapstanMachine, and links them as core does.
func (b *box) addMachine(changeMachine func(*clusterv1.Machine), change func(*infrav1.CapstanMachine)) (*clusterv1.Machine, *infrav1.CapstanMachine) {
	b.t.Helper()
	name := unique("m")
	b.create(&corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: b.namespace, Name: name + "-data"}, Data: map[string][]byte{"value": []byte("#cloud-config")},
	})
	machine := &clusterv1.Machine{
		ObjectMeta: metav1.ObjectMeta{Namespace: b.namespace, Name: name, Labels: map[string]string{clusterv1.ClusterNameLabel: b.cluster.Name}},
		Spec: clusterv1.MachineSpec{
			ClusterName: b.cluster.Name, Version: "v1.36.3",
			Bootstrap:         clusterv1.Bootstrap{DataSecretName: ptr.To(name + "-data")},
			InfrastructureRef: clusterv1.ContractVersionedObjectReference{APIGroup: infrav1.GroupVersion.Group, Kind: "CapstanMachine", Name: name},
		},
	}
	if changeMachine != nil {
		changeMachine(machine)
	}
	b.create(machine)
	capstan := &infrav1.CapstanMachine{ObjectMeta: metav1.ObjectMeta{Namespace: b.namespace, Name: name}}
	if change != nil {
		change(capstan)
	}
	b.create(capstan)
	b.own(capstan, machine, "Machine")
	return machine, capstan
}

func controlPlane(m *clusterv1.Machine) { m.Labels[clusterv1.MachineControlPlaneLabel] = "" }

func (b *box) create(obj client.Object) {
	b.t.Helper()
	b.Expect(env.Client.Create(ctx, obj)).To(Succeed())
}

func (b *box) get(obj client.Object) {
	b.t.Helper()
	b.Expect(env.Client.Get(ctx, client.ObjectKeyFromObject(obj), obj)).To(Succeed())
}

// update changes an object.
func update[T client.Object](b *box, obj T, change func(T)) {
	b.t.Helper()
	b.Expect(testenv.Change(ctx, env.Client, obj, change)).To(Succeed())
}

func (b *box) delete(obj client.Object) {
	b.t.Helper()
	b.Expect(env.Client.Delete(ctx, obj)).To(Succeed())
}

func (b *box) gone(obj client.Object) {
	b.t.Helper()
	b.Eventually(func() error { return env.Client.Get(ctx, client.ObjectKeyFromObject(obj), obj) }).
		Should(MatchError(ContainSubstring("not found")), "%s should be gone: %+v", obj.GetName(), obj)
}

type conditioned interface {
	client.Object
	conditions.Getter
}

// condition waits for a condition's status and reason, and returns its message.
func (b *box) condition(obj conditioned, kind string, status metav1.ConditionStatus, reason string) string {
	b.t.Helper()
	b.Eventually(func() string {
		b.get(obj)
		if c := conditions.Get(obj, kind); c != nil {
			return string(c.Status) + " " + c.Reason
		}
		return ""
	}).Should(Equal(string(status)+" "+reason), "%s of %s: %+v", kind, obj.GetName(), obj.GetConditions())
	return conditions.GetMessage(obj, kind)
}

// deletePaused deletes a paused object, and waits until the manager has seen the deletion.
func (b *box) deletePaused(obj conditioned) {
	b.t.Helper()
	b.delete(obj)
	b.Eventually(func() bool { b.get(obj); return testenv.PausedDeletion(obj) }).Should(BeTrue(), "%s: %+v", obj.GetName(), obj.GetConditions())
}

// backends returns the addresses of the backends of the cluster's load balancer.
func (b *box) backends() (out []string) {
	for _, m := range b.fake.LoadBalancer(b.capstan.Spec.ID).GetBackends() {
		out = append(out, m.GetAddress())
	}
	return out
}

// running waits until a machine is provisioned.
func (b *box) running(m *infrav1.CapstanMachine) {
	b.t.Helper()
	b.condition(m, clusterv1.ReadyCondition, metav1.ConditionTrue, clusterv1.ReadyReason)
	b.Eventually(func() bool {
		b.get(m)
		return ptr.Deref(m.Status.Initialization.Provisioned, false) && m.Spec.ProviderID != ""
	}).Should(BeTrue())
}

// settled waits until objects cause neither writes nor calls to their host. The last write can still follow, because an object is
// reconciled at most once a second. It returns the number of writes and calls, and how to count them.
func (b *box) settled(objs ...client.Object) (before int, work func() int) {
	b.t.Helper()
	work = func() (n int) {
		if b.fake != nil {
			n = b.fake.Calls("EnsureNetwork") + b.fake.Calls("EnsureLoadBalancer") + b.fake.Calls("EnsureMachine")
		}
		return n + writes.of(objs...)
	}
	before, since := work(), time.Now()
	b.Eventually(func() time.Duration {
		if n := work(); n != before {
			before, since = n, time.Now()
		}
		return time.Since(since)
	}).Should(BeNumerically(">", 3*time.Second))
	return before, work
}

// unchanged checks that further reconciles of objects in their desired state cause neither writes nor calls to their host.
func (b *box) unchanged(objs ...client.Object) {
	b.t.Helper()
	before, work := b.settled(objs...)
	for _, o := range objs {
		update(b, o, func(o client.Object) { o.SetAnnotations(map[string]string{"touched": unique("by-a-test")}) })
	}
	b.Consistently(work, "1500ms").Should(Equal(before), "writes and calls while nothing changed")
}

// eachVersion watches the objects of a kind in the box and yields each stored version from now on. The caller ends the loop. The
// test fails if no event arrives in time.
func eachVersion[T client.Object](b *box, list client.ObjectList) iter.Seq[T] {
	b.t.Helper()
	c, err := client.NewWithWatch(env.Config, client.Options{Scheme: env.Scheme})
	b.Expect(err).NotTo(HaveOccurred())
	watch, err := c.Watch(ctx, list, client.InNamespace(b.namespace))
	b.Expect(err).NotTo(HaveOccurred())
	b.t.Cleanup(watch.Stop)
	return func(yield func(T) bool) {
		timeout := time.After(expect.Patience)
		for {
			select {
			case e := <-watch.ResultChan():
				obj, ok := e.Object.(T)
				b.Expect(ok).To(BeTrue(), "the watch brought %v", e)
				if !yield(obj) {
					return
				}
			case <-timeout:
				b.t.Fatal("the watch returned no further version in time")
			}
		}
	}
}
