package model

import (
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/inplace"
)

// TestPlanUpdates (CP-21): the outdated Machines that are updated in place, those that are replaced, and the causes that stop both.
func TestPlanUpdates(t *testing.T) { //nolint:funlen // one line for each case
	const never, prefer, only = controlplanev1.InPlaceNever, controlplanev1.InPlacePrefer, controlplanev1.InPlaceOnly
	for _, c := range []struct {
		what     string
		policy   controlplanev1.InPlacePolicy
		replicas int
		held     string
		machines string
		want     string
		why      string
	}{
		{what: "no policy", policy: "", replicas: 3, machines: "a:vW b:vW c:vW", want: "create 1"},
		{what: "never", policy: never, replicas: 3, machines: "a:vW b:vW c:vW", want: "create 1"},
		{what: "prefer", policy: prefer, replicas: 3, machines: "a:vW b:vW c:vW", want: "update a"},
		{what: "only", policy: only, replicas: 3, machines: "a:vW b:vW c:vW", want: "update a"},
		{what: "one machine needs no second one", policy: prefer, replicas: 1, machines: "a:vW", want: "update a"},
		{what: "up to date", policy: only, replicas: 3, machines: "a:v b:v c:v", want: "nothing"},
		{what: "the next one", policy: only, replicas: 3, machines: "a:v b:vW c:vW", want: "update b"},
		{what: "the unhealthy one first", policy: prefer, replicas: 3, machines: "a:vW b:uW c:vW", want: "update b"},
		{what: "one that is dead for long is not replaced", policy: only, replicas: 3, machines: "a:vW b:sW c:vW", want: "update b"},

		{what: "prefer, another machine needed", policy: prefer, replicas: 3, machines: "a:vN b:vN c:vN", want: "create 1"},
		{what: "prefer, the replacement goes on", policy: prefer, replicas: 3, machines: "a:vN b:vN c:vN d:v", want: "remove a"},
		{what: "prefer, first what can be updated", policy: prefer, replicas: 3, machines: "a:vN b:vW c:vW", want: "update b"},
		{what: "prefer, then the rest", policy: prefer, replicas: 3, machines: "a:vN b:v c:v", want: "create 1"},
		{what: "only, another machine needed", policy: only, replicas: 3, machines: "a:vN b:vN c:vN", want: "wait", why: "spec.config.preCommands: needs another machine, because it is so"},
		{what: "only, one of the changes needs another machine", policy: only, replicas: 1, machines: "a:vWN", want: "wait", why: "spec.config.preCommands"},
		{what: "only, one Machine cannot: none begins", policy: only, replicas: 3, machines: "a:vW b:vW c:vN", want: "wait", why: "Machine c cannot be updated in place"},

		{what: "another one is unhealthy", policy: only, replicas: 3, machines: "a:vW b:v c:u", want: "wait", why: "c is not healthy"},
		{what: "another one's API server is down", policy: only, replicas: 3, machines: "a:vW b:v c:va", want: "wait", why: "API server of Machine c"},
		{what: "another one is joining", policy: only, replicas: 3, machines: "a:vW b:v c:l", want: "wait", why: "c has not joined"},
		{what: "another one is not known", policy: only, replicas: 3, machines: "a:vW b:v c:?", want: "wait", why: "not healthy"},
		{what: "another one is being deleted", policy: only, replicas: 3, machines: "a:vW b:vW c:vd", want: "wait", why: "c is being deleted"},
		{what: "the updated one has to be available first", policy: only, replicas: 3, machines: "a:vr b:vWR c:vWR", want: "wait", why: "a has to be Ready for 10 seconds"},
		{what: "the updated one is available", policy: only, replicas: 3, machines: "a:vR b:vWR c:vWR", want: "update b"},
		{what: "a single unhealthy one", policy: only, replicas: 1, machines: "a:uW", want: "wait", why: "a is not healthy"},
		{what: "a single one without an API server", policy: only, replicas: 1, machines: "a:vaW", want: "wait", why: "API server of Machine a"},
		{what: "the backup first", policy: only, replicas: 3, held: "waiting for a backup", machines: "a:vW b:vW c:vW", want: "wait", why: "waiting for a backup"},
		{what: "missing ones first", policy: only, replicas: 3, held: "waiting for a backup", machines: "a:vW b:vW", want: "create 1"},
		{what: "too many go first, and of them those that find no place", policy: prefer, replicas: 3, machines: "a:vW b:vW c:vW d:- e:-", want: "remove d"},
		{what: "too many go first", policy: only, replicas: 1, machines: "a:vW b:vW c:vW", want: "remove a"},

		{what: "recorded: the writes follow", policy: only, replicas: 3, machines: "a:vWM b:vW c:vW", want: "update a"},
		{what: "recorded, and another one is unhealthy since", policy: only, replicas: 3, machines: "a:vWM b:vW c:u", want: "wait", why: "c is not healthy"},
		{what: "recorded, and its member restarts", policy: only, replicas: 3, machines: "a:nWM b:vW c:vW", want: "update a"},
		{what: "written", policy: only, replicas: 3, machines: "a:vP b:vW c:vW", want: "wait", why: "a: The update in place is running"},
		{what: "running", policy: only, replicas: 3, machines: "a:vU b:vW c:vW", want: "wait", why: "kubelet: busy"},
		{what: "running, its member is down", policy: only, replicas: 3, machines: "a:nU b:vW c:vW", want: "wait", why: "kubelet: busy"},
		{what: "running, and the policy changes", policy: never, replicas: 3, machines: "a:vU b:vW c:vW", want: "wait", why: "kubelet: busy"},
		{what: "running, and the spec changes", policy: only, replicas: 3, machines: "a:vWU b:vW c:vW", want: "wait", why: "kubelet: busy"},
		{what: "running, one is missing", policy: only, replicas: 3, machines: "a:vU b:vW", want: "wait", why: "kubelet: busy"},
		{what: "done", policy: only, replicas: 3, machines: "a:vD b:vW c:vW", want: "update a"},
		{what: "done, and the policy has changed", policy: never, replicas: 3, machines: "a:vD b:vW c:vW", want: "update a"},
		{what: "done, and another one is being deleted", policy: only, replicas: 3, machines: "a:vD b:vd c:vW", want: "update a"},
		{what: "done, and one is missing", policy: only, replicas: 3, machines: "a:vD b:vW", want: "update a"},
		{what: "done, and another one is to be removed", policy: only, replicas: 3, machines: "a:vD b:v c:x", want: "update a"},
		{what: "done, and it is being deleted itself", policy: only, replicas: 3, machines: "a:vdD b:v c:vW", want: "wait", why: "a is being deleted"},
		{what: "done, and the new spec needs a machine", policy: only, replicas: 3, machines: "a:vND b:vN c:vN", want: "update a"},
		{what: "running, and another one is being deleted", policy: only, replicas: 3, machines: "a:vU b:vd c:vW", want: "wait", why: "b is being deleted"},
		{what: "running, and there are too many", policy: only, replicas: 1, machines: "a:vU b:vW c:vW", want: "wait", why: "kubelet: busy"},
		{what: "done, and there are too many", policy: only, replicas: 1, machines: "a:vD b:vW c:vW", want: "update a"},
		{what: "failed: the others stop", policy: prefer, replicas: 3, machines: "a:vF b:vW c:vW", want: "wait", why: "The update in place failed: kubelet: busy. Nothing else is updated until this is solved"},
		{what: "rolled back: the others stop", policy: only, replicas: 3, machines: "a:vB b:vW c:vW", want: "wait", why: "rolled back: kubelet: busy"},
		{what: "failed, and the user wants replacements", policy: never, replicas: 3, machines: "a:uF b:vW c:vW", want: "wait", why: "a is not healthy"},
		{what: "rolled back, and the user wants replacements", policy: never, replicas: 3, machines: "a:vB b:vW c:vW", want: "create 1"},

		{what: "rolled back, one is missing", policy: only, replicas: 3, machines: "a:vB b:vW", want: "create 1"},
		{what: "rolled back, one is missing, and the spec changes", policy: only, replicas: 3, machines: "a:vWB b:vW", want: "create 1"},
		{what: "rolled back, one is missing, and the spec needs a machine", policy: only, replicas: 3, machines: "a:vNB b:vN", want: "create 1"},
		{what: "rolled back, one is being deleted", policy: only, replicas: 3, machines: "a:vB b:vd c:vW", want: "wait", why: "b is being deleted"},
		{what: "failed, one is missing", policy: prefer, replicas: 3, machines: "a:vF b:vW", want: "create 1"},
		{what: "failed, one is missing, and etcd takes no member", policy: prefer, replicas: 3, machines: "a:uF b:vW", want: "wait", why: "a"},
		{what: "no capacity, one is missing", policy: only, replicas: 3, machines: "a:vC b:vW", want: "create 1"},
		{what: "recorded, one is missing", policy: only, replicas: 3, machines: "a:vWM b:vW", want: "create 1"},
		{what: "the spec needs a machine, one is missing", policy: only, replicas: 3, machines: "a:vN b:vN", want: "create 1"},
		{what: "rolled back, scaled up", policy: only, replicas: 5, machines: "a:vB b:vW c:vW", want: "create 2"},
		{what: "rolled back, scaled down", policy: only, replicas: 1, machines: "a:vB b:v c:v", want: "remove a"},
		{what: "no capacity, scaled down", policy: prefer, replicas: 1, machines: "a:v b:vC c:v", want: "remove b"},
		{what: "the spec needs a machine, scaled down", policy: only, replicas: 1, machines: "a:v b:vN c:v", want: "remove b"},
		{what: "its host is lost", policy: only, replicas: 3, machines: "a:sUL b:vW c:vW", want: "wait", why: "a: The update in place is interrupted"},
		{what: "its host is lost, and the spec changes", policy: only, replicas: 3, machines: "a:sWUL b:vW c:vW", want: "wait", why: "interrupted"},
		{what: "its host is lost, and the user wants replacements", policy: never, replicas: 3, machines: "a:sUL b:vW c:vW", want: "remove a"},
		{what: "another encryption: one machine is updated", policy: only, replicas: 1, machines: "a:vWE", want: "update a"},
		{what: "another encryption: the update comes before others", policy: only, replicas: 3, machines: "a:vWE", want: "update a"},
		{what: "another encryption: recorded", policy: only, replicas: 3, machines: "a:vWME", want: "update a"},
		{what: "another encryption: failed", policy: only, replicas: 1, machines: "a:vFE", want: "wait", why: "or change the encryption in two steps"},
		{what: "another encryption: failed, scaled up", policy: only, replicas: 3, machines: "a:vFE", want: "wait", why: "or change the encryption in two steps"},
		{what: "another encryption: failed, and the user wants a replacement", policy: never, replicas: 1, machines: "a:vBE", want: "wait", why: "former encryption setting"},
		{what: "another encryption: unhealthy, and the policy changes", policy: prefer, replicas: 1, machines: "a:uWNE", want: "wait", why: "former encryption setting"},
		{what: "another encryption: none is replaced", policy: never, replicas: 3, machines: "a:vWE b:vWE c:vWE", want: "wait", why: "former encryption setting"},
		{what: "another encryption: one of three is not updated", policy: only, replicas: 3, machines: "a:vWE b:vWE c:vWE", want: "wait", why: "former encryption setting"},
		{what: "another encryption: one of three is missing", policy: never, replicas: 3, machines: "a:vWE b:vWE", want: "wait", why: "former encryption setting"},
		{what: "another encryption: too many go", policy: never, replicas: 1, machines: "a:vWE b:vWE c:vWE", want: "remove a"},
		{what: "another encryption: deleted by hand", policy: only, replicas: 1, machines: "a:vdE", want: "create 1"},
		{what: "another encryption: a rollout of an earlier build ends", policy: never, replicas: 3, machines: "a:vWE b:vWE c:v", want: "create 1"},
		{what: "the new one joins before anything is updated", policy: only, replicas: 3, machines: "a:vWM b:vW c:l", want: "wait", why: "c has not joined"},
	} {
		t.Run(c.what, func(t *testing.T) {
			got := PlanMachines(build(c.machines), Target{Replicas: c.replicas, maxSurge: 1, initialized: true, inPlace: c.policy, held: c.held})
			if got.String() != c.want || !strings.Contains(got.Why, c.why) {
				t.Errorf("got %s (%s), want %s (%s)", got, got.Why, c.want, c.why)
			}
		})
	}
}

