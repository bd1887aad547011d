package connections

import (
	"fmt"
	"testing"

	"capstan.dev/capstan/internal/host/hostpb"
)

// BenchmarkFleet measures the questions of a placement to the connections, for each host of fleets with 50 machines on each: the free resources
// of the host, and whether the host has a machine with an address.
func BenchmarkFleet(b *testing.B) {
	for _, hosts := range []int{10, 100} {
		b.Run(fmt.Sprintf("hosts=%d", hosts), func(b *testing.B) {
			p := &Pool{hosts: map[string]*Host{}}
			for i := range hosts {
				h := &Host{info: &hostpb.HostInfo{Cpus: 128, MemoryBytes: 512 << 30}, promised: map[string]Resources{}}
				for n := range 50 {
					h.keepAll(&hostpb.Machine{Spec: &hostpb.MachineSpec{
						Id: fmt.Sprintf("%d-%d", i, n), Cpus: 1, MemoryBytes: 1 << 30, Network: &hostpb.Network{Id: fmt.Sprint((i*50 + n) % (2 * hosts))},
						Addresses: []*hostpb.Address{{Address: fmt.Sprint("10.0.0.", n)}},
					}})
				}
				p.hosts[fmt.Sprint(i)] = h
			}
			for b.Loop() {
				for _, h := range p.hosts {
					h.Free()
				}
				p.Holders(Network{ID: "1"}, "10.0.0.99", "new")
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(hosts), "ns/host")
		})
	}
}
