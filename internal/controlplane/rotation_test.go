package controlplane

import (
	"context"
	"crypto/x509"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/util/cert"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/collections"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/cluster-api/util/secret"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/bootstrap"
	"capstan.dev/capstan/internal/controlplane/model"
	"capstan.dev/capstan/internal/node/nodeconfig"
	"capstan.dev/capstan/internal/reconciling"
)

// rotating is a cluster whose certificate authority is rotated. It has a control plane Machine, a worker that has not joined, and
// a Node. Each step has a new scope, as if the manager were killed after each step.
type rotating struct {
	t                    *testing.T
	management, workload client.Client
	clients              *clients
}

func newRotating(t *testing.T) *rotating {
	t.Helper()
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{corev1.AddToScheme, clusterv1.AddToScheme, Provider.AddToScheme} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	cp := &controlplanev1.CapstanControlPlane{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "cp", UID: "cp", Annotations: map[string]string{controlplanev1.InitializedAnnotation: "true"}}}
	ca, err := newAuthority(controlplanev1.CapstanControlPlaneSpec{}, time.Now().Add(-time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	authority := &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "demo-ca", OwnerReferences: []metav1.OwnerReference{controllerRef(cp)}},
		Data:       map[string][]byte{secret.TLSCrtDataName: ca.Cert, secret.TLSKeyDataName: ca.Key},
	}
	machine := func(name string, labels map[string]string) *clusterv1.Machine {
		m := &clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, Labels: map[string]string{clusterv1.ClusterNameLabel: "demo"}}}
		m.Spec.Bootstrap.DataSecretName = ptr.To(name)
		for k, v := range labels {
			m.Labels[k] = v
		}
		return m
	}
	data := func(name string) *corev1.Secret {
		return &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name}}
	}
	worker := machine("w", nil)
	worker.Status.NodeRef.Name = "w"
	r := &rotating{
		t: t,
		management: reconciling.Live(fake.NewClientBuilder().WithScheme(scheme).WithStatusSubresource(&clusterv1.Machine{}).
			WithObjects(cp, authority, machine("a", map[string]string{clusterv1.MachineControlPlaneLabel: ""}), worker, data("a"), data("w")).Build()),
		workload: fake.NewClientBuilder().WithScheme(scheme).WithObjects(
			&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w"}},
			&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "orphan", Annotations: map[string]string{clusterv1.MachineAnnotation: "gone", clusterv1.ClusterNameAnnotation: "demo", clusterv1.ClusterNamespaceAnnotation: "ns"}}},
			&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "kube-root-ca.crt"}},
			&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "extension-apiserver-authentication"}, Data: map[string]string{"client-ca-file": string(ca.Cert)}},
		).Build(),
	}
	r.clients = &clients{Client: r.management, LiveClient: r.management, SecretClient: r.management}
	return r
}

func (r *rotating) get(c client.Client, namespace, name string, obj client.Object) {
	r.t.Helper()
	if err := c.Get(context.Background(), client.ObjectKey{Namespace: namespace, Name: name}, obj); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rotating) change(c client.Client, namespace, name string, obj client.Object, change func()) {
	r.t.Helper()
	r.get(c, namespace, name, obj)
	before := obj.DeepCopyObject().(client.Object)
	change()
	if err := c.Patch(context.Background(), obj, client.MergeFrom(before)); err != nil {
		r.t.Fatal(err)
	}
}

// scope reads the present objects.
func (r *rotating) scope() *scope {
	r.t.Helper()
	cp, machine, ca := &controlplanev1.CapstanControlPlane{}, &clusterv1.Machine{}, &corev1.Secret{}
	r.get(r.management, "ns", "cp", cp)
	r.get(r.management, "ns", "a", machine)
	r.get(r.management, "ns", "demo-ca", ca)
	return &scope{ControlPlane: &model.ControlPlane{
		Object: cp, Cluster: &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "demo"}},
		Machines: collections.FromMachines(machine), Authority: ca, Workload: &model.Workload{}, Now: time.Now(),
	}, client: r.workload}
}

