package machinepool

import (
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/inplace"
	"capstan.dev/capstan/internal/reconciling"
)

// updatable parses machines like pool: a available, b behind and updatable, n behind and not updatable, l leaving,
// q behind and undecided, e behind and its bootstrap is not reported, p begun, u running, d done, f rolled back, r running a former update; x begun for a former spec; c its Node is
// drained.
func updatable(machines ...string) []instance {
	var out []instance
	for n, m := range machines {
		name, flags, _ := strings.Cut(m, ":")
		has := func(flag string) bool { return strings.Contains(flags, flag) }
		i := instance{name: name, created: epoch.Add(time.Duration(n) * time.Minute), available: has("a"), leaving: has("l"), behind: strings.ContainsAny(flags, "bnqepudfr")}
		i.update = updateState{drained: has("c"), verdict: updatePossible, begun: strings.ContainsAny(flags, "pudfr"), runs: strings.ContainsAny(flags, "ur"), current: !has("x"), text: "kubelet: busy"}
		switch {
		case has("n"):
			i.update.verdict, i.update.why = updateImpossible, "preCommands: needs another machine"
		case has("q"):
			i.update.verdict = updateUndecided
		case has("e"):
			i.update.verdict = updateUnreported
		}
		for flag, phase := range map[string]infrav1.UpdatePhase{"u": infrav1.UpdateRunning, "d": infrav1.UpdateSucceeded, "f": infrav1.UpdateRolledBack} {
			if has(flag) {
				i.update.phase = phase
			}
		}
		out = append(out, i)
	}
	return out
}

