// Package connections keeps a connection to every CapstanHost and a mirror of what is on it. Each host
// is watched with one stream; changes become reconcile requests, so that no reconciler polls.
//
// Layer: reconciler.
package connections

import (
	"context"
	"maps"
	"slices"
	"sync"

	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
)

// Event says what changed on a host. Exactly one of the fields behind Host is set.
type Event struct {
	// Host is the name of the CapstanHost.
	Host string
	// Machine that changed, or as it last was when it is gone.
	Machine *hostpb.Machine
	// LoadBalancer that changed, or as it last was when it is gone.
	LoadBalancer *hostpb.LoadBalancer
	// Connection is true if the host was connected or disconnected.
	Connection bool
	// Capacity is true if what the host has, or has left, changed.
	Capacity bool
	// Claimed is true if a machine has another management cluster.
	Claimed bool
}

// Pool keeps the connections. Its methods are safe for concurrent use.
type Pool struct {
	// Keepalive of the connections; to be set before the first one.
	Keepalive hostpb.Keepalive

	ctx     context.Context
	secrets client.Reader

	mu        sync.RWMutex
	hosts     map[string]*Host
	receivers []func(Event)
}

// NewPool returns an empty pool. The connections end with ctx. secrets reads the credentials' Secrets.
func NewPool(ctx context.Context, secrets client.Reader) *Pool {
	return &Pool{Keepalive: hostpb.DefaultKeepalive, ctx: ctx, secrets: secrets, hosts: map[string]*Host{}}
}

// Connect makes sure that there is a connection to the host and returns it. It does not wait until the
// host answers. An error means that the credentials are missing or unusable.
func (p *Pool) Connect(ctx context.Context, host *infrav1.CapstanHost) (*Host, error) {
	creds, err := loadCredentials(ctx, p.secrets, host)
	if err != nil {
		p.Disconnect(host.Name)
		return nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if h := p.hosts[host.Name]; h != nil {
		if h.address == host.Spec.Address && h.credentials.Equal(creds) {
			return h, nil
		}
		h.close()
	}
	h, err := newHost(host.Name, host.Spec.Address, creds, p.Keepalive, p.notify)
	if err != nil {
		delete(p.hosts, host.Name)
		return nil, err
	}
	p.hosts[host.Name] = h
	go h.run(p.ctx)
	return h, nil
}

// Disconnect closes the connection and forgets the host.
func (p *Pool) Disconnect(name string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if h := p.hosts[name]; h != nil {
		h.close()
		delete(p.hosts, name)
	}
}

// Get returns the host of that name, or nil when there is no connection to be had: the CapstanHost does
// not exist or has not been reconciled yet.
func (p *Pool) Get(name string) *Host {
	p.mu.RLock()
	defer p.mu.RUnlock()
	return p.hosts[name]
}

// Addresses are those that machines have in a network, by what the hosts last said. The machine of the given id does not count.
func (p *Pool) Addresses(networkID, except string) map[string]bool {
	p.mu.RLock()
	hosts := slices.Collect(maps.Values(p.hosts))
	p.mu.RUnlock()
	out := map[string]bool{}
	for _, h := range hosts {
		for _, m := range h.Machines() {
			if m.GetSpec().GetNetwork().GetId() != networkID || m.GetSpec().GetId() == except {
				continue
			}
			for _, a := range m.GetSpec().GetAddresses() {
				out[a.GetAddress()] = true
			}
		}
	}
	return out
}

// Source turns events into reconcile requests of a controller. toRequests must not block.
func (p *Pool) Source(toRequests func(context.Context, Event) []reconcile.Request) source.Source {
	return source.Func(func(ctx context.Context, queue workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.receivers = append(p.receivers, func(e Event) {
			for _, r := range toRequests(ctx, e) {
				queue.Add(r)
			}
		})
		return nil
	})
}

func (p *Pool) notify(e Event) {
	p.mu.RLock()
	receivers := p.receivers
	p.mu.RUnlock()
	for _, receive := range receivers {
		receive(e)
	}
}
