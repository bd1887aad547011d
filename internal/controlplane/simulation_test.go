package controlplane

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/annotations"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/yaml"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	etcdv1 "capstan.dev/capstan/api/etcd/v1beta2"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/controlplane/model"
	"capstan.dev/capstan/internal/testenv"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/internal/testenv/testcluster"
)

// simulation simulates Cluster API core, the machines and the agent that operates etcd, one step at a time. A test can therefore
// check every state in between. The simulation fails the test at any step that a real etcd would not survive.
type simulation struct {
	t       *testing.T
	cluster *testcluster.Cluster

	// broken machines never start. dead machines were killed: their API server and their member do not answer.
	// The drain of stubborn machines never ends.
	broken, dead, stubborn map[string]bool
	// careful members are asked to leave, and the agent does not remove them yet.
	careful map[string]bool
	// restoring allows the removal of machines whose members vote, because their etcd is no longer used.
	restoring bool
	// silent disables the agent that operates etcd.
	silent bool
	// most and fewest are the largest number of Machines and the smallest number of working voting members so far.
	most, fewest int
	// made contains all Machines that have existed.
	made map[string]bool
	// renewed contains the times of the last renewals of Leases.
	renewed map[string]time.Time
}

// newSimulation removes the objects of former tests from the workload cluster, which has the same API server.
func newSimulation(t *testing.T, cluster *testcluster.Cluster) *simulation {
	t.Helper()
	ctx := context.Background()
	if err := env.Client.DeleteAllOf(ctx, &etcdv1.EtcdMember{}); err != nil {
		t.Fatal(err)
	}
	if err := env.Client.DeleteAllOf(ctx, &etcdv1.EtcdBackup{}); err != nil {
		t.Fatal(err)
	}
	if err := env.Client.DeleteAllOf(ctx, &etcdv1.EtcdBackupCheck{}); err != nil {
		t.Fatal(err)
	}
	if err := env.Client.DeleteAllOf(ctx, &coordinationv1.Lease{}, client.InNamespace(metav1.NamespaceSystem), client.HasLabels{"test"}); err != nil {
		t.Fatal(err)
	}
	return &simulation{t: t, cluster: cluster, broken: map[string]bool{}, dead: map[string]bool{}, stubborn: map[string]bool{}, careful: map[string]bool{}, made: map[string]bool{}, renewed: map[string]time.Time{}, fewest: 1000}
}

// forget starts the records of the simulation again, with the present Machines.
func (w *simulation) forget() {
	w.t.Helper()
	names := namesOfMachines(w.t, w)
	w.made, w.most, w.fewest = map[string]bool{}, len(names), len(names)
	for _, name := range names {
		w.made[name] = true
	}
}

// installMembers installs the kinds EtcdMember, EtcdBackup and EtcdBackupCheck, as the first control plane machine does.
func installMembers() error {
	for kind, list := range map[string]client.ObjectList{
		"etcdmembers": &etcdv1.EtcdMemberList{}, "etcdbackups": &etcdv1.EtcdBackupList{}, "etcdbackupchecks": &etcdv1.EtcdBackupCheckList{},
	} {
		if err := installKind(kind, list); err != nil {
			return err
		}
	}
	return nil
}

func installKind(kind string, list client.ObjectList) error {
	data, err := os.ReadFile(filepath.Join(testenv.Root(), "internal", "node", "provision", "manifests", "etcd.capstan.dev_"+kind+".yaml"))
	if err != nil {
		return err
	}
	crd := &unstructured.Unstructured{}
	if err := yaml.Unmarshal(data, crd); err != nil {
		return err
	}
	if err := env.Client.Create(context.Background(), crd); err != nil {
		return err
	}
	for end := time.Now().Add(expect.Patience); ; time.Sleep(50 * time.Millisecond) {
		if err = env.Client.List(context.Background(), list); err == nil || time.Now().After(end) {
			return err
		}
	}
}

// until makes steps until a condition holds.
func (w *simulation) until(what string, holds func() bool) {
	w.t.Helper()
	expect.True(w.t, what, func() bool {
		w.step()
		return holds()
	})
}

// still makes steps and checks that a condition holds after each of them.
func (w *simulation) still(what string, holds func() bool) {
	w.t.Helper()
	expect.Consistently(w.t, what, func() bool {
		w.step()
		return holds()
	})
}

func (w *simulation) step() {
	w.t.Helper()
	machines, members := machinesOf(w.t, w.cluster), w.members()
	w.most = max(w.most, len(machines))
	for i := range machines {
		m := &machines[i]
		w.made[m.Name] = true
		switch {
		case !m.DeletionTimestamp.IsZero():
			w.remove(m)
		case !w.broken[m.Name]:
			w.boot(m, slices.ContainsFunc(members, func(member etcdv1.EtcdMember) bool { return member.Name == m.Name }))
		}
	}
	w.lookAfterEtcd(members)
}