func TestPlanUpdates(t *testing.T) {
	const only = infrav1.InPlaceOnly
	for _, tc := range []struct {
		name        string
		replicas    int
		unavailable int
		policy      infrav1.InPlacePolicy
		frozen      bool
		pool        []instance
		start       []string
		finish      []string
		uncordon    []string
		why         string
		waits       string
	}{
		{name: "a drained one waits for a missing one", replicas: 3, policy: only, pool: updatable("a:abc", "b:ab"), uncordon: []string{"a"}},
		{name: "the drained one is next", replicas: 2, policy: only, pool: updatable("a:abc", "b:ab"), start: []string{"a"}},
		{name: "a drained one runs", replicas: 2, policy: only, pool: updatable("a:auc", "b:ab")},
		{name: "a drained one is done", replicas: 2, policy: only, pool: updatable("a:adc", "b:a"), finish: []string{"a"}, uncordon: []string{"a"}},
		{name: "a drained one was rolled back", replicas: 2, policy: only, pool: updatable("a:afc", "b:a"), uncordon: []string{"a"}, why: "machine a in place ended as RolledBack"},
		{name: "a drained one need not change any more", replicas: 2, policy: only, pool: updatable("a:ac", "b:a"), uncordon: []string{"a"}},
		{name: "another one became unavailable", replicas: 2, policy: only, pool: updatable("a:abc", "b:b"), start: []string{"b"}, uncordon: []string{"a"}},
		{name: "a drained one is deleted", replicas: 2, policy: only, pool: updatable("a:alc", "b:a")},
		{name: "up to date", replicas: 2, policy: only, pool: updatable("a:a", "b:a")},
		{name: "not allowed", replicas: 2, policy: infrav1.InPlaceNever, pool: updatable("a:ab", "b:ab")},
		{name: "one at a time by default", replicas: 3, policy: only, pool: updatable("a:ab", "b:ab", "c:ab"), start: []string{"a"}},
		{name: "maxUnavailable at once", replicas: 3, unavailable: 2, policy: only, pool: updatable("a:ab", "b:ab", "c:ab"), start: []string{"a", "b"}},
		{name: "one runs", replicas: 3, policy: only, pool: updatable("a:u", "b:ab", "c:ab")},
		{name: "one runs and is available", replicas: 3, policy: only, pool: updatable("a:au", "b:ab", "c:ab")},
		{name: "one is begun", replicas: 3, policy: only, pool: updatable("a:ap", "b:ab", "c:ab")},
		{name: "one is done", replicas: 3, policy: only, pool: updatable("a:ad", "b:ab", "c:ab"), finish: []string{"a"}, start: []string{"b"}},
		{name: "one is done and not available yet", replicas: 3, policy: only, pool: updatable("a:d", "b:ab", "c:ab"), finish: []string{"a"}},
		{name: "one is done, no longer allowed", replicas: 3, policy: infrav1.InPlaceNever, pool: updatable("a:ad", "b:ab"), finish: []string{"a"}},
		{name: "one is unavailable", replicas: 3, policy: only, pool: updatable("a:a", "b:", "c:ab")},
		{name: "the unavailable one is updated", replicas: 3, policy: only, pool: updatable("a:ab", "b:b", "c:ab"), start: []string{"b"}},
		{name: "many are unavailable", replicas: 3, policy: only, pool: updatable("a:ab", "b:b", "c:b"), start: []string{"b"}},
		{name: "many are unavailable, one runs", replicas: 3, policy: only, pool: updatable("a:ab", "b:u", "c:b")},
		{name: "many are unavailable, maxUnavailable at once", replicas: 4, unavailable: 2, policy: only, pool: updatable("a:ab", "b:b", "c:b", "d:b"), start: []string{"b", "c"}},
		{name: "one is missing", replicas: 3, policy: only, pool: updatable("a:ab", "b:ab")},
		{name: "one is leaving", replicas: 3, policy: only, pool: updatable("a:ab", "b:ab", "c:al")},
		{name: "one was rolled back", replicas: 3, unavailable: 3, policy: only, pool: updatable("a:ab", "b:af", "c:ab"), why: "machine b in place ended as RolledBack: kubelet: busy"},
		{name: "one was rolled back from a former spec", replicas: 3, policy: only, pool: updatable("a:a", "b:abfx", "c:a"), start: []string{"b"}},
		{name: "one runs for a former spec", replicas: 3, policy: only, pool: updatable("a:ab", "b:aux", "c:a")},
		{name: "one runs a former update", replicas: 3, policy: only, pool: updatable("a:ab", "b:anrx", "c:a")},
		{name: "one runs a former update, no longer allowed", replicas: 3, policy: infrav1.InPlaceNever, pool: updatable("a:a", "b:anrx", "c:a")},
		{name: "a drained one runs a former update", replicas: 2, policy: only, pool: updatable("a:arxc", "b:a")},
		{name: "a change needs another machine", replicas: 3, policy: only, pool: updatable("a:ab", "b:an", "c:ab"), why: "machine b cannot be updated in place, and rollingUpdate.inPlace is Only: preCommands"},
		{name: "the CapstanConfig is not known", replicas: 3, policy: only, pool: updatable("a:ab", "b:aq", "c:ab"), waits: "machine b waits until the bootstrap provider has rendered"},
		{name: "a drained one when the CapstanConfig is not known", replicas: 2, policy: only, pool: updatable("a:aqc", "b:a"), uncordon: []string{"a"}, waits: "machine a waits"},
		{name: "a bootstrap is not reported", replicas: 3, policy: only, pool: updatable("a:ab", "b:ae", "c:ab"), start: []string{"a"}, waits: "machine b waits until its host reports"},
		{name: "frozen", replicas: 3, policy: only, frozen: true, pool: updatable("a:ab", "b:ab", "c:ab")},
	} {
		t.Run(tc.name, func(t *testing.T) {
			want := desired{replicas: tc.replicas, budget: budget{maxSurge: 1, maxUnavailable: tc.unavailable}, frozen: tc.frozen, updating: updateInput{policy: tc.policy}}
			got := planUpdates(want, tc.pool)
			if !slices.Equal(got.start, tc.start) || !slices.Equal(got.finish, tc.finish) || !slices.Equal(got.uncordon, tc.uncordon) || !strings.Contains(got.why, tc.why) || (got.why == "") != (tc.why == "") || !strings.Contains(got.waits, tc.waits) || (got.waits == "") != (tc.waits == "") {
				t.Errorf("got %+v, want start %v, finish %v, uncordon %v, why %q, waits %q", got, tc.start, tc.finish, tc.uncordon, tc.why, tc.waits)
			}
		})
	}
}

