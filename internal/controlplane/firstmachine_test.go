package controlplane

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/reconciling"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/internal/testenv/testcluster"
)

// stoppableClient is a client that blocks at one write, before it or directly after it, until the test releases it.
type stoppableClient struct {
	client.Client
	mu             sync.Mutex
	writes, stopAt int
	behind         bool
	stopped, goOn  chan struct{}
}

func newStoppableClient(stopAt int, behind bool) *stoppableClient {
	return &stoppableClient{Client: &unpaused{env.Client}, stopAt: stopAt, behind: behind, stopped: make(chan struct{}), goOn: make(chan struct{})}
}

func (s *stoppableClient) write(do func() error) error {
	s.mu.Lock()
	s.writes++
	here := s.writes == s.stopAt
	s.mu.Unlock()
	if !here {
		return do()
	}
	if !s.behind {
		close(s.stopped)
		<-s.goOn
		return do()
	}
	err := do()
	close(s.stopped)
	<-s.goOn
	return err
}

func (s *stoppableClient) Create(ctx context.Context, obj client.Object, opts ...client.CreateOption) error {
	return s.write(func() error { return s.Client.Create(ctx, obj, opts...) })
}

func (s *stoppableClient) Delete(ctx context.Context, obj client.Object, opts ...client.DeleteOption) error {
	return s.write(func() error { return s.Client.Delete(ctx, obj, opts...) })
}

func (s *stoppableClient) Patch(ctx context.Context, obj client.Object, patch client.Patch, opts ...client.PatchOption) error {
	return s.write(func() error { return s.Client.Patch(ctx, obj, patch, opts...) })
}

func (s *stoppableClient) Apply(ctx context.Context, obj runtime.ApplyConfiguration, opts ...client.ApplyOption) error {
	return s.write(func() error { return s.Client.Apply(ctx, obj, opts...) })
}

// leader is a manager that acts as the leader.
type leader struct {
	client     *stoppableClient
	reconciler *Reconciler
}

func newLeader(stopAt int, behind bool) *leader {
	c := newStoppableClient(stopAt, behind)
	return &leader{c, newReconciler(c, nil, reconciling.Options{LiveClient: &unpaused{env.Client}, SecretCachingClient: env.Client})}
}

// acts reconciles until a Machine exists and no step is left. It repeats failed reconciles, as a manager does.
func (l *leader) acts(t *testing.T, cluster *testcluster.Cluster) {
	request := ctrl.Request{NamespacedName: client.ObjectKey{Namespace: cluster.Namespace, Name: "demo"}}
	quiet := 0
	for end := time.Now().Add(expect.Patience); quiet < 3; {
		if time.Now().After(end) {
			t.Error("a leader still has steps to do")
			return
		}
		result, err := l.reconciler.Reconcile(context.Background(), request)
		switch {
		case err != nil || result.RequeueAfter > 0 && result.RequeueAfter < time.Second:
			quiet = 0
			time.Sleep(10 * time.Millisecond)
		default:
			quiet++
		}
	}
}

// clusterWithoutManager is a cluster that no manager reconciles. The test runs its own.
func clusterWithoutManager(t *testing.T, restored bool) *testcluster.Cluster {
	t.Helper()
	cluster := testcluster.New(t, env, nil)
	cluster.SetInfraEndpoint(somewhere)
	cluster.ControlPlane(func(cp *controlplanev1.CapstanControlPlane) {
		cp.Annotations = map[string]string{clusterv1.PausedAnnotation: ""}
		if restored {
			yes := true
			cp.Spec.Config.Cluster.Encryption.Mode = bootstrapv1.EncryptionNone
			cp.Spec.Restore = controlplanev1.RestoreSpec{Name: "etcd-one", Store: inDirectory(), OtherAuthorities: &yes}
		}
	})
	return cluster
}

// begins checks that exactly one machine initializes a cluster, and that no other object remains.
func begins(t *testing.T, cluster *testcluster.Cluster) {
	t.Helper()
	configs, infra := &bootstrapv1.CapstanConfigList{}, &infrav1.CapstanMachineList{}
	for _, list := range []client.ObjectList{configs, infra} {
		if err := env.Client.List(context.Background(), list, client.InNamespace(cluster.Namespace)); err != nil {
			t.Fatal(err)
		}
	}
	machines := machinesOf(t, cluster)
	if len(machines) != 1 || len(configs.Items) != 1 || len(infra.Items) != 1 || configs.Items[0].Spec.Role != bootstrapv1.RoleInit ||
		configs.Items[0].Name != machines[0].Name || infra.Items[0].Name != machines[0].Name {
		t.Errorf("%d Machines, %d CapstanConfigs, %d infrastructure machines", len(machines), len(configs.Items), len(infra.Items))
	}
}

