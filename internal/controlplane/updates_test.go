package controlplane

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/controlplane/model"
	"capstan.dev/capstan/internal/nodedrain"
	"capstan.dev/capstan/internal/reconciling"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/internal/testenv/testcluster"
)

// updater simulates the bootstrap provider, the infrastructure provider and the hosts in updates in place. It fails the test if two
// Machines are updated at the same time, or if a host would start an update with objects of different updates.
type updater struct {
	*simulation
	// failing are updates that are rolled back, as machine@version. held are Machines whose updates do not end. crowded are Machines whose
	// hosts have no room for the update.
	failing, held, crowded map[string]bool
	// late: the provider does not confirm yet that it holds an update.
	late bool
	// done lists the updates that succeeded, as machine@version.
	done []string
}

func newUpdater(w *simulation) *updater {
	return &updater{simulation: w, failing: map[string]bool{}, held: map[string]bool{}, crowded: map[string]bool{}}
}

func (u *updater) until(what string, holds func() bool) {
	u.t.Helper()
	expect.True(u.t, what, func() bool {
		u.step()
		return holds()
	})
}

func (u *updater) still(what string, holds func() bool) {
	u.t.Helper()
	expect.Consistently(u.t, what, func() bool {
		u.step()
		return holds()
	})
}

func (u *updater) step() {
	u.t.Helper()
	u.simulation.step()
	machines, busy := machinesOf(u.t, u.cluster), 0
	for i := range machines {
		if _, updates := machines[i].Annotations[clusterv1.UpdateInProgressAnnotation]; updates {
			busy++
			u.update(&machines[i])
		}
	}
	if busy > 1 {
		u.t.Errorf("%d Machines are updated at once", busy)
	}
}

// parts reads the CapstanMachine first: the provider marks it after its CapstanConfig.
func (u *updater) parts(name string) (*bootstrapv1.CapstanConfig, *infrav1.CapstanMachine) {
	u.t.Helper()
	meta := metav1.ObjectMeta{Namespace: u.cluster.Namespace, Name: name}
	config, infra := &bootstrapv1.CapstanConfig{ObjectMeta: meta}, &infrav1.CapstanMachine{ObjectMeta: meta}
	if err := errors.Join(u.cluster.Get(infra), u.cluster.Get(config)); err != nil {
		u.t.Fatal(err)
	}
	return config, infra
}

// update does one step of the update of a Machine: data, then the start, then the result.
func (u *updater) update(m *clusterv1.Machine) {
	u.t.Helper()
	config, infra := u.parts(m.Name)
	marked := func(o client.Object) bool {
		_, ok := o.GetAnnotations()[clusterv1.UpdateInProgressAnnotation]
		return ok
	}
	data := bootstrapv1.ConfigUpdateStatus{
		ID: fmt.Sprintf("%s-%d", m.Spec.Version, config.Generation), DataSecretName: "x", KubernetesVersion: m.Spec.Version, ObservedGeneration: config.Generation,
	}
	if marked(config) && config.Status.Update != data {
		u.cluster.ChangeStatus(config, func() { config.Status.Update = data })
		return
	}
	if !marked(infra) {
		return
	}
	if !marked(config) { // At the end of an update, the CapstanMachine loses its mark first.
		if _, infra := u.parts(m.Name); marked(infra) {
			u.t.Errorf("the CapstanMachine %s is marked without its CapstanConfig", m.Name)
		}
		return
	}
	id := fmt.Sprintf("%s-%d", data.ID, infra.Generation)
	if _, held := m.Annotations[controlplanev1.UpdateHeldAnnotation]; held {
		if !u.late && conditions.GetReason(infra, infrav1.UpdatingCondition) != infrav1.UpdateHeldReason {
			u.cluster.ChangeStatus(infra, func() {
				conditions.Set(infra, metav1.Condition{Type: infrav1.UpdatingCondition, Status: metav1.ConditionTrue, Reason: infrav1.UpdateHeldReason, Message: "held", ObservedGeneration: infra.Generation})
			})
		}
		return
	}
	if u.crowded[m.Name] {
		if !conditions.IsFalse(infra, infrav1.UpdatingCondition) {
			u.cluster.ChangeStatus(infra, func() {
				conditions.Set(infra, metav1.Condition{Type: infrav1.UpdatingCondition, Status: metav1.ConditionFalse, Reason: infrav1.NoCapacityReason, Message: "no memory", ObservedGeneration: infra.Generation})
			})
		}
		return
	}
	phase := infrav1.UpdateRunning
	if infra.Status.Update.ID == id && !u.held[m.Name] {
		phase = infrav1.UpdateSucceeded
		if u.failing[m.Name+"@"+m.Spec.Version] {
			phase = infrav1.UpdateRolledBack
		}
	}
	report := infrav1.MachineUpdateStatus{ID: id, Phase: phase, Step: "kubelet", Message: "as played",
		KubernetesVersion: m.Spec.Version, ConfigUpdateID: data.ID, ObservedGeneration: infra.Generation}
	if infra.Status.Update.ID == id && infra.Status.Update.Phase == phase {
		return
	}
	u.cluster.ChangeStatus(infra, func() { infra.Status.Update = report })
	if phase == infrav1.UpdateSucceeded {
		u.done = append(u.done, m.Name+"@"+m.Spec.Version)
	}
}

