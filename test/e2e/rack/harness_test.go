//go:build e2e

// Package rack_test tests several real capstands, each on a box of its own: see package rack. Where no cluster is needed,
// machines are real runc containers with the testinit of package host_test as PID 1.
package rack_test

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/test/e2e/harness"
	"capstan.dev/capstan/test/rack"
	"capstan.dev/capstan/test/versions"
)

const version = versions.Default

var programs string // folder with testinit

func TestMain(m *testing.M) { os.Exit(harness.RunWithPrograms(m, &programs)) }

// startPlane starts a management plane for a test.
func startPlane(t *testing.T, args ...string) *harness.Plane {
	t.Helper()
	plane, err := harness.Start(args...)
	if plane != nil {
		t.Cleanup(func() { expect.NoError(t, plane.Down()) })
	}
	expect.NoError(t, err)
	return plane
}

// get asks a testinit from the box.
func (b *box) get(address, path string, query ...string) (string, error) {
	return get(b.Space, address, path, query...)
}

// get asks a testinit; each request has a connection of its own.
func get(from rack.Space, address, path string, query ...string) (string, error) {
	web := &http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{
		DialContext: from.Dial, TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, DisableKeepAlives: true,
	}}
	values := url.Values{}
	for i := 0; i < len(query); i += 2 {
		values.Set(query[i], query[i+1])
	}
	res, err := web.Get("https://" + address + path + "?" + values.Encode())
	if err != nil {
		return "", err
	}
	defer func() { _ = res.Body.Close() }()
	body, err := io.ReadAll(res.Body)
	if err == nil && res.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", res.Status, body)
	}
	return string(body), err
}

// box is a host of the rack, with one machine that is a stand-in.
type box struct {
	*rack.Box
	t *testing.T
	// mtu of the cluster's network.
	mtu int32
	// dualStack gives the cluster's network IPv6 addresses too.
	dualStack bool
	// lan attaches the machine to the network of the clients.
	lan bool
	// elects lets the machine take part in the election of the virtual address.
	elects bool
	// leaseReads are the answers of the API server to the machine in this election.
	leaseReads atomic.Int64
}

// standIns are machines that start in a second.
func standIns(t *testing.T) rack.Software {
	t.Helper()
	return rack.Software{Capstand: filepath.Join(harness.Bin(), "capstand"), Assets: harness.StandIns(t, programs)}
}

// newRack creates boxes with running capstands, and the router between them.
func newRack(t *testing.T, size int, s rack.Software) ([]*box, rack.Space) {
	t.Helper()
	made, router := rack.New(t, size, s)
	return emptyAtTheEnd(t, made), router
}

// emptyAtTheEnd lets the test fail if it leaves anything on a box.
func emptyAtTheEnd(t *testing.T, made []*rack.Box) (boxes []*box) {
	for _, m := range made {
		b := &box{Box: m, t: t, mtu: 1450}
		boxes = append(boxes, b)
		t.Cleanup(b.cleanUp)
	}
	return boxes
}

func (b *box) ctx() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), rack.Patience)
	b.t.Cleanup(cancel)
	return ctx
}

// The cluster of the rack.
const (
	clusterID = "e2e-rack"
	machines  = "10.231.16."
	// machinesIPv6 is the network of machines that have IPv6 addresses too.
	machinesIPv6 = "fd00:231:16::"
	// clients is the network of the clients, with the address of the router.
	clients, clientsRouter = "203.0.113.", "203.0.113.254"
)

func (b *box) name() string { return fmt.Sprint("rack-", b.Number) }

func (b *box) address() string {
	if b.lan {
		return fmt.Sprint(clients, 19+b.Number)
	}
	return fmt.Sprint(machines, 9+b.Number)
}

// joinLAN moves the address of the box in the network of the clients to a bridge, to which the machine is attached.
func (b *box) joinLAN() {
	b.lan = true
	address := fmt.Sprint(clients, b.Number, "/24")
	b.Run("ip link add br-lab type bridge; ip link set br-lab up; ip addr del " + address + " dev lan; ip link set lan master br-lab; ip addr add " + address + " dev br-lab")
}