// look reconciles once and returns the reason and message of the condition, and the authorities in the Secret.
func (r *rotating) look() (reason, message string, list []string, bundle []byte) {
	r.t.Helper()
	s := r.scope()
	cp, ca := s.Object, &corev1.Secret{}
	if _, err := (&rotations{r.clients, &secrets{r.clients}, &annotator{r.clients}, &recorder{}}).reconcile(context.Background(), s); err != nil {
		r.t.Fatal(err)
	}
	r.get(r.management, "ns", "demo-ca", ca)
	list, err := nodeconfig.Fingerprints(ca.Data[secret.TLSCrtDataName])
	if err != nil {
		r.t.Fatal(err)
	}
	kind := controlplanev1.CertificateAuthorityRotatingCondition
	return conditions.GetReason(cp, kind), conditions.GetMessage(cp, kind), list, ca.Data[secret.TLSCrtDataName]
}

// signature returns the signature of the provider for a Node.
func (r *rotating) signature(name string) string {
	r.t.Helper()
	n := &corev1.Node{}
	r.get(r.workload, "", name, n)
	return n.Annotations[nodeconfig.SignatureAnnotation]
}

func parseCerts(t *testing.T, bundle []byte) []*x509.Certificate {
	t.Helper()
	out, err := cert.ParseCertsPEM(bundle)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// says reconciles until the condition has a reason and a message. A step needs one or two reconciles.
func (r *rotating) says(reason, words string) (list []string, bundle []byte) {
	r.t.Helper()
	var is, message string
	for range 5 {
		if is, message, list, bundle = r.look(); is == reason && strings.Contains(message, words) {
			return list, bundle
		}
	}
	r.t.Fatalf("%s: %s; want %s: %s", is, message, reason, words)
	return nil, nil
}

// TestRotationToTheEnd_CP15: the order in each phase is control plane Machines, the authorities for pods, Nodes. The next phase
// begins after the last Node. Nothing of the old authority remains in the end.
func TestRotationToTheEnd_CP15(t *testing.T) {
	r := newRotating(t)
	_, _, first, trusted := r.look()
	cp := &controlplanev1.CapstanControlPlane{}
	r.change(r.management, "ns", "cp", cp, func() { cp.Spec.Certificates.RotateCAAfter = metav1.NewTime(time.Now().Add(-time.Minute)) })
	var last []string
	for _, phase := range []string{controlplanev1.TrustingNewReason, controlplanev1.SigningNewReason, controlplanev1.DroppingOldReason} {
		list, bundle := r.says(phase, "control plane Machine a is to be replaced")
		if slices.Equal(list, last) {
			t.Fatalf("%s: the Secret still contains %v", phase, list)
		}
		last = list
		data := &corev1.Secret{}
		r.change(r.management, "ns", "a", data, func() {
			data.Annotations = map[string]string{bootstrapv1.AuthoritiesAnnotation: strings.Join(list, ",")}
		})
		r.says(phase, "has not published")
		node := &corev1.Node{}
		if r.get(r.workload, "", "w", node); node.Annotations[nodeconfig.AuthoritiesAnnotation] == string(bundle) {
			t.Errorf("%s: the Node got its signature too early", phase)
		}
		published := &corev1.ConfigMap{}
		r.change(r.workload, "kube-system", "kube-root-ca.crt", published, func() { published.Data = map[string]string{"ca.crt": string(bundle)} })
		r.says(phase, "Node w")
		r.change(r.workload, "", "w", node, func() {
			if node.Annotations[nodeconfig.SignatureAnnotation] != "" {
				t.Errorf("%s: signed for a machine without a challenge", phase)
			}
			node.Annotations[nodeconfig.ChallengeAnnotation] = "challenge of " + phase
		})
		r.says(phase, "Node w")
		r.change(r.workload, "", "w", node, func() {
			if node.Annotations[nodeconfig.AuthoritiesAnnotation] != string(bundle) {
				t.Errorf("%s: the Node got no signature", phase)
			}
			signature := node.Annotations[nodeconfig.SignatureAnnotation]
			if err := nodeconfig.VerifyAuthorities(parseCerts(t, trusted), bundle, "challenge of "+phase, signature); err != nil {
				t.Errorf("%s: %v", phase, err)
			}
			if _, _, _, trusted = r.look(); r.signature("w") != signature {
				t.Errorf("%s: the same challenge was signed twice", phase)
			}
			delete(node.Annotations, nodeconfig.ChallengeAnnotation) // for the next phase
			node.Annotations[nodeconfig.TrustedAuthoritiesAnnotation] = strings.Join(list, ",")
			node.Annotations[nodeconfig.KubeletAuthorityAnnotation] = list[0]
		})
	}
	list, bundle := r.says(controlplanev1.NotRotatingReason, "")
	if len(list) != 1 || list[0] == first[0] {
		t.Errorf("authorities %v after the rotation, %v before it", list, first)
	}
	node, orphans, published := &corev1.Node{}, &corev1.NodeList{}, &corev1.ConfigMap{}
	if r.get(r.workload, "", "w", node); node.Annotations[nodeconfig.AuthoritiesAnnotation] != "" || node.Annotations[nodeconfig.SignatureAnnotation] != "" {
		t.Error("the Node still has the annotations of the rotation")
	}
	if err := r.workload.List(context.Background(), orphans); err != nil || len(orphans.Items) != 1 {
		t.Errorf("the Node without a Machine still exists: %v", err)
	}
	if r.get(r.workload, "kube-system", "extension-apiserver-authentication", published); published.Data["client-ca-file"] != string(bundle) {
		t.Error("the old authority is still published for other servers")
	}
	for range 3 {
		if reason, message, again, _ := r.look(); reason != controlplanev1.NotRotatingReason || !slices.Equal(again, list) {
			t.Errorf("the same request started another rotation: %s: %s", reason, message)
		}
	}
}

// TestRotationWaitsForWorkersOnTheWay: the rotation waits for workers that were created before it and have not joined. They would
// not trust the servers after the next phase.
func TestRotationWaitsForWorkersOnTheWay(t *testing.T) {
	r := newRotating(t)
	r.look()
	worker := &clusterv1.Machine{}
	r.get(r.management, "ns", "w", worker)
	worker.Status.NodeRef = clusterv1.MachineNodeReference{}
	if err := r.management.Status().Update(context.Background(), worker); err != nil {
		t.Fatal(err)
	}
	cp, data, published := &controlplanev1.CapstanControlPlane{}, &corev1.Secret{}, &corev1.ConfigMap{}
	r.change(r.management, "ns", "cp", cp, func() { cp.Spec.Certificates.RotateCAAfter = metav1.NewTime(time.Now().Add(-time.Minute)) })
	list, bundle := r.says(controlplanev1.TrustingNewReason, "to be replaced")
	r.change(r.management, "ns", "a", data, func() {
		data.Annotations = map[string]string{bootstrapv1.AuthoritiesAnnotation: strings.Join(list, ",")}
	})
	r.change(r.workload, "kube-system", "kube-root-ca.crt", published, func() { published.Data = map[string]string{"ca.crt": string(bundle)} })
	r.says(controlplanev1.TrustingNewReason, "Machine w has no Node yet")
}

// TestRotationAndMachinesOfPools: a rotation waits for a Machine of a pool that has started and has not joined, because nothing records the
// authorities that it has read. It does not wait for one that has not started: core gives it an empty name of bootstrap data, and it will
// read the current data of the pool.
func TestRotationAndMachinesOfPools(t *testing.T) {
	r := newRotating(t)
	s := r.scope()
	pooled := &clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "p", Labels: map[string]string{clusterv1.ClusterNameLabel: "demo", clusterv1.MachinePoolNameLabel: "pool"}}}
	pooled.Spec.Bootstrap.DataSecretName = ptr.To("")
	if err := r.management.Create(t.Context(), pooled); err != nil {
		t.Fatal(err)
	}
	published := &corev1.ConfigMap{}
	r.change(r.workload, "kube-system", "kube-root-ca.crt", published, func() { published.Data = map[string]string{"ca.crt": string(s.Authority.Data[secret.TLSCrtDataName])} })
	rotations := &rotations{r.clients, &secrets{r.clients}, &annotator{r.clients}, &recorder{}}
	waits := func() bool {
		t.Helper()
		lacking, err := rotations.lackingNodes(t.Context(), s, s.Rotation())
		if err != nil {
			t.Fatal(err)
		}
		return strings.Contains(strings.Join(lacking, "\n"), "Machine p")
	}
	if waits() {
		t.Error("the rotation waits for a Machine of a pool that has not started")
	}
	pooled.Status.Initialization.InfrastructureProvisioned = ptr.To(true)
	if err := r.management.Status().Update(t.Context(), pooled); err != nil {
		t.Fatal(err)
	}
	if !waits() {
		t.Error("the rotation does not wait for a Machine of a pool that has started and has not joined")
	}
}