// unmarked reports whether no object has an annotation of an update.
func (u *updater) unmarked() bool {
	for _, m := range machinesOf(u.t, u.cluster) {
		config, infra := u.parts(m.Name)
		for _, o := range []client.Object{&m, config, infra} {
			for _, annotation := range []string{clusterv1.UpdateInProgressAnnotation, controlplanev1.UpdateFromAnnotation, controlplanev1.UpdateEncryptionAnnotation} {
				if _, ok := o.GetAnnotations()[annotation]; ok {
					return false
				}
			}
		}
	}
	return true
}

func (u *updater) settled(cp *controlplanev1.CapstanControlPlane, n int) func() bool {
	return func() bool { return u.unmarked() && u.simulation.settled(cp, n)() }
}

func inPlace(policy controlplanev1.InPlacePolicy, replicas int32) func(*controlplanev1.CapstanControlPlane) {
	return func(cp *controlplanev1.CapstanControlPlane) {
		cp.Spec.Replicas = &replicas
		cp.Spec.Rollout.Strategy.InPlace = policy
	}
}

// TestUpdates_CP21: changes of the version, of the config and of the template reach every Machine, one at a time, and no
// Machine is created or deleted. Then a member is unhealthy, and in the end, an update fails.
func TestUpdates_CP21(t *testing.T) {
	w, cp, _ := connected(t, inPlace(controlplanev1.InPlaceOnly, 3))
	u := newUpdater(w)
	u.until("three", u.settled(cp, 3))
	before := namesOfMachines(t, w)
	larger := &infrav1.CapstanMachineTemplate{ObjectMeta: w.cluster.Meta("larger")}
	larger.Spec.Template.Spec.CPUs = 4
	w.cluster.Create(larger)
	for _, c := range []struct {
		what   string
		change func()
		holds  func(*clusterv1.Machine, *bootstrapv1.CapstanConfig, *infrav1.CapstanMachine) bool
	}{
		{"a version", func() { cp.Spec.Version = "v1.36.4" }, func(m *clusterv1.Machine, _ *bootstrapv1.CapstanConfig, _ *infrav1.CapstanMachine) bool {
			return m.Spec.Version == "v1.36.4"
		}},
		{"a config", func() { cp.Spec.Config.Cluster.APIServer.CertSANs = []string{"demo.example.com"} }, func(_ *clusterv1.Machine, c *bootstrapv1.CapstanConfig, _ *infrav1.CapstanMachine) bool {
			return len(c.Spec.Cluster.APIServer.CertSANs) == 1 && c.Spec.Role != ""
		}},
		{"a template", func() { cp.Spec.MachineTemplate.Spec.InfrastructureRef.Name = "larger" }, func(_ *clusterv1.Machine, _ *bootstrapv1.CapstanConfig, i *infrav1.CapstanMachine) bool {
			return i.Spec.CPUs == 4 && i.Annotations[clusterv1.TemplateClonedFromNameAnnotation] == "larger"
		}},
	} {
		t.Run(c.what, func(t *testing.T) {
			u.t, w.t, u.done, w.fewest = t, t, nil, 1000
			w.cluster.Change(cp, c.change)
			u.until("all have it", func() bool { return len(u.done) == 3 && u.settled(cp, 3)() })
			for _, m := range machinesOf(t, w.cluster) {
				if config, infra := u.parts(m.Name); !c.holds(&m, config, infra) {
					t.Errorf("Machine %s does not have the change: %v, %v, %v", m.Name, m.Spec, config.Spec, infra.Spec)
				}
			}
			if !testcluster.Has(cp, controlplanev1.UpdatingCondition, metav1.ConditionFalse, "") {
				t.Errorf("conditions %v", cp.Status.Conditions)
			}
		})
	}
	u.t, w.t = t, t
	if after := namesOfMachines(t, w); !slices.Equal(before, after) || len(w.made) != 3 || w.most != 3 || w.fewest != 3 {
		t.Errorf("Machines %v became %v; %d were made, %d at once, %d members at least", before, after, len(w.made), w.most, w.fewest)
	}
	for _, part := range []struct {
		name string
		run  func(*testing.T, *updater, *controlplanev1.CapstanControlPlane)
	}{{"an unhealthy member", updatesWaitForHealth}, {"a failed update", updateFails}} {
		if !t.Run(part.name, func(t *testing.T) {
			u.t, w.t, u.done = t, t, nil
			part.run(t, u, cp)
		}) {
			t.FailNow()
		}
	}
	u.t, w.t = t, t
}