// TestPlanChangedUpdates: the spec changes after a failed update.
func TestPlanChangedUpdates(t *testing.T) {
	for name, test := range map[string]struct {
		machines, want string
		policy         controlplanev1.InPlacePolicy
	}{
		"another spec after a failure":                             {"a:vWB b:vW c:vW", "update a", controlplanev1.InPlaceOnly},
		"another spec after a failure of a single machine":         {"a:aW", "update a", controlplanev1.InPlaceOnly},
		"another spec that needs a machine, only":                  {"a:vNB b:vW c:vW", "wait", controlplanev1.InPlaceOnly},
		"another spec that needs a machine, after a failed update": {"a:vNB b:vN c:vN", "create 1", controlplanev1.InPlacePrefer},
	} {
		f, replicas := build(test.machines), 3
		if len(f.Instances) == 1 {
			replicas = 1
			f.Instances[0].Update = &Update{begun: true, Phase: infrav1.UpdateFailed}
		}
		if u := f.Instances[0].Update; u != nil {
			u.Written = false // for the new spec
		}
		if got := PlanMachines(f, Target{Replicas: replicas, maxSurge: 1, initialized: true, inPlace: test.policy}); got.String() != test.want {
			t.Errorf("%s: %s (%s), expected %s", name, got, got.Why, test.want)
		}
	}
}