// aMember is a machine of a pool with version v1.35.4 and bootstrap data "old".
func aMember(change func(*infrav1.CapstanMachine)) member {
	m := &infrav1.CapstanMachine{ObjectMeta: metav1.ObjectMeta{Generation: 4, Annotations: map[string]string{
		infrav1.MachineSpecHashAnnotation: "old", infrav1.MachineVersionAnnotation: "v1.35.4", infrav1.MachineBootstrapSecretAnnotation: "old",
		infrav1.MachineConfigAnnotation: inplace.Fixed{"preCommands": "a"}.String(),
	}}}
	m.Spec.ProviderID, m.Spec.ID, m.Spec.CPUs = "capstan://x", "x", 2
	reconciling.SetCondition(m, infrav1.MachineRunningCondition, metav1.ConditionTrue, infrav1.MachineRunningReason, "")
	reconciling.SetCondition(m, infrav1.BootstrapSucceededCondition, metav1.ConditionTrue, infrav1.BootstrapSucceededReason, "")
	change(m)
	return member{capstan: m}
}

// updatingIs returns a change of a machine: its condition Updating is False for a reason.
func updatingIs(reason string) func(*infrav1.CapstanMachine) {
	return func(m *infrav1.CapstanMachine) {
		reconciling.SetCondition(m, infrav1.UpdatingCondition, metav1.ConditionFalse, reason, "no")
	}
}

// withUpdate returns a change of a machine: its pool has begun an update, and the host reports a phase.
func withUpdate(phase infrav1.UpdatePhase) func(*infrav1.CapstanMachine) {
	return func(m *infrav1.CapstanMachine) {
		m.Annotations[clusterv1.UpdateInProgressAnnotation] = ""
		m.Annotations[infrav1.MachineSpecHashAnnotation] = "new"
		m.Annotations[infrav1.MachineVersionAnnotation] = "v1.36.3"
		m.Annotations[infrav1.MachineBootstrapSecretAnnotation] = "new"
		m.Spec.CPUs = 4
		m.Status.Update = infrav1.MachineUpdateStatus{Phase: phase, ObservedGeneration: 4, KubernetesVersion: "v1.36.3", ConfigUpdateID: "u"}
	}
}

// bootstrapIs returns a change of a machine: its bootstrap has not succeeded, for a reason.
func bootstrapIs(reason string) func(*infrav1.CapstanMachine) {
	return func(m *infrav1.CapstanMachine) {
		reconciling.SetCondition(m, infrav1.BootstrapSucceededCondition, metav1.ConditionFalse, reason, "no")
	}
}

// withoutStatus is the machine after a move.
func withoutStatus(m *infrav1.CapstanMachine) { m.Status = infrav1.CapstanMachineStatus{} }

func withFailure(m *infrav1.CapstanMachine) {
	reconciling.SetCondition(m, infrav1.MachineRunningCondition, metav1.ConditionFalse, infrav1.MachineFailedReason, "no start")
}

func withUnreachableHost(m *infrav1.CapstanMachine) {
	reconciling.SetCondition(m, infrav1.MachineRunningCondition, metav1.ConditionUnknown, infrav1.MachineHostUnreachableReason, "no")
}

// changes makes several changes of a machine.
func changes(all ...func(*infrav1.CapstanMachine)) func(*infrav1.CapstanMachine) {
	return func(m *infrav1.CapstanMachine) {
		for _, change := range all {
			change(m)
		}
	}
}

