package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
	"capstan.dev/capstan/internal/testenv"
)

// asManager makes this test program run the manager, so that tests can start several managers as separate processes.
const asManager = "CAPSTAN_TEST_RUN_MANAGER"

func TestMain(m *testing.M) {
	if os.Getenv(asManager) != "" {
		main()
		return
	}
	code := m.Run()
	for _, env := range shared {
		if err := env.Stop(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

// shared are the API servers of several tests, after the first of them, by the folders of their webhooks.
var shared = map[string]*testenv.Env{}

// allWebhooks are the folders of the webhooks of all providers.
var allWebhooks = []string{"config/bootstrap/webhook", "config/control-plane/webhook", "config/infrastructure/webhook", "config/ipam/webhook"}

// environment is an API server without Cluster API core. The test does the work of core.
type environment struct {
	*WithT
	t   *testing.T
	env *testenv.Env
}

// newEnvironment starts an API server with the webhooks of the given folders.
func newEnvironment(t *testing.T, webhooks ...string) *environment {
	t.Helper()
	w := environmentOf(t, startAPI(t, webhooks...))
	t.Cleanup(func() { w.Expect(w.env.Stop()).To(Succeed()) })
	return w
}

// sharedEnvironment is newEnvironment for tests whose objects do not disturb each other: their names differ, or their namespaces. The managers of a
// test end with it.
func sharedEnvironment(t *testing.T, webhooks ...string) *environment {
	t.Helper()
	key := strings.Join(webhooks, " ")
	if shared[key] == nil {
		shared[key] = startAPI(t, webhooks...)
	}
	return environmentOf(t, shared[key])
}

func startAPI(t *testing.T, webhooks ...string) *testenv.Env {
	t.Helper()
	env, err := testenv.Start(testenv.Options{Webhooks: webhooks, AddToScheme: []func(*runtime.Scheme) error{
		infrav1.AddToScheme, controlplanev1.AddToScheme, bootstrapv1.AddToScheme, ipamv1.AddToScheme,
	}})
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	return env
}

func environmentOf(t *testing.T, env *testenv.Env) *environment {
	t.Helper()
	g := NewWithT(t)
	g.SetDefaultEventuallyTimeout(2 * time.Minute)
	g.SetDefaultEventuallyPollingInterval(200 * time.Millisecond)
	g.SetDefaultConsistentlyPollingInterval(50 * time.Millisecond)
	return &environment{WithT: g, t: t, env: env}
}

// run starts `manager all`. It ends with stop, or with the test.
func (w *environment) run(args ...string) (stop func()) {
	w.t.Helper()
	p := w.start("all", args...)
	return p.stop
}

// process is a manager of a test.
type process struct {
	*exec.Cmd
	ended chan struct{} // closed after the process has ended
	err   error         // result of the process
}

// stop ends the process with SIGTERM, also after a SIGSTOP.
func (p *process) stop() {
	_ = p.Process.Signal(syscall.SIGCONT)
	_ = p.Process.Signal(syscall.SIGTERM)
	<-p.ended
}

// start starts a manager of one provider, or of all providers. It ends with the test at the latest.
func (w *environment) start(provider string, args ...string) *process {
	w.t.Helper()
	dir := w.t.TempDir()
	kubeconfig := filepath.Join(dir, "kubeconfig")
	w.Expect(os.WriteFile(kubeconfig, w.env.Kubeconfig, 0o600)).To(Succeed())
	log, err := os.Create(filepath.Join(dir, "log"))
	w.Expect(err).NotTo(HaveOccurred())
	self, err := os.Executable()
	w.Expect(err).NotTo(HaveOccurred())
	p := &process{ended: make(chan struct{})}
	p.Cmd = exec.Command(self, append([]string{
		provider, "--kubeconfig=" + kubeconfig, "--health-addr=0", "--diagnostics-address=0", "--webhook-port=0",
	}, args...)...)
	p.Env = append(os.Environ(), asManager+"=1")
	p.Stdout, p.Stderr = log, log
	w.Expect(p.Start()).To(Succeed())
	go func() {
		p.err = p.Wait()
		close(p.ended)
	}()
	w.t.Cleanup(func() {
		p.stop()
		_ = log.Close()
		if w.t.Failed() {
			text, _ := exec.Command("tail", "-n", "20", log.Name()).Output()
			w.t.Logf("manager %s %v:\n%s", provider, args, text)
		}
	})
	return p
}

func (w *environment) create(obj client.Object) {
	w.t.Helper()
	w.Expect(w.env.Client.Create(w.t.Context(), obj)).To(Succeed(), "%T %s", obj, obj.GetName())
}

// patch changes the metadata of an object.
func (w *environment) patch(obj client.Object, format string, args ...any) {
	w.t.Helper()
	w.Expect(w.env.Client.Patch(w.t.Context(), obj, client.RawPatch("application/merge-patch+json", fmt.Appendf(nil, format, args...)))).To(Succeed())
}

// family contains one object of every kind that the providers reconcile, with the references that core and users set.
type family struct {
	w       *environment
	meta    func(name string) metav1.ObjectMeta
	cluster *clusterv1.Cluster
	host    *infrav1.CapstanHost
	pool    *ipamv1.CapstanIPPool
	claim   *capiipamv1.IPAddressClaim
	capstan *infrav1.CapstanCluster
	machine *infrav1.CapstanMachine
	// members returns the objects of the Cluster: all but the Cluster, the host and the pool.
	members []client.Object
}

// familyOf contains the options of a family.
type familyOf struct {
	namespace, name string
	labels          map[string]string
	annotations     map[string]string // options of all objects but the Cluster
	paused          bool              // options of the Cluster
	hostAddress     string
	subnet          string // options of the pool
}

func (w *environment) family(o familyOf) *family {
	w.t.Helper()
	f := &family{w: w, meta: func(name string) metav1.ObjectMeta {
		labels := map[string]string{}
		for k, v := range o.labels {
			labels[k] = v
		}
		return metav1.ObjectMeta{Namespace: o.namespace, Name: name, Labels: labels, Annotations: o.annotations}
	}}
	f.host = &infrav1.CapstanHost{ObjectMeta: f.meta(o.name), Spec: infrav1.CapstanHostSpec{Address: o.hostAddress}}
	f.host.Namespace = ""
	w.create(f.host)
	f.pool = &ipamv1.CapstanIPPool{ObjectMeta: f.meta(o.name)}
	f.pool.Spec.Subnets = []ipamv1.Subnet{{CIDR: o.subnet}}
	w.create(f.pool)

	f.cluster = &clusterv1.Cluster{ObjectMeta: f.meta(o.name), Spec: clusterv1.ClusterSpec{
		InfrastructureRef: clusterv1.ContractVersionedObjectReference{APIGroup: infrav1.GroupVersion.Group, Kind: "CapstanCluster", Name: o.name},
		ControlPlaneRef:   clusterv1.ContractVersionedObjectReference{APIGroup: controlplanev1.GroupVersion.Group, Kind: "CapstanControlPlane", Name: o.name},
	}}
	f.cluster.Annotations = nil
	if o.paused {
		f.cluster.Spec.Paused = ptr.To(true)
	}
	w.create(f.cluster)
	before := f.cluster.DeepCopy()
	f.cluster.Status.Initialization.InfrastructureProvisioned = ptr.To(true) // Core would set these fields.
	w.Expect(w.env.Client.Status().Patch(w.t.Context(), f.cluster, client.MergeFrom(before))).To(Succeed())

	f.capstan = &infrav1.CapstanCluster{ObjectMeta: f.meta(o.name)}
	f.add(f.capstan, f.cluster, "Cluster")
	template := &infrav1.CapstanMachineTemplate{ObjectMeta: f.meta(o.name)}
	template.Spec.Template.Spec.CPUs = 1
	w.create(template)
	controlPlane := &controlplanev1.CapstanControlPlane{ObjectMeta: f.meta(o.name)}
	controlPlane.Spec.Version = "v1.36.3"
	controlPlane.Spec.MachineTemplate.Spec.InfrastructureRef = clusterv1.ContractVersionedObjectReference{
		APIGroup: infrav1.GroupVersion.Group, Kind: "CapstanMachineTemplate", Name: o.name,
	}
	f.add(controlPlane, f.cluster, "Cluster")
	f.addWorker(o.name)
	f.addPool(o.name)
	f.claim = &capiipamv1.IPAddressClaim{ObjectMeta: f.meta(o.name), Spec: capiipamv1.IPAddressClaimSpec{
		ClusterName: o.name, PoolRef: capiipamv1.IPPoolReference{APIGroup: ipamv1.GroupVersion.Group, Kind: "CapstanIPPool", Name: o.name},
	}}
	f.add(f.claim, f.cluster, "Cluster")
	return f
}

// add creates an object that another one owns.
func (f *family) add(obj, owner client.Object, kind string) {
	f.w.t.Helper()
	obj.SetOwnerReferences([]metav1.OwnerReference{{
		APIVersion: clusterv1.GroupVersion.String(), Kind: kind, Name: owner.GetName(), UID: owner.GetUID(), Controller: ptr.To(true),
	}})
	obj.GetLabels()[clusterv1.ClusterNameLabel] = f.cluster.Name
	f.w.create(obj)
	f.members = append(f.members, obj)
}

// addWorker creates a Machine that has bootstrap data, its CapstanMachine, and a CapstanConfig.
func (f *family) addWorker(name string) {
	f.w.t.Helper()
	f.w.create(&corev1.Secret{ObjectMeta: f.meta(name + "-data"), Data: map[string][]byte{"value": []byte("#cloud-config")}})
	machine := &clusterv1.Machine{ObjectMeta: f.meta(name), Spec: clusterv1.MachineSpec{
		ClusterName: f.cluster.Name, Version: "v1.36.3", Bootstrap: clusterv1.Bootstrap{DataSecretName: ptr.To(name + "-data")},
		InfrastructureRef: clusterv1.ContractVersionedObjectReference{APIGroup: infrav1.GroupVersion.Group, Kind: "CapstanMachine", Name: name},
	}}
	machine.Labels[clusterv1.ClusterNameLabel] = f.cluster.Name
	f.w.create(machine)
	f.machine = &infrav1.CapstanMachine{ObjectMeta: f.meta(name)}
	f.add(f.machine, machine, "Machine")
	f.add(&bootstrapv1.CapstanConfig{ObjectMeta: f.meta(name)}, machine, "Machine")
}

// addPool creates a MachinePool without machines and its CapstanMachinePool.
func (f *family) addPool(name string) {
	f.w.t.Helper()
	pool := &clusterv1.MachinePool{ObjectMeta: f.meta(name), Spec: clusterv1.MachinePoolSpec{
		ClusterName: f.cluster.Name, Replicas: ptr.To[int32](0), Template: clusterv1.MachineTemplateSpec{Spec: clusterv1.MachineSpec{
			ClusterName: f.cluster.Name, Version: "v1.36.3", Bootstrap: clusterv1.Bootstrap{DataSecretName: ptr.To(name + "-data")},
			InfrastructureRef: clusterv1.ContractVersionedObjectReference{APIGroup: infrav1.GroupVersion.Group, Kind: "CapstanMachinePool", Name: name},
		}},
	}}
	pool.Labels[clusterv1.ClusterNameLabel] = f.cluster.Name
	f.w.create(pool)
	f.add(&infrav1.CapstanMachinePool{ObjectMeta: f.meta(name)}, pool, "MachinePool")
}

// everything returns the members, the host and the pool.
func (f *family) everything() []client.Object {
	return append([]client.Object{f.host, f.pool}, f.members...)
}

// state is the part of an object that a manager changes when it reconciles the object.
type state struct {
	name, version string
	finalizers    []string
	conditions    map[string]string
}

// reconciled reports whether a manager has changed the object, apart from the condition Paused.
func (s state) reconciled() bool {
	for kind := range s.conditions {
		if kind != clusterv1.PausedCondition {
			return true
		}
	}
	return len(s.finalizers) > 0
}

func (w *environment) look(obj client.Object) state {
	w.t.Helper()
	gvk, err := apiutil.GVKForObject(obj, w.env.Scheme)
	w.Expect(err).NotTo(HaveOccurred())
	u := &unstructured.Unstructured{}
	u.SetGroupVersionKind(gvk)
	w.Expect(w.env.Client.Get(w.t.Context(), client.ObjectKeyFromObject(obj), u)).To(Succeed())
	s := state{name: gvk.Kind + " " + obj.GetName(), version: u.GetResourceVersion(), finalizers: u.GetFinalizers(), conditions: map[string]string{}}
	found, _, _ := unstructured.NestedSlice(u.Object, "status", "conditions")
	for _, c := range found {
		c := c.(map[string]any)
		s.conditions[c["type"].(string)] = c["status"].(string)
	}
	return s
}

// reconciled waits until a manager has reconciled all of the objects.
func (w *environment) reconciled(objs ...client.Object) {
	w.t.Helper()
	for _, obj := range objs {
		w.Eventually(func() bool { return w.look(obj).reconciled() }).Should(BeTrue(), "no manager reconciles the %s", w.look(obj).name)
	}
}

// untouched checks that no manager reconciles any of the objects.
func (w *environment) untouched(objs ...client.Object) {
	w.t.Helper()
	for _, obj := range objs {
		if s := w.look(obj); s.reconciled() || len(s.conditions) > 0 {
			w.t.Errorf("a manager reconciles the %s: %+v", s.name, s)
		}
	}
}

func (w *environment) gone(obj client.Object) {
	w.t.Helper()
	w.Eventually(func() bool {
		return apierrors.IsNotFound(w.env.Client.Get(w.t.Context(), client.ObjectKeyFromObject(obj), obj))
	}).Should(BeTrue(), "%T %s still exists", obj, obj.GetName())
}
