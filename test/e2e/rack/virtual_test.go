//go:build e2e

package rack_test

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/envtest"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/machineapi"
	"capstan.dev/capstan/internal/node/endpoint"
	"capstan.dev/capstan/internal/node/kube"
	"capstan.dev/capstan/internal/testenv"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/test/rack"
)

// The electors of both parts use one API server.
func TestVirtualAddressMoves(t *testing.T) {
	assets, err := testenv.Assets()
	expect.NoError(t, err)
	log.SetLogger(logr.Discard())
	env := &envtest.Environment{BinaryAssetsDirectory: assets, ControlPlaneStartTimeout: rack.Patience, ControlPlaneStopTimeout: rack.Patience}
	t.Cleanup(func() { expect.NoError(t, env.Stop()) })
	api, err := env.Start()
	expect.NoError(t, err)
	t.Run("IPv6", func(t *testing.T) { moveIPv6Address(t, api) })
	t.Run("LAN", func(t *testing.T) { moveLANEndpoint(t, api) })
}

// An IPv6 virtual address moves to another box when the network of its holder is cut. A neighbour learns the new holder from an
// advertisement that it did not ask for. The electors of the machines compete for a real Lease; each reaches the API server through
// the network of its box.
func moveIPv6Address(t *testing.T, api *rest.Config) {
	boxes, router := newRack(t, 2, standIns(t))
	electEndpoint(t, api, router, boxes)
	// The neighbour takes its entry for reachable, and has no reason to ask.
	router.Run(`echo 3600000 > /proc/sys/net/ipv6/neigh/lan/base_reachable_time_ms
		nft 'add table inet watch; add chain inet watch output { type filter hook output priority 0; }; add counter inet watch asked
		add rule inet watch output ip6 daddr { ff02::1:ff00:100, ` + rack.VirtualIPv6Address + ` } icmpv6 type nd-neighbor-solicit counter name asked'`)
	const client = "[" + rack.VirtualIPv6Address + "]:6443"
	answers := func() error { _, err := get(router, client, "/name"); return err }

	first := rack.HolderOf(t, racks(boxes), rack.VirtualIPv6Address)
	rack.Eventually(t, "an answer at the address", answers)
	router.Run("ip -6 neigh replace " + rack.VirtualIPv6Address + " lladdr " + lanMAC(first) + " dev lan nud reachable; nft reset counter inet watch asked")
	cut := time.Now()
	first.Unplug(router)
	second := rack.HolderOf(t, rack.Others(racks(boxes), first), rack.VirtualIPv6Address)
	if first.Has(rack.VirtualIPv6Address) {
		t.Error("two boxes have the address")
	}
	rack.Eventually(t, "the new holder in the table of a neighbour", func() error {
		if entry := router.Run("ip -6 neigh show " + rack.VirtualIPv6Address); !strings.Contains(entry, lanMAC(second)) {
			return fmt.Errorf("expected %s, found %s", lanMAC(second), entry)
		}
		return nil
	})
	if asked := router.Run("nft list counter inet watch asked"); !strings.Contains(asked, "packets 0 ") {
		t.Errorf("the neighbour has asked for the address: this test proves nothing about advertisements: %s", asked)
	}
	rack.Eventually(t, "an answer at the address from its new holder", answers)
	t.Logf("an answer %s after the cut", time.Since(cut).Round(time.Millisecond))

	first.Plug(router)
	rack.Eventually(t, "an answer to the box that returned", func() error { _, err := get(first.Space, client, "/name"); return err })
	returned := boxes[first.Number-1]
	before := returned.leaseReads.Load()
	rack.Eventually(t, "the machine of the box that returned reads the Lease for longer than a term", func() error {
		// It reads twice a second.
		if n, want := returned.leaseReads.Load()-before, int64(3*machineapi.EndpointLease/time.Second); n < want {
			return fmt.Errorf("%d reads, want %d", n, want)
		}
		return nil
	})
	if !second.Has(rack.VirtualIPv6Address) || first.Has(rack.VirtualIPv6Address) {
		t.Error("the address moved when its previous holder returned")
	}
}

// In a LAN, the virtual address is on the bridge of its holder. A client and the machines of both boxes reach it there, also after it moved
// to the other box, because the network of its holder was cut.
func moveLANEndpoint(t *testing.T, api *rest.Config) {
	boxes, router := newRack(t, 2, standIns(t))
	router.Run("ip addr add " + clientsRouter + "/24 dev lan")
	for _, b := range boxes {
		b.joinLAN()
	}
	electEndpoint(t, api, router, boxes)
	const endpoint = rack.VirtualAddress + ":6443"
	answers := func() error { _, err := get(router, endpoint, "/name"); return err }
	reached := func(b *box) {
		t.Helper()
		rack.Eventually(t, "the endpoint for machine "+b.name(), func() error { return b.machineReaches(endpoint) })
	}

	first := rack.HolderOf(t, racks(boxes), rack.VirtualAddress)
	rack.Eventually(t, "an answer at the address", answers)
	reached(boxes[0])
	reached(boxes[1])
	cut := time.Now()
	first.Unplug(router)
	second := rack.HolderOf(t, rack.Others(racks(boxes), first), rack.VirtualAddress)
	if first.Has(rack.VirtualAddress) {
		t.Error("two boxes have the address")
	}
	if links := second.Run("ip -o addr show to " + rack.VirtualAddress); !strings.Contains(links, "br-lab") {
		t.Errorf("the address is not on the bridge of the LAN: %s", links)
	}
	rack.Eventually(t, "an answer at the address from its new holder", answers)
	t.Logf("an answer %s after the cut", time.Since(cut).Round(time.Millisecond))
	first.Plug(router)
	reached(boxes[0])
	reached(boxes[1])
}