// TestMemberUpdates: the differences that can be changed in place, and the machines that are replaced.
func TestMemberUpdates(t *testing.T) {
	want := func(change func(*desired)) desired {
		out := desired{version: "v1.36.3", secret: "new", hash: "new", updating: updateInput{
			policy: infrav1.InPlacePrefer, config: inplace.Fixed{"preCommands": "a"}, id: "u", spec: infrav1.CapstanMachineSpec{CPUs: 4},
		}}
		change(&out)
		return out
	}
	now, begun, and, bootstrap := updatingIs, withUpdate, changes, bootstrapIs
	moved, failed, unreachable := withoutStatus, withFailure, withUnreachableHost
	same := func(*desired) {}
	unknown := func(d *desired) { d.updating.config = nil }
	never := func(d *desired) { d.updating.policy = infrav1.InPlaceNever }
	only := func(d *desired) { d.updating.policy = infrav1.InPlaceOnly }
	for name, test := range map[string]struct {
		want       func(*desired)
		machine    func(*infrav1.CapstanMachine)
		why        string
		undecided  bool
		unreported bool
		phase      infrav1.UpdatePhase
		refused    bool
		replace    bool
	}{
		"in place":                                {want: same, machine: func(*infrav1.CapstanMachine) {}},
		"in place, never":                         {want: func(d *desired) { d.updating.policy = infrav1.InPlaceNever }, machine: func(*infrav1.CapstanMachine) {}, replace: true},
		"without a policy":                        {want: func(d *desired) { d.updating.policy = "" }, machine: func(*infrav1.CapstanMachine) {}, replace: true},
		"two minor versions":                      {want: func(d *desired) { d.version = "v1.37.0" }, machine: func(*infrav1.CapstanMachine) {}, why: "one minor version at a time", replace: true},
		"another image":                           {want: func(d *desired) { d.updating.spec.Image = "x" }, machine: func(*infrav1.CapstanMachine) {}, why: "image: needs another machine", replace: true},
		"another image, only":                     {want: func(d *desired) { d.updating.spec.Image, d.updating.policy = "x", infrav1.InPlaceOnly }, machine: func(*infrav1.CapstanMachine) {}, why: "image"},
		"another domain":                          {want: func(d *desired) { d.domains = []string{"a"} }, machine: func(m *infrav1.CapstanMachine) { m.Status.FailureDomain = "b" }, why: "failureDomains", replace: true},
		"other commands":                          {want: func(d *desired) { d.updating.config = inplace.Fixed{"preCommands": "b"} }, machine: func(*infrav1.CapstanMachine) {}, why: "preCommands: needs another machine", replace: true},
		"the config is not known":                 {want: unknown, machine: func(*infrav1.CapstanMachine) {}, undecided: true},
		"not known, only":                         {want: func(d *desired) { unknown(d); d.updating.policy = infrav1.InPlaceOnly }, machine: func(*infrav1.CapstanMachine) {}, undecided: true},
		"not known, the data is the same":         {want: func(d *desired) { unknown(d); d.secret = "old" }, machine: func(*infrav1.CapstanMachine) {}},
		"not known, and another image":            {want: func(d *desired) { unknown(d); d.updating.spec.Image = "x" }, machine: func(*infrav1.CapstanMachine) {}, why: "image", replace: true},
		"not known, nothing recorded":             {want: unknown, machine: func(m *infrav1.CapstanMachine) { delete(m.Annotations, infrav1.MachineConfigAnnotation) }, why: "before the pool allowed", replace: true},
		"not known, and it has failed":            {want: unknown, machine: failed, replace: true},
		"the machine recorded no config":          {want: same, machine: func(m *infrav1.CapstanMachine) { delete(m.Annotations, infrav1.MachineConfigAnnotation) }, why: "before the pool allowed", replace: true},
		"a machine that has never run":            {want: func(d *desired) { d.updating.policy = infrav1.InPlaceOnly }, machine: func(m *infrav1.CapstanMachine) { m.Spec.ProviderID = "" }, replace: true},
		"it boots":                                {want: same, machine: bootstrap(infrav1.BootstrapRunningReason), replace: true},
		"it boots, only":                          {want: only, machine: bootstrap(infrav1.BootstrapRunningReason), replace: true},
		"it boots, begun and refused":             {want: only, machine: and(begun(""), bootstrap(infrav1.BootstrapRunningReason), now(infrav1.WaitingForUpdateReason)), replace: true},
		"its bootstrap has failed, only":          {want: only, machine: bootstrap(infrav1.BootstrapFailedReason), replace: true},
		"failed bootstrap, begun and refused":     {want: only, machine: and(begun(""), bootstrap(infrav1.BootstrapFailedReason), now(infrav1.WaitingForUpdateReason)), replace: true},
		"it has booted, perhaps, only":            {want: only, machine: and(bootstrap(infrav1.BootstrapRunningReason), unreachable), unreported: true},
		"it has booted, perhaps":                  {want: same, machine: and(bootstrap(infrav1.BootstrapRunningReason), unreachable), unreported: true},
		"moved, not begun":                        {want: same, machine: moved, unreported: true},
		"it failed before the end of its boot":    {want: only, machine: and(bootstrap(infrav1.BootstrapRunningReason), failed)},
		"begun":                                   {want: same, machine: begun("")},
		"begun, no longer allowed":                {want: never, machine: and(begun(""), now(infrav1.NoCapacityReason)), refused: true, replace: true},
		"begun, no longer allowed, no data yet":   {want: never, machine: and(begun(""), now(infrav1.WaitingForUpdateReason)), replace: true},
		"begun after a former one, no longer":     {want: never, machine: and(begun(infrav1.UpdateSucceeded), func(m *infrav1.CapstanMachine) { m.Status.Update.ObservedGeneration = 3 }), replace: true},
		"runs a former one, the next is refused":  {want: never, machine: and(begun(infrav1.UpdateRunning), now(infrav1.NoCapacityReason), func(m *infrav1.CapstanMachine) { m.Status.Update.ConfigUpdateID = "t" })},
		"moved, no longer allowed":                {want: never, machine: and(begun(""), moved), unreported: true},
		"moved, its condition is out of date":     {want: never, machine: and(begun(""), moved, now(infrav1.NoCapacityReason), func(m *infrav1.CapstanMachine) { m.Generation++ }), unreported: true},
		"moved, and needs another machine":        {want: func(d *desired) { d.hash, d.updating.spec.Image = "newer", "x" }, machine: and(begun(""), moved), why: "image"},
		"moved and lost, no longer allowed":       {want: never, machine: and(begun(""), moved, failed), replace: true},
		"running and lost, no longer allowed":     {want: never, machine: and(begun(infrav1.UpdateRunning), failed), phase: infrav1.UpdateRunning, replace: true},
		"refused by its host":                     {want: same, machine: and(begun(""), now(infrav1.UpdateRefusedReason)), refused: true},
		"refused for a former spec":               {want: same, machine: and(begun(""), now(infrav1.UpdateRefusedReason), func(m *infrav1.CapstanMachine) { m.Generation++ })},
		"begun, and not looked at":                {want: same, machine: and(begun(""), now(infrav1.UpdateSucceededReason))},
		"refused, and not begun":                  {want: same, machine: now(infrav1.NoCapacityReason)},
		"runs with other data, no longer allowed": {want: func(d *desired) { never(d); d.updating.id = "v" }, machine: begun(infrav1.UpdateRunning)},
		"no CapstanConfig":                        {want: func(d *desired) { unknown(d); d.updating.foreign, d.secret = true, "old" }, machine: func(*infrav1.CapstanMachine) {}, why: "only a CapstanConfig has", replace: true},
		"no CapstanConfig, only":                  {want: func(d *desired) { unknown(d); d.updating.foreign, d.updating.policy = true, infrav1.InPlaceOnly }, machine: func(*infrav1.CapstanMachine) {}, why: "only a CapstanConfig has"},
		"running":                                 {want: same, machine: begun(infrav1.UpdateRunning), phase: infrav1.UpdateRunning},
		"running, no longer allowed":              {want: func(d *desired) { d.updating.policy = infrav1.InPlaceNever }, machine: begun(infrav1.UpdateRunning), phase: infrav1.UpdateRunning},
		"done":                                    {want: same, machine: and(begun(infrav1.UpdateSucceeded), now(infrav1.UpdateSucceededReason)), phase: infrav1.UpdateSucceeded},
		"the same was done before":                {want: same, machine: and(begun(infrav1.UpdateSucceeded), now(infrav1.NotUpdatingReason))},
		"done before, the host has a newer one":   {want: same, machine: and(begun(infrav1.UpdateSucceeded), now(infrav1.WaitingForUpdateReason))},
		"a former spec was done":                  {want: func(d *desired) { d.hash = "newer" }, machine: and(begun(infrav1.UpdateSucceeded), now(infrav1.UpdateSucceededReason)), phase: infrav1.UpdateSucceeded},
		"a former spec was done before":           {want: func(d *desired) { d.hash = "newer" }, machine: and(begun(infrav1.UpdateSucceeded), now(infrav1.NotUpdatingReason))},
		"done with other data":                    {want: func(d *desired) { d.updating.id = "v" }, machine: begun(infrav1.UpdateSucceeded)},
		"rolled back":                             {want: same, machine: begun(infrav1.UpdateRolledBack), phase: infrav1.UpdateRolledBack},
		"rolled back, no longer allowed":          {want: func(d *desired) { d.updating.policy = infrav1.InPlaceNever }, machine: begun(infrav1.UpdateRolledBack), phase: infrav1.UpdateRolledBack, replace: true},
	} {
		d, m := want(test.want), aMember(test.machine)
		u := d.updateOf(m)
		if !strings.Contains(u.why, test.why) || (u.why == "") != (test.why == "") || (u.verdict == updateUndecided) != test.undecided || (u.verdict == updateUnreported) != test.unreported || u.phase != test.phase || u.refused != test.refused || d.replace(m, u) != test.replace {
			t.Errorf("%s: %+v, replaced %v; want %q, undecided %v, unreported %v, %q, refused %v, replaced %v", name, u, d.replace(m, u), test.why, test.undecided, test.unreported, test.phase, test.refused, test.replace)
		}
	}
}

