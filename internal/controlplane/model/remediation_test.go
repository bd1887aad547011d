package model

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"k8s.io/utils/ptr"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
)

// TestRepair (CP-10): the unhealthy Machine that is replaced next, and the time of the repair.
func TestRepair(t *testing.T) {
	now := time.Unix(100000, 0)
	after := func(age time.Duration, retries int) string {
		return fmt.Sprintf(`{"machine":"former","timestamp":%q,"retryCount":%d}`, now.Add(-age).UTC().Format(time.RFC3339), retries)
	}
	retries := func(n int32) controlplanev1.RemediationSpec {
		return controlplanev1.RemediationSpec{MaxRetry: &n, RetryPeriodSeconds: ptr.To[int32](600)}
	}
	for _, c := range []struct {
		what     string
		machines string
		before   bool
		spec     controlplanev1.RemediationSpec
		history  string
		// irreplaceable is the reason why no Machine can be created.
		irreplaceable string
		open          *RemediationRecord
		machine       string
		act           bool
		message       string
		again         time.Duration
		count         int32
	}{
		{what: "healthy", machines: "a:v b:v c:v"},
		{what: "one of three", machines: "a:v b:v z:uf", machine: "z", act: true},
		{what: "one of three that still votes", machines: "a:v b:v z:vf", machine: "z", act: true},
		{what: "two of three", machines: "a:v b:uf z:uf", machine: "b", message: "no quorum"},
		{what: "two of five", machines: "a:v b:v c:v y:uf z:uf", machine: "y", act: true},
		{what: "another one blinks", machines: "a:v b:u z:uf", machine: "z", message: "no quorum"},
		{what: "not known", machines: "a:v b:? z:vf", machine: "z", message: "lose its quorum"},
		{what: "one at a time", machines: "a:v b:vd z:vf", machine: "z", message: "b is being deleted"},
		{what: "one that is drained waits for it", machines: "a:v b:vd z:uf", machine: "z", act: true},
		{what: "one that is drained, and the majority needs the dead one", machines: "a:u b:vd z:uf", machine: "z", message: "no quorum"},
		{what: "one that leaves waits for it", machines: "a:v b:vhb z:uf", machine: "z", act: true},
		{what: "one that leaves does not wait for it", machines: "a:v b:vhb z:vf", machine: "z", message: "b is being deleted"},
		{what: "another one is starting", machines: "a:v b:v c:l z:uf", machine: "z", message: "c is still starting"},
		{what: "another one cannot be added before it leaves", machines: "a:v b:v c:- z:uf", machine: "z", act: true},
		{what: "another one cannot start before it leaves", machines: "a:v b:v c:n z:uf", machine: "z", act: true},
		{what: "another one is starting, and it still votes", machines: "a:v b:v c:- z:vf", machine: "z", message: "c is still starting"},
		{what: "another one is starting, and the majority needs it", machines: "a:v c:- z:uf", machine: "z", message: "no quorum"},
		{what: "another one that starts is no majority", machines: "a:v b:u c:- z:uf", machine: "z", message: "no quorum"},
		{what: "it has not joined itself", machines: "a:v b:v z:-f", machine: "z", act: true},
		{what: "no API server would be left", machines: "a:va b:va z:vf", machine: "z", message: "no other Machine has an API server"},
		{what: "the only one, whose node is ill", machines: "z:vf", machine: "z", act: true},
		{what: "the only one, dead", machines: "z:uf", machine: "z", message: "the only control plane machine"},
		{what: "the only one, and none can be created", machines: "z:vf", irreplaceable: "it is broken", machine: "z", message: "no other one can be created: it is broken"},
		{what: "one of three, and none can be created", machines: "a:v b:v z:uf", irreplaceable: "it is broken", machine: "z", act: true},
		{what: "the replacement of a deleted one that waits for it", machines: "a:vd z:-f", machine: "z", act: true},
		{what: "the replacement of a deleted one, a learner that died", machines: "a:vd z:lf", machine: "z", act: true},
		{what: "the replacements of deleted ones", machines: "a:vd y:-f z:-f", machine: "y", act: true},
		{what: "the replacement of a deleted one that is dead too", machines: "a:ud z:-f", machine: "z", message: "a is being deleted"},
		{what: "the replacement of a deleted one has joined", machines: "a:vd z:vf", machine: "z", message: "a is being deleted"},
		{what: "the replacement of a deleted one, and none can be created", machines: "a:vd z:-f", irreplaceable: "it is broken", machine: "z", message: "no other one can be created: it is broken"},
		{what: "before there is data", machines: "z:-f", before: true, machine: "z", act: true},
		{what: "what has not joined first", machines: "a:v b:v c:v y:uf z:-f", machine: "z", act: true},
		{what: "a replacement, soon after", machines: "a:v b:v z:uf", history: after(5*time.Minute, 0), spec: retries(3), machine: "z", message: "retryPeriodSeconds are not over", again: 5 * time.Minute, count: 1},
		{what: "a replacement, later", machines: "a:v b:v z:uf", history: after(15*time.Minute, 1), spec: retries(3), machine: "z", act: true, count: 2},
		{what: "a replacement too many", machines: "a:v b:v z:uf", history: after(15*time.Minute, 3), spec: retries(3), machine: "z", message: "3 replacements have failed", count: 4},
		{what: "no retries", machines: "a:v b:v z:uf", history: after(15*time.Minute, 0), spec: retries(0), machine: "z", message: "maxRetry", count: 1},
		{what: "a replacement too many, and the host of another one is lost", machines: "a:v b:v c:v y:uf z:-f", history: after(15*time.Minute, 0), spec: retries(0), machine: "y", act: true},
		{what: "a replacement too many, and no other one can be repaired", machines: "a:v b:u y:uf z:-f", history: after(15*time.Minute, 0), spec: retries(0), machine: "z", message: "maxRetry", count: 1},
		{what: "a replacement too many, and another one still votes", machines: "a:v b:v y:vf z:-f", history: after(15*time.Minute, 0), spec: retries(0), machine: "z", message: "maxRetry", count: 1},
		{what: "it is being updated, and the host of another one is lost", machines: "a:v b:v c:v y:-fU z:uf", machine: "z", act: true},
		{what: "it is being updated, and the other one waits for time", machines: "a:v b:v c:v y:-fU z:uf", history: after(5*time.Minute, 0), spec: retries(3), machine: "y", message: "updated in place", again: 5 * time.Minute},
		{what: "long after", machines: "a:v b:v z:uf", history: after(2*time.Hour, 3), spec: retries(3), machine: "z", act: true},
		{what: "the one before has no replacement yet", machines: "a:v z:vf", open: &RemediationRecord{Machine: "gone"}, machine: "z", message: "gone was repaired, and its replacement is not made yet"},
		{what: "the one before has no replacement yet, and a dead member keeps it from being made", machines: "a:v b:v c:v z:uf", open: &RemediationRecord{Machine: "gone"}, machine: "z", act: true},
		{what: "the one before has no replacement yet, and the majority needs it", machines: "a:v z:uf", open: &RemediationRecord{Machine: "gone"}, machine: "z", message: "no quorum"},
		{what: "it was written down and not done", machines: "a:v b:v z:vf", open: &RemediationRecord{Machine: "z"}, machine: "z", act: true},
		{what: "it still votes, and another one is being updated", machines: "a:vU b:v z:vf", machine: "z", message: "update in place of Machine a"},
		{what: "it still votes, and the update of another one is over", machines: "a:vD b:v z:vf", machine: "z", act: true},
		{what: "it still votes, and the update of another one has failed", machines: "a:vB b:v z:vf", machine: "z", act: true},
		{what: "it still votes, and the host of another one is lost during its update", machines: "a:vUL b:v z:vf", machine: "z", act: true},
		{what: "it is dead, and another one is being updated", machines: "a:vU b:v z:uf", machine: "z", act: true},
		{what: "the member of another one is down after its failed update", machines: "a:uF b:v z:vf", machine: "z", message: "lose its quorum"},
		{what: "it still votes, and another one of five is being updated", machines: "a:vU b:v c:v d:v z:vf", machine: "z", act: true},
		{what: "history that somebody spoilt", machines: "a:v b:v z:uf", history: "{", spec: retries(0), machine: "z", act: true},
	} {
		t.Run(c.what, func(t *testing.T) {
			f := build(c.machines)
			f.irreplaceable = c.irreplaceable
			if c.history != "" {
				f.Find("z").Machine.Annotations[controlplanev1.RemediationForAnnotation] = c.history
			}
			got := planRemediation(f, c.spec, !c.before, c.open, now)
			if c.machine == "" {
				if got.Machine != nil {
					t.Error("repairs", got.Machine.Name())
				}
				return
			}
			if got.Machine == nil || got.Machine.Name() != c.machine || got.Act != c.act || !strings.Contains(got.Message, c.message) || got.Again != c.again || got.Record.Retries != c.count {
				t.Errorf("got %+v", got)
			}
			if !got.Act && got.Reason == "" {
				t.Error("no reason is given")
			}
		})
	}
}

