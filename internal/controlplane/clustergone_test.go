package controlplane

import (
	"context"
	"errors"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	clusterctlv1 "sigs.k8s.io/cluster-api/cmd/clusterctl/api/v1alpha3"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/internal/testenv/testcluster"
)

// withMachine returns a cluster with the first Machine of its control plane.
func withMachine(t *testing.T) (*testcluster.Cluster, *controlplanev1.CapstanControlPlane, *clusterv1.Machine) {
	t.Helper()
	cluster := testcluster.New(t, env, nil)
	cp := cluster.ControlPlane(func(cp *controlplanev1.CapstanControlPlane) {
		cp.Spec.MachineTemplate.Spec.Deletion.NodeDeletionTimeoutSeconds = ptr.To[int32](0)
	})
	cluster.SetInfraEndpoint(somewhere)
	expect.True(t, "the first Machine", func() bool { return handedOver(t, cluster) })
	return cluster, cp, &machinesOf(t, cluster)[0]
}

func deleteNow(t *testing.T, objs ...client.Object) {
	t.Helper()
	for _, obj := range objs {
		if err := env.Client.Delete(context.Background(), obj); err != nil {
			t.Fatal(err)
		}
	}
}

// TestDeletionAfterTheClusterIsGone (ALL-13): a control plane can be deleted after its Cluster, with or without its owner reference. Its
// Machines and their objects are deleted too. Before the deletion, nothing is deleted, and never the Machines of others.
func TestDeletionAfterTheClusterIsGone(t *testing.T) {
	for name, loseOwners := range map[string]bool{"owner reference": false, "no owner reference": true} {
		t.Run(name, func(t *testing.T) {
			cluster, cp, machine := withMachine(t)
			stranger, strangersConfig := cluster.Machine("stranger", func(m *clusterv1.Machine) {
				m.Labels[clusterv1.MachineControlPlaneLabel] = ""
				m.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "ReplicaSet", Name: cp.Name, UID: "other", Controller: ptr.To(true)}}
			}, nil)
			cluster.Change(machine, func() { machine.Annotations[clusterv1.PreTerminateDeleteHookAnnotationPrefix+"/user"] = "" })
			deleteNow(t, cluster.Cluster)
			if loseOwners {
				cluster.Change(cp, func() { cp.OwnerReferences = nil })
			}
			remains := func() bool {
				return cluster.Get(machine) == nil && machine.DeletionTimestamp.IsZero() && machine.Annotations[controlplanev1.PreTerminateHookAnnotation] == "" &&
					len(machine.Finalizers) == 1
			}
			expect.Consistently(t, "nothing is deleted before the control plane", remains)
			cluster.Change(cp, func() { cp.Annotations[clusterv1.PausedAnnotation] = "" })
			deleteNow(t, cp)
			cluster.Becomes(t, cp, "paused", func() bool { return testcluster.Has(cp, clusterv1.PausedCondition, metav1.ConditionTrue, "") })
			expect.Consistently(t, "nothing is deleted during a pause", remains)
			cluster.Change(cp, func() { delete(cp.Annotations, clusterv1.PausedAnnotation) })

			cluster.Becomes(t, cp, "the deletion is reported", func() bool {
				return testcluster.Has(cp, clusterv1.DeletingCondition, metav1.ConditionTrue, "the Cluster does not exist, and 1 control plane machines") &&
					testcluster.Has(cp, clusterv1.AvailableCondition, metav1.ConditionFalse, "being deleted")
			})
			parts := []client.Object{&infrav1.CapstanMachine{ObjectMeta: cluster.Meta(machine.Name)}, &bootstrapv1.CapstanConfig{ObjectMeta: cluster.Meta(machine.Name)}}
			expect.Consistently(t, "the hook of a user delays the deletion of the machine", func() bool {
				return cluster.Get(parts[0]) == nil && cluster.Get(parts[1]) == nil && cluster.Get(machine) == nil
			})
			owners := []metav1.OwnerReference{}
			cluster.Change(parts[1], func() {
				owners = parts[1].GetOwnerReferences()
				parts[1].SetOwnerReferences(stranger.OwnerReferences)
			})
			cluster.Change(machine, func() { delete(machine.Annotations, clusterv1.PreTerminateDeleteHookAnnotationPrefix+"/user") })
			cluster.Becomes(t, cp, "the object of another owner is named", func() bool {
				return testcluster.Has(cp, clusterv1.DeletingCondition, metav1.ConditionTrue, "waits for the deletion of the CapstanConfig "+machine.Name)
			})
			cluster.Change(parts[1], func() { parts[1].SetOwnerReferences(owners) })
			for _, obj := range append(parts, machine, cp) {
				expect.True(t, "deletion", func() bool { return apierrors.IsNotFound(cluster.Get(obj)) })
			}
			if err := cluster.Get(stranger); err != nil || !stranger.DeletionTimestamp.IsZero() || cluster.Get(strangersConfig) != nil {
				t.Errorf("the Machine of another owner was deleted: %v", err)
			}
		})
	}
}

