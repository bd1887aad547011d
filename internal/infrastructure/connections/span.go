package connections

import (
	"context"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/owner"
)

// Network identifies a network of a host. Ids are public, and a tenant can write the id of another cluster into a CapstanCluster. So a record
// of a network also belongs to the namespace and name of its cluster, as the network on the host does.
type Network struct{ ID, Namespace, Name string }

// NetworkOf returns the network of a cluster with an id.
func NetworkOf(id string, cluster owner.Object) Network {
	return Network{ID: id, Namespace: cluster.GetNamespace(), Name: cluster.GetName()}
}

// span is a network with an overlay, and its peers, as the host last accepted them.
type span struct {
	network *hostpb.Network
	peers   *hostpb.SetPeersRequest
}

// EnsurePeers makes a network with an overlay, and sets its peers, the tunnel addresses of the other hosts that have it, and the
// keys of all of them. It calls the host only if the host accepted something else last on this connection.
func (h *Host) EnsurePeers(ctx context.Context, n *hostpb.Network, peers []*hostpb.Peer, hosts []string, keys map[string]string) error {
	key, want := NetworkOf(n.GetId(), n), &span{n, &hostpb.SetPeersRequest{NetworkId: n.GetId(), Namespace: n.GetNamespace(), Name: n.GetName(), Peers: peers, Hosts: hosts, PublicKeys: keys}}
	h.mu.RLock()
	have, before := h.spans[key], h.forgotten
	h.mu.RUnlock()
	if have != nil && proto.Equal(have.network, want.network) && proto.Equal(have.peers, want.peers) {
		return nil
	}
	if _, err := h.EnsureNetwork(ctx, want.network); err != nil {
		return err
	}
	if _, err := h.SetPeers(ctx, want.peers); err != nil {
		return err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	// The host may have removed the network since the calls.
	if h.err == nil && h.forgotten == before {
		h.spans[key] = want
	}
	return nil
}

// Refused contains the reasons why a host does not publish Services at their places.
type Refused map[Place]string

// Place is an address of a Service. Name is that of a Service with ports of the host, and empty for an address of its own.
type Place struct{ Address, Name string }

// Services returns the list that the host accepted last for a network on this connection, or nil.
func (h *Host) Services(network Network) *hostpb.SetServicesRequest {
	h.mu.RLock()
	defer h.mu.RUnlock()
	return h.services[network].request
}

// AllServices returns the Services of all networks that the host publishes. Those of an older capstand are the lists that it accepted on this
// connection.
func (h *Host) AllServices(ctx context.Context) (lists []*hostpb.SetServicesRequest, err error) {
	answer, err := h.ListServices(ctx, &hostpb.ListServicesRequest{})
	if Code(err) != codes.Unimplemented {
		return answer.GetLists(), err
	}
	h.mu.RLock()
	defer h.mu.RUnlock()
	for _, p := range h.services {
		lists = append(lists, p.request)
	}
	return lists, nil
}

// publication is the last request for the Services of a network that the host accepted.
type publication struct {
	request *hostpb.SetServicesRequest
	// whole: the host refused no place.
	whole bool
}

// HasServices reports whether the host accepted exactly these Services last on this connection, and refused no place.
func (h *Host) HasServices(want *hostpb.SetServicesRequest) bool {
	h.mu.RLock()
	defer h.mu.RUnlock()
	have := h.services[NetworkOf(want.GetNetworkId(), want)]
	return have.whole && proto.Equal(have.request, want)
}

// EnsureServices sets the published Services of a network, and returns the places that the host refused. It calls the host
// only if the host accepted something else last on this connection, or refused a place.
func (h *Host) EnsureServices(ctx context.Context, want *hostpb.SetServicesRequest) (Refused, error) {
	if h.HasServices(want) {
		return nil, nil
	}
	return h.PublishServices(ctx, want)
}

// PublishServices is EnsureServices with a call in any case: another manager can have changed the Services of the host since the record.
func (h *Host) PublishServices(ctx context.Context, want *hostpb.SetServicesRequest) (Refused, error) {
	key := NetworkOf(want.GetNetworkId(), want)
	h.mu.Lock()
	before := h.forgotten
	h.dropServices(key) // A call that fails may have changed the host.
	h.mu.Unlock()
	answer, err := h.SetServices(ctx, want)
	if err != nil {
		return nil, err
	}
	refused := Refused{}
	for _, r := range answer.GetRefused() {
		refused[Place{r.GetAddress(), r.GetName()}] = r.GetMessage()
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	// The host may have removed the network since the call.
	if h.err == nil && h.forgotten == before {
		h.keepServices(key, publication{want, len(refused) == 0})
	}
	return refused, nil
}

// keepServices records what the host accepted for a network, unless the mirror is full: without a record, the next EnsureServices calls the
// host again. The request can contain what the host has reported, so it counts. The caller holds h.mu.
func (h *Host) keepServices(network Network, p publication) {
	h.dropServices(network)
	if size := memory(p.request); h.bytes+size <= maxMirrorBytes {
		h.services[network] = p
		h.bytes += size
	}
}

// dropServices deletes the record of the Services of a network. The caller holds h.mu.
func (h *Host) dropServices(network Network) {
	if p, found := h.services[network]; found {
		h.bytes -= memory(p.request)
		delete(h.services, network)
	}
}

// DeleteNetwork removes a network with its peers. The next EnsurePeers sets them again.
func (h *Host) DeleteNetwork(ctx context.Context, r *hostpb.DeleteNetworkRequest, opts ...grpc.CallOption) (*hostpb.DeleteNetworkResponse, error) {
	key := NetworkOf(r.GetId(), r)
	h.mu.Lock()
	h.forget(key)
	h.mu.Unlock()
	answer, err := h.HostClient.DeleteNetwork(ctx, r, opts...)
	if Code(err) == codes.OK || Code(err) == codes.NotFound {
		h.SetPulses(key, false)
	}
	return answer, err
}

// forget deletes the record of a network, so that the next EnsurePeers or EnsureServices calls the host. The caller holds h.mu.
func (h *Host) forget(network Network) {
	delete(h.spans, network)
	h.dropServices(network)
	h.forgotten++
}