// TestMovedMachine: a machine whose status was lost in a move or a restore does not differ from the pool for this.
func TestMovedMachine(t *testing.T) {
	moved := func(m *infrav1.CapstanMachine) { m.Status = infrav1.CapstanMachineStatus{} }
	for name, test := range map[string]struct {
		machine            func(*infrav1.CapstanMachine)
		outdated, replaced bool
	}{
		"directly after the move": {machine: moved},
		"before its host reports": {machine: func(m *infrav1.CapstanMachine) {
			moved(m)
			m.Status.Initialization.Provisioned = ptr.To(true) // From the spec alone.
		}},
		"it has never run": {func(m *infrav1.CapstanMachine) { m.Spec.ProviderID = "" }, true, true},
		"it was made for another domain": {func(m *infrav1.CapstanMachine) {
			moved(m)
			m.Annotations[infrav1.MachineFailureDomainAnnotation] = "b"
		}, true, true},
		"its host is in the domain":     {machine: func(m *infrav1.CapstanMachine) { m.Status.FailureDomain = "a" }},
		"its host is in another domain": {func(m *infrav1.CapstanMachine) { m.Status.FailureDomain = "b" }, true, true},
		"it differs otherwise":          {func(m *infrav1.CapstanMachine) { moved(m); m.Annotations[infrav1.MachineSpecHashAnnotation] = "older" }, true, false},
	} {
		d := desired{version: "v1.35.4", secret: "old", hash: "old", domains: []string{"a"}, updating: updateInput{policy: infrav1.InPlacePrefer, spec: infrav1.CapstanMachineSpec{CPUs: 2}}}
		m := aMember(test.machine)
		if outdated, replaced := d.outdated(m), d.outdated(m) && d.replace(m, d.updateOf(m)); outdated != test.outdated || replaced != test.replaced {
			t.Errorf("%s: outdated %v, replaced %v; want %v, %v", name, outdated, replaced, test.outdated, test.replaced)
		}
	}
}