// TestLostOwnerReference: a deleted control plane without its owner reference belongs to the Cluster that references it, and is deleted as usual:
// after the workers, and not during a pause of the Cluster. The copy that clusterctl move deletes deletes nothing.
func TestLostOwnerReference(t *testing.T) {
	cluster, cp, machine := withMachine(t)
	worker := &clusterv1.Machine{ObjectMeta: cluster.Meta("worker"), Spec: machine.Spec}
	cluster.Create(worker)
	cluster.Change(cluster.Cluster, func() { cluster.Spec.Paused = ptr.To(true) })
	cluster.Change(cp, func() { cp.OwnerReferences = nil })
	deleteNow(t, cp)
	cluster.Becomes(t, cp, "paused", func() bool { return testcluster.Has(cp, clusterv1.PausedCondition, metav1.ConditionTrue, "") })
	cluster.Change(cluster.Cluster, func() { cluster.Spec.Paused = nil })
	cluster.Becomes(t, cp, "waits for the worker", func() bool {
		return testcluster.Has(cp, clusterv1.DeletingCondition, metav1.ConditionTrue, "1 worker")
	})
	if cluster.Get(machine) != nil || !machine.DeletionTimestamp.IsZero() {
		t.Error("the control plane machine was deleted before the worker")
	}
	cluster.Change(cp, func() { cp.Annotations[clusterctlv1.DeleteForMoveAnnotation] = "" })
	deleteNow(t, cluster.Cluster, worker)
	expect.Consistently(t, "clusterctl deletes no machine", func() bool { return cluster.Get(machine) == nil && machine.DeletionTimestamp.IsZero() })
	cluster.Change(cp, func() { delete(cp.Annotations, clusterctlv1.DeleteForMoveAnnotation) })
	expect.True(t, "deletion", func() bool {
		return apierrors.IsNotFound(cluster.Get(cp)) && apierrors.IsNotFound(cluster.Get(machine))
	})
}

// TestClusterOf: a Cluster that the cache lacks, or that cannot be read, is not a Cluster that does not exist.
func TestClusterOf(t *testing.T) {
	scheme := runtime.NewScheme()
	if err := errors.Join(clusterv1.AddToScheme(scheme), controlplanev1.AddToScheme(scheme)); err != nil {
		t.Fatal(err)
	}
	owner := &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "owner"}}
	referencing := &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "referencing"}}
	referencing.Spec.ControlPlaneRef = clusterv1.ContractVersionedObjectReference{APIGroup: controlplanev1.GroupVersion.Group, Kind: controlplanev1.ControlPlaneKind, Name: "demo"}
	elsewhere := referencing.DeepCopy()
	elsewhere.Namespace = "elsewhere"
	another := &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "another"}}
	for name, c := range map[string]struct {
		stored     []client.Object
		cached     []client.Object
		fails      bool
		notDeleted bool
		moved      bool
		want       string
		gone       bool
	}{
		"in the cache":                {cached: []client.Object{owner}, want: "owner"},
		"not in the cache yet":        {stored: []client.Object{owner}, want: "owner"},
		"without the owner reference": {stored: []client.Object{another, referencing}, want: "referencing"},
		"in another namespace":        {stored: []client.Object{elsewhere}, want: "named", gone: true},
		"gone":                        {stored: []client.Object{another}, want: "named", gone: true},
		"moved, and gone":             {moved: true},
		"cannot be read":              {fails: true},
		"gone, not deleted":           {notDeleted: true},
	} {
		t.Run(name, func(t *testing.T) {
			cp := &controlplanev1.CapstanControlPlane{ObjectMeta: metav1.ObjectMeta{
				Namespace: "ns", Name: "demo", Labels: map[string]string{clusterv1.ClusterNameLabel: "named"}, DeletionTimestamp: ptr.To(metav1.Now()),
				OwnerReferences: []metav1.OwnerReference{{APIVersion: "cluster.x-k8s.io/v1beta1", Kind: "Cluster", Name: "owner"}},
			}}
			if c.notDeleted {
				cp.DeletionTimestamp = nil
			}
			latest := cp.DeepCopy()
			latest.DeletionTimestamp = nil // A fake client stores no deleted object without a finalizer.
			if c.moved {
				latest.Annotations = map[string]string{clusterctlv1.DeleteForMoveAnnotation: ""}
			}
			live := fake.NewClientBuilder().WithScheme(scheme).WithObjects(append(c.stored, latest)...).WithInterceptorFuncs(interceptor.Funcs{
				List: func(ctx context.Context, w client.WithWatch, list client.ObjectList, opts ...client.ListOption) error {
					if c.fails {
						return errors.New("unreachable")
					}
					return w.List(ctx, list, opts...)
				},
			}).Build()
			r := &Reconciler{clients: &clients{Client: fake.NewClientBuilder().WithScheme(scheme).WithObjects(c.cached...).Build(), LiveClient: live}}
			cluster, gone, err := r.clusterOf(t.Context(), cp)
			found := ""
			if cluster != nil {
				found = cluster.Name
			}
			if found != c.want || gone != c.gone || (err != nil) != c.fails {
				t.Errorf("found %q, gone %v, %v", found, gone, err)
			}
		})
	}
}