// TestRotationAndDataOfPools: a rotation waits until the bootstrap data of a MachinePool has the target. It does not wait for data of another
// bootstrap provider, for deleted data, and for a pool that is being deleted.
func TestRotationAndDataOfPools(t *testing.T) {
	r := newRotating(t)
	s := r.scope()
	pool := &clusterv1.MachinePool{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "p", Labels: map[string]string{clusterv1.ClusterNameLabel: "demo"}, Finalizers: []string{"x"}}}
	from := &pool.Spec.Template.Spec.Bootstrap
	from.ConfigRef = clusterv1.ContractVersionedObjectReference{APIGroup: bootstrapv1.GroupVersion.Group, Kind: bootstrapv1.ConfigKind, Name: "p"}
	data := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "p-1", Annotations: map[string]string{bootstrapv1.AuthoritiesAnnotation: "former"}}}
	write := func(do func(context.Context, client.Object) error, obj client.Object) {
		t.Helper()
		if err := do(t.Context(), obj); err != nil {
			t.Fatal(err)
		}
	}
	update := func(ctx context.Context, obj client.Object) error { return r.management.Update(ctx, obj) }
	remove := func(ctx context.Context, obj client.Object) error { return r.management.Delete(ctx, obj) }
	create := func(ctx context.Context, obj client.Object) error { return r.management.Create(ctx, obj) }
	published := &corev1.ConfigMap{}
	r.change(r.workload, "kube-system", "kube-root-ca.crt", published, func() { published.Data = map[string]string{"ca.crt": string(s.Authority.Data[secret.TLSCrtDataName])} })
	rotations := &rotations{r.clients, &secrets{r.clients}, &annotator{r.clients}, &recorder{}}
	group := func(name string) func() { return func() { from.ConfigRef.APIGroup = name; write(update, pool) } }
	for _, step := range []struct {
		name   string
		before func()
		waits  bool
	}{
		{"no data yet", func() { write(create, pool); write(create, data) }, false},
		{"former data", func() { from.DataSecretName = ptr.To("p-1"); write(update, pool) }, true},
		{"data of another provider", group("bootstrap.cluster.x-k8s.io"), false},
		{"former data again", group(bootstrapv1.GroupVersion.Group), true},
		{"the target", func() {
			data.Annotations[bootstrapv1.AuthoritiesAnnotation] = strings.Join(s.Rotation().Target, ",")
			write(update, data)
		}, false},
		{"data without a record", func() { data.Annotations = nil; write(update, data) }, true},
		{"a deleted pool", func() { write(remove, pool) }, false},
	} {
		step.before()
		lacking, err := rotations.lackingNodes(t.Context(), s, s.Rotation())
		if waits := strings.Contains(strings.Join(lacking, "\n"), "the bootstrap data of MachinePool p"); err != nil || waits != step.waits {
			t.Errorf("%s: the rotation waits for the pool: %v, %v", step.name, waits, err)
		}
	}
}