// TestUpdateText: the host's report describes an update that it has begun. Until then, the condition of the CapstanMachine does.
func TestUpdateText(t *testing.T) {
	for name, test := range map[string]struct {
		report   infrav1.MachineUpdateStatus
		observed int64
		text     string
	}{
		"the host has begun":              {infrav1.MachineUpdateStatus{Phase: infrav1.UpdateRunning, ObservedGeneration: 4, KubernetesVersion: "v1.35.4", ConfigUpdateID: "u", Step: "kubelet", Message: "busy"}, 4, "kubelet: busy"},
		"the host has not begun":          {infrav1.MachineUpdateStatus{}, 4, "Waiting for Secret s"},
		"the report is of an earlier one": {infrav1.MachineUpdateStatus{Phase: infrav1.UpdateSucceeded, ObservedGeneration: 3, Step: "node"}, 4, "Waiting for Secret s"},
		"the condition is out of date":    {infrav1.MachineUpdateStatus{}, 3, ""},
	} {
		m := aMember(func(m *infrav1.CapstanMachine) {
			m.Annotations[clusterv1.UpdateInProgressAnnotation], m.Status.Update = "", test.report
			m.Status.Conditions = []metav1.Condition{{
				Type: infrav1.UpdatingCondition, Status: metav1.ConditionTrue, Reason: infrav1.WaitingForUpdateReason, Message: "Waiting for Secret s", ObservedGeneration: test.observed,
			}}
		})
		if got := (desired{hash: "old", updating: updateInput{id: "u"}}).updateOf(m); got.text != test.text {
			t.Errorf("%s: %q, want %q", name, got.text, test.text)
		}
	}
}

