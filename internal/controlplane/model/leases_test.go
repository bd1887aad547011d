package model

import (
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
)

// TestRenewals: the age of a Lease is the time since its last observed change by the local clock. The clock of its holder does not
// matter.
func TestRenewals(t *testing.T) {
	const yes, no, unknown = metav1.ConditionTrue, metav1.ConditionFalse, metav1.ConditionUnknown
	// Each look finds the Lease that the holder wrote so many seconds ago by the local clock; -1 if no Lease exists.
	type looked struct {
		at, written int
		want        metav1.ConditionStatus
	}
	for _, c := range []struct {
		what  string
		ahead time.Duration // the host's clock
		begin bool          // the cluster was begun at 0
		looks []looked
	}{
		{"a manager starts, and it lives", 0, false, []looked{{1, 0, unknown}, {9, 0, unknown}, {11, 10, yes}, {51, 10, yes}, {52, 10, no}}},
		{"a manager starts, and it is dead", 0, false, []looked{{1, 0, unknown}, {41, 0, unknown}, {42, 0, no}, {90, 0, no}}},
		{"a manager starts, it is dead, and its host is ahead", time.Hour, false, []looked{{1, 0, unknown}, {42, 0, no}, {3600, 0, no}}},
		{"it lives, and its host is ahead", time.Hour, false, []looked{{1, 0, unknown}, {11, 10, yes}, {31, 30, yes}}},
		{"it lives, and its host is behind", -time.Hour, false, []looked{{1, 0, unknown}, {11, 10, yes}, {31, 30, yes}}},
		{"it died right after we looked: no more than its time counts", 0, false, []looked{{1, 0, unknown}, {11, 10, yes}, {50, 20, yes}, {61, 20, yes}, {62, 20, no}}},
		{"the same, and its host is ahead", time.Hour, false, []looked{{1, 0, unknown}, {11, 10, yes}, {50, 20, yes}, {61, 20, yes}, {62, 20, no}}},
		{"it died while nobody could be asked", 0, false, []looked{{1, 0, unknown}, {11, 10, yes}, {600, 20, no}, {611, 610, yes}}},
		{"it joins", 0, false, []looked{{1, -1, no}, {2, 1, yes}, {42, 1, yes}, {43, 1, no}}},
		{"it joins, and its host is ahead", time.Hour, false, []looked{{1, -1, no}, {2, 1, unknown}, {12, 11, yes}}},
		{"it joined while nobody could be asked", 0, false, []looked{{1, -1, no}, {60, 30, unknown}, {61, 60, yes}}},
		{"the cluster begins", 0, true, []looked{{3, 1, yes}}},
		{"the cluster begins with what a backup has", 0, true, []looked{{3, -3600, unknown}, {5, 4, yes}}},
		{"the cluster goes back to a backup", 0, false, []looked{{1, 0, unknown}, {11, 10, yes}, {21, 5, unknown}, {62, 5, no}, {63, 62, yes}}},
	} {
		start, key := time.Unix(1000000, 0), LeaseSetKey{types.NamespacedName{Name: "cp"}, LeaseOfEtcdCare}
		r := &LeaseHistory{}
		if c.begin {
			r.Begin(key.ControlPlane, start)
		}
		for _, l := range c.looks {
			now := start.Add(time.Duration(l.at) * time.Second)
			var leases []coordinationv1.Lease
			if l.written != -1 {
				leases = append(leases, *leaseOf("a", "holder", start.Add(time.Duration(l.written)*time.Second).Add(c.ahead)))
			}
			if got := r.Observe(key, leases, now)["a"].Alive(now); got != l.want {
				t.Errorf("%s, after %d s: got %s, want %s", c.what, l.at, got, l.want)
			}
		}
	}
}

func leaseOf(uid types.UID, holder string, renewed time.Time) *coordinationv1.Lease {
	return &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{UID: uid},
		Spec:       coordinationv1.LeaseSpec{HolderIdentity: &holder, RenewTime: ptr.To(metav1.NewMicroTime(renewed))},
	}
}

// TestRenewalOfAnother: the times of one holder do not count for the next holder.
func TestRenewalOfAnother(t *testing.T) {
	start := time.Unix(1000000, 0)
	second := func(n int) time.Time { return start.Add(time.Duration(n) * time.Second) }
	before := observe(leaseOf("a", "one", second(10)), &observation{Renewal: Renewal{At: second(0)}, holder: "one", renewTime: second(0)}, second(0), second(11))
	if !before.Changed || !before.At.Equal(second(10)) {
		t.Errorf("%+v", before)
	}
	if got := observe(leaseOf("a", "two", second(12)), &before, second(11), second(31)); !got.Changed || !got.At.Equal(second(31)) {
		t.Errorf("%+v", got)
	}
	// The clock of the holder was set forward and back.
	if got := observe(leaseOf("a", "one", second(5000)), &before, second(11), second(21)); !got.Changed || !got.At.Equal(second(21)) {
		t.Errorf("%+v", got)
	}
	if got := observe(leaseOf("a", "one", second(9)), &before, second(11), second(21)); got.Changed || !got.At.Equal(second(21)) {
		t.Errorf("%+v", got)
	}
}

// TestRenewalsForget: the record of deleted Leases and control planes is removed.
func TestRenewalsForget(t *testing.T) {
	r := &LeaseHistory{}
	one, two := types.NamespacedName{Name: "one"}, types.NamespacedName{Name: "two"}
	for _, name := range []types.NamespacedName{one, two} {
		r.Begin(name, time.Unix(1, 0))
		for _, what := range []string{LeaseOfEtcdCare, LeasesOfAPIServers} {
			r.Observe(LeaseSetKey{name, what}, []coordinationv1.Lease{*leaseOf("a", "x", time.Unix(1, 0)), *leaseOf("b", "x", time.Unix(1, 0))}, time.Unix(1, 0))
		}
	}
	r.Observe(LeaseSetKey{one, LeaseOfEtcdCare}, []coordinationv1.Lease{*leaseOf("b", "x", time.Unix(1, 0))}, time.Unix(2, 0))
	if l := r.sets[LeaseSetKey{one, LeaseOfEtcdCare}].leases; len(l) != 1 || l["b"].renewTime.IsZero() {
		t.Errorf("%+v", l)
	}
	r.Begin(one, time.Unix(3, 0))
	if l := r.sets[LeaseSetKey{one, LeaseOfEtcdCare}]; len(l.leases) != 1 {
		t.Errorf("begun again: %+v", l)
	}
	r.Forget(one)
	r.Forget(two)
	if len(r.sets) != 0 {
		t.Errorf("%+v", r.sets)
	}
}