// TestHeldUpdates: a recorded update does not take a new version before the hold ends. One whose Machine has the version already continues.
func TestHeldUpdates(t *testing.T) {
	for name, test := range map[string]struct{ machines, version, want string }{
		"failed":                               {"a:vFW b:vW c:vW", "v1", "wait"},
		"rolled back":                          {"a:vBW b:vW c:vW", "v1", "wait"},
		"it waits for capacity":                {"a:vCW b:vW c:vW", "v1", "wait"},
		"recorded, and not written":            {"a:vMW b:vW c:vW", "v1", "wait"},
		"a single machine":                     {"a:vBW", "v1", "wait"},
		"recorded with the version":            {"a:vMW b:vW c:vW", "v2", "update a"},
		"failed with the version":              {"a:vFW b:vW c:vW", "v2", "update a"},
		"failed, and a missing machine joins":  {"a:vFW b:vW", "v1", "create 1"},
		"failed, and the spec needs a machine": {"a:vFN b:vN c:vN", "v1", "wait"},
	} {
		f, replicas := build(test.machines), 3
		if len(f.Instances) == 1 {
			replicas = 1
		}
		f.Instances[0].Machine.Spec.Version = test.version
		f.Instances[0].Update.Written = false // for the new spec
		w := Target{Replicas: replicas, maxSurge: 1, initialized: true, inPlace: controlplanev1.InPlacePrefer, version: "v2", held: "no backup"}
		if got := PlanMachines(f, w); got.String() != test.want || test.want == "wait" && got.Why != w.held {
			t.Errorf("%s: %s (%s), expected %s", name, got, got.Why, test.want)
		}
	}
}