// TestRotationInPasses: a cluster can have more Nodes than one pass reaches. The next pass continues, and no pass reads a Machine that the
// cache contains.
func TestRotationInPasses(t *testing.T) {
	r, ctx := newRotating(t), t.Context()
	s := r.scope()
	state := s.Rotation()
	objects := []client.Object{&corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "kube-root-ca.crt"}, Data: map[string]string{"ca.crt": string(s.Authority.Data[secret.TLSCrtDataName])},
	}}
	for _, name := range []string{"n1", "n2", "n3", "n4"} {
		objects = append(objects, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{
			clusterv1.MachineAnnotation: "w", clusterv1.ClusterNameAnnotation: "demo", clusterv1.ClusterNamespaceAnnotation: "ns",
		}}})
	}
	var written []string
	var end context.CancelFunc
	s.client = fake.NewClientBuilder().WithObjects(objects...).WithInterceptorFuncs(interceptor.Funcs{
		Patch: func(ctx context.Context, c client.WithWatch, obj client.Object, patch client.Patch, opts ...client.PatchOption) error {
			if _, node := obj.(*corev1.Node); node {
				if written = append(written, obj.GetName()); len(written) == 2 {
					end()
				}
			}
			return c.Patch(ctx, obj, patch, opts...)
		},
	}).Build()
	r.clients.LiveClient = fake.NewClientBuilder().WithScheme(r.management.Scheme()).Build() // It has no Machine: a read would remove Nodes.
	rotations := &rotations{r.clients, &secrets{r.clients}, &annotator{r.clients}, &recorder{}}
	for _, want := range []string{"2 of 4 Nodes were reached in one pass", "Node n1 does not report"} {
		pass, cancel := context.WithCancel(ctx)
		end = cancel
		lacking, err := rotations.lackingNodes(pass, s, state)
		cancel()
		if err != nil || len(lacking) == 0 || !strings.Contains(lacking[0], want) {
			t.Errorf("got %q, %v, want %s", lacking, err, want)
		}
	}
	if want := []string{"n1", "n2", "n3", "n4"}; !slices.Equal(written, want) {
		t.Errorf("the Nodes %v were written, want %v", written, want)
	}
	r.confirm(ctx, s.client, state.Target)
	written = nil
	for _, want := range []bool{false, true} {
		pass, cancel := context.WithCancel(ctx)
		end = cancel
		finished, err := finishRotation(pass, s)
		cancel()
		if err != nil || finished != want {
			t.Errorf("finished %v, %v, want %v", finished, err, want)
		}
		if lacking, err := rotations.lackingNodes(ctx, s, state); err != nil || len(lacking) > 0 {
			t.Errorf("got %q, %v, want a rotation that lacks nothing", lacking, err)
		}
	}
	if want := []string{"n1", "n2", "n3", "n4"}; !slices.Equal(written, want) {
		t.Errorf("the Nodes %v were written at the end of the rotation, want each of them once", written)
	}
}

