package ledger

import (
	"slices"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
)

// twoAddresses is the spec of a pool with the addresses 10.0.0.1 and 10.0.0.2.
func twoAddresses() ipamv1.CapstanIPPoolSpec {
	return ipamv1.CapstanIPPoolSpec{Subnets: []ipamv1.Subnet{{CIDR: "10.0.0.0/30"}}}
}

// The end of a pending allocation without an IPAddress wakes the next claim in the queue.
func TestExpiryWakesNextClaim(t *testing.T) {
	f := newFixture(twoAddresses())
	f.ask("a")
	f.ask("b")
	if got := f.ask("c"); got.Outcome != Exhausted {
		t.Fatalf("got %+v, want Exhausted", got)
	}
	f.dead["claim-a"] = f.clock
	f.tick()
	if len(f.woken) != 0 {
		t.Errorf("claims were woken before the deadline: %v", f.woken)
	}
	f.clock = f.clock.Add(2 * time.Minute)
	f.tick()
	if !slices.Equal(f.woken, []string{"c"}) {
		t.Errorf("woken claims: %v, want c", f.woken)
	}
}

// A takeover replaces the pending allocations in memory by those of the record.
func TestTakeoverReadsRecord(t *testing.T) {
	f := newFixture(twoAddresses())
	if got := f.ask("a"); got.Address != "10.0.0.1" {
		t.Fatalf("got %+v", got)
	}
	doc := f.doc.DeepCopyObject().(*ipamv1.CapstanIPPool) //nolint:forcetypeassert // newFixture has created it.
	doc.Status.Allocator = &ipamv1.AllocatorStatus{Pending: []ipamv1.PendingAllocation{
		{Address: "10.0.0.2", Namespace: "ns", Name: "b", UID: "claim-b", Until: metav1.NewTime(f.clock.Add(time.Minute))},
	}}
	f.adopt(doc, true)
	if len(f.pending) != 1 || f.pending["claim-b"] == nil || f.pending["claim-b"].shared.IsZero() {
		t.Errorf("got the pending allocations %v, want that of claim b", f.pending)
	}
	if got := f.ask("c"); got.Address != "10.0.0.1" {
		t.Errorf("got %+v, want the address that is not in the record", got)
	}
}

// The address that another process has chosen for a claim stays used until the deadline, even if the API server refuses the IPAddress.
// Later requests of the claim do not move this deadline.
func TestRefusedAddressOfAnotherProcess(t *testing.T) {
	f := newFixture(twoAddresses())
	doc := f.doc.DeepCopyObject().(*ipamv1.CapstanIPPool) //nolint:forcetypeassert // newFixture has created it.
	doc.Status.Allocator = &ipamv1.AllocatorStatus{Pending: []ipamv1.PendingAllocation{
		{Address: "10.0.0.2", Namespace: "ns", Name: "a", UID: "claim-a", Until: metav1.NewTime(f.clock.Add(time.Minute))},
	}}
	f.adopt(doc, true)
	for i, free := range []uint64{1, 1, 2} {
		if got := f.ask("a"); got.Address != "10.0.0.2" {
			t.Fatalf("got %+v", got)
		}
		f.reg.Pool(f.key).Refused(TicketOf(f.claim("a")))
		if got := f.view().Free; got.Lo != free {
			t.Errorf("%d addresses are free after refusal %d, want %d", got.Lo, i, free)
		}
		f.clock = f.clock.Add(40 * time.Second)
	}
}

// The address of a deleted claim stays used until no request to create its IPAddress can be in progress.
func TestAbandonedAllocationStaysUntilDeadline(t *testing.T) {
	f := newFixture(twoAddresses())
	f.ask("a")
	pool := f.reg.Pool(f.key)
	pool.Abandon("claim-a")
	pool.Retract("claim-a")
	pool.Created("claim-a", f.address("a", "10.0.0.1", nil))
	f.removeAddress("ip-a", false)
	if free := f.view().Free; free.AtLeast(2) {
		t.Errorf("%v addresses are free before the deadline, want 1", free)
	}
	f.clock = f.clock.Add(2 * time.Minute)
	f.tick()
	if free := f.view().Free; !free.AtLeast(2) {
		t.Errorf("%v addresses are free after the deadline, want 2", free)
	}
}

