package ledger

import (
	"time"

	"k8s.io/apimachinery/pkg/util/validation/field"

	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
	"capstan.dev/capstan/internal/ipam/alloc"
)

// View is what the ledger knows of a pool at one moment.
type View struct {
	Total, Free alloc.U128
	Used        int
	OutOfRange  int
	Resting     int
	Waiting     int
	Pending     int
	// Addresses is the number of IPAddresses that refer to the pool, of
	// whatever kind.
	Addresses int
	Invalid   field.ErrorList
	// Quiet is how long no address or claim has arrived.
	Quiet time.Duration
	// Pool is what the spec contains.
	Pool alloc.Ranges
	V6   bool
}

func (p *Pool) view() View {
	v := View{
		Waiting:   p.queue.waiting,
		Pending:   len(p.pending),
		Addresses: len(p.addresses),
		Invalid:   p.planErr,
		Quiet:     p.now().Sub(p.arrived),
	}
	if p.set != nil {
		v.Total, v.Free = p.plan.Total(), p.set.Free()
		v.Used, v.OutOfRange, v.Resting = p.set.Used(), p.set.OutOfRange()+p.aliens, p.set.Resting()
		v.Pool, v.V6 = p.plan.Pool, p.plan.V6
	}
	return v
}

// View returns what is known of the pool.
func (p *Pool) View() View {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.view()
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
