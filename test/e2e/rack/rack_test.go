//go:build e2e

package rack_test

import (
	"fmt"
	"sync"
	"syscall"
	"testing"
	"time"

	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/test/rack"
)

// setPeers sets the peers of each box.
func setPeers(t *testing.T, boxes ...*box) {
	t.Helper()
	for _, b := range boxes {
		req := &hostpb.SetPeersRequest{NetworkId: clusterID, Namespace: "default", Name: "rack"}
		for _, other := range boxes {
			if other != b {
				req.Peers = append(req.Peers, &hostpb.Peer{Addresses: []string{other.address()}, Host: other.Tunnel()})
				req.Hosts = append(req.Hosts, other.Tunnel())
			}
			if key := other.key(); key != "" && other != b {
				if req.PublicKeys == nil {
					req.PublicKeys = map[string]string{}
				}
				req.PublicKeys[other.Tunnel()] = key
			}
		}
		_, err := b.SetPeers(b.ctx(), req)
		expect.NoError(t, err)
	}
}

// key is the public key with which a box encrypts its overlays, or "".
func (b *box) key() string {
	info, err := b.GetInfo(b.ctx(), &hostpb.GetInfoRequest{})
	expect.NoError(b.t, err)
	return info.OverlayPublicKey
}

// allReach expects that each box and each machine connects to each machine.
func allReach(t *testing.T, boxes ...*box) {
	t.Helper()
	var all sync.WaitGroup
	for _, from := range boxes {
		for _, to := range boxes {
			all.Go(func() {
				if err := from.reaches(to); err != nil {
					t.Errorf("box %d to machine %s: %v", from.Number, to.name(), err)
				}
				if err := from.machineReaches(to.address() + ":6443"); err != nil {
					t.Errorf("machine %s to machine %s: %v", from.name(), to.name(), err)
				}
			})
		}
	}
	all.Wait()
}

// endpointPort is the port of the cluster's endpoint on the first box.
const endpointPort = 20000

// balance creates the load balancer of each box. The endpoint is an address of the first one.
func balance(t *testing.T, boxes ...*box) (endpoint string) {
	t.Helper()
	endpoint = fmt.Sprintf("%s:%d", boxes[0].Tunnel(), endpointPort)
	for i, b := range boxes {
		lb := &hostpb.LoadBalancer{Id: clusterID, Namespace: "default", Name: "rack", NetworkId: clusterID, Listen: []string{":6443"}}
		if i == 0 {
			lb.Listen = append(lb.Listen, endpoint)
		} else {
			lb.Endpoint = endpoint
		}
		for _, m := range boxes {
			lb.Backends = append(lb.Backends, &hostpb.Backend{Name: m.name(), Address: m.address() + ":6443"})
		}
		_, err := b.EnsureLoadBalancer(b.ctx(), lb)
		expect.NoError(t, err)
	}
	return endpoint
}

// healthy waits until the load balancer of a box has that many healthy backends.
func healthy(b *box, want int) {
	b.t.Helper()
	stream, err := b.Watch(b.ctx(), &hostpb.WatchRequest{})
	expect.NoError(b.t, err)
	for last := (*hostpb.LoadBalancer)(nil); ; {
		event, err := stream.Recv()
		if err != nil {
			b.t.Fatalf("load balancer of box %d: %v, last seen %v", b.Number, err, last)
		}
		if last = event.GetLoadBalancer(); last == nil {
			continue
		}
		found := 0
		for _, backend := range last.Backends {
			if backend.Healthy {
				found++
			}
		}
		if found == want && last.Serving {
			return
		}
	}
}

// The machines of one cluster on three boxes are in one network. It outlives a capstand, and each machine reaches the
// cluster's endpoint when the box of the endpoint is lost.
func TestThreeBoxes(t *testing.T) {
	boxes, _ := newRack(t, 3, standIns(t))
	ids := map[string]bool{}
	for _, b := range boxes {
		info, err := b.GetInfo(b.ctx(), &hostpb.GetInfoRequest{})
		expect.NoError(t, err)
		ids[info.BoxId] = true
		b.make()
	}
	if len(ids) != len(boxes) {
		t.Fatalf("the boxes have the ids %v: this test proves nothing", ids)
	}
	if err := boxes[0].reaches(boxes[1]); err == nil {
		t.Error("a machine on another box answers before it is a peer")
	}
	setPeers(t, boxes...)
	allReach(t, boxes...)

	second := boxes[1]
	second.End(syscall.SIGKILL)
	rack.Eventually(t, "an answer without capstand", func() error { return second.reaches(boxes[2]) })
	second.Run("ip link del $(ip -o link | grep -oE 'cpx[0-9a-f]+')")
	if err := second.reaches(boxes[2]); err == nil {
		t.Error("a machine on another box answers without a tunnel")
	}
	second.Start()
	rack.Eventually(t, "the tunnel after the restart", func() error { return second.reaches(boxes[2]) })
	allReach(t, boxes...)

	endpoint := balance(t, boxes...)
	for _, b := range boxes {
		healthy(b, 3)
		if err := b.machineReaches(endpoint); err != nil {
			t.Errorf("machine %s to the endpoint: %v", b.name(), err)
		}
	}
	lost := time.Now()
	boxes[0].Leave()
	for _, b := range boxes[1:] {
		healthy(b, 2)
		if err := b.machineReaches(endpoint); err != nil {
			t.Errorf("machine %s to the endpoint after the loss of its box: %v", b.name(), err)
		}
	}
	t.Logf("all load balancers noticed the loss of a box after %s", time.Since(lost).Round(time.Millisecond))
	boxes[0].Join()
	for _, b := range boxes {
		healthy(b, 3)
	}
}
