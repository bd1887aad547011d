package integration

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	"google.golang.org/grpc"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hollow"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/testenv"
	"capstan.dev/capstan/internal/testenv/expect"
)

const (
	oldVersion = "v1.35.9"
	newVersion = "v1.36.3"
)

var names atomic.Int32

func unique(prefix string) string { return fmt.Sprintf("%s-%d", prefix, names.Add(1)) }

// world is a namespace with hollow hosts and one cluster.
type world struct {
	*WithT
	t         *testing.T
	namespace string
	hosts     []*infrav1.CapstanHost
	// die ends the capstand of each host.
	die     []func()
	cluster *clusterv1.Cluster
	pool    *infrav1.CapstanMachinePool
	mp      *clusterv1.MachinePool
}

// newWorld returns a cluster on one hollow host, or on one for each failure domain.
func newWorld(t *testing.T, domains ...string) *world {
	t.Helper()
	t.Parallel()
	return newWorldWith(t, hollow.Behaviour{StartDelay: 20 * time.Millisecond, BootDelay: 50 * time.Millisecond, Jitter: 0.5}, domains...)
}

func newWorldWith(t *testing.T, b hollow.Behaviour, domains ...string) *world {
	t.Helper()
	g := NewWithT(t)
	g.SetDefaultEventuallyTimeout(expect.Patience)
	g.SetDefaultEventuallyPollingInterval(200 * time.Millisecond)
	g.SetDefaultConsistentlyPollingInterval(100 * time.Millisecond)
	g.SetDefaultConsistentlyDuration(1500 * time.Millisecond)
	w := &world{WithT: g, t: t, namespace: env.Namespace(t)}
	if len(domains) == 0 {
		domains = []string{""}
	}
	for _, d := range domains {
		w.addHost(d, b)
	}
	w.addCluster()
	return w
}

func (w *world) addHost(domain string, b hollow.Behaviour) {
	w.t.Helper()
	// Not t.TempDir(): a socket's path holds at most 107 bytes.
	dir, err := os.MkdirTemp("", "hollow")
	w.Expect(err).NotTo(HaveOccurred())
	ctx, cancel := context.WithCancel(ctx)
	h, err := hollow.New(ctx, hollow.Config{
		Root: dir, Name: "hollow", CPUs: 64, MemoryBytes: 1 << 50, Versions: []string{oldVersion, newVersion}, Behaviour: b,
		Credentials: func(context.Context, hollow.Identity) (*rest.Config, error) { return env.Config, nil },
	}, slog.New(slog.NewTextHandler(io.Discard, nil)))
	w.Expect(err).NotTo(HaveOccurred())
	socket := filepath.Join(dir, "s")
	l, err := net.Listen("unix", socket)
	w.Expect(err).NotTo(HaveOccurred())
	server := grpc.NewServer()
	hostpb.RegisterHostServer(server, h)
	go func() { _ = server.Serve(l) }()
	w.t.Cleanup(func() {
		cancel()
		server.Stop()
		h.Wait()
		_ = os.RemoveAll(dir)
	})
	host := &infrav1.CapstanHost{ObjectMeta: metav1.ObjectMeta{Name: unique("host")}, Spec: infrav1.CapstanHostSpec{
		Address: "unix://" + socket, FailureDomain: domain, ControlPlane: ptr.To(false),
		AllowedNamespaces: &infrav1.AllowedNamespaces{Names: []string{w.namespace}},
	}}
	w.create(host)
	w.hosts, w.die = append(w.hosts, host), append(w.die, server.Stop)
	w.Eventually(func() bool {
		w.get(host)
		return conditions.IsTrue(host, clusterv1.ReadyCondition)
	}).Should(BeTrue())
}

