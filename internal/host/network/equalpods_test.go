package network

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"capstan.dev/capstan/internal/testenv/testnetns"
)

// podCluster is a cluster with a machine on each of two boxes and one Pod on each machine. Its Pods have the same addresses as those
// of other podClusters, and its Service is at the same address.
type podCluster struct {
	name       string
	network    Network
	machines   [2]string // their addresses
	onA, onB   netns.NsHandle
	podA, podB netns.NsHandle
}

const (
	podA, podB = "10.244.0.5", "10.244.1.5"
	serviceB   = "10.96.0.10" // leads to podB
	// The second cluster has these, the first one does not.
	podOnlyB, serviceOnlyB = "10.244.1.6", "10.96.0.11"
)

// podCluster creates a cluster on two boxes.
func (r *rack) podCluster(name string, n Network, machines [2]string, a, b *rackBox) *podCluster {
	r.Helper()
	r.ensure(n, a, b)
	c := &podCluster{name: name, network: n, machines: machines}
	c.onA, c.onB = r.machine(a, n, name+"-a", machines[0]), r.machine(b, n, name+"-b", machines[1])
	peers := Peers{Machines: []Peer{peer(a, machines[0]), peer(b, machines[1])}}
	if a.Link != nil {
		peers.Keys = keys(a, b)
	}
	r.peers(n, peers, a, b)
	r.route(c.onA, "10.244.1.0/24", machines[1])
	r.route(c.onB, "10.244.0.0/24", machines[0])
	c.podA, c.podB = r.pod(c.onA, n, podA), r.pod(c.onB, n, podB)
	r.serve(c.podB, ":80", name)
	r.service(c.onA, serviceB, podB)
	return c
}

// route adds a route to a Pod network through another machine.
func (r *rack) route(machine netns.NsHandle, to, via string) {
	r.Helper()
	r.must(in(machine, func() error {
		return connect(Interface, netip.Prefix{}, netip.MustParsePrefix(to), netip.MustParseAddr(via))
	}))
}

// pod creates a Pod on a machine, as a CNI plugin does.
func (r *rack) pod(machine netns.NsHandle, n Network, address string) netns.NsHandle {
	r.Helper()
	ns := r.namespace()
	gateway, own := netip.MustParsePrefix("169.254.1.1/32"), netip.PrefixFrom(netip.MustParseAddr(address), 32)
	link := "pod" + address[strings.LastIndex(address, ".")+1:]
	r.must(testnetns.Cable(testnetns.End{NS: ns, Name: "eth0"}, testnetns.End{NS: machine, Name: link}))
	r.must(in(machine, func() error {
		if err := set("/proc/sys/net/ipv4/ip_forward", "1"); err != nil {
			return err
		}
		return connect(link, gateway, own, netip.Addr{})
	}))
	r.must(in(ns, func() error {
		if err := connect("eth0", own, gateway, netip.Addr{}); err != nil {
			return err
		}
		link, err := netlink.LinkByName("eth0")
		if err == nil {
			err = netlink.LinkSetMTU(link, n.Overlay.MTU)
		}
		if err != nil {
			return err
		}
		return connect("eth0", netip.Prefix{}, netip.MustParsePrefix("0.0.0.0/0"), gateway.Addr())
	}))
	return ns
}

// service leads an address to a Pod, as kube-proxy does.
func (r *rack) service(machine netns.NsHandle, address, pod string) {
	r.Helper()
	r.must(in(machine, func() error {
		nft(r.T, fmt.Sprintf(`add table ip services
			add chain ip services prerouting { type nat hook prerouting priority dstnat; }
			add rule ip services prerouting ip daddr %s tcp dport 80 dnat to %s`, address, pod))
		return nil
	}))
}

