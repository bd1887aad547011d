// Package connections maintains a connection to every CapstanHost and a mirror of its objects. Each host is watched
// with one stream; changes become reconcile requests, so that no reconciler polls.
//
// Layer: reconciler. Allowed imports: api, library, contract.
package connections

import (
	"context"
	"slices"
	"sync"
	"time"

	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
)

// Event describes a change on a host. Exactly one of the fields after Host is set.
type Event struct {
	// Host is the name of the CapstanHost.
	Host string
	// Machine that changed, or its last state if it was removed.
	Machine *hostpb.Machine
	// LoadBalancer that changed, or its last state if it was removed.
	LoadBalancer *hostpb.LoadBalancer
	// Connection is true if the host was connected or disconnected.
	Connection bool
	// Silence is true if a host that gets pulses fell silent, or answers again. Its connection may still exist.
	Silence bool
	// Capacity is true if the total or the free resources of the host changed.
	Capacity bool
	// Claimed is true if a machine has another management cluster.
	Claimed bool
}

// Pool keeps the connections. Its methods are safe for concurrent use.
type Pool struct {
	// Keepalive of the connections; to be set before the first one.
	Keepalive hostpb.Keepalive
	// Silence is the time without an answered pulse after which a host is silent: an event reports it, and its calls end. To be set
	// before the first connection.
	Silence time.Duration
	// ManagementCluster returns the identity of the management cluster, with which hosts record when a manager was last
	// connected; to be set before the first connection. Without it they record nothing.
	ManagementCluster func(context.Context) (string, error)

	// Inbound are the connections of hosts that dial; to be set before the first host.
	Inbound *Inbound

	ctx     context.Context
	secrets client.Reader

	mu        sync.RWMutex
	hosts     map[string]*Host
	receivers []func(Event)
	// removed is the time at which the last host was disconnected for good, or the pool was made.
	removed time.Time
}

// NewPool returns an empty pool. The connections end with ctx. secrets reads the credentials' Secrets.
func NewPool(ctx context.Context, secrets client.Reader) *Pool {
	return &Pool{Keepalive: hostpb.DefaultKeepalive, Silence: hostpb.Silence, Inbound: NewInbound(), ctx: ctx, secrets: secrets, hosts: map[string]*Host{}, removed: time.Now()}
}

func (p *Pool) managementCluster(ctx context.Context) (string, error) {
	if p.ManagementCluster == nil {
		return "", nil
	}
	return p.ManagementCluster(ctx)
}

// Connect makes sure that there is a connection to the host and returns it. It does not wait until the
// host answers. An error means that the credentials are missing or unusable. A failed read ends no connection: the host may be healthy.
func (p *Pool) Connect(ctx context.Context, host *infrav1.CapstanHost) (*Host, error) {
	secret, err := readSecret(ctx, p.secrets, host)
	if err != nil {
		return nil, err
	}
	creds, err := credentialsOf(secret, host)
	if err != nil {
		p.Disconnect(host.Name)
		return nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if h := p.hosts[host.Name]; h != nil {
		if h.address == host.Spec.Address && (h.slot != nil) == host.Dials() && h.credentials.Equal(creds) {
			return h, nil
		}
		h.close()
	}
	h, err := newHost(host, creds, p)
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
		p.removed = time.Now()
	}
}

// Unchanged returns for how long no host was removed from the pool.
func (p *Pool) Unchanged() time.Duration {
	p.mu.RLock()
	defer p.mu.RUnlock()
	return time.Since(p.removed)
}

// WithID returns the names of the connections to the host with an id, sorted.
func (p *Pool) WithID(id string) (names []string) {
	p.mu.RLock()
	defer p.mu.RUnlock()
	for name, h := range p.hosts {
		if id != "" && h.ID() == id {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// Get returns the host of that name, or nil when there is no connection to be had: the CapstanHost does
// not exist or has not been reconciled yet.
func (p *Pool) Get(name string) *Host {
	p.mu.RLock()
	defer p.mu.RUnlock()
	return p.hosts[name]
}

// Connected returns the host of that name while it is connected, or nil.
func (p *Pool) Connected(name string) *Host {
	if h := p.Get(name); h != nil && h.ConnectionError() == nil {
		return h
	}
	return nil
}

// Holders returns the names of the hosts with a machine that has the address in the network, except the machine of the given id. A host can
// report any network: the caller must ask whether the host may have it.
func (p *Pool) Holders(network Network, address, except string) (hosts []string) {
	p.mu.RLock()
	defer p.mu.RUnlock()
	for name, h := range p.hosts {
		if h.holds(networkAddress{network, address}, except) {
			hosts = append(hosts, name)
		}
	}
	return hosts
}

// Source turns events into reconcile requests of a controller. toRequests must not block.
func (p *Pool) Source(toRequests func(context.Context, Event) []reconcile.Request) source.Source {
	return p.SourceAfter(0, toRequests)
}

// SourceAfter is Source with a delay. The events of one object within the delay are one request.
func (p *Pool) SourceAfter(delay time.Duration, toRequests func(context.Context, Event) []reconcile.Request) source.Source {
	return source.Func(func(ctx context.Context, queue workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.receivers = append(p.receivers, func(e Event) {
			for _, r := range toRequests(ctx, e) {
				queue.AddAfter(r, delay)
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
