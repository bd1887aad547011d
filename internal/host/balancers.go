package host

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"net"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/host/admission"
	"capstan.dev/capstan/internal/host/balancer"
	"capstan.dev/capstan/internal/host/events"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/refusal"
)

// balancers is the registry of the load balancers of this host.
type balancers struct {
	*platform
	networks *networks
	// removed is called after a load balancer was removed from the registry; mu is held.
	removed func()
	byID    map[string]*loadBalancer
}

// add registers a load balancer that is recorded on disk; mu is held.
func (bs *balancers) add(spec *hostpb.LoadBalancer, listen []string) *loadBalancer {
	lb := newLoadBalancer(bs, spec, listen)
	bs.byID[spec.Id] = lb
	return lb
}

// EnsureLoadBalancer creates or changes a load balancer.
func (bs *balancers) EnsureLoadBalancer(_ context.Context, want *hostpb.LoadBalancer) (*hostpb.LoadBalancer, error) {
	if err := admission.CheckLoadBalancer(want); err != nil {
		return nil, err
	}
	bs.mu.Lock()
	defer bs.mu.Unlock()
	listen, err := bs.admit(want)
	if err != nil {
		return nil, err
	}
	spec := &hostpb.LoadBalancer{Id: want.Id, Namespace: want.Namespace, Name: want.Name, NetworkId: want.NetworkId, Listen: want.Listen, Endpoint: want.Endpoint}
	if v := want.VirtualAddress; v != nil {
		spec.VirtualAddress = &hostpb.VirtualAddress{Address: v.Address, First: v.First}
	}
	for _, b := range want.Backends {
		spec.Backends = append(spec.Backends, &hostpb.Backend{Name: b.Name, Address: b.Address})
	}
	if lb := bs.byID[spec.Id]; lb != nil {
		return bs.change(lb, spec, listen)
	}
	return bs.create(spec, listen)
}

// create records and starts a load balancer; mu is held.
func (bs *balancers) create(spec *hostpb.LoadBalancer, listen []string) (*hostpb.LoadBalancer, error) {
	if err := bs.store.create(balancersDir, spec.Id, spec, nil); err != nil {
		err = errors.Join(err, bs.networks.unserve(context.WithoutCancel(bs.ctx), spec)) // admit gave it its addresses
		return nil, status.Errorf(codes.Internal, "recording load balancer: %v", err)
	}
	lb := bs.add(spec, listen)
	lb.log.Info("Load balancer recorded", "listen", listen)
	bs.broadcaster.Publish(events.LoadBalancer(hostpb.Event_CHANGED, lb.snapshot()))
	bs.running.Go(func() { lb.run(bs.ctx) })
	return lb.snapshot(), nil
}

// change records a load balancer's new spec and configures its process; mu is held.
func (bs *balancers) change(lb *loadBalancer, spec *hostpb.LoadBalancer, listen []string) (*hostpb.LoadBalancer, error) {
	if proto.Equal(lb.currentSpec(), spec) && !lb.halfChanged {
		return lb.snapshot(), nil
	}
	lb.halfChanged = true
	err := writeSpec(specFile(lb.dir), spec)
	if err == nil {
		err = lb.reconfigure(spec, listen)
	}
	if err != nil {
		if lb.described == nil { // The old spec remains in force. Until a description, nothing changes.
			err = errors.Join(err, bs.networks.serve(lb.spec, lb.listen))
		}
		return nil, status.Errorf(codes.Internal, "recording and configuring load balancer: %v", err)
	}
	lb.halfChanged = false
	if lb.described != nil {
		close(lb.described)
		lb.described = nil
	}
	return lb.snapshot(), nil
}

// admit decides whether a load balancer may have the spec, gives the bridge its addresses, and returns its listen
// addresses; mu is held.
func (bs *balancers) admit(want *hostpb.LoadBalancer) ([]string, error) {
	if err := admission.LoadBalancer(want, bs.specs()); err != nil {
		return nil, err
	}
	listen, err := bs.networks.listenAddresses(want)
	if err != nil {
		return nil, err
	}
	var have []string
	if lb := bs.byID[want.Id]; lb != nil {
		if lb.deleted.Err() != nil {
			return nil, refusal.Errorf(hostpb.Refusal_DELETED, "load balancer %s is being deleted", want.Id)
		}
		have = lb.listen
		if lb.described != nil { // its process may run and listen on these addresses
			have = listen
		}
	}
	served, err := bs.networks.served(want, listen)
	if err != nil {
		return nil, refusal.Errorf(hostpb.Refusal_INVALID, "load balancer %s/%s: %v", want.Namespace, want.Name, err)
	}
	if _, err := bs.networks.redirect(want, listen); err != nil {
		return nil, refusal.Errorf(hostpb.Refusal_INVALID, "load balancer %s/%s: %v", want.Namespace, want.Name, err)
	}
	if err := cmp.Or(portsFree(listen, served, have, roaming(want)), bs.networks.portsUnpublished(listen, have)); err != nil {
		return nil, refusal.Errorf(hostpb.Refusal_PORT_IN_USE, "load balancer %s/%s: %v", want.Namespace, want.Name, err)
	}
	if err := bs.networks.serve(want, listen); err != nil { // last, so that a refused load balancer leaves no address
		return nil, networkError(err)
	}
	return listen, nil
}