// TestTwoLeaders: a leader blocks at each of its writes in turn, while another leader acts. Then the first one continues. Exactly one
// machine initializes the cluster, also during a restore, and also when the name template changes in between. A new cluster has a
// leader that blocks directly after a write, too: it has read less than one that blocks before its next write.
func TestTwoLeaders(t *testing.T) {
	before, both := []bool{false}, []bool{false, true}
	for name, c := range map[string]struct {
		restored, renamed bool
		behind            []bool
	}{"new": {behind: both}, "restored": {restored: true, behind: before}, "renamed": {renamed: true, behind: before}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cluster := clusterWithoutManager(t, c.restored)
			alone := newLeader(-1, false)
			alone.acts(t, cluster)
			begins(t, cluster)
			if alone.client.writes < 10 {
				t.Fatalf("%d writes were counted", alone.client.writes)
			}
			// The first writes create Secrets, the last ones create Machines.
			for n := max(1, alone.client.writes-6); n <= alone.client.writes; n++ {
				for _, behind := range c.behind {
					t.Run(fmt.Sprintf("write %d, after it %v", n, behind), func(t *testing.T) {
						t.Parallel()
						twoLeaders(t, c.restored, c.renamed, n, behind)
					})
				}
			}
		})
	}
}

func twoLeaders(t *testing.T, restored, renamed bool, stopAt int, behind bool) {
	cluster := clusterWithoutManager(t, restored)
	first, second := newLeader(stopAt, behind), newLeader(-1, false)
	done := make(chan struct{})
	go func() { defer close(done); first.acts(t, cluster) }()
	select {
	case <-first.client.stopped:
	case <-done: // This run needed one write less.
		return
	}
	if renamed {
		cp := &controlplanev1.CapstanControlPlane{ObjectMeta: cluster.Meta("demo")}
		cluster.Change(cp, func() { cp.Spec.MachineNaming.Template = "other-{{ .random }}" })
	}
	second.acts(t, cluster)
	begins(t, cluster)
	close(first.client.goOn)
	<-done
	second.acts(t, cluster)
	begins(t, cluster)
}

// TestForeignName: a tenant writes the name of another Machine into the record of the first Machine. This name is not used.
func TestForeignName(t *testing.T) {
	cluster := testcluster.New(t, env, nil)
	worker, _ := cluster.Machine("worker", nil, nil)
	cp := cluster.ControlPlane(func(cp *controlplanev1.CapstanControlPlane) {
		cp.Annotations = map[string]string{controlplanev1.FirstMachineAnnotation: `{"name":"worker"}`}
	})
	cluster.SetInfraEndpoint(somewhere)
	cluster.Becomes(t, cp, "refused", func() bool {
		return testcluster.Has(cp, clusterv1.ScalingUpCondition, metav1.ConditionTrue, "the name worker is taken")
	})
	before := worker.ResourceVersion
	if err := cluster.Get(worker); err != nil || worker.ResourceVersion != before {
		t.Errorf("the worker was changed: %v", err)
	}
	cluster.Change(cp, func() { delete(cp.Annotations, controlplanev1.FirstMachineAnnotation) })
	expect.True(t, "without the annotation, the first Machine has another name", func() bool {
		return len(machinesOf(t, cluster)) == 1
	})
}

// TestFormerData: a first Machine that is created again waits until the garbage collector has deleted the bootstrap data of the former one.
func TestFormerData(t *testing.T) {
	cluster := testcluster.New(t, env, nil)
	former := &bootstrapv1.CapstanConfig{ObjectMeta: cluster.Meta("first")}
	former.UID = "former"
	data := &corev1.Secret{ObjectMeta: cluster.Meta("first")}
	data.OwnerReferences = []metav1.OwnerReference{*metav1.NewControllerRef(former, bootstrapv1.GroupVersion.WithKind("CapstanConfig"))}
	cluster.Create(data)
	cluster.SetInfraEndpoint(somewhere)
	cp := cluster.ControlPlane(func(cp *controlplanev1.CapstanControlPlane) {
		cp.Annotations = map[string]string{controlplanev1.FirstMachineAnnotation: `{"name":"first"}`}
	})
	cluster.Becomes(t, cp, "it waits", func() bool {
		return testcluster.Has(cp, clusterv1.ScalingUpCondition, metav1.ConditionTrue, "the Secret first still has the bootstrap data of a former CapstanConfig")
	})
	if err := cluster.Get(former); !apierrors.IsNotFound(err) {
		t.Errorf("the CapstanConfig exists too early: %v", err)
	}
	if err := env.Client.Delete(t.Context(), data); err != nil {
		t.Fatal(err)
	}
	expect.True(t, "the first Machine exists", func() bool {
		machines := machinesOf(t, cluster)
		return len(machines) == 1 && machines[0].Name == "first"
	})
}

// refusals counts the create requests, and refuses them.
type refusals struct {
	client.Client
	mu    sync.Mutex
	names []string
}

