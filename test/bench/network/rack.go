package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"capstan.dev/capstan/internal/host/network"
	"capstan.dev/capstan/internal/host/network/wireguard"
	"capstan.dev/capstan/internal/testenv/testnetns"
)

// rack is hosts with a router between them, and the paths to measure.
type rack struct {
	dir    string
	router netns.NsHandle
	hosts  []*host
	paths  []path
}

// host is a network namespace with a tunnel address.
type host struct {
	network.Box
	ns       netns.NsHandle
	tunnel   netip.Addr
	machines []string
}

// machine is a machine with one pod.
type machine struct {
	ns, podNS    netns.NsHandle
	address, pod netip.Addr
}

var (
	everything = netip.MustParsePrefix("0.0.0.0/0")
	router     = netip.MustParseAddr("198.51.100.1")
	// networks of three clusters. The last two span hosts.
	local     = network.Network{ID: "local", CIDR: "10.231.7.0/24", Cluster: "bench/local"}
	vxlan     = network.Network{ID: "vxlan", CIDR: "10.231.8.0/24", Cluster: "bench/vxlan", Overlay: &network.Overlay{VNI: 5000, MTU: 1450}}
	encrypted = network.Network{ID: "encrypted", CIDR: "10.231.9.0/24", Cluster: "bench/encrypted", Overlay: &network.Overlay{VNI: 5001, MTU: 1370}}
)

// newRack builds the hosts and the networks. With an error, it returns the parts that exist.
func newRack(ctx context.Context, dir string) (r *rack, err error) {
	r = &rack{dir: dir}
	if r.router, err = testnetns.New(); err != nil {
		return nil, fmt.Errorf("creating a network namespace: %w: run as root", err)
	}
	for range 4 {
		if err := r.addHost(); err != nil {
			return r, err
		}
	}
	a, b, c, d := r.hosts[0], r.hosts[1], r.hosts[2], r.hosts[3]
	if err := errors.Join(c.encrypt(), d.encrypt()); err != nil {
		return r, err
	}
	if err := r.addFloor(); err != nil {
		return r, fmt.Errorf("the bare cable: %w", err)
	}
	if err := r.addNetwork(ctx, local, "one host", a, a); err != nil {
		return r, err
	}
	if err := r.add("two hosts, no overlay", a.ns, b.ns, b.tunnel); err != nil {
		return r, err
	}
	if err := r.addNetwork(ctx, vxlan, "two hosts, VXLAN", a, b); err != nil {
		return r, err
	}
	err = r.addNetwork(ctx, encrypted, "two hosts, "+c.encryption(), c, d)
	return r, err
}

// add adds a path to measure.
func (r *rack) add(name string, from, to netns.NsHandle, address netip.Addr) error {
	p, err := newPath(name, from, to, address)
	r.paths = append(r.paths, p)
	return err
}

// addFloor adds the path through a bare cable.
func (r *rack) addFloor() error {
	left, right := netip.MustParseAddr("192.168.0.1"), netip.MustParseAddr("192.168.0.2")
	from, to, err := join(left, right)
	if err != nil {
		return err
	}
	return r.add("bare cable (floor)", from, to, right)
}

// join connects two new network namespaces with a cable.
func join(left, right netip.Addr) (a, b netns.NsHandle, err error) {
	if a, err = testnetns.New(); err != nil {
		return a, b, err
	}
	if b, err = testnetns.New(); err != nil {
		return a, b, err
	}
	return a, b, cable(testnetns.End{NS: a, Name: "eth0"}, testnetns.End{NS: b, Name: "eth0"}, left, right)
}

// cable connects two network namespaces, which reach each other by their addresses.
func cable(a, b testnetns.End, own, other netip.Addr) error {
	if err := testnetns.Cable(a, b); err != nil {
		return err
	}
	return errors.Join(
		testnetns.In(a.NS, func() error { return testnetns.Connect(a.Name, single(own), single(other), netip.Addr{}) }),
		testnetns.In(b.NS, func() error { return testnetns.Connect(b.Name, single(other), single(own), netip.Addr{}) }),
	)
}

func single(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

// addHost adds a host that reaches the others through the router.
func (r *rack) addHost() error {
	number := len(r.hosts) + 1
	name := fmt.Sprint("host-", number)
	h := &host{tunnel: netip.AddrFrom4([4]byte{192, 0, 2, byte(number)})}
	h.Box = network.Box{Dir: filepath.Join(r.dir, name, "run"), HostID: name, HostRoot: filepath.Join(r.dir, name, "root")}
	if err := os.MkdirAll(h.HostRoot, 0o700); err != nil {
		return err
	}
	var err error
	if h.ns, err = testnetns.New(); err != nil {
		return err
	}
	r.hosts = append(r.hosts, h)
	if err := cable(testnetns.End{NS: h.ns, Name: "uplink"}, testnetns.End{NS: r.router, Name: name}, h.tunnel, router); err != nil {
		return err
	}
	return testnetns.In(h.ns, func() error { return testnetns.Connect("uplink", netip.Prefix{}, everything, router) })
}

// encrypt makes the host encrypt its overlays.
func (h *host) encrypt() error {
	file := filepath.Join(h.HostRoot, "wireguard.key")
	private, err := wireguard.EnsureKey(file)
	h.Link = &wireguard.Link{KeyFile: file, Public: private.PublicKey(), Dir: filepath.Join(h.Dir, "wireguard"), UID: 65534}
	return err
}

// encryption names the part that encrypts. The link exists with the first network.
func (h *host) encryption() string {
	name := "WireGuard (process)"
	_ = testnetns.In(h.ns, func() error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = "probe"
		probe := &netlink.Wireguard{LinkAttrs: attrs}
		if netlink.LinkAdd(probe) == nil {
			name = "WireGuard (kernel)"
			return netlink.LinkDel(probe)
		}
		return nil
	})
	return name
}