// Two clusters on the same boxes can have equal Pod networks and equal Service networks. A Pod reaches the Pods and Services of its
// own cluster only, also when both clusters have connections between equal addresses and ports at the same time. The frames between
// machines pass the rules of the boxes for IP.
func TestEqualPodNetworks(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	for _, path := range []string{"VXLAN", "WireGuard"} {
		t.Run(path, func(t *testing.T) {
			r := newRack(t, false)
			r.bridgeNF = "1"
			a, b := r.add(), r.add()
			first := Network{ID: "first", CIDR: "10.231.7.0/24", Cluster: "default/first", Overlay: &Overlay{VNI: 5000, MTU: 1400}}
			second := Network{ID: "second", CIDR: "10.231.8.0/24", Cluster: "other/second", Overlay: &Overlay{VNI: 5001, MTU: 1400}}
			for _, box := range []*rackBox{a, b} {
				if path == "WireGuard" {
					r.encrypted(box)
					first.Overlay.MTU, second.Overlay.MTU = 1370, 1370
				}
			}
			c1 := r.podCluster("first", first, [2]string{"10.231.7.10", "10.231.7.20"}, a, b)
			c2 := r.podCluster("second", second, [2]string{"10.231.8.10", "10.231.8.20"}, a, b)
			r.serve(r.pod(c2.onB, second, podOnlyB), ":80", "only second")
			r.service(c2.onA, serviceOnlyB, podOnlyB)

			for _, c := range []*podCluster{c1, c2} {
				r.reaches(c.name+": Pod on the other box", c.podA, podB+":80", c.name)
				r.reaches(c.name+": Service", c.podA, serviceB+":80", c.name)
			}
			r.equalConnections([]*rackBox{a, b}, c1, c2)
			r.onlyOwnCluster(c1, c2)
		})
	}
}

// equalConnections: both clusters have a connection between the same addresses and ports at the same time. The boxes track neither of
// them, because they could not tell them apart.
func (r *rack) equalConnections(boxes []*rackBox, clusters ...*podCluster) {
	r.Helper()
	source := &net.TCPAddr{IP: net.ParseIP(podA), Port: 40000}
	conns := map[*podCluster]net.Conn{}
	for _, c := range clusters {
		r.must(in(c.podA, func() (err error) {
			conns[c], err = (&net.Dialer{LocalAddr: source, Timeout: 10 * time.Second}).Dial("tcp", podB+":80")
			return err
		}))
		r.Cleanup(func() { _ = conns[c].Close() })
		r.must(conns[c].SetDeadline(time.Now().Add(10 * time.Second)))
	}
	for range 10 { // The packets of both connections alternate.
		for _, c := range clusters {
			_, err := conns[c].Write(make([]byte, bulk/10))
			r.must(err)
		}
	}
	for _, b := range boxes {
		r.must(in(b.ns, func() error {
			flows, err := netlink.ConntrackTableList(netlink.ConntrackTable, netlink.FAMILY_V4)
			for _, flow := range flows {
				if flow.Forward.SrcIP.Equal(source.IP) {
					r.Errorf("box %s tracks a connection between Pods: %s", b.HostID, flow)
				}
			}
			return err
		}))
	}
	for _, c := range clusters {
		if got, err := io.ReadAll(conns[c]); string(got) != c.name {
			r.Errorf("%s, with an equal connection of another cluster: got %q, %v", c.name, got, err)
		}
	}
}

// onlyOwnCluster: a Pod of the first cluster gets no answer from addresses that exist in the second one only, even if its machine
// sends the packets to the gateway. A Pod of the second cluster does.
func (r *rack) onlyOwnCluster(c1, c2 *podCluster) {
	r.Helper()
	only := []string{podOnlyB + ":80", serviceOnlyB + ":80", c2.machines[1] + ":8080"}
	r.serve(c2.onB, ":8080", "only second")
	for _, address := range only {
		r.reaches("second cluster: "+address, c2.podA, address, "only second")
	}
	refused := func(what string) {
		var all sync.WaitGroup
		for _, address := range only {
			all.Go(func() { r.blocked("first cluster"+what+": "+address, c1.podA, address) })
		}
		all.Wait()
	}
	refused("")
	r.route(c1.onA, podOnlyB+"/32", "10.231.7.1")
	refused(" through the gateway")
}