// TestUnreplaced (CP-10): the recorded repairs that still wait for a replacement.
func TestUnreplaced(t *testing.T) {
	y := &RemediationRecord{Machine: "y"}
	x := &RemediationRecord{Machine: "x", Retries: 2, Open: y}
	for _, c := range []struct {
		what     string
		machines string
		replaces string // the Machine b replaces this one
		open     *RemediationRecord
		want     *RemediationRecord
	}{
		{what: "nothing was repaired", machines: "a:v b:v"},
		{what: "it is gone", machines: "a:v b:v", open: y, want: y},
		{what: "it goes", machines: "a:v b:v y:vd", open: y, want: y},
		{what: "it is about to go", machines: "a:v b:v y:vf", open: y, want: y},
		{what: "it has healed before it went", machines: "a:v b:v y:v", open: y},
		{what: "it has a replacement, and another Machine is missing", machines: "a:v b:v", replaces: "y", open: y},
		{what: "it has a replacement that joined before it goes", machines: "b:v y:vd", replaces: "y", open: y},
		{what: "there are as many as are wanted", machines: "a:v b:v c:v", open: y},
		{what: "one of them goes", machines: "a:v b:v c:vd", open: y, want: y},
		{what: "two are gone", machines: "a:v b:v", open: x, want: x},
		{what: "two are gone, and one has a replacement", machines: "a:v b:v", replaces: "x", open: x, want: y},
	} {
		f := build(c.machines)
		if c.replaces != "" {
			f.Find("b").Machine.Annotations[controlplanev1.RemediationForAnnotation] = (&RemediationRecord{Machine: c.replaces}).String()
		}
		if got := f.unreplaced(c.open, 3); got != c.want {
			t.Errorf("%s: got %s, want %s", c.what, got, c.want)
		}
	}
}