// TestHolds: an update that waits begins only while the others have a quorum without its Machine. One that is about to begin is not held: other
// members stay until its end.
func TestHolds(t *testing.T) {
	for machines, want := range map[string]bool{
		"a:vC b:v c:v": false, "a:vC b:v": true, "a:vC b:v c:vd": true, "a:vC b:v c:u": true, "a:vC b:v c:l": true, "a:vC b:v c:-": true,
		"a:uC b:v c:v": false, "a:vC b:v c:v d:v": false, "a:vC b:v c:s d:v": true,
		"a:vC": false, "a:vC b:vd": true,
		"a:vP b:v c:vd": false, "a:vM b:v c:vd": false, "a:vU b:v c:vd": false, "a:vF b:v c:vd": false, "a:vD b:v c:vd": false, "a:v b:v c:vd": false,
	} {
		f := build(machines)
		if got := f.Holds(&f.Instances[0]); got != want {
			t.Errorf("%s: %v", machines, got)
		}
		f.Stacked = false
		if f.Holds(&f.Instances[0]) {
			t.Errorf("%s, external etcd: held", machines)
		}
	}
}

// TestUpdatesDeferRemediation (CP-10): a MachineHealthCheck does not delete a Machine in the middle of its update. An update that nothing
// ends delays no repair.
func TestUpdatesDeferRemediation(t *testing.T) {
	for machines, acts := range map[string]bool{
		"a:vfU b:v c:v": false, "a:vfM b:v c:v": true, "a:vfP b:v c:v": false, "a:vfB b:v c:v": true, "a:vfF b:v c:v": true, "a:vf b:v c:v": true,
		"a:sfUL b:v c:v": true, "a:sfPL b:v c:v": true, "a:sfML b:v c:v": true, "a:vfC b:v c:v": true,
	} {
		if p := planRemediation(build(machines), controlplanev1.RemediationSpec{}, true, nil, time.Unix(5000, 0)); p.Act != acts || p.Machine == nil {
			t.Errorf("%s: remediates %v (%s), expected %v", machines, p.Act, p.Message, acts)
		}
	}
}