// heldAlone begins the update of a single control plane Machine, and holds it on its host.
func heldAlone(t *testing.T, policy controlplanev1.InPlacePolicy) (*simulation, *controlplanev1.CapstanControlPlane, *updater, string) {
	t.Helper()
	w, cp, _ := connected(t, inPlace(policy, 1))
	u := newUpdater(w)
	u.until("one", u.settled(cp, 1))
	name := namesOfMachines(t, w)[0]
	u.held[name] = true
	w.cluster.Change(cp, func() { cp.Spec.Version = "v1.36.4" })
	return w, cp, u, name
}

// TestUpdatedAlone: a single control plane Machine is updated without a second one. Meanwhile the status has the former
// version, which keeps workers from being upgraded, and the conditions show the step.
func TestUpdatedAlone(t *testing.T) {
	w, cp, u, name := heldAlone(t, controlplanev1.InPlacePrefer)
	u.until("the update runs", func() bool {
		return w.cluster.Get(cp) == nil && testcluster.Has(cp, controlplanev1.UpdatingCondition, metav1.ConditionTrue, "kubelet: as played. 1 of 1 machines remain") &&
			testcluster.Has(cp, clusterv1.RollingOutCondition, metav1.ConditionTrue, "kubelet: as played")
	})
	if cp.Status.Version != "v1.36.3" || len(cp.Status.Versions) != 1 || cp.Status.Versions[0].Version != "v1.36.3" {
		t.Errorf("version %s, versions %v: expected the former one during the update", cp.Status.Version, cp.Status.Versions)
	}
	if ptr.Deref(cp.Status.UpToDateReplicas, 1) != 0 {
		t.Error("the Machine counts as up to date during its update")
	}
	w.cluster.Change(cp, func() { cp.Spec.Config.Cluster.Scheduler.ExtraArgs = []bootstrapv1.Arg{{Name: "v", Value: "2"}} })
	u.still("another change waits for the end", func() bool {
		config, _ := u.parts(name)
		return len(config.Spec.Cluster.Scheduler.ExtraArgs) == 0
	})
	u.held = map[string]bool{}
	u.until("both changes are there", func() bool {
		config, _ := u.parts(name)
		return len(config.Spec.Cluster.Scheduler.ExtraArgs) == 1 && u.settled(cp, 1)()
	})
	if len(w.made) != 1 {
		t.Errorf("%d Machines were made", len(w.made))
	}
}

// TestUpdateEndsUncertified: an update ends also while a certificate authority is missing.
func TestUpdateEndsUncertified(t *testing.T) {
	w, cp, u, _ := heldAlone(t, controlplanev1.InPlaceOnly)
	u.until("the update runs", func() bool {
		return w.cluster.Get(cp) == nil && testcluster.Has(cp, controlplanev1.UpdatingCondition, metav1.ConditionTrue, "kubelet: as played")
	})
	if err := env.Client.Delete(context.Background(), w.cluster.Secret("demo-etcd")); err != nil {
		t.Fatal(err)
	}
	u.until("the authority is missing", func() bool {
		return w.cluster.Get(cp) == nil && testcluster.Has(cp, controlplanev1.CertificatesAvailableCondition, metav1.ConditionFalse, "demo-etcd was deleted")
	})
	u.held = map[string]bool{}
	u.until("the update is finished", func() bool { return len(u.done) == 1 && u.unmarked() })
}