// TestAttended: an update that a host carries out ends by itself, unless the host does not answer or has lost the machine.
func TestAttended(t *testing.T) {
	running := func(status metav1.ConditionStatus, reason string) func(*infrav1.CapstanMachine) {
		return func(m *infrav1.CapstanMachine) {
			reconciling.SetCondition(m, infrav1.MachineRunningCondition, status, reason, "no")
		}
	}
	for name, test := range map[string]struct {
		phase  infrav1.UpdatePhase
		change func(*infrav1.CapstanMachine)
		want   bool
	}{
		"the host carries it out":   {infrav1.UpdateRunning, func(*infrav1.CapstanMachine) {}, true},
		"the machine restarts":      {infrav1.UpdateRunning, running(metav1.ConditionFalse, infrav1.MachineRestartingReason), true},
		"its host is away":          {infrav1.UpdateRunning, running(metav1.ConditionUnknown, infrav1.MachineHostUnreachableReason), false},
		"its disk is lost":          {infrav1.UpdateRunning, running(metav1.ConditionFalse, infrav1.MachineLostReason), false},
		"directly after a move":     {"", func(m *infrav1.CapstanMachine) { m.Status = infrav1.CapstanMachineStatus{} }, true},
		"it was rolled back":        {infrav1.UpdateRolledBack, func(*infrav1.CapstanMachine) {}, false},
		"another one was requested": {infrav1.UpdateRunning, func(m *infrav1.CapstanMachine) { m.Generation++ }, true},
		"none was requested":        {infrav1.UpdateRunning, func(m *infrav1.CapstanMachine) { delete(m.Annotations, clusterv1.UpdateInProgressAnnotation) }, false},
	} {
		m := aMember(func(m *infrav1.CapstanMachine) { m.Annotations[clusterv1.UpdateInProgressAnnotation] = "" })
		m.capstan.Status.Update.Phase = test.phase
		test.change(m.capstan)
		if got := (desired{hash: "old"}).updateOf(m); got.attended != test.want {
			t.Errorf("%s: %+v, expected attended: %v", name, got, test.want)
		}
	}
}

// TestReadConfig: the parts of the CapstanConfig are known only when the data of new machines was rendered from its present spec.
func TestReadConfig(t *testing.T) {
	for name, test := range map[string]struct {
		observed, update int64
		secret           string
		rendered         metav1.ConditionStatus
		known            bool
		id               string
	}{
		"rendered":                          {2, 2, "new", metav1.ConditionTrue, true, "u"},
		"rendered, no data of an update":    {2, 0, "new", metav1.ConditionTrue, true, ""},
		"an edit is not observed":           {1, 1, "new", metav1.ConditionTrue, false, ""},
		"an edit is observed, not rendered": {2, 0, "new", metav1.ConditionFalse, false, ""},
		"new machines get former data":      {2, 2, "newer", metav1.ConditionTrue, false, "u"},
		"without a status, after a move":    {0, 0, "", metav1.ConditionUnknown, false, ""},
	} {
		config := &bootstrapv1.CapstanConfig{ObjectMeta: metav1.ObjectMeta{Generation: 2}, Spec: bootstrapv1.CapstanConfigSpec{PreCommands: []string{"b"}}}
		config.Status.ObservedGeneration, config.Status.DataSecretName = test.observed, test.secret
		config.Status.Update = bootstrapv1.ConfigUpdateStatus{ID: "u", KubernetesVersion: "v1.36.3", ObservedGeneration: test.update}
		reconciling.SetCondition(config, bootstrapv1.DataSecretAvailableCondition, test.rendered, "Test", "")
		d := desired{version: "v1.36.3", secret: "new"}
		d.readConfig(config)
		if known := d.updating.config != nil; known != test.known || d.updating.id != test.id {
			t.Errorf("%s: the parts are known: %v, the update data has the id %q; want %v, %q", name, known, d.updating.id, test.known, test.id)
		}
	}
}