// updating returns the objects of a Machine whose update from v1.35.4 to v1.36.3 the host has reported.
func updating(phase infrav1.UpdatePhase) (*clusterv1.Machine, *bootstrapv1.CapstanConfig, *infrav1.CapstanMachine) {
	marks := map[string]string{clusterv1.UpdateInProgressAnnotation: ""}
	m := &clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{Name: "a", Annotations: map[string]string{
		clusterv1.UpdateInProgressAnnotation: "", controlplanev1.UpdateFromAnnotation: "v1.35.4",
	}}, Spec: clusterv1.MachineSpec{Version: "v1.36.3"}}
	config := &bootstrapv1.CapstanConfig{ObjectMeta: metav1.ObjectMeta{Generation: 2, Annotations: marks}}
	config.Status.Update = bootstrapv1.ConfigUpdateStatus{ID: "x", ObservedGeneration: 2, KubernetesVersion: "v1.36.3"}
	infra := &infrav1.CapstanMachine{ObjectMeta: metav1.ObjectMeta{Generation: 3, Annotations: marks}}
	infra.Status.Update = infrav1.MachineUpdateStatus{Phase: phase, ConfigUpdateID: "x", KubernetesVersion: "v1.36.3", ObservedGeneration: 3}
	return m, config, infra
}

// TestReports: a report of a host counts only for the objects as they are now.
func TestReports(t *testing.T) {
	type (
		machine = *clusterv1.Machine
		cfg     = *bootstrapv1.CapstanConfig
		infra   = *infrav1.CapstanMachine
	)
	for name, test := range map[string]struct {
		change func(machine, cfg, infra)
		known  bool
	}{
		"as reported":                         {func(machine, cfg, infra) {}, true},
		"another version":                     {func(m machine, _ cfg, _ infra) { m.Spec.Version = "v1.36.4" }, false},
		"another config":                      {func(_ machine, c cfg, _ infra) { c.Generation++ }, false},
		"data of another config":              {func(_ machine, c cfg, _ infra) { c.Status.Update.ID = "y" }, false},
		"data of another version":             {func(_ machine, c cfg, _ infra) { c.Status.Update.KubernetesVersion = "v1.35.4" }, false},
		"no data":                             {func(_ machine, c cfg, i infra) { c.Status.Update.ID, i.Status.Update.ConfigUpdateID = "", "" }, false},
		"other limits":                        {func(_ machine, _ cfg, i infra) { i.Generation++ }, false},
		"a report about another version":      {func(_ machine, _ cfg, i infra) { i.Status.Update.KubernetesVersion = "v1.35.4" }, false},
		"the config is not marked":            {func(_ machine, c cfg, _ infra) { c.Annotations = nil }, false},
		"the infrastructure machine is not":   {func(_ machine, _ cfg, i infra) { i.Annotations = nil }, false},
		"the Machine has lost its annotation": {func(m machine, _ cfg, _ infra) { delete(m.Annotations, clusterv1.UpdateInProgressAnnotation) }, false},
	} {
		m, config, i := updating(infrav1.UpdateSucceeded)
		test.change(m, config, i)
		if u := NewUpdate(m, config, i, nil); (u.Phase == infrav1.UpdateSucceeded) != test.known {
			t.Errorf("%s: phase %q, expected a known one: %v", name, u.Phase, test.known)
		}
	}
	m, config, i := updating("")
	m.Annotations[controlplanev1.UpdateSucceededAnnotation], config.Annotations, i.Annotations = "", nil, nil
	if u := NewUpdate(m, config, i, []inplace.Change{{Path: "a"}}); u.Phase != infrav1.UpdateSucceeded {
		t.Errorf("a recorded success is forgotten: %+v", u)
	}
	m, config, i = updating(infrav1.UpdateRunning)
	if u := NewUpdate(m, config, i, []inplace.Change{{Path: "a"}}); u.Written {
		t.Error("an update with a difference is written")
	}
	if u := NewUpdate(m, config, i, nil); !u.Written || !u.running() {
		t.Errorf("%+v", u)
	}
	delete(m.Annotations, controlplanev1.UpdateFromAnnotation)
	if u := NewUpdate(m, config, i, nil); u != nil {
		t.Error("an update without a record")
	}
}