// addNetwork creates a network with a machine on each of two hosts, which can be the same one, and adds the paths between the
// machines and between their pods.
func (r *rack) addNetwork(ctx context.Context, n network.Network, name string, a, b *host) error {
	from, err := a.addMachine(ctx, n, 10)
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	to, err := b.addMachine(ctx, n, 20)
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	if a != b {
		err = errors.Join(a.setPeer(ctx, n, b, to), b.setPeer(ctx, n, a, from))
	}
	err = errors.Join(err, from.routeTo(to), to.routeTo(from),
		r.add(name+", machines", from.ns, to.ns, to.address), r.add(name+", pods", from.podNS, to.podNS, to.pod))
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}

func (h *host) addMachine(ctx context.Context, n network.Network, number byte) (m machine, err error) {
	if n.Overlay != nil {
		overlay := *n.Overlay
		overlay.Address, n.Overlay = h.tunnel, &overlay
	}
	subnets, err := network.Subnets(n.CIDR, n.IPv6CIDR)
	if err != nil {
		return m, err
	}
	in := subnets[0].Prefix.Addr().As4()
	in[3] = number
	m.address, m.pod = netip.AddrFrom4(in), netip.AddrFrom4([4]byte{10, 244, number, 2})
	id := fmt.Sprint(n.ID, "-", number)
	err = testnetns.In(h.ns, func() error {
		if err := h.Ensure(ctx, n); err != nil {
			return err
		}
		if err := h.Lease(n.ID, id, "bench/"+id, []string{m.address.String()}); err != nil {
			return err
		}
		h.machines = append(h.machines, id)
		return h.Plug(n.ID, id, []network.Address{{Prefix: netip.PrefixFrom(m.address, subnets[0].Prefix.Bits()), Gateway: subnets[0].Gateway}})
	})
	if err != nil {
		return m, err
	}
	if m.ns, err = netns.GetFromPath(h.NetNS(id)); err != nil {
		return m, err
	}
	err = m.addPod()
	return m, err
}

// addPod connects a pod with its machine as the CNI plugin ptp does. Its interface has the MTU of the machine.
func (m *machine) addPod() (err error) {
	if m.podNS, err = testnetns.New(); err != nil {
		return err
	}
	if err := testnetns.In(m.ns, forward); err != nil {
		return err
	}
	gateway := m.pod.Prev()
	if err := cable(testnetns.End{NS: m.podNS, Name: "eth0"}, testnetns.End{NS: m.ns, Name: "pod"}, m.pod, gateway); err != nil {
		return err
	}
	if err := testnetns.In(m.podNS, func() error { return testnetns.Connect("eth0", netip.Prefix{}, everything, gateway) }); err != nil {
		return err
	}
	mtu, err := mtuOf(m.ns, network.Interface)
	return errors.Join(err, setMTU(m.podNS, "eth0", mtu), setMTU(m.ns, "pod", mtu))
}

// routeTo adds the route to the pods of another machine.
func (m machine) routeTo(other machine) error {
	return testnetns.In(m.ns, func() error {
		return testnetns.Connect(network.Interface, netip.Prefix{}, netip.PrefixFrom(other.pod, 24).Masked(), other.address)
	})
}

// setPeer gives a host the machine of the other one.
func (h *host) setPeer(ctx context.Context, n network.Network, other *host, m machine) error {
	return testnetns.In(h.ns, func() error {
		peers := network.Peers{Machines: []network.Peer{{Addresses: []netip.Addr{m.address}, Host: other.tunnel}}}
		if other.Link != nil {
			peers.Keys = map[netip.Addr]string{other.tunnel: other.Link.Public.String()}
		}
		return h.SetPeers(ctx, n.ID, peers)
	})
}

// forward lets a machine forward packets of its pods.
func forward() error { return os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0) }

func mtuOf(ns netns.NsHandle, name string) (mtu int, err error) {
	err = testnetns.In(ns, func() error {
		link, err := netlink.LinkByName(name)
		if err == nil {
			mtu = link.Attrs().MTU
		}
		return err
	})
	return mtu, err
}

func setMTU(ns netns.NsHandle, name string, mtu int) error {
	return testnetns.In(ns, func() error {
		link, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		return netlink.LinkSetMTU(link, mtu)
	})
}

// remove removes the network namespaces that the file system holds, and ends the processes of links. The other namespaces end with
// this process.
func (r *rack) remove() (err error) {
	for _, h := range r.hosts {
		for _, id := range h.machines {
			err = errors.Join(err, testnetns.In(h.ns, func() error { return h.Unplug(id) }))
		}
		if h.Link != nil {
			err = errors.Join(err, testnetns.In(h.ns, h.Link.Remove))
		}
	}
	return err
}
