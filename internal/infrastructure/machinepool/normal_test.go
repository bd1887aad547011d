package machinepool

import (
	"cmp"
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
)

// TestDecide: the steps that follow from the machines of a pool and its desired state.
func TestDecide(t *testing.T) {
	const minReady = time.Minute
	deleted := &metav1.Time{Time: epoch}
	// made returns a machine whose Node has been ready for some time.
	made := func(name string, ready time.Duration, change ...func(*member)) member {
		m := member{capstan: &infrav1.CapstanMachine{}, machine: &clusterv1.Machine{}}
		m.capstan.Name, m.machine.Name = name, name
		m.capstan.Annotations = map[string]string{infrav1.MachineSpecHashAnnotation: "h"}
		m.machine.Status.NodeRef.Name = name
		m.machine.Status.Conditions = []metav1.Condition{{Type: clusterv1.ReadyCondition, Status: metav1.ConditionTrue, LastTransitionTime: metav1.NewTime(epoch.Add(-ready))}}
		for _, f := range change {
			f(&m)
		}
		return m
	}
	a, b := made("a", time.Hour), made("b", time.Hour)
	updated := made("a", time.Hour, func(m *member) {
		m.capstan.Annotations[clusterv1.UpdateInProgressAnnotation] = ""
		m.capstan.Status.Update.Phase, m.capstan.Status.Update.ConfigUpdateID = infrav1.UpdateSucceeded, "u"
		m.capstan.Status.Conditions = []metav1.Condition{{Type: infrav1.UpdatingCondition, Status: metav1.ConditionFalse, Reason: infrav1.UpdateSucceededReason}}
	})
	behind := func(name string) member {
		return made(name, time.Hour, func(m *member) {
			m.capstan.Annotations[infrav1.MachineSpecHashAnnotation] = "former"
			m.capstan.Spec.ProviderID = "capstan://" + name
			m.capstan.Status.Conditions = []metav1.Condition{{Type: infrav1.BootstrapSucceededCondition, Status: metav1.ConditionTrue}}
		})
	}
	replaced := made("a", time.Hour, func(m *member) { m.capstan.Annotations[infrav1.MachineSpecHashAnnotation] = "former" })
	for name, test := range map[string]struct {
		replicas        int
		budget          budget
		members         []member
		orphans         []clusterv1.Machine
		machines        string
		create          int
		remove, updated string
		started         string
		again           time.Duration
		empty           bool
	}{
		"complete":                                    {replicas: 2, members: []member{a, b}, empty: true},
		"one is missing":                              {replicas: 2, members: []member{a}, create: 1},
		"one is too many":                             {replicas: 1, members: []member{a, b}, remove: "a"},
		"ready for too short":                         {replicas: 2, members: []member{a, made("b", 20*time.Second)}, again: 40 * time.Second, empty: true},
		"an update has ended":                         {replicas: 1, members: []member{updated}, updated: "a"},
		"an update can begin":                         {replicas: 2, members: []member{behind("a"), b}, started: "a"},
		"a surplus machine is not updated":            {replicas: 1, members: []member{behind("a"), behind("b")}, remove: "a", started: "b"},
		"a replacement and an update have one budget": {replicas: 2, budget: budget{maxUnavailable: 1}, members: []member{replaced, behind("b")}, remove: "a"},
		"a Machine is left":                           {replicas: 2, members: []member{a, b}, orphans: []clusterv1.Machine{{ObjectMeta: metav1.ObjectMeta{Name: "c"}}}, machines: "c"},
		"a machine is deleted":                        {replicas: 1, members: []member{a, made("b", time.Hour, func(m *member) { m.capstan.DeletionTimestamp = deleted })}, machines: "b"},
		"both are deleted": {replicas: 1, members: []member{a, made("b", time.Hour, func(m *member) {
			m.capstan.DeletionTimestamp, m.machine.DeletionTimestamp = deleted, deleted
		})}, empty: true},
	} {
		want := desired{replicas: test.replicas, hash: "h", minReady: minReady, budget: cmp.Or(test.budget, budget{maxSurge: 1})}
		want.updating = updateInput{policy: infrav1.InPlacePrefer, id: "u"}
		got := decide(observed{members: test.members, orphans: test.orphans, want: want}, epoch)
		var machines []string
		for _, m := range got.machines {
			machines = append(machines, m.Name)
		}
		if strings.Join(machines, " ") != test.machines || len(got.plan.create) != test.create || strings.Join(got.plan.remove, " ") != test.remove ||
			strings.Join(got.updates.finish, " ") != test.updated || strings.Join(got.updates.start, " ") != test.started || got.again != test.again || got.empty() != test.empty || len(got.instances) != len(test.members) {
			t.Errorf("%s: got %+v", name, got)
		}
	}
}

