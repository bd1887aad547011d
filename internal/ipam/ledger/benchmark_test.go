package ledger

import (
	"fmt"
	"testing"

	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
)

// BenchmarkDecide measures the life of an address in memory: decision, creation and deletion. The pool has 1000 other
// addresses and 1000 waiting claims that cannot be served.
func BenchmarkDecide(b *testing.B) {
	f := newFixture(ipamv1.CapstanIPPoolSpec{Subnets: []ipamv1.Subnet{{CIDR: "10.0.0.0/16"}}})
	for i := range 1000 {
		f.addAddress(f.address(fmt.Sprint("other", i), fmt.Sprintf("10.0.%d.%d", 100+i/250, 1+i%250), nil))
		f.park(f.queue.add(TicketOf(f.claim(fmt.Sprint("parked", i)))))
	}
	claim, pool := f.claim("a"), f.reg.Pool(f.key)
	b.ReportAllocs()
	for b.Loop() {
		res, _ := f.decide(&Request{Ticket: TicketOf(claim)})
		if res.Outcome != Granted {
			b.Fatalf("got %+v", res)
		}
		ip := f.address("a", res.Address, nil)
		pool.Created(claim.UID, ip)
		f.removeAddress(ip.UID, false)
		delete(f.addresses.gone, ip.UID)
	}
}