// addCluster adds a cluster whose API server is that of the test.
func (w *world) addCluster() {
	w.t.Helper()
	name := unique("c")
	w.create(&corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: name + "-kubeconfig", Labels: map[string]string{clusterv1.ClusterNameLabel: name}},
		Type:       clusterv1.ClusterSecretType, Data: map[string][]byte{"value": env.Kubeconfig},
	})
	w.create(&infrav1.CapstanCluster{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: name},
		Spec: infrav1.CapstanClusterSpec{
			LoadBalancer:         infrav1.LoadBalancerSpec{Mode: infrav1.LoadBalancerExternal},
			ControlPlaneEndpoint: env.Endpoint(),
		},
	})
	w.cluster = &clusterv1.Cluster{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: name},
		Spec: clusterv1.ClusterSpec{
			ControlPlaneEndpoint: env.Endpoint(),
			InfrastructureRef:    clusterv1.ContractVersionedObjectReference{APIGroup: infrav1.GroupVersion.Group, Kind: "CapstanCluster", Name: name},
		},
	}
	w.create(w.cluster)
	w.Eventually(func() bool {
		w.get(w.cluster)
		return ptr.Deref(w.cluster.Status.Initialization.InfrastructureProvisioned, false)
	}).Should(BeTrue(), "the cluster's infrastructure")
	w.Expect(testenv.ChangeStatus(ctx, env.Client, w.cluster, func(c *clusterv1.Cluster) {
		c.Status.Initialization.ControlPlaneInitialized = ptr.To(true)
		conditions.Set(c, metav1.Condition{Type: clusterv1.ClusterControlPlaneInitializedCondition, Status: metav1.ConditionTrue, Reason: "Test"})
	})).To(Succeed())
	// Core drains no Node of a cluster without control plane machines.
	w.create(&clusterv1.Machine{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: w.namespace, Name: name + "-control-plane",
			Labels:      map[string]string{clusterv1.ClusterNameLabel: name, clusterv1.MachineControlPlaneLabel: ""},
			Annotations: map[string]string{clusterv1.PausedAnnotation: ""},
		},
		Spec: clusterv1.MachineSpec{
			ClusterName: name, Bootstrap: clusterv1.Bootstrap{DataSecretName: ptr.To("none")},
			InfrastructureRef: clusterv1.ContractVersionedObjectReference{APIGroup: infrav1.GroupVersion.Group, Kind: "CapstanMachine", Name: name + "-control-plane"},
		},
	})
}

// addPool adds a pool without waiting for it.
func (w *world) addPool(replicas int32, change func(*clusterv1.MachinePool, *infrav1.CapstanMachinePool)) {
	w.t.Helper()
	name := unique("pool")
	w.addSecret(name + "-1")
	w.pool = &infrav1.CapstanMachinePool{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: name},
		Spec: infrav1.CapstanMachinePoolSpec{MachineTemplate: infrav1.CapstanMachinePoolMachineTemplate{
			ObjectMeta: clusterv1.ObjectMeta{Labels: map[string]string{"team": "one"}},
			Spec:       infrav1.CapstanMachineSpec{CPUs: 2},
		}},
	}
	w.mp = &clusterv1.MachinePool{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: name + "-mp"},
		Spec: clusterv1.MachinePoolSpec{
			ClusterName: w.cluster.Name, Replicas: &replicas,
			Template: clusterv1.MachineTemplateSpec{Spec: clusterv1.MachineSpec{
				ClusterName: w.cluster.Name, Version: newVersion,
				Bootstrap:         clusterv1.Bootstrap{DataSecretName: ptr.To(name + "-1")},
				InfrastructureRef: clusterv1.ContractVersionedObjectReference{APIGroup: infrav1.GroupVersion.Group, Kind: "CapstanMachinePool", Name: name},
			}},
		},
	}
	if change != nil {
		change(w.mp, w.pool)
	}
	w.create(w.pool)
	w.create(w.mp)
}

func (w *world) addSecret(name string) {
	w.t.Helper()
	w.create(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: name}, Data: map[string][]byte{"value": []byte("#cloud-config\n")}})
}

func (w *world) create(o client.Object) {
	w.t.Helper()
	w.Expect(env.Client.Create(ctx, o)).To(Succeed())
}

func (w *world) get(o client.Object) {
	w.t.Helper()
	w.Expect(env.Client.Get(ctx, client.ObjectKeyFromObject(o), o)).To(Succeed())
}

func (w *world) update(change func(*clusterv1.MachinePool)) {
	w.t.Helper()
	w.get(w.mp)
	before := w.mp.DeepCopy()
	change(w.mp)
	w.Expect(env.Client.Patch(ctx, w.mp, client.MergeFrom(before))).To(Succeed())
}