// TestUnattended: an update has no end if its host does not answer, or has lost the machine.
func TestUnattended(t *testing.T) {
	missing := func(reason string) *clusterv1.Machine {
		m, _, _ := updating(infrav1.UpdateRunning)
		m.Status.Conditions = []metav1.Condition{{Type: clusterv1.MachineInfrastructureReadyCondition, Status: metav1.ConditionFalse, Reason: reason}}
		return m
	}
	for reason, want := range map[string]bool{
		clusterv1.MachineInfrastructureDeletedReason: true, clusterv1.MachineInfrastructureDoesNotExistReason: true, clusterv1.InternalErrorReason: false, "": false,
	} {
		if u := NewUpdate(missing(reason), &bootstrapv1.CapstanConfig{}, nil, nil); u.unattended != want {
			t.Errorf("without a CapstanMachine, %q: %v", reason, u.unattended)
		}
	}
	if u := NewUpdate(missing(""), nil, &infrav1.CapstanMachine{}, nil); !u.unattended {
		t.Error("without a CapstanConfig")
	}
	for name, test := range map[string]struct {
		status metav1.ConditionStatus
		reason string
		want   bool
	}{
		"runs":                {metav1.ConditionTrue, infrav1.MachineRunningReason, false},
		"restarts":            {metav1.ConditionFalse, infrav1.MachineRestartingReason, false},
		"failed":              {metav1.ConditionFalse, infrav1.MachineFailedReason, false},
		"its host is away":    {metav1.ConditionUnknown, infrav1.MachineHostUnreachableReason, true},
		"its host is another": {metav1.ConditionUnknown, infrav1.MachineHostMismatchReason, true},
		"its disk is lost":    {metav1.ConditionFalse, infrav1.MachineLostReason, true},
	} {
		m, config, infra := updating(infrav1.UpdateRunning)
		infra.Status.Conditions = []metav1.Condition{{Type: infrav1.MachineRunningCondition, Status: test.status, Reason: test.reason}}
		if u := NewUpdate(m, config, infra, nil); u.unattended != test.want {
			t.Errorf("%s: %v", name, u.unattended)
		}
	}
}

// TestWithoutData: an update whose data cannot be made restarts nothing, so a deletion and a repair do not wait for it: the spec may only be
// corrected after the deletion.
func TestWithoutData(t *testing.T) {
	type cfg = *bootstrapv1.CapstanConfig
	noData := func(c cfg) { c.Status.Update = bootstrapv1.ConfigUpdateStatus{} }
	for name, test := range map[string]struct {
		change  func(cfg)
		unknown bool // nobody has tried to make the data
		phase   infrav1.UpdatePhase
		waits   bool
	}{
		"the data cannot be made":                       {change: noData},
		"only data of a former spec":                    {change: func(c cfg) { c.Status.Update.ObservedGeneration-- }},
		"only data of a former version":                 {change: func(c cfg) { c.Status.Update.KubernetesVersion = "v1.35.4" }},
		"the data is not made yet":                      {change: noData, unknown: true, waits: true},
		"the spec was corrected a moment ago":           {change: func(c cfg) { noData(c); c.Generation++ }, waits: true},
		"the data was made, and cannot be made again":   {change: func(cfg) {}, waits: true},
		"the host has begun, and it cannot be made now": {change: func(cfg) {}, phase: infrav1.UpdateRunning, waits: true},
	} {
		m, config, infra := updating(test.phase)
		if !test.unknown {
			config.Status.Conditions = []metav1.Condition{{Type: bootstrapv1.UpdateDataAvailableCondition, Status: metav1.ConditionFalse, ObservedGeneration: 2, Message: "the Secret x does not exist"}}
		}
		test.change(config)
		f := build("a:vf b:v c:v")
		f.Instances[0].Update = NewUpdate(m, config, infra, nil)
		if why := f.CannotRemove("b"); (why != "") != test.waits {
			t.Errorf("%s: the removal of another member: %q", name, why)
		}
		if p := planRemediation(f, controlplanev1.RemediationSpec{}, true, nil, time.Unix(5000, 0)); p.Act == test.waits {
			t.Errorf("%s: remediates %v (%s)", name, p.Act, p.Message)
		}
		if u := f.Instances[0].Update; !test.waits && u.String() != "The update in place waits: the Secret x does not exist" {
			t.Errorf("%s: %s", name, u)
		}
	}
}