func (b *box) network() *hostpb.Network {
	if b.lan {
		return &hostpb.Network{Id: clusterID, Namespace: "default", Name: "rack", Cidr: clients + "0/24", Lan: &hostpb.LAN{Bridge: "br-lab"}}
	}
	n := &hostpb.Network{
		Id: clusterID, Namespace: "default", Name: "rack", Cidr: machines + "0/24",
		Overlay: &hostpb.Overlay{Vni: 70001, Address: b.Tunnel(), Mtu: b.mtu},
	}
	if b.dualStack {
		n.Ipv6Cidr = machinesIPv6 + "/64"
	}
	return n
}

func (b *box) machine() *hostpb.MachineSpec {
	m := &hostpb.MachineSpec{
		Id: fmt.Sprint(clusterID, "-", b.Number), Namespace: "default", Name: b.name(), Cluster: "rack", Network: b.network(),
		Addresses: []*hostpb.Address{{Address: b.address(), Prefix: 24}},
		Cpus:      1, MemoryBytes: 256 << 20, DiskBytes: 64 << 20, Image: "host", KubernetesVersion: version, ProviderId: "capstan://rack", ControlPlane: b.elects,
	}
	if b.lan {
		m.Addresses[0].Gateway = clientsRouter
	}
	if b.dualStack {
		m.Addresses = append(m.Addresses, &hostpb.Address{Address: fmt.Sprintf("%s%x", machinesIPv6, 9+b.Number), Prefix: 64})
	}
	return m
}

// make creates the box's machine and waits until it runs.
func (b *box) make() {
	b.t.Helper()
	_, err := b.EnsureNetwork(b.ctx(), b.network())
	expect.NoError(b.t, err)
	_, err = b.EnsureMachine(b.ctx(), &hostpb.EnsureMachineRequest{Spec: b.machine(), BootstrapData: []byte("#cloud-config\n")})
	expect.NoError(b.t, err)
	rack.Eventually(b.t, "machine "+b.name(), func() error { return b.reaches(b) })
}

// reaches returns nil if the box, as its load balancer does, connects to the machine of another one.
func (b *box) reaches(other *box) error {
	got, err := b.get(other.address()+":6443", "/name")
	if err == nil && got != other.name() {
		err = fmt.Errorf("%s answers as %q", other.address(), got)
	}
	return err
}

// machineReaches returns nil if the box's machine connects to an address.
func (b *box) machineReaches(address string) error {
	_, err := b.get(b.address()+":6443", "/dial", "to", address)
	return err
}

// cleanUp deletes everything through capstand, and expects that the box is then as it was.
func (b *box) cleanUp() {
	if b.t.Failed() {
		b.t.Logf("box %d: %s", b.Number, b.Output)
	}
	if !b.Runs() {
		b.Start()
	}
	m := b.machine()
	res, err := b.DeleteMachine(b.ctx(), &hostpb.DeleteMachineRequest{Id: m.Id, Namespace: m.Namespace, Name: m.Name})
	if err != nil || !res.Done {
		b.t.Errorf("machine %s was not deleted: %v, %v", m.Name, res, err)
	}
	_, err = b.DeleteLoadBalancer(b.ctx(), &hostpb.DeleteLoadBalancerRequest{Id: clusterID, Namespace: "default", Name: "rack"})
	expect.NoError(b.t, err)
	_, err = b.DeleteNetwork(b.ctx(), &hostpb.DeleteNetworkRequest{Id: clusterID, Namespace: "default", Name: "rack"})
	expect.NoError(b.t, err)
	b.isEmpty()
	b.End(syscall.SIGTERM)
}

// isEmpty expects that the box is as it was before its first machine.
func (b *box) isEmpty() {
	b.t.Helper()
	if left := b.Run("ip -o link | grep -E ': (cap|cpx|cpm)' || true; nft list tables; ip route | grep -E '^(24[0-7]|10[.]231)' || true; ls /run/capstan/networks /run/capstan/netns"); left != "/run/capstan/netns:\n\n/run/capstan/networks:" {
		b.t.Errorf("box %d has left: %s", b.Number, left)
	}
}