// TestEncryptionBegins_CP21: no Machine joins before the API server of the only one can read the data of others, also after a failed update
// and a change of the policy and the replicas.
func TestEncryptionBegins_CP21(t *testing.T) {
	w, cp, _ := connected(t, func(cp *controlplanev1.CapstanControlPlane) {
		inPlace(controlplanev1.InPlaceOnly, 1)(cp)
		cp.Spec.Config.Cluster.Encryption.Mode = bootstrapv1.EncryptionNone
	})
	u := newUpdater(w)
	u.until("one", u.settled(cp, 1))
	name := namesOfMachines(t, w)[0]
	u.failing[name+"@v1.36.3"] = true
	w.cluster.Change(cp, func() { cp.Spec.Config.Cluster.Encryption.Mode = bootstrapv1.EncryptionSecretBox })
	u.until("it is rolled back", func() bool {
		return w.cluster.Get(cp) == nil && conditions.GetReason(cp, controlplanev1.UpdatingCondition) == controlplanev1.UpdateFailedReason &&
			testcluster.Has(cp, clusterv1.RollingOutCondition, metav1.ConditionTrue, model.TwoSteps)
	})
	w.cluster.Change(cp, func() {
		cp.Spec.Rollout.Strategy.InPlace, cp.Spec.Replicas = controlplanev1.InPlaceNever, ptr.To[int32](3)
	})
	u.until("the reason is shown", func() bool {
		return w.cluster.Get(cp) == nil && testcluster.Has(cp, clusterv1.RollingOutCondition, metav1.ConditionTrue, "Machine "+name+" has the former encryption setting and cannot read data that the new setting encrypts")
	})
	u.still("no Machine joins", func() bool { return len(machinesOf(t, w.cluster)) == 1 })
	u.failing = map[string]bool{}
	w.cluster.Change(cp, func() {
		cp.Spec.Rollout.Strategy.InPlace = controlplanev1.InPlaceOnly
		cp.Spec.Config.Cluster.Scheduler.ExtraArgs = []bootstrapv1.Arg{{Name: "v", Value: "2"}}
	})
	u.until("two join the updated one", func() bool { return len(w.made) == 3 && u.settled(cp, 3)() })
}

// TestUpdateImpossible_CP21: a change that needs another machine stops with Only, and names the field; with Prefer, machines are
// replaced.
func TestUpdateImpossible_CP21(t *testing.T) {
	w, cp, _ := connected(t, inPlace(controlplanev1.InPlaceOnly, 1))
	u := newUpdater(w)
	u.until("one", u.settled(cp, 1))
	w.cluster.Change(cp, func() {
		cp.Spec.Version = "v1.36.4"
		cp.Spec.Config.PreCommands = []string{"true"}
	})
	u.until("it names the field", func() bool {
		return w.cluster.Get(cp) == nil && testcluster.Has(cp, clusterv1.RollingOutCondition, metav1.ConditionTrue, "spec.config.preCommands: needs another machine") &&
			testcluster.Has(cp, controlplanev1.UpdatingCondition, metav1.ConditionFalse, "spec.config.preCommands") &&
			conditions.GetReason(cp, controlplanev1.UpdatingCondition) == controlplanev1.CannotUpdateReason
	})
	u.still("nothing is done", func() bool {
		return len(w.made) == 1 && u.unmarked() && machinesOf(t, w.cluster)[0].Spec.Version == "v1.36.3"
	})
	w.cluster.Change(cp, func() { cp.Spec.Rollout.Strategy.InPlace = controlplanev1.InPlacePrefer })
	u.until("it is replaced", func() bool { return len(w.made) == 2 && u.settled(cp, 1)() })
}