// TestUnconfirmedHold (CP-21): while the provider has not confirmed a hold, the host can begin, and no other member leaves.
func TestUnconfirmedHold(t *testing.T) {
	for name, test := range map[string]struct {
		reason       string
		held, paused bool
		waits        bool
	}{
		"not held":               {reason: infrav1.NoCapacityReason},
		"held, no capacity":      {reason: infrav1.NoCapacityReason, held: true, waits: true},
		"held, refused":          {reason: infrav1.UpdateRefusedReason, held: true, waits: true},
		"held, a call failed":    {reason: infrav1.WaitingForUpdateReason, held: true, waits: true},
		"confirmed":              {reason: infrav1.UpdateHeldReason, held: true},
		"the provider is paused": {reason: infrav1.NoCapacityReason, held: true, paused: true},
	} {
		m, config, infra := updating("")
		infra.Status.Conditions = []metav1.Condition{{Type: infrav1.UpdatingCondition, Reason: test.reason, ObservedGeneration: infra.Generation, Message: "no"}}
		if test.held {
			m.Annotations[controlplanev1.UpdateHeldAnnotation] = ""
		}
		if test.paused {
			infra.Annotations[clusterv1.PausedAnnotation] = ""
		}
		f := build("a:vf b:v c:v")
		f.Instances[0].Update = NewUpdate(m, config, infra, nil)
		if why := f.CannotRemove("b"); (why != "") != test.waits {
			t.Errorf("%s: the removal of another member: %q", name, why)
		}
		if !f.Instances[0].Update.waits() {
			t.Errorf("%s: the update does not wait", name)
		}
	}
}

// TestStopped: a Node serves again after its update has failed or was refused. An update that waits for capacity, or whose data is not made
// yet, begins later by itself.
func TestStopped(t *testing.T) {
	type infra = *infrav1.CapstanMachine
	refusal := func(reason string) func(infra) {
		return func(i infra) {
			i.Status.Conditions = []metav1.Condition{{Type: infrav1.UpdatingCondition, Status: metav1.ConditionFalse, Reason: reason, ObservedGeneration: 3, Message: "no"}}
		}
	}
	refused := refusal(infrav1.UpdateRefusedReason)
	for name, test := range map[string]struct {
		phase   infrav1.UpdatePhase
		change  func(infra)
		noData  bool
		stopped bool
	}{
		"not begun":                     {change: func(infra) {}},
		"refused":                       {change: refused, stopped: true},
		"no capacity":                   {change: refusal(infrav1.NoCapacityReason)},
		"a former spec was refused":     {change: func(i infra) { refused(i); i.Generation++ }},
		"a former config was refused":   {change: refused, noData: true},
		"running":                       {phase: infrav1.UpdateRunning, change: func(infra) {}},
		"runs after an earlier refusal": {phase: infrav1.UpdateRunning, change: refused},
		"rolled back":                   {phase: infrav1.UpdateRolledBack, change: func(infra) {}, stopped: true},
	} {
		m, config, i := updating(test.phase)
		test.change(i)
		if test.noData {
			config.Generation++
		}
		if u := NewUpdate(m, config, i, nil); u.Stopped() != test.stopped {
			t.Errorf("%s: %+v, expected stopped: %v", name, u, test.stopped)
		}
	}
	if (*Update)(nil).Stopped() {
		t.Error("no update has stopped")
	}
}