// TestAfterTrouble: a refused step does not delay the steps that only time brings.
func TestAfterTrouble(t *testing.T) {
	kind := infrav1.GroupVersion.WithResource("capstanmachines").GroupResource()
	refused, conflict := apierrors.NewForbidden(kind, "a", errors.New("exceeded quota")), apierrors.NewConflict(kind, "a", errors.New("it was changed"))
	for name, test := range map[string]struct {
		trouble     error
		again, want time.Duration
		fails       bool
	}{
		"refused":                      {trouble: refused, want: updateRetry},
		"refused, and a step is due":   {trouble: errors.Join(refused, refused), again: time.Second, want: time.Second},
		"refused, and one is due late": {trouble: refused, again: time.Hour, want: updateRetry},
		"a conflict":                   {trouble: errors.Join(conflict), again: time.Second, fails: true},
	} {
		if got, err := afterTrouble(t.Context(), test.trouble, test.again); got != test.want || (err != nil) != test.fails {
			t.Errorf("%s: got %s, %v", name, got, err)
		}
	}
	ended, end := context.WithCancel(t.Context())
	end()
	if _, err := afterTrouble(ended, ended.Err(), 0); err == nil {
		t.Error("the end of the manager counts as a refused step")
	}
}

// TestOwnReplicas: a component that begins to manage the replicas finds the number of the MachinePool, also the second time.
func TestOwnReplicas(t *testing.T) {
	for name, test := range map[string]struct {
		managed, copied bool
		has, want       *int32
		wantCopied      bool
		changed         bool
	}{
		"not managed":                    {},
		"not managed, with a manifest's": {has: ptr.To[int32](2), want: ptr.To[int32](2)},
		"begins to be managed":           {managed: true, want: ptr.To[int32](5), wantCopied: true, changed: true},
		"managed, with a manifest's":     {managed: true, has: ptr.To[int32](2), want: ptr.To[int32](2)},
		"managed":                        {managed: true, copied: true, has: ptr.To[int32](2), want: ptr.To[int32](2), wantCopied: true},
		"managed no more":                {copied: true, has: ptr.To[int32](2), changed: true},
	} {
		mp, pool := &clusterv1.MachinePool{}, &infrav1.CapstanMachinePool{}
		mp.Spec.Replicas, pool.Spec.Replicas = ptr.To[int32](5), test.has
		if test.managed {
			mp.Annotations = map[string]string{clusterv1.ReplicasManagedByAnnotation: "somebody"}
		}
		if test.copied {
			pool.Annotations = map[string]string{infrav1.PoolReplicasCopiedAnnotation: ""}
		}
		changed := ownReplicas(mp, pool)
		if _, copied := pool.Annotations[infrav1.PoolReplicasCopiedAnnotation]; changed != test.changed || copied != test.wantCopied || !ptr.Equal(pool.Spec.Replicas, test.want) {
			t.Errorf("%s: changed %v, annotations %v, replicas %v", name, changed, pool.Annotations, pool.Spec.Replicas)
		}
	}
}