// TestWaitingUpdateIsHeld_CP21: while an update waits for its host, another Machine is deleted. The host may not begin the update before the
// replacement has joined: the restart of one of two members would cost etcd its quorum.
func TestWaitingUpdateIsHeld_CP21(t *testing.T) {
	w, cp, _ := connected(t, inPlace(controlplanev1.InPlaceOnly, 3))
	u := newUpdater(w)
	u.until("three", u.settled(cp, 3))
	for _, name := range namesOfMachines(t, w) {
		u.crowded[name] = true
	}
	w.cluster.Change(cp, func() { cp.Spec.Version = "v1.36.4" })
	held := func() (waiting, held []string) {
		for _, m := range machinesOf(t, w.cluster) {
			if model.Updates(&m) {
				waiting = append(waiting, m.Name)
			}
			if _, ok := m.Annotations[controlplanev1.UpdateHeldAnnotation]; ok {
				held = append(held, m.Name)
			}
		}
		return waiting, held
	}
	u.until("one waits", func() bool {
		return w.cluster.Get(cp) == nil && testcluster.Has(cp, controlplanev1.UpdatingCondition, metav1.ConditionTrue, "no memory")
	})
	u.still("it may begin", func() bool { _, held := held(); return len(held) == 0 })
	u.late = true
	waiting, _ := held()
	other := slices.DeleteFunc(machinesOf(t, w.cluster), func(m clusterv1.Machine) bool { return m.Name == waiting[0] })[0]
	if err := env.Client.Delete(t.Context(), &other); err != nil {
		t.Fatal(err)
	}
	u.until("it is held before the member leaves", func() bool {
		_, names := held()
		return slices.Equal(names, waiting) && w.member(other.Name) != nil
	})
	u.still("the member waits for the provider", func() bool { return w.member(other.Name) != nil })
	u.late = false
	u.until("it may begin when the replacement has joined", func() bool {
		_, names := held()
		return len(names) == 0 && !slices.Contains(namesOfMachines(t, w), other.Name)
	})
	u.crowded = map[string]bool{}
	u.until("all are updated", u.settled(cp, 3))
}

// updateFails: with Prefer too, a rolled back update stops the others. Another spec repairs it; the former one is not lost.
func updateFails(t *testing.T, u *updater, cp *controlplanev1.CapstanControlPlane) {
	w, former := u.simulation, cp.Spec.Version
	for _, name := range namesOfMachines(t, w) {
		u.failing[name+"@v1.36.5"] = true
	}
	w.cluster.Change(cp, func() {
		cp.Spec.Rollout.Strategy.InPlace = controlplanev1.InPlacePrefer
		cp.Spec.Version = "v1.36.5"
	})
	u.until("it is rolled back", func() bool {
		return w.cluster.Get(cp) == nil && testcluster.Has(cp, controlplanev1.UpdatingCondition, metav1.ConditionTrue, "rolled back: kubelet: as played. 3 of 3 machines remain") &&
			conditions.GetReason(cp, controlplanev1.UpdatingCondition) == controlplanev1.UpdateFailedReason &&
			testcluster.Has(cp, clusterv1.RollingOutCondition, metav1.ConditionTrue, "Nothing else is updated until this is solved")
	})
	u.still("the others wait", func() bool {
		changed := 0
		for _, m := range machinesOf(t, w.cluster) {
			if model.Updates(&m) {
				changed++
			}
		}
		return changed == 1 && len(w.made) == 3
	})
	if cp.Status.Version != former {
		t.Errorf("version %s: the machine runs the former one", cp.Status.Version)
	}
	w.cluster.Change(cp, func() { cp.Spec.Version = "v1.36.6" })
	u.until("all have the third version", func() bool { return len(u.done) == 3 && u.settled(cp, 3)() })
	if len(w.made) != 3 {
		t.Errorf("%d Machines were made", len(w.made))
	}
}

// updatesWaitForHealth: an unhealthy member stops updates.
func updatesWaitForHealth(t *testing.T, u *updater, cp *controlplanev1.CapstanControlPlane) {
	w := u.simulation
	dead := namesOfMachines(t, w)[1]
	w.dead[dead] = true
	u.until("it is seen", func() bool {
		return w.cluster.Get(cp) == nil && testcluster.Has(cp, controlplanev1.EtcdClusterHealthyCondition, metav1.ConditionFalse, dead)
	})
	w.cluster.Change(cp, func() { cp.Spec.Config.Cluster.APIServer.CertSANs = []string{"a.example.com"} })
	u.until("the dead one is updated first, and nothing else", func() bool { return len(u.done) == 1 && strings.HasPrefix(u.done[0], dead+"@") })
	u.still("the others wait", func() bool { return len(u.done) == 1 })
	w.dead = map[string]bool{}
	u.until("all", func() bool { return len(u.done) == 3 && u.settled(cp, 3)() })
}

