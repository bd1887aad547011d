package controlplane

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/collections"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/controlplane/model"
	"capstan.dev/capstan/internal/reconciling"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/internal/testenv/testcluster"
)

// refuseMachines makes the API server refuse every Machine with the label refused, as Cluster API's core does with
// taints when its feature gate is off.
func refuseMachines(t *testing.T, cluster *testcluster.Cluster) {
	t.Helper()
	meta := metav1.ObjectMeta{Name: cluster.Namespace}
	policy := &admissionregistrationv1.ValidatingAdmissionPolicy{ObjectMeta: meta, Spec: admissionregistrationv1.ValidatingAdmissionPolicySpec{
		MatchConstraints: &admissionregistrationv1.MatchResources{ResourceRules: []admissionregistrationv1.NamedRuleWithOperations{{RuleWithOperations: admissionregistrationv1.RuleWithOperations{
			Operations: []admissionregistrationv1.OperationType{admissionregistrationv1.Create, admissionregistrationv1.Update},
			Rule:       admissionregistrationv1.Rule{APIGroups: []string{clusterv1.GroupVersion.Group}, APIVersions: []string{"*"}, Resources: []string{"machines"}},
		}}}},
		Validations: []admissionregistrationv1.Validation{{
			Expression: "object.metadata.namespace != '" + cluster.Namespace + "' || !has(object.metadata.labels) || !('refused' in object.metadata.labels)",
			Message:    "nobody may have this label",
		}},
	}}
	binding := &admissionregistrationv1.ValidatingAdmissionPolicyBinding{ObjectMeta: meta, Spec: admissionregistrationv1.ValidatingAdmissionPolicyBindingSpec{
		PolicyName: policy.Name, ValidationActions: []admissionregistrationv1.ValidationAction{admissionregistrationv1.Deny},
	}}
	for _, obj := range []client.Object{policy, binding} {
		cluster.Create(obj)
		t.Cleanup(func() { _ = env.Client.Delete(context.Background(), obj) })
	}
	probe := machinesOf(t, cluster)[0]
	probe.Labels["refused"] = ""
	expect.True(t, "the policy is active", func() bool {
		return env.Client.Patch(context.Background(), probe.DeepCopy(), client.RawPatch("application/merge-patch+json", []byte(`{"metadata":{"labels":{"refused":""}}}`)), client.DryRunAll) != nil
	})
}

// TestRefusedChange (CP-07, CP-10, CP-17): if the API server refuses a change, a condition contains the refusal and the remedy.
// Machines can still leave.
func TestRefusedChange(t *testing.T) {
	w, cp, _ := connected(t, nil)
	scaleTo(w, cp, 3)
	w.until("three", w.settled(cp, 3))
	refuseMachines(t, w.cluster)
	w.cluster.Change(cp, func() { cp.Spec.MachineTemplate.ObjectMeta.Labels = map[string]string{"refused": ""} })
	w.until("a condition reports that the Machines cannot be changed", func() bool {
		return w.cluster.Get(cp) == nil && testcluster.Has(cp, clusterv1.MachinesUpToDateCondition, metav1.ConditionFalse, "nobody may have this label") &&
			testcluster.Has(cp, clusterv1.MachinesUpToDateCondition, metav1.ConditionFalse, "or feature gate that refuses it")
	})
	deleted := namesOfMachines(t, w)[0]
	deleteMachine(t, w, deleted)
	w.until("the Machine and its member are removed", func() bool { return w.member(deleted) == nil && len(machinesOf(t, w.cluster)) == 2 })
	w.until("a condition reports that no Machine can be created", func() bool {
		return w.cluster.Get(cp) == nil && testcluster.Has(cp, clusterv1.ScalingUpCondition, metav1.ConditionTrue, "cannot make the Machine") &&
			testcluster.Has(cp, clusterv1.ScalingUpCondition, metav1.ConditionTrue, "nobody may have this label")
	})
	w.cluster.Change(cp, func() { cp.Spec.MachineTemplate.ObjectMeta.Labels = nil })
	w.until("three again", func() bool {
		return w.settled(cp, 3)() && testcluster.Has(cp, clusterv1.MachinesUpToDateCondition, metav1.ConditionTrue, "")
	})
}

