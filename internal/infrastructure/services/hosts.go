package services

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/keymutex"
	"sigs.k8s.io/controller-runtime/pkg/client"

	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/owner"
	"capstan.dev/capstan/internal/infrastructure/connections"
	"capstan.dev/capstan/internal/infrastructure/hostselection"
	"capstan.dev/capstan/internal/infrastructure/placement"
	"capstan.dev/capstan/internal/reconciling"
	"capstan.dev/capstan/internal/selection"
)

const (
	// patience is the time after which the absence of a host is a reason to report its Services.
	patience = 40 * time.Second
	// minRetry and maxRetry bound the time between two attempts to move an address to which its former host still answers.
	minRetry, maxRetry = 2 * time.Second, 10 * time.Second
)

// readHosts describes the hosts that have machines of the cluster or may have addresses of its Services.
func (r *Reconciler) readHosts(ctx context.Context, s *scope) error {
	list, ns := &infrav1.CapstanHostList{}, &corev1.Namespace{}
	if err := r.Client.List(ctx, list, client.UnsafeDisableDeepCopy); err != nil {
		return err
	}
	if err := r.Client.Get(ctx, client.ObjectKey{Name: s.capstan.Namespace}, ns); err != nil {
		return err
	}
	s.hosts = map[string]*host{}
	for i := range list.Items {
		h := &list.Items[i]
		if hostselection.Abandoned(h) {
			continue
		}
		described := s.wanted(permission(h, ns))
		s.hosts[h.Name] = described
		conn := r.Pool.Get(h.Name)
		if conn != nil && conn.SilenceError() == nil {
			described.connected, described.machines = true, machinesOn(conn, s)
			described.present = len(described.machines) > 0 || owner.Same(conn.LoadBalancer(s.capstan.Spec.ID), s.cluster)
			conn.SetPulses(s.network(), s.needsPulses(described))
			described.ports.supported = conn.Info().GetHostPorts()
			continue
		}
		var away time.Duration
		if conn != nil {
			away = conn.Silence()
		}
		// Another manager may have noticed the loss before the start of this one.
		if c := conditions.Get(h, infrav1.HostConnectedCondition); c != nil && c.Status != "True" {
			away = max(away, time.Since(c.LastTransitionTime.Time))
		}
		described.absence = absent(away, r.Pool.Silence)
	}
	return nil
}

// needsPulses reports whether a host has an address of the cluster, or can get one from a lost host. The loss of such a host must not be
// found in the attempt to give it an address.
func (s *scope) needsPulses(h *host) bool {
	return s.published(h.name) || h.present && s.publishesAddresses()
}

// absence describes a host that does not answer.
type absence struct {
	// silent: addresses of the host may move to a host at which nobody answers for them. A capstand that is upgraded or killed returns
	// sooner, and meanwhile its box answers.
	silent bool
	// lost: the host has been away for longer than patience.
	lost bool
	// wait is the time until one of these changes, and retry that until the next attempt to move an address.
	wait, retry time.Duration
}

// absent returns the state of a host that fell silent, or lost its connection, some time ago.
func absent(away, silence time.Duration) absence {
	a := absence{silent: away >= silence, lost: away >= patience, retry: min(max(away/10, minRetry), maxRetry)}
	switch {
	case !a.silent:
		a.wait = silence - away
	case !a.lost:
		a.wait = patience - away
	}
	return a
}

// permission returns a host with the addresses and ports that the clusters of a namespace may publish there.
func permission(h *infrav1.CapstanHost, ns *corev1.Namespace) *host {
	return &host{name: h.Name, allowed: allowed(h, ns), ports: portsOf(h, ns)}
}

// wanted removes the addresses and the ports from a host that the cluster does not publish.
func (s *scope) wanted(h *host) *host {
	if !s.optedIn() {
		h.allowed = nil
	}
	if !s.publishesPorts() {
		h.ports = hostPorts{}
	}
	return h
}

// allowed returns the addresses that the clusters of a namespace may publish on a host.
func allowed(h *infrav1.CapstanHost, ns *corev1.Namespace) (out []netip.Prefix) {
	services := h.Spec.Services
	if services == nil || !placement.Admits(h, ns.Name, ns.Labels) ||
		!selection.Namespace(services.AllowedNamespaces.Names, services.AllowedNamespaces.Selector, ns.Name, ns.Labels) {
		return nil
	}
	for _, text := range services.Addresses {
		if prefix, err := netip.ParsePrefix(text); err == nil {
			out = append(out, prefix)
		}
	}
	return out
}

// machinesOn returns the machines of the cluster on a host. A host keeps an address while its machines start again.
func machinesOn(conn *connections.Host, s *scope) (out []machine) {
	for _, m := range conn.Machines() {
		n := m.GetSpec().GetNetwork()
		phase := m.GetStatus().GetPhase()
		if n.GetId() != s.capstan.Spec.ID || !owner.Same(n, s.cluster) || phase == hostpb.MachineStatus_DELETING {
			continue
		}
		found := machine{name: m.GetSpec().GetName(), running: phase == hostpb.MachineStatus_RUNNING}
		for _, a := range m.GetSpec().GetAddresses() {
			if address, err := netip.ParseAddr(a.GetAddress()); err == nil {
				found.addresses = append(found.addresses, address)
			}
		}
		out = append(out, found)
	}
	return out
}

// locks serialize the requests for the Services of a network on a host. Within a lock, the permission is read and the request is sent, so
// that no request with an old permission follows the withdrawal.
type locks struct{ keymutex.KeyMutex }