// TestDrainBeforeUpdate: the Node is cordoned and its pods are evicted before the machine changes, and it is uncordoned
// after that.
func TestDrainBeforeUpdate(t *testing.T) {
	ctx := context.Background()
	w, cp, _ := connected(t, func(cp *controlplanev1.CapstanControlPlane) {
		inPlace(controlplanev1.InPlaceOnly, 1)(cp)
		cp.Spec.Rollout.Strategy.DrainBeforeUpdate = ptr.To(true)
	})
	u := newUpdater(w)
	u.until("one", u.settled(cp, 1))
	name := namesOfMachines(t, w)[0]
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
	pod := func(name string) *corev1.Pod {
		return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: w.cluster.Namespace, Name: name}, Spec: corev1.PodSpec{
			NodeName: node.Name, Containers: []corev1.Container{{Name: "a", Image: "a"}},
			TerminationGracePeriodSeconds: ptr.To[int64](3600),
		}}
	}
	moved, stays := pod("moved"), pod("stays")
	stays.Labels = map[string]string{clusterv1.PodDrainLabel: "skip"}
	for _, o := range []client.Object{node, moved, stays} {
		if err := env.Client.Create(ctx, o); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = env.Client.Delete(ctx, o, client.GracePeriodSeconds(0)) })
	}
	w.cluster.Change(cp, func() { cp.Spec.Config.Cluster.APIServer.CertSANs = []string{"a.example.com"} })
	u.until("it drains", func() bool {
		return w.cluster.Get(cp) == nil && testcluster.Has(cp, clusterv1.RollingOutCondition, metav1.ConditionTrue, "1 pods have to leave the Node "+name)
	})
	u.still("the machine does not change before", func() bool {
		config, _ := u.parts(name)
		return len(config.Spec.Cluster.APIServer.CertSANs) == 0
	})
	if err := env.Client.Get(ctx, client.ObjectKeyFromObject(node), node); err != nil || !node.Spec.Unschedulable {
		t.Errorf("the Node is not cordoned: %v", err)
	}
	if err := env.Client.Get(ctx, client.ObjectKeyFromObject(moved), moved); err != nil || moved.DeletionTimestamp.IsZero() {
		t.Errorf("the pod is not evicted: %v", err)
	}
	if err := env.Client.Delete(ctx, moved, client.GracePeriodSeconds(0)); err != nil {
		t.Fatal(err)
	}
	u.until("it is updated", func() bool { return len(u.done) == 1 && u.settled(cp, 1)() })
	if err := env.Client.Get(ctx, client.ObjectKeyFromObject(node), node); err != nil || node.Spec.Unschedulable || node.Annotations[nodedrain.Annotation] != "" {
		t.Errorf("the Node is still cordoned: %v, %v", node.Annotations, err)
	}
	if err := env.Client.Get(ctx, client.ObjectKeyFromObject(stays), stays); err != nil || !stays.DeletionTimestamp.IsZero() {
		t.Errorf("the pod with the label is gone: %v", err)
	}

	u.failing[name+"@"+cp.Spec.Version] = true
	w.cluster.Change(cp, func() { cp.Spec.Config.Cluster.APIServer.CertSANs = []string{"b.example.com"} })
	u.until("it is cordoned again", func() bool {
		return env.Client.Get(ctx, client.ObjectKeyFromObject(node), node) == nil && node.Spec.Unschedulable
	})
	u.until("the Node of a machine that was rolled back is uncordoned", func() bool {
		err := env.Client.Get(ctx, client.ObjectKeyFromObject(node), node)
		return err == nil && !node.Spec.Unschedulable && w.cluster.Get(cp) == nil && testcluster.Has(cp, controlplanev1.UpdatingCondition, metav1.ConditionTrue, "rolled back")
	})
}

// crashing is a manager that ends at its nth write to a Machine, CapstanConfig or CapstanMachine: before the write or after it.
type crashing struct {
	client.Client
	left  int
	after bool
	wrote []string
}

var errCrashed = errors.New("the manager ends here")

func (c *crashing) Patch(ctx context.Context, obj client.Object, patch client.Patch, opts ...client.PatchOption) error {
	switch obj.(type) {
	case *clusterv1.Machine, *bootstrapv1.CapstanConfig, *infrav1.CapstanMachine:
	default:
		if obj.GetObjectKind().GroupVersionKind().Kind != "CapstanMachine" {
			return c.Client.Patch(ctx, obj, patch, opts...)
		}
	}
	c.left--
	if c.left < 0 || c.left == 0 && !c.after {
		return errCrashed
	}
	c.wrote = append(c.wrote, fmt.Sprintf("%T", obj))
	if err := c.Client.Patch(ctx, obj, patch, opts...); err != nil || c.left > 0 {
		return err
	}
	return errCrashed
}