func (r *refusals) Create(ctx context.Context, obj client.Object, opts ...client.CreateOption) error {
	if _, ok := obj.(*bootstrapv1.CapstanConfig); ok {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.names = append(r.names, obj.GetName())
		return apierrors.NewForbidden(bootstrapv1.GroupVersion.WithResource("capstanconfigs").GroupResource(), obj.GetName(), fmt.Errorf("refused for the %d. time", len(r.names)))
	}
	return r.Client.Create(ctx, obj, opts...)
}

// TestRefusedConfig: a refused CapstanConfig is tried again under the same name, with increasing pauses. Neither the number of
// reconciles nor a changing message shortens the pauses.
func TestRefusedConfig(t *testing.T) {
	cluster := clusterWithoutManager(t, false)
	c := &refusals{Client: &unpaused{env.Client}}
	r := newReconciler(c, nil, reconciling.Options{LiveClient: &unpaused{env.Client}, SecretCachingClient: env.Client})
	request := ctrl.Request{NamespacedName: client.ObjectKey{Namespace: cluster.Namespace, Name: "demo"}}
	cp := &controlplanev1.CapstanControlPlane{ObjectMeta: cluster.Meta("demo")}
	reconcile := func(times int) {
		for range times {
			if _, err := r.Reconcile(context.Background(), request); apierrors.IsForbidden(err) {
				t.Errorf("a refusal is an error of the reconcile, with a growing pause: %v", err)
			}
		}
	}
	begun := time.Now()
	reconcile(30)
	first, allowed := len(c.names), 1
	for pause := firstPause; pause <= time.Since(begun); pause = 2*pause + firstPause {
		allowed++
	}
	if first == 0 || first > allowed {
		t.Errorf("%d attempts in %s, want at most %d", first, time.Since(begun), allowed)
	}
	for _, name := range c.names {
		if name != c.names[0] {
			t.Errorf("got names %v, want one name", c.names)
			break
		}
	}
	if err := cluster.Get(cp); err != nil || !testcluster.Has(cp, clusterv1.ScalingUpCondition, metav1.ConditionTrue, "refused for the") {
		t.Errorf("no condition contains the refusal: %v", cp.Status.Conditions)
	}
	cluster.Change(cp, func() { cp.Spec.Config.PreCommands = []string{"true"} })
	reconcile(1)
	if len(c.names) == first {
		t.Error("a changed spec is not tried at once")
	}
}

// TestRefusedConfigForReal is TestRefusedConfig with a manager and an API server that refuses.
func TestRefusedConfigForReal(t *testing.T) {
	cluster := testcluster.New(t, env, nil)
	meta := metav1.ObjectMeta{Name: "configs-" + cluster.Namespace}
	policy := &admissionregistrationv1.ValidatingAdmissionPolicy{ObjectMeta: meta, Spec: admissionregistrationv1.ValidatingAdmissionPolicySpec{
		MatchConstraints: &admissionregistrationv1.MatchResources{ResourceRules: []admissionregistrationv1.NamedRuleWithOperations{{RuleWithOperations: admissionregistrationv1.RuleWithOperations{
			Operations: []admissionregistrationv1.OperationType{admissionregistrationv1.Create},
			Rule:       admissionregistrationv1.Rule{APIGroups: []string{bootstrapv1.GroupVersion.Group}, APIVersions: []string{"*"}, Resources: []string{"capstanconfigs"}},
		}}}},
		Validations: []admissionregistrationv1.Validation{{
			Expression: "object.metadata.namespace != '" + cluster.Namespace + "'", Message: "no configs here",
		}},
	}}
	binding := &admissionregistrationv1.ValidatingAdmissionPolicyBinding{ObjectMeta: meta, Spec: admissionregistrationv1.ValidatingAdmissionPolicyBindingSpec{
		PolicyName: policy.Name, ValidationActions: []admissionregistrationv1.ValidationAction{admissionregistrationv1.Deny},
	}}
	for _, obj := range []client.Object{policy, binding} {
		cluster.Create(obj)
		t.Cleanup(func() { _ = env.Client.Delete(context.Background(), obj) })
	}
	expect.True(t, "the policy is active", func() bool {
		return env.Client.Create(context.Background(), &bootstrapv1.CapstanConfig{ObjectMeta: cluster.Meta("probe")}, client.DryRunAll) != nil
	})
	cluster.SetInfraEndpoint(somewhere)
	cp := cluster.ControlPlane(nil)
	cluster.Becomes(t, cp, "a condition reports it", func() bool {
		return testcluster.Has(cp, clusterv1.ScalingUpCondition, metav1.ConditionTrue, "no configs here")
	})
	version := cp.ResourceVersion
	expect.Consistently(t, "nothing is written during the refusals", func() bool { return cluster.Get(cp) == nil && cp.ResourceVersion == version })
}