// balancer is the load balancer of the cluster.
func (b *box) balancer() *hostpb.LoadBalancer {
	lb := &hostpb.LoadBalancer{
		Id: clusterID, Namespace: "default", Name: "rack", NetworkId: clusterID, Listen: []string{":6443", "[" + machinesIPv6 + "1]:6443"},
		Endpoint: "[" + rack.VirtualIPv6Address + "]:6443", VirtualAddress: &hostpb.VirtualAddress{Address: rack.VirtualIPv6Address},
	}
	if b.lan {
		lb.Endpoint, lb.VirtualAddress.Address = rack.VirtualAddress+":6443", rack.VirtualAddress
		lb.Listen = []string{lb.Endpoint}
	}
	return lb
}

// electEndpoint creates a network with a control plane machine, an elector and a load balancer on each box. It is dual stack, or in the
// LAN of the clients. At the end of the test, the electors' Lease is deleted.
func electEndpoint(t *testing.T, api *rest.Config, router rack.Space, boxes []*box) {
	t.Helper()
	reachable(t, api, router)
	direct, err := dynamic.NewForConfig(api)
	expect.NoError(t, err)
	t.Cleanup(func() {
		expect.NoError(t, direct.Resource(kube.Leases).Namespace(metav1.NamespaceSystem).DeleteCollection(context.WithoutCancel(t.Context()), metav1.DeleteOptions{}, metav1.ListOptions{}))
	})
	for _, b := range boxes {
		b.dualStack, b.elects = !b.lan, true
		b.make()
	}
	if !boxes[0].lan {
		setPeers(t, boxes...)
	}
	for _, b := range boxes {
		lb := b.balancer()
		for _, m := range boxes {
			lb.Backends = append(lb.Backends, &hostpb.Backend{Name: m.name(), Address: m.address() + ":6443"})
		}
		_, err := b.EnsureLoadBalancer(b.ctx(), lb)
		expect.NoError(t, err)
		config := rest.CopyConfig(api)
		config.Dial = func(ctx context.Context, _, _ string) (net.Conn, error) { return b.Dial(ctx, "tcp", apiAddress) }
		config.Wrap(func(next http.RoundTripper) http.RoundTripper { return counter{next, &b.leaseReads} })
		leases, err := dynamic.NewForConfig(config)
		expect.NoError(t, err)
		elector := endpoint.Elector{ // The folder is mounted in the namespace of the box.
			Name: b.name(), Dir: filepath.Join("/proc", b.PID, "root", b.Root, "run", b.machine().Id), Log: slog.New(slog.NewTextHandler(t.Output(), nil)),
			Leases: leases.Resource(kube.Leases).Namespace(metav1.NamespaceSystem),
		}
		ctx, end := context.WithCancel(context.Background())
		var running sync.WaitGroup
		running.Go(func() { elector.Run(ctx) })
		t.Cleanup(func() { end(); running.Wait() })
	}
}

// counter counts the requests that an API server has answered.
type counter struct {
	http.RoundTripper
	n *atomic.Int64
}

func (c counter) RoundTrip(r *http.Request) (*http.Response, error) {
	res, err := c.RoundTripper.RoundTrip(r)
	if err == nil {
		c.n.Add(1)
	}
	return res, err
}

// apiAddress is where boxes reach the API server.
const apiAddress = "198.18.0.254:6443"

// reachable lets the boxes reach an API server through the router.
func reachable(t *testing.T, config *rest.Config, router rack.Space) {
	t.Helper()
	server, err := url.Parse(config.Host)
	expect.NoError(t, err)
	rack.Uplink(t, router)
	listener, err := net.Listen("tcp", apiAddress)
	expect.NoError(t, err)
	t.Cleanup(func() { _ = listener.Close() })
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			go forward(conn, server.Host)
		}
	}()
}

// forward connects a client with a server until one of them ends the connection.
func forward(client net.Conn, address string) {
	defer func() { _ = client.Close() }()
	server, err := net.Dial("tcp", address)
	if err != nil {
		return
	}
	go func() { _, _ = io.Copy(server, client); _ = server.Close() }()
	_, _ = io.Copy(client, server)
}

// racks are the boxes without their machines.
func racks(boxes []*box) (all []*rack.Box) {
	for _, b := range boxes {
		all = append(all, b.Box)
	}
	return all
}

// lanMAC is the MAC address of the box in the network of the clients.
func lanMAC(b *rack.Box) string { return strings.Fields(b.Run("ip -brief link show lan"))[2] }