// TestDifferences: the paths that conditions name are those of the control plane.
func TestDifferences(t *testing.T) {
	now := time.Unix(1000000, 0)
	controlPlane := func(change func(*controlplanev1.CapstanControlPlane)) *controlplanev1.CapstanControlPlane {
		out := &controlplanev1.CapstanControlPlane{Spec: controlplanev1.CapstanControlPlaneSpec{Version: "1.36.3"}}
		change(out)
		return out
	}
	same := func(*controlplanev1.CapstanControlPlane) {}
	machine := &clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{CreationTimestamp: metav1.NewTime(now.Add(-time.Hour))}, Spec: clusterv1.MachineSpec{Version: "v1.36.3"}}
	config := &bootstrapv1.CapstanConfig{Spec: bootstrapv1.CapstanConfigSpec{Role: bootstrapv1.RoleInit, Restore: bootstrapv1.RestoreSource{Name: "x"}}}
	for name, test := range map[string]struct {
		controlPlane *controlplanev1.CapstanControlPlane
		parts        Parts
		want         string
	}{
		"none":    {controlPlane(same), Parts{Config: config}, ""},
		"version": {controlPlane(func(c *controlplanev1.CapstanControlPlane) { c.Spec.Version = "v1.36.4" }), Parts{Config: config}, "spec.version Restart"},
		"back":    {controlPlane(func(c *controlplanev1.CapstanControlPlane) { c.Spec.Version = "v1.36.2" }), Parts{Config: config}, "spec.version Replace"},
		"config": {controlPlane(func(c *controlplanev1.CapstanControlPlane) { c.Spec.Config.PreCommands = []string{"a"} }), Parts{Config: config},
			"spec.config.preCommands Replace"},
		"foreign": {controlPlane(same), Parts{Config: config, Foreign: true}, "spec.machineTemplate.spec.infrastructureRef Replace"},
		"template": {controlPlane(same), Parts{Config: config, InfraMachine: &infrav1.CapstanMachine{}, Desired: &infrav1.CapstanMachineSpec{CPUs: 2}},
			"spec.machineTemplate.spec.infrastructureRef: spec.template.spec.cpus Restart"},
		"after": {controlPlane(func(c *controlplanev1.CapstanControlPlane) { c.Spec.Rollout.After = metav1.NewTime(now) }), Parts{Config: config},
			"spec.rollout.after Replace"},
	} {
		var has []string
		for _, c := range Differences(test.controlPlane, machine, test.parts, now) {
			has = append(has, c.Path+" "+string(c.Verdict))
		}
		if strings.Join(has, "; ") != test.want {
			t.Errorf("%s: %q, expected %q", name, has, test.want)
		}
	}
}

// TestVersionsDuringUpdates: workers follow when the API server runs the new version, not when its update begins.
func TestVersionsDuringUpdates(t *testing.T) {
	m, _, _ := updating(infrav1.UpdateRunning)
	if v := Versions(map[string]*clusterv1.Machine{"a": m}); len(v) != 1 || v[0].Version != "v1.35.4" {
		t.Errorf("versions %v, expected the former one", v)
	}
}

func TestUpdatingCondition(t *testing.T) {
	for name, test := range map[string]struct {
		machines, reason, message string
		policy                    controlplanev1.InPlacePolicy
		status                    metav1.ConditionStatus
	}{
		"nothing":                 {"a:v b:v c:v", controlplanev1.NotUpdatingReason, "", controlplanev1.InPlaceOnly, metav1.ConditionFalse},
		"running":                 {"a:vU b:vW c:v", controlplanev1.UpdatingReason, "Machine a: The update in place is running: kubelet: busy. 2 of 3 machines remain", controlplanev1.InPlaceOnly, metav1.ConditionTrue},
		"failed":                  {"a:v b:vB c:vW", controlplanev1.UpdateFailedReason, "rolled back", controlplanev1.InPlacePrefer, metav1.ConditionTrue},
		"impossible":              {"a:vN b:v c:v", controlplanev1.CannotUpdateReason, "spec.config.preCommands", controlplanev1.InPlaceOnly, metav1.ConditionFalse},
		"impossible and replaced": {"a:vN b:v c:v", controlplanev1.NotUpdatingReason, "", controlplanev1.InPlacePrefer, metav1.ConditionFalse},
	} {
		if c := UpdatingCondition(build(test.machines), test.policy); c.Status != test.status || c.Reason != test.reason || !strings.Contains(c.Message, test.message) {
			t.Errorf("%s: %+v, expected %s, %s, %q", name, c, test.status, test.reason, test.message)
		}
	}
}