// lockCount makes it improbable that two networks wait for each other.
const lockCount = 1024

func (l locks) lock(host string, n connections.Network) (unlock func()) {
	key := strings.Join([]string{host, n.ID, n.Namespace, n.Name}, "/")
	l.LockKey(key)
	return func() { _ = l.UnlockKey(key) } // never fails
}

// set publishes the Services of one host. It returns the places that the host refused, or ErrWaiting while the host has to answer other
// calls first.
func (r *Reconciler) set(ctx context.Context, s *scope, name string, services []*hostpb.PublishedService) (connections.Refused, error) {
	conn := r.Pool.Get(name)
	if conn == nil {
		return nil, fmt.Errorf("host %s is not connected", name)
	}
	want := &hostpb.SetServicesRequest{NetworkId: s.capstan.Spec.ID, Namespace: s.cluster.Namespace, Name: s.cluster.Name, Services: services}
	if !conn.HasServices(want) {
		end, again := r.hostTurns.TakeTimed(name)
		if end == nil {
			s.lookAgain(again)
			return nil, fmt.Errorf("%w: host %s does not answer the calls for other clusters. If this lasts, restart capstand on the host, or look for the cause in its log", reconciling.ErrWaiting, name)
		}
		defer end()
	}
	defer r.setting.lock(name, s.network())()
	if _, fewer, err := r.stillPermitted(ctx, name, want); err != nil || fewer {
		return nil, cmp.Or(err, fmt.Errorf("host %s: its permissions changed a moment ago", name))
	}
	refused, err := conn.EnsureServices(ctx, want)
	switch {
	case err == nil:
		return refused, nil
	case len(services) == 0 && (connections.Code(err) == codes.NotFound || connections.Code(err) == codes.Unimplemented):
		return nil, nil // The host has nothing of the cluster, or is older than Services.
	case connections.Code(err) == codes.Unimplemented:
		return nil, fmt.Errorf("host %s has a capstand that cannot publish Services: upgrade it", name)
	}
	return nil, fmt.Errorf("host %s: %s", name, connections.Message(err))
}

// withdraw ends publications that hosts do not allow any more, without a view of the workload cluster.
func (r *Reconciler) withdraw(ctx context.Context, s *scope) (err error) {
	kept := map[string][]*hostpb.PublishedService{}
	for name, h := range s.hosts {
		conn := r.Pool.Get(name)
		if !h.connected || conn == nil {
			continue
		}
		last := conn.Services(s.network())
		keep, changed := h.permitted(last)
		if last == nil { // This manager has not set the Services yet.
			nothing := len(h.allowed) == 0 && len(h.ports.permitted) == 0
			changed = h.present && nothing || s.published(name) && len(h.allowed) == 0 || slices.Contains(s.portHosts, name) && len(h.ports.permitted) == 0
		}
		if last == nil && !changed {
			continue
		}
		if changed {
			if _, e := r.set(ctx, s, name, keep); e != nil {
				err = errors.Join(err, reconciling.IgnoreWaiting(e))
				continue
			}
		}
		// Also without a change: the reconciler withdrawal can be first, and leaves the record to this one.
		kept[name] = keep
	}
	return errors.Join(err, r.recordKept(ctx, s, kept))
}

// permitted returns the Services among those of a request that the host still allows, and whether these are not all.
func (h *host) permitted(last *hostpb.SetServicesRequest) (keep []*hostpb.PublishedService, changed bool) {
	for _, service := range last.GetServices() {
		address, err := netip.ParseAddr(service.GetAddress())
		allowed := err == nil && h.allows(address)
		if service.GetHostPorts() {
			allowed = err == nil && h.ports.has(address) && !slices.ContainsFunc(service.GetPorts(), func(p *hostpb.PublishedPort) bool {
				return !h.ports.permits(corev1.Protocol(p.GetProtocol().String()), int32(p.GetPort()))
			})
		}
		if allowed {
			keep = append(keep, service)
		}
	}
	return keep, len(keep) < len(last.GetServices())
}

// recordKept records the Services that hosts still publish.
func (r *Reconciler) recordKept(ctx context.Context, s *scope, kept map[string][]*hostpb.PublishedService) error {
	gone := func(claim *capiipamv1.IPAddressClaim, host string) bool {
		keep, found := kept[host]
		return found && !slices.ContainsFunc(keep, func(p *hostpb.PublishedService) bool {
			return !p.GetHostPorts() && p.GetName() == claim.Annotations[infrav1.ServiceAnnotation]
		})
	}
	withPorts := slices.DeleteFunc(slices.Clone(s.portHosts), func(host string) bool {
		keep, found := kept[host]
		return found && !slices.ContainsFunc(keep, (*hostpb.PublishedService).GetHostPorts)
	})
	return errors.Join(r.forget(ctx, s, gone), r.recordPortHosts(ctx, s, withPorts))
}

// mayPublish reports whether a host has to be asked for the end of its publications. The records are objects of the namespace of the
// cluster, whose users can change them. So each connected host is asked that has machines or the load balancer of the cluster, and
// therefore its network. The connection remembers the answer.
func (s *scope) mayPublish(name string) bool {
	return s.hosts[name].present || s.published(name) || slices.Contains(s.portHosts, name)
}

// published reports whether a host may have the address of a Service.
func (s *scope) published(name string) bool { return s.recorded[name] > 0 }
