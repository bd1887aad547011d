package ledger

import (
	"time"

	"k8s.io/apimachinery/pkg/util/validation/field"

	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
	"capstan.dev/capstan/internal/ipam/alloc"
)

// View is the state of a pool in the ledger at one moment.
type View struct {
	Total, Free alloc.U128
	Used        int
	OutOfRange  int
	Resting     int
	Waiting     int
	Pending     int
	// Addresses is the number of IPAddresses that reference the pool, of either kind.
	Addresses int
	Invalid   field.ErrorList
	// Quiet is the time since the last arrival of an address or claim, AddressQuiet that since the last address.
	Quiet, AddressQuiet time.Duration
	// Pool contains the addresses of the spec.
	Pool alloc.Ranges
	V6   bool
}

func (s *state) view() View {
	v := View{
		Waiting:   s.queue.waiting,
		Pending:   len(s.pending),
		Addresses: len(s.addresses.byUID),
		Invalid:   s.space.invalid,

		Quiet:        s.now().Sub(s.arrived),
		AddressQuiet: s.now().Sub(s.addressArrived),
	}
	if set, plan := s.space.set, s.space.plan; set != nil {
		v.Total, v.Free = plan.Total(), set.Free()
		v.Used, v.OutOfRange, v.Resting = set.Used(), set.OutOfRange()+s.space.aliens, set.Resting()
		v.Pool, v.V6 = plan.Pool, plan.V6
	}
	return v
}

// Counts returns the view as it is shown in the pool's status.
func (v View) Counts() *ipamv1.AddressCounts {
	return &ipamv1.AddressCounts{
		Total:      v.Total.String(),
		Free:       v.Free.String(),
		Used:       int64(v.Used),
		OutOfRange: int64(v.OutOfRange),
		Resting:    int64(v.Resting),
		Waiting:    int64(v.Waiting),
	}
}