// confirm writes the reports of machines that trust the target.
func (r *rotating) confirm(ctx context.Context, workload client.Client, target []string) {
	r.t.Helper()
	nodes := &corev1.NodeList{}
	if err := workload.List(ctx, nodes); err != nil {
		r.t.Fatal(err)
	}
	for i := range nodes.Items {
		n := &nodes.Items[i]
		n.Annotations[nodeconfig.TrustedAuthoritiesAnnotation] = strings.Join(target, ",")
		n.Annotations[nodeconfig.KubeletAuthorityAnnotation] = target[0]
		if err := workload.Update(ctx, n); err != nil {
			r.t.Fatal(err)
		}
	}
}

// TestReadsBeforeAPass: they take no time from the pass.
func TestReadsBeforeAPass(t *testing.T) {
	r := newRotating(t)
	s := r.scope()
	deadlines := map[string]time.Time{}
	note := func(ctx context.Context, what string) { deadlines[what], _ = ctx.Deadline() }
	s.client = fake.NewClientBuilder().WithObjects(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n", Annotations: map[string]string{nodeconfig.AuthoritiesAnnotation: "old"}}}).
		WithInterceptorFuncs(interceptor.Funcs{
			List: func(ctx context.Context, c client.WithWatch, list client.ObjectList, opts ...client.ListOption) error {
				note(ctx, "read")
				return c.List(ctx, list, opts...)
			},
			Patch: func(ctx context.Context, c client.WithWatch, obj client.Object, patch client.Patch, opts ...client.PatchOption) error {
				note(ctx, "write")
				return c.Patch(ctx, obj, patch, opts...)
			},
		}).Build()
	if finished, err := finishRotation(t.Context(), s); err != nil || !finished {
		t.Fatalf("finished %v, %v", finished, err)
	}
	if deadlines["read"].IsZero() || !deadlines["write"].After(deadlines["read"]) {
		t.Errorf("the deadlines are %v, want a later one for writes", deadlines)
	}
}

// TestUnsafeAuthorityIsRefused: a Secret is not used if a user has replaced it with an authority that no machine trusts.
func TestUnsafeAuthorityIsRefused(t *testing.T) {
	r := newRotating(t)
	r.look()
	other, err := newAuthority(controlplanev1.CapstanControlPlaneSpec{}, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	stored, cp := &corev1.Secret{}, &controlplanev1.CapstanControlPlane{}
	r.get(r.management, "ns", "cp", cp)
	check := func() string {
		s := &scope{ControlPlane: &model.ControlPlane{Object: cp, Cluster: &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "demo"}}, Now: time.Now()}}
		problem, err := (&authorities{r.clients, &secrets{r.clients}}).ensureCertificate(context.Background(), s, bootstrap.Certificates(bootstrapv1.ClusterConfiguration{}).GetByPurpose(secret.ClusterCA))
		if err != nil {
			t.Fatal(err)
		}
		return problem
	}
	if problem := check(); problem != "" {
		t.Errorf("its own: %s", problem)
	}
	r.change(r.management, "ns", "demo-ca", stored, func() {
		stored.Data[secret.TLSCrtDataName], stored.Data[secret.TLSKeyDataName] = other.Cert, other.Key
	})
	if problem := check(); !strings.Contains(problem, "put it behind the current signing authority") {
		t.Errorf("another authority: %q", problem)
	}
}

// TestLateRecord: a manager that has lost its leadership does not bring back the record of a former step.
func TestLateRecord(t *testing.T) {
	r := newRotating(t)
	late := r.scope()
	cp := &controlplanev1.CapstanControlPlane{}
	r.change(r.management, "ns", "cp", cp, func() { cp.Annotations[controlplanev1.AuthoritiesAnnotation] = "new" })
	for _, step := range []struct {
		name string
		of   *scope
		want string
	}{{"late", late, "new"}, {"current", r.scope(), "old,new"}} {
		rotations := &rotations{r.clients, &secrets{r.clients}, &annotator{r.clients}, &recorder{}}
		if err := rotations.rotate(t.Context(), step.of, model.Rotation{Target: []string{"old", "new"}}, model.RotationRecord); err != nil {
			t.Fatal(err)
		}
		if r.get(r.management, "ns", "cp", cp); cp.Annotations[controlplanev1.AuthoritiesAnnotation] != step.want {
			t.Errorf("%s: the record is %q, want %q", step.name, cp.Annotations[controlplanev1.AuthoritiesAnnotation], step.want)
		}
	}
}