// TestRefusedChangeIsNoError: steps that no event starts do not wait for the growing pause after errors.
func TestRefusedChangeIsNoError(t *testing.T) {
	c := fake.NewClientBuilder().WithScheme(env.Scheme).WithInterceptorFuncs(interceptor.Funcs{
		Apply: func(context.Context, client.WithWatch, runtime.ApplyConfiguration, ...client.ApplyOption) error {
			return apierrors.NewForbidden(clusterv1.GroupVersion.WithResource("machines").GroupResource(), "demo-1", errors.New("it has taints"))
		},
	}).Build()
	r, found, later := newReconciler(c, nil, reconciling.Options{StrictContract: true}), &result{}, 0
	s := &scope{ControlPlane: &model.ControlPlane{Object: &controlplanev1.CapstanControlPlane{}, Cluster: &clusterv1.Cluster{}, Workload: model.NotAsked()}}
	s.Machines = collections.FromMachines(&clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "demo-1", UID: "1"}})
	err := runUntilStop(t.Context(), s, found, r.propagation.reconcile, func(context.Context, *scope) (result, error) {
		later++
		return result{}, nil
	})
	if err != nil || later != 1 || found.requeueAfter <= 0 || found.requeueAfter > longestPause || len(found.refused) != 1 {
		t.Errorf("got %+v, %d later steps and the error %v", found, later, err)
	}
}

// TestAfterRefusal: a refused change is tried again after a pause. Other errors are errors of the step.
func TestAfterRefusal(t *testing.T) {
	kind := clusterv1.GroupVersion.WithResource("machines").GroupResource()
	refused := apierrors.NewForbidden(kind, "demo-1", errors.New("a policy keeps it"))
	for name, test := range map[string]struct {
		again time.Duration
		err   error
		want  time.Duration
		fails bool
	}{
		"none":                    {},
		"refused":                 {err: fmt.Errorf("cannot delete: %w", refused), want: longestPause},
		"refused, with a pause":   {again: time.Second, err: refused, want: time.Second},
		"refused by a webhook":    {err: apierrors.NewBadRequest("a webhook refused it"), want: longestPause},
		"changed":                 {err: apierrors.NewConflict(kind, "demo-1", errors.New("it was changed")), fails: true},
		"an API server that ends": {err: apierrors.NewServiceUnavailable("it ends"), fails: true},
	} {
		out := requeueAfter(test.again)
		if err := out.afterRefusal(t.Context(), test.err); (err != nil) != test.fails || out.requeueAfter != test.want {
			t.Errorf("%s: got %s, %v", name, out.requeueAfter, err)
		}
	}
}

// TestNewMachineIsAppliedOnce: a Machine was applied when it was created. The name of its data and its provider id, which core writes, are no
// reason to apply it again. A change of the template is one.
func TestNewMachineIsAppliedOnce(t *testing.T) {
	applied := 0
	c := fake.NewClientBuilder().WithScheme(env.Scheme).WithInterceptorFuncs(interceptor.Funcs{
		Apply: func(context.Context, client.WithWatch, runtime.ApplyConfiguration, ...client.ApplyOption) error {
			applied++
			return nil
		},
	}).Build()
	r := newReconciler(c, nil, reconciling.Options{StrictContract: true})
	cp := &controlplanev1.CapstanControlPlane{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "demo"}}
	cluster := &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "demo"}}
	s := &scope{ControlPlane: &model.ControlPlane{Object: cp, Cluster: cluster, Workload: model.NotAsked()}}
	machine := desiredMachine(s, &clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "demo-1", UID: "1"}})
	if err := r.machines.afterCreation(t.Context(), s, attempt{machine: machine}); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct { // The order matters: the case "taints" changes the applied Machine.
		name   string
		change func(*clusterv1.Machine)
		want   int
	}{
		{name: "new", change: func(*clusterv1.Machine) {}},
		{name: "data", change: func(m *clusterv1.Machine) { m.Spec.Bootstrap.DataSecretName = ptr.To("data") }},
		{name: "provider id", change: func(m *clusterv1.Machine) { m.Spec.ProviderID = "capstan://1" }},
		{name: "taints", change: func(m *clusterv1.Machine) { m.Spec.Taints = []clusterv1.MachineTaint{{Key: "other"}} }, want: 1},
	} {
		applied = 0
		changed := machine.DeepCopy()
		tc.change(changed)
		if err := r.propagation.applyOnce(t.Context(), changed, desiredMachine(s, changed)); err != nil || applied != tc.want {
			t.Errorf("%s: applied %d times, want %d, %v", tc.name, applied, tc.want, err)
		}
	}
}