// TestUpdateInterrupted_CP21: the manager is killed before and after each write of an update, and another one completes it.
func TestUpdateInterrupted_CP21(t *testing.T) {
	w, cp, _ := connected(t, inPlace(controlplanev1.InPlaceOnly, 1))
	u := newUpdater(w)
	u.until("one", u.settled(cp, 1))
	w.cluster.Change(cp, func() { cp.Annotations[clusterv1.PausedAnnotation] = "" })
	w.cluster.Becomes(t, cp, "the manager keeps away", func() bool { return testcluster.Has(cp, clusterv1.PausedCondition, "True", "") })
	name := namesOfMachines(t, w)[0]
	writes := 7 // Machine, CapstanConfig, CapstanMachine; at the end the Machine, the other two, and the Machine again
	for n := 1; n <= writes; n++ {
		for _, after := range []bool{false, true} {
			version := fmt.Sprintf("v1.36.%d", 2+2*n+map[bool]int{true: 1}[after])
			w.cluster.Change(cp, func() {
				cp.Spec.Version = version
				cp.Spec.Config.Cluster.APIServer.CertSANs = []string{version + ".example.com"}
			})
			manager := &crashing{Client: &unpaused{env.Client}, left: n, after: after}
			err := u.run(cp, manager, func() bool { return manager.left <= 0 })
			if !errors.Is(err, errCrashed) {
				t.Fatalf("write %d: %v, wrote %v", n, err, manager.wrote)
			}
			next := &crashing{Client: &unpaused{env.Client}, left: 1000}
			if err := u.run(cp, next, func() bool {
				return u.unmarked() && machinesOf(t, w.cluster)[0].Spec.Version == version && slices.Contains(u.done, name+"@"+version)
			}); err != nil {
				t.Fatalf("after a crash at write %d (after it: %v): %v", n, after, err)
			}
			if len(manager.wrote)+len(next.wrote) != writes {
				t.Errorf("after a crash at write %d (after it: %v), writes are repeated: %v, then %v", n, after, manager.wrote, next.wrote)
			}
			if config, _ := u.parts(name); config.Spec.Cluster.APIServer.CertSANs[0] != version+".example.com" {
				t.Errorf("after a crash at write %d the config has %v", n, config.Spec.Cluster.APIServer.CertSANs)
			}
		}
	}
	if len(w.made) != 1 || len(u.done) != 2*writes {
		t.Errorf("%d Machines were made, updates %v", len(w.made), u.done)
	}
}

// TestUpdateEndsWithConnection: without a connection, the Node of an updated Machine cannot be uncordoned, so the update does not end.
func TestUpdateEndsWithConnection(t *testing.T) {
	m := &clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{Name: "a"}}
	m.Status.NodeRef.Name = "a"
	r := &updates{clients: &clients{Client: struct{ client.Client }{}}} // Each write panics.
	out, err := r.finish(context.Background(), &scope{}, &model.Instance{Machine: m}, &bootstrapv1.CapstanConfig{}, &unstructured.Unstructured{})
	if err != nil || out.requeueAfter == 0 || !strings.Contains(out.blocked, "no connection") {
		t.Errorf("%+v, %v", out, err)
	}
}

// run reconciles with a manager that has just started, until a condition holds or the manager ends.
func (u *updater) run(cp *controlplanev1.CapstanControlPlane, manager client.Client, holds func() bool) (err error) {
	u.t.Helper()
	workload := &directClusterCache{Client: env.Client}
	r := newReconciler(manager, nil, reconciling.Options{LiveClient: &unpaused{env.Client}, SecretCachingClient: env.Client, ClusterCache: workload})
	expect.True(u.t, "the manager comes to an end", func() bool {
		u.step()
		(&staleControlPlane{simulation: u.simulation}).beat()
		if _, err = r.Reconcile(context.Background(), ctrl.Request{NamespacedName: client.ObjectKeyFromObject(cp)}); errors.Is(err, errCrashed) {
			return true
		}
		return err == nil && holds()
	})
	return err
}