// The same is true for a claim that was served, if an earlier request to create its IPAddress has ended without an answer.
func TestUnansweredRequestKeepsAddressUntilDeadline(t *testing.T) {
	f := newFixture(twoAddresses())
	f.ask("a")
	pool := f.reg.Pool(f.key)
	pool.Unanswered("claim-a")
	pool.Created("claim-a", f.address("a", "10.0.0.1", nil))
	pool.Abandon("claim-a")
	f.removeAddress("ip-a", false)
	if free := f.view().Free; free.AtLeast(2) {
		t.Errorf("%v addresses are free before the deadline, want 1", free)
	}
	f.clock = f.clock.Add(2 * time.Minute)
	f.tick()
	if free := f.view().Free; !free.AtLeast(2) {
		t.Errorf("%v addresses are free after the deadline, want 2", free)
	}
}

// The rest begins with the end of the IPAddress. The finalizer of another component, for example for the address of a Service, can delay
// it after the deletion of the claim.
func TestRestBeginsWithTheRelease(t *testing.T) {
	for _, delay := range []time.Duration{0, 2 * time.Minute, time.Hour} {
		spec := twoAddresses()
		spec.RestSeconds = ptr.To[int32](160)
		f := newFixture(spec)
		ip := f.address("a", "10.0.0.1", ptr.To[int32](30))
		f.addAddress(ip)
		f.space.rest(ip.Spec, f.clock)
		f.reg.Pool(f.key).Releasing(ip.UID)
		for _, step := range []struct {
			after time.Duration
			free  uint64
		}{{delay, 1}, {150 * time.Second, 1}, {20 * time.Second, 2}} {
			f.clock = f.clock.Add(step.after)
			f.tick()
			f.removeAddress(ip.UID, false)
			if free := f.view().Free; free.Lo != step.free {
				t.Errorf("released after %v, %v later: %d addresses are free, want %d", delay, step.after, free.Lo, step.free)
			}
		}
	}
}

// A claim that is deleted during a failed write of the record gets no place in the queue, where it would hold back later claims.
func TestFailedWriteForDeletedClaim(t *testing.T) {
	for _, deleted := range []bool{false, true} {
		f := newFixture(twoAddresses())
		f.ask("a")
		if deleted {
			f.reg.Pool(f.key).Abandon("claim-a")
		}
		f.revert(&Request{Ticket: TicketOf(f.claim("a"))}, false)
		if _, queued := f.queue.tickets["claim-a"]; queued == deleted {
			t.Errorf("deleted %v: in the queue %v", deleted, queued)
		}
		if free := f.view().Free; !free.AtLeast(2) {
			t.Errorf("deleted %v: %v addresses are free, want 2", deleted, free)
		}
	}
}

// A claim whose IPAddress conflicts with another one does not delay later claims.
func TestConflictDoesNotDelayLaterClaims(t *testing.T) {
	f := newFixture(twoAddresses())
	f.addAddress(f.address("other", "10.0.0.1", nil))
	f.addAddress(f.address("a", "10.0.0.1", nil))
	if got := f.ask("a"); got.Outcome != Failed {
		t.Fatalf("got %+v, want Failed", got)
	}
	f.clock = f.clock.Add(time.Second)
	if got := f.ask("b"); got.Outcome != Granted || got.Address != "10.0.0.2" {
		t.Errorf("got %+v, want 10.0.0.2", got)
	}
}

// A claim from another management cluster counts as an arrival, and so does an IPAddress that was not allocated here.
func TestQuiet(t *testing.T) {
	f := newFixture(twoAddresses())
	f.clock = f.clock.Add(time.Hour)
	f.addAddress(f.address("a", "10.0.0.1", nil))
	f.clock = f.clock.Add(time.Minute)
	f.enqueue(TicketOf(f.claim("b")), true)
	f.clock = f.clock.Add(time.Second)
	f.enqueue(TicketOf(f.claim("c")), false)
	if v := f.view(); v.Quiet != time.Second || v.AddressQuiet != time.Minute+time.Second {
		t.Errorf("got %v and %v for addresses, want 1s and 1m1s", v.Quiet, v.AddressQuiet)
	}
}