// boot does one step of the start of a machine. Its member is a learner at first.
func (w *simulation) boot(m *clusterv1.Machine, isMember bool) {
	w.t.Helper()
	if m.Spec.Bootstrap.DataSecretName == nil {
		// Each reconcile would read a missing Secret live, once for each Machine.
		data := &corev1.Secret{ObjectMeta: w.cluster.Meta(m.Name), Type: clusterv1.ClusterSecretType}
		if err := env.Client.Create(context.Background(), data); err != nil && !apierrors.IsAlreadyExists(err) {
			w.t.Fatal(err)
		}
		w.ignoreGone(env.Client.Patch(context.Background(), m, client.RawPatch("application/merge-patch+json", []byte(fmt.Sprintf(
			`{"spec":{"bootstrap":{"dataSecretName":%q}}}`, m.Name)))))
		return
	}
	if !ptr.Deref(w.cluster.Status.Initialization.ControlPlaneInitialized, false) {
		return
	}
	if !m.Status.NodeRef.IsDefined() {
		before := m.DeepCopy()
		m.Status.NodeRef.Name = m.Name
		m.Status.Addresses = clusterv1.MachineAddresses{{Type: clusterv1.MachineHostName, Address: m.Name}}
		for _, kind := range []string{clusterv1.ReadyCondition, clusterv1.AvailableCondition} {
			conditions.Set(m, metav1.Condition{Type: kind, Status: metav1.ConditionTrue, Reason: kind})
		}
		w.patchConditions(m, before)
	}
	if !w.dead[m.Name] {
		w.renew("apiserver-"+m.Name, map[string]string{apiServerIdentityLabel: apiServerIdentity, corev1.LabelHostname: m.Name})
	}
	if isMember {
		return
	}
	member := &etcdv1.EtcdMember{ObjectMeta: metav1.ObjectMeta{Name: m.Name}, Spec: etcdv1.EtcdMemberSpec{PeerURL: "https://" + m.Name + ":2380", ClientURL: "https://" + m.Name + ":2379"}}
	if err := env.Client.Create(context.Background(), member); err != nil && !apierrors.IsAlreadyExists(err) {
		w.t.Fatal(err)
	}
}

// remove does the next step of core for a deleted Machine.
func (w *simulation) remove(m *clusterv1.Machine) {
	w.t.Helper()
	if w.stubborn[m.Name] {
		return
	}
	if annotations.HasWithPrefix(clusterv1.PreTerminateDeleteHookAnnotationPrefix, m.Annotations) {
		if !model.WaitsForHook(m) {
			before := m.DeepCopy()
			conditions.Set(m, metav1.Condition{Type: clusterv1.MachineDeletingCondition, Status: metav1.ConditionTrue, Reason: clusterv1.MachineDeletingWaitingForPreTerminateHookReason})
			w.patchConditions(m, before)
		}
		return
	}
	if member := w.member(m.Name); member != nil && conditions.IsTrue(member, etcdv1.JoinedCondition) {
		if !w.restoring {
			w.t.Errorf("Machine %s is removed while its member has a vote", m.Name)
		}
		w.set(member, metav1.Condition{Type: etcdv1.JoinedCondition, Status: metav1.ConditionFalse, Reason: etcdv1.NotStartedReason})
	}
	// Core deletes the objects of a Machine before the Machine itself.
	for _, part := range []client.Object{&bootstrapv1.CapstanConfig{}, &infrav1.CapstanMachine{}} {
		part.SetNamespace(m.Namespace)
		part.SetName(m.Name)
		w.ignoreGone(env.Client.Delete(context.Background(), part))
	}
	w.ignoreGone(env.Client.Patch(context.Background(), m, client.RawPatch("application/merge-patch+json", []byte(`{"metadata":{"finalizers":null}}`))))
}

// patchConditions writes the status of a Machine with its resource version, because other writers change the list of conditions
// too. After a conflict, the next step repeats the write.
func (w *simulation) patchConditions(m, before *clusterv1.Machine) {
	w.t.Helper()
	w.ignoreGone(env.Client.Status().Patch(context.Background(), m, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})))
}