// TestAnnotations: the record of the CapstanConfig is written when it is known, and never erased.
func TestAnnotations(t *testing.T) {
	want := desired{hash: "h", version: "v1.36.3", secret: "s"}
	if record, ok := want.annotations()[infrav1.MachineConfigAnnotation]; ok {
		t.Errorf("the record is %q without a known CapstanConfig", record)
	}
	want.updating.config = inplace.Fixed{"preCommands": "a"}
	if got := want.annotations()[infrav1.MachineConfigAnnotation]; got != want.updating.config.String() {
		t.Errorf("the record is %q", got)
	}
}

// MP-07: the condition Updating goes when the policy no longer allows updates in place, but not before the last one has ended.
func TestUpdatingCondition_MP07(t *testing.T) {
	running := aMember(func(m *infrav1.CapstanMachine) { m.Annotations[clusterv1.UpdateInProgressAnnotation] = "" })
	for name, tc := range map[string]struct {
		policy  infrav1.InPlacePolicy
		members []member
		shown   bool
	}{
		"allowed":                  {infrav1.InPlaceOnly, nil, true},
		"not allowed":              {infrav1.InPlaceNever, nil, false},
		"no longer, and one is on": {infrav1.InPlaceNever, []member{running}, true},
	} {
		s := &scope{pool: &infrav1.CapstanMachinePool{}, observed: observed{members: tc.members, want: desired{updating: updateInput{policy: tc.policy}}}}
		reconciling.SetCondition(s.pool, infrav1.UpdatingCondition, metav1.ConditionFalse, infrav1.UpdateFailedReason, "1 of 1 machines remain")
		setUpdating(s, updatePlan{}, nil)
		if got := conditions.Has(s.pool, infrav1.UpdatingCondition); got != tc.shown {
			t.Errorf("%s: shown %v, want %v", name, got, tc.shown)
		}
	}
}

// MP-07: the condition Updating describes the update that runs or, without one, the cause that none begins.
func TestUpdatingReason_MP07(t *testing.T) {
	for name, tc := range map[string]struct {
		plan    updatePlan
		pool    []instance
		status  metav1.ConditionStatus
		reason  string
		message string
	}{
		"up to date":       {pool: updatable("a:a"), status: metav1.ConditionFalse, reason: infrav1.NotUpdatingReason},
		"one runs":         {pool: updatable("a:u", "b:ab"), status: metav1.ConditionTrue, reason: infrav1.UpdateRunningReason, message: "2 of 2 machines remain; machine a: kubelet: busy"},
		"one failed":       {plan: updatePlan{why: "the update failed"}, pool: updatable("a:f"), status: metav1.ConditionFalse, reason: infrav1.UpdateFailedReason, message: "1 of 1 machines remain; the update failed"},
		"one is undecided": {plan: updatePlan{waits: "machine a waits"}, pool: updatable("a:aq"), status: metav1.ConditionTrue, reason: infrav1.WaitingForUpdateReason, message: "1 of 1 machines remain; machine a waits"},
	} {
		s := &scope{pool: &infrav1.CapstanMachinePool{}, observed: observed{want: desired{updating: updateInput{policy: infrav1.InPlaceOnly}}}}
		setUpdating(s, tc.plan, tc.pool)
		if c := conditions.Get(s.pool, infrav1.UpdatingCondition); c.Status != tc.status || c.Reason != tc.reason || c.Message != tc.message {
			t.Errorf("%s: %+v", name, c)
		}
	}
}