func (w *world) updatePool(change func(*infrav1.CapstanMachinePool)) error {
	w.t.Helper()
	w.get(w.pool)
	before := w.pool.DeepCopy()
	change(w.pool)
	return env.Client.Patch(ctx, w.pool, client.MergeFrom(before))
}

func (w *world) scale(n int32) {
	w.t.Helper()
	w.update(func(mp *clusterv1.MachinePool) { mp.Spec.Replicas = &n })
}

// capstanMachines lists the CapstanMachines of the pool, including those that are being deleted.
func (w *world) capstanMachines() []infrav1.CapstanMachine {
	w.t.Helper()
	list := &infrav1.CapstanMachineList{}
	w.Expect(env.Client.List(ctx, list, client.InNamespace(w.namespace))).To(Succeed())
	return list.Items
}

func (w *world) machines() []clusterv1.Machine {
	w.t.Helper()
	list := &clusterv1.MachineList{}
	w.Expect(env.Client.List(ctx, list, client.InNamespace(w.namespace), client.HasLabels{clusterv1.MachinePoolNameLabel})).To(Succeed())
	return list.Items
}

func (w *world) machineNames() []string {
	var out []string
	for _, m := range w.capstanMachines() {
		out = append(out, m.Name)
	}
	slices.Sort(out)
	return out
}

func (w *world) node(name string) *corev1.Node {
	w.t.Helper()
	n := &corev1.Node{}
	w.Expect(env.Client.Get(ctx, client.ObjectKey{Name: name}, n)).To(Succeed())
	return n
}

// settled waits until the pool has exactly n machines, all available and up to date.
func (w *world) settled(n int) {
	w.t.Helper()
	w.Eventually(func(g Gomega) {
		g.Expect(env.Client.Get(ctx, client.ObjectKeyFromObject(w.pool), w.pool)).To(Succeed())
		s := w.pool.Status
		g.Expect(s.Replicas).To(HaveValue(BeEquivalentTo(n)), "replicas")
		// Gomega calls describe only for the message of a failure.
		g.Expect(s.AvailableReplicas).To(HaveValue(BeEquivalentTo(n)), w.describe)
		g.Expect(s.UpToDateReplicas).To(HaveValue(BeEquivalentTo(n)), "up to date")
		g.Expect(conditions.IsTrue(w.pool, clusterv1.ReadyCondition)).To(BeTrue(), "Ready: %+v", s.Conditions)
		for _, c := range []string{clusterv1.ScalingUpCondition, clusterv1.ScalingDownCondition, clusterv1.RollingOutCondition, clusterv1.DeletingCondition} {
			g.Expect(conditions.IsFalse(w.pool, c)).To(BeTrue(), c)
		}
		g.Expect(w.capstanMachines()).To(HaveLen(n), "CapstanMachines; pool: %+v", s.Conditions)
		g.Expect(w.machines()).To(HaveLen(n), "Machines")
	}).Should(Succeed())
}

// condition waits for a condition and returns its message.
func (w *world) condition(name string, status metav1.ConditionStatus, reason string) string {
	w.t.Helper()
	w.Eventually(func() string {
		w.get(w.pool)
		c := conditions.Get(w.pool, name)
		if c == nil {
			return ""
		}
		return string(c.Status) + " " + c.Reason
	}).Should(Equal(string(status) + " " + reason))
	return conditions.GetMessage(w.pool, name)
}

// describe returns the state of the Machines for the message of a failure.
func (w *world) describe() string {
	out := ""
	for _, m := range w.machines() {
		out += "\n" + m.Name + " " + m.Status.Phase
		for _, c := range m.Status.Conditions {
			if c.Status != metav1.ConditionTrue {
				out += fmt.Sprintf("\n  %s %s %s %s", c.Type, c.Status, c.Reason, c.Message)
			}
		}
	}
	for _, m := range w.capstanMachines() {
		out += "\n" + m.Name + " " + m.Spec.ProviderID
		for _, c := range m.Status.Conditions {
			out += fmt.Sprintf("\n  %s %s %s %s", c.Type, c.Status, c.Reason, c.Message)
		}
	}
	return out
}