// lookAfterEtcd does one step of the agent at etcd's leader: members join, one learner at a time, and leave.
func (w *simulation) lookAfterEtcd(members []etcdv1.EtcdMember) {
	w.t.Helper()
	voting, working, leaving, learners := 0, 0, 0, 0
	for i := range members {
		m := &members[i]
		if conditions.IsTrue(m, etcdv1.JoinedCondition) {
			voting++
			if !w.dead[m.Name] {
				working++
			}
			if m.Spec.Leave && !w.careful[m.Name] {
				leaving++
			}
		}
		if conditions.GetReason(m, etcdv1.JoinedCondition) == etcdv1.LearnerReason {
			learners++
		}
	}
	if leaving > 1 {
		w.t.Errorf("%d members leave at once", leaving)
	}
	if voting > 0 {
		w.fewest = min(w.fewest, working)
	}
	if w.silent || voting > 0 && working < voting/2+1 {
		return // Without a quorum, etcd accepts no change.
	}
	w.renew(etcdv1.CareLeaseName, nil)
	for i := range members {
		m := &members[i]
		joined := conditions.GetReason(m, etcdv1.JoinedCondition)
		healthy := metav1.Condition{Type: etcdv1.HealthyCondition, Status: metav1.ConditionTrue, Reason: etcdv1.HealthyReason}
		if w.dead[m.Name] {
			healthy.Status, healthy.Reason = metav1.ConditionFalse, etcdv1.UnreachableReason
		}
		switch {
		case joined == etcdv1.LeftReason:
			continue
		case m.Spec.Leave && !w.careful[m.Name]:
			w.set(m, metav1.Condition{Type: etcdv1.JoinedCondition, Status: metav1.ConditionFalse, Reason: etcdv1.LeftReason})
			return // One change at a time.
		case voting == 0 || joined == etcdv1.VotingReason || joined == etcdv1.LearnerReason && !w.dead[m.Name]:
			w.set(m, metav1.Condition{Type: etcdv1.JoinedCondition, Status: metav1.ConditionTrue, Reason: etcdv1.VotingReason}, healthy)
			voting++
		case learners == 0 && joined != etcdv1.LearnerReason && !w.dead[m.Name]:
			w.set(m, metav1.Condition{Type: etcdv1.JoinedCondition, Status: metav1.ConditionFalse, Reason: etcdv1.LearnerReason})
			learners++
		}
	}
}

func (w *simulation) set(m *etcdv1.EtcdMember, wanted ...metav1.Condition) {
	w.t.Helper()
	before := m.DeepCopy()
	for _, c := range wanted {
		conditions.Set(m, c)
	}
	if reflect.DeepEqual(before, m) {
		return // The API server takes as long for an empty patch as for a change.
	}
	w.ignoreGone(env.Client.Status().Patch(context.Background(), m, client.MergeFrom(before)))
}

func (w *simulation) renew(name string, labels map[string]string) {
	w.t.Helper()
	if time.Since(w.renewed[name]) < 5*time.Second {
		return
	}
	w.renewed[name] = time.Now()
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceSystem, Name: name}}
	if _, err := controllerutil.CreateOrPatch(context.Background(), env.Client, lease, func() error {
		lease.Labels = map[string]string{"test": ""}
		for k, v := range labels {
			lease.Labels[k] = v
		}
		lease.Spec.RenewTime = ptr.To(metav1.NowMicro())
		return nil
	}); err != nil {
		w.t.Fatal(err)
	}
}

func (w *simulation) members() []etcdv1.EtcdMember {
	w.t.Helper()
	list := &etcdv1.EtcdMemberList{}
	if err := env.Client.List(context.Background(), list); err != nil {
		w.t.Fatal(err)
	}
	return list.Items
}

func (w *simulation) member(name string) *etcdv1.EtcdMember {
	for _, m := range w.members() {
		if m.Name == name {
			return &m
		}
	}
	return nil
}

// voting returns the number of voting members.
func (w *simulation) voting() int {
	w.t.Helper()
	return voting(w.members())
}

func voting(members []etcdv1.EtcdMember) (n int) {
	for _, m := range members {
		if conditions.IsTrue(&m, etcdv1.JoinedCondition) {
			n++
		}
	}
	return n
}

// settled returns a condition: n Machines exist, all of them up to date, n members vote, there are no other members, and the
// status contains these numbers (CP-03, CP-05). The status comes first, because one read of it ends most attempts.
func (w *simulation) settled(cp *controlplanev1.CapstanControlPlane, n int) func() bool {
	return func() bool {
		if w.cluster.Get(cp) != nil || !statusSettled(cp, int32(n)) {
			return false
		}
		machines, members := machinesOf(w.t, w.cluster), w.members()
		if len(machines) != n || voting(members) != n || len(members) != n {
			return false
		}
		for i := range machines {
			if !conditions.IsTrue(&machines[i], controlplanev1.MachineEtcdMemberHealthyCondition) || !conditions.IsTrue(&machines[i], controlplanev1.MachineAPIServerHealthyCondition) {
				return false
			}
		}
		return true
	}
}

func statusSettled(cp *controlplanev1.CapstanControlPlane, n int32) bool {
	for _, counted := range []*int32{cp.Status.Replicas, cp.Status.ReadyReplicas, cp.Status.AvailableReplicas, cp.Status.UpToDateReplicas} {
		if counted == nil || *counted != n {
			return false
		}
	}
	return cp.Status.Version == cp.Spec.Version &&
		testcluster.Has(cp, controlplanev1.EtcdClusterHealthyCondition, metav1.ConditionTrue, "") && testcluster.Has(cp, clusterv1.RollingOutCondition, metav1.ConditionFalse, "")
}

// ignoreGone ignores missing objects and conflicts, because the simulation and the reconciler change the same objects.
func (w *simulation) ignoreGone(err error) {
	w.t.Helper()
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		w.t.Fatal(err)
	}
}