// DeleteLoadBalancer removes a load balancer. An unknown load balancer is no error.
func (bs *balancers) DeleteLoadBalancer(ctx context.Context, req *hostpb.DeleteLoadBalancerRequest) (*hostpb.DeleteLoadBalancerResponse, error) {
	bs.mu.Lock()
	lb := bs.byID[req.Id]
	bs.mu.Unlock()
	var have *hostpb.LoadBalancer
	if lb != nil {
		have = lb.currentSpec()
	}
	if err := admission.Deletion("load balancer", req, have); err != nil {
		return nil, err
	}
	if lb == nil {
		return &hostpb.DeleteLoadBalancerResponse{}, nil
	}
	// The mark makes the deletion continue after a crash.
	if err := atomicfile.WriteFile(filepath.Join(lb.dir, "deleted"), nil, 0o600); atomicfile.IgnoreMissing(err) != nil {
		return nil, status.Errorf(codes.Internal, "deleting load balancer: %v", err)
	}
	lb.delete()
	select {
	case <-lb.gone:
		return &hostpb.DeleteLoadBalancerResponse{}, nil
	case <-ctx.Done():
	case <-time.After(deleteWait):
	}
	return nil, status.Errorf(codes.Unavailable, "load balancer %s is still being removed: %s", req.Id, lb.snapshot().Message)
}

// forget removes a load balancer of which nothing is left from the registry.
func (bs *balancers) forget(lb *loadBalancer) {
	bs.mu.Lock()
	defer bs.mu.Unlock()
	delete(bs.byID, lb.id)
	lb.publishDeletion()
	bs.removed()
}

// specs iterates over the load balancers; mu is held.
func (bs *balancers) specs() iter.Seq[*hostpb.LoadBalancer] {
	return func(yield func(*hostpb.LoadBalancer) bool) {
		for _, lb := range bs.byID {
			if !yield(lb.spec) {
				return
			}
		}
	}
}

// listenAddresses fills in the gateway.
func listenAddresses(wanted []string, gateway string) ([]string, error) {
	var all []string
	for i, listen := range wanted {
		host, port, err := net.SplitHostPort(listen)
		if err != nil {
			return nil, fmt.Errorf("listen address %q: expected host:port", listen)
		}
		if i == 0 && host == "" {
			host = gateway
		}
		all = append(all, net.JoinHostPort(host, port))
	}
	return all, nil
}

// roaming returns the listen address of a load balancer that the host has at times only: its virtual address in a LAN. Elsewhere,
// connections to a virtual address are redirected, and the result is empty.
func roaming(spec *hostpb.LoadBalancer) string {
	if spec.VirtualAddress != nil && slices.Contains(spec.Listen, spec.Endpoint) {
		return spec.Endpoint
	}
	return ""
}

// portsFree tries to listen on the addresses that are new, except those that the bridge does not have yet. roaming is one that the host
// need not have. The result can be outdated a moment later; then the load balancer reports the error itself.
func portsFree(listen, served, have []string, roaming string) error {
	for _, address := range listen {
		if host, _, err := net.SplitHostPort(address); err == nil && slices.Contains(served, host) {
			continue
		}
		if err := portFree(address, have, address == roaming); err != nil {
			return err
		}
	}
	return nil
}

// portFree returns why an address cannot be listened on. Addresses that the load balancer has already are accepted.
func portFree(address string, have []string, roaming bool) error {
	if slices.Contains(have, address) {
		return nil
	}
	listener, err := balancer.Listen(address, roaming)
	if errors.Is(err, unix.EADDRNOTAVAIL) {
		return fmt.Errorf("%s is an address of neither this host nor the cluster's machine network; choose another", address)
	}
	if err != nil {
		return fmt.Errorf("%w; free the port or choose another", err)
	}
	return listener.Close()
}
