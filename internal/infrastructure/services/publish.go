package services

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/infrastructure/connections"
	"capstan.dev/capstan/internal/order"
	"capstan.dev/capstan/internal/reconciling"
)

// Reasons of the events on Services.
const (
	publishedEvent    = "Published"
	notPublishedEvent = "NotPublished"
)

// target is an address of a Service.
type target struct {
	service *corev1.Service
	family  corev1.IPFamily
	// claim of the address, or nil if it is the own address of the host.
	claim   *capiipamv1.IPAddressClaim
	address netip.Addr
	host    string
	// from is the host that has the address and does not answer, while another one tries to get it; else nil.
	from *host
	// done: the host publishes it.
	done bool
	// unknown: the host did not answer, so its publications count as unchanged.
	unknown bool
	// machines get the connections.
	machines []string
}

func (t *target) place() connections.Place {
	if t.claim == nil {
		return connections.Place{Address: t.address.String(), Name: nameOf(t.service)}
	}
	return connections.Place{Address: t.address.String()}
}

func nameOf(s *corev1.Service) string { return s.Namespace + "/" + s.Name }

// publish gives the Services their addresses and publishes them. It ends the publication of all others on connected hosts.
func (r *Reconciler) publish(ctx context.Context, s *scope, v *view) error {
	targets, ports, refused, err := r.targets(ctx, s)
	if err == nil {
		err = r.placeAll(ctx, s, v, targets) // Without the record of a host, the host must not get an address.
	}
	var plan portsPlan
	if err == nil {
		plan, err = r.placePorts(ctx, s, ports)
	}
	if err != nil { // No host is asked, so those with Services that are gone still have them.
		s.unsettled = true
		return errors.Join(refused, err)
	}
	targets = append(targets, plan.targets...)
	err = errors.Join(refused, r.apply(ctx, s, v, targets), r.settlePorts(ctx, s, targets))
	r.refuseIdle(ctx, s, plan)
	shown := map[*corev1.Service][]corev1.LoadBalancerIngress{}
	for _, service := range ports {
		shown[service.Service] = nil
	}
	for _, t := range targets {
		shown[t.service] = append(shown[t.service], s.shown(t)...)
	}
	for service, addresses := range shown {
		err = errors.Join(err, r.setIngress(ctx, s, service, addresses))
	}
	for _, t := range targets {
		if t.done && t.serves() {
			r.report(ctx, s, t.service, corev1.EventTypeNormal, publishedEvent, "Clients reach the Service at "+t.address.String())
		}
	}
	return err
}

// shown returns the address that the status of the Service shows for a target. A host that is away, or does not answer, goes on
// publishing.
func (s *scope) shown(t *target) []corev1.LoadBalancerIngress {
	address := t.address.String()
	ended := s.trouble[nameOf(t.service)] != "" && (t.host == "" || s.hosts[t.host].connected) && !t.unknown
	if t.done && t.serves() || !t.done && !ended && slices.Contains(ingress(t.service), address) {
		return []corev1.LoadBalancerIngress{t.ingress()}
	}
	return nil
}

// serves reports whether clients can use the address. One from a pool belongs to the Service, and connections to it wait for a machine.
// Of several hosts, clients use those with machines.
func (t *target) serves() bool { return t.claim != nil || len(t.machines) > 0 }

// ingress is the entry of the target in the status of the Service. An address of a host has the mode Proxy, because machines do not have
// it: with this mode, kube-proxy does not redirect it. The ports of the entry record the ports that the Service has there.
func (t *target) ingress() corev1.LoadBalancerIngress {
	out := corev1.LoadBalancerIngress{IP: t.address.String()}
	if t.claim != nil {
		return out
	}
	out.IPMode = ptr.To(corev1.LoadBalancerIPModeProxy)
	for _, p := range t.service.Spec.Ports {
		out.Ports = append(out.Ports, corev1.PortStatus{Port: p.Port, Protocol: p.Protocol})
	}
	return out
}

// targets returns the addresses of the Services that have one, and the Services with ports of the hosts. refused are the errors of Services
// that no host has. err is an error of a Service that a host may have: a list without this Service would end its connections.
func (r *Reconciler) targets(ctx context.Context, s *scope) (out []*target, ports []accepted, refused, err error) {
	r.refuseChosen(ctx, s)
	for _, service := range s.chosen.accepted {
		unmarked := r.mark(ctx, s, service.Service)
		if apierrors.IsNotFound(unmarked) {
			continue
		}
		refused = errors.Join(refused, unmarked)
		if usesHostPorts(service.Service) {
			if unmarked == nil || len(ingress(service.Service)) > 0 {
				ports = append(ports, service)
			}
			continue
		}
		for _, family := range service.families {
			had := len(s.records[claimName(s.capstan.Name, service.Service, family)]) > 0
			if unmarked != nil && !had {
				continue // The mark comes before the claim.
			}
			address, claim, waiting, e := r.addressFor(ctx, s, service.Service, family)
			switch {
			case e != nil && had:
				s.trouble[nameOf(service.Service)] = e.Error()
				return nil, nil, refused, e
			case e != nil:
				refused = errors.Join(refused, e)
				r.refuse(ctx, s, service.Service, e.Error())
			case claim == nil:
				r.refuse(ctx, s, service.Service, waiting)
			default:
				out = append(out, &target{service: service.Service, family: family, claim: claim, address: address})
			}
		}
	}
	return out, ports, refused, nil
}

// refuseChosen refuses Services. Their number is that of the API server of the cluster: the events name the first ones only.
func (r *Reconciler) refuseChosen(ctx context.Context, s *scope) {
	refused := slices.SortedFunc(maps.Keys(s.chosen.refused), func(a, b *corev1.Service) int { return cmp.Compare(nameOf(a), nameOf(b)) })
	for i, service := range refused {
		if i < maxRefusals {
			r.refuse(ctx, s, service, s.chosen.refused[service])
			continue
		}
		s.trouble[nameOf(service)] = s.chosen.refused[service]
	}
}

// refuse notes the reason why a Service is not published, and shows it to the users of the workload cluster.
func (r *Reconciler) refuse(ctx context.Context, s *scope, service *corev1.Service, why string) {
	s.trouble[nameOf(service)] = why
	r.report(ctx, s, service, corev1.EventTypeWarning, notPublishedEvent, why)
}

// placeAll chooses the hosts of all Services and records them.
func (r *Reconciler) placeAll(ctx context.Context, s *scope, v *view, targets []*target) error {
	for _, t := range targets {
		if h := s.hosts[s.currentHost(t.claim.Name)]; h != nil {
			h.services++
		}
	}
	for _, t := range targets {
		record, current := s.records[t.claim.Name], s.currentHost(t.claim.Name)
		var why string
		t.host, why = place(t.address, nodesOf(t.service, t.family, v.eligible, v.slices), record, s.hosts)
		if t.host == "" {
			r.refuse(ctx, s, t.service, why)
			continue
		}
		if t.host == current {
			continue
		}
		if h := s.hosts[current]; h != nil {
			h.services--
			if !h.connected && h.allows(t.address) {
				t.from = h
			}
		}
		s.hosts[t.host].services++
		if err := r.recordHosts(ctx, s, t.claim, withNew(record, t.host, t.from != nil)); err != nil {
			return err
		}
	}
	return nil
}

// apply sets the Services of each connected host.
func (r *Reconciler) apply(ctx context.Context, s *scope, v *view, targets []*target) (err error) {
	on := map[string][]*target{}
	for _, t := range targets {
		on[t.host] = append(on[t.host], t)
	}
	s.asked = true
	accepted := map[string]bool{}
	for _, name := range s.publishers(on) {
		if h := s.hosts[name]; !h.connected {
			r.awayWith(ctx, s, h, on[name])
			continue
		}
		done, e := r.applyTo(ctx, s, v, name, on[name])
		accepted[name], err = done, errors.Join(err, e)
	}
	at := map[string]string{}
	for _, t := range targets {
		if t.claim != nil {
			at[t.claim.Name] = t.host
		}
	}
	return errors.Join(err, r.forget(ctx, s, func(claim *capiipamv1.IPAddressClaim, host string) bool {
		return accepted[host] && at[claim.Name] != host
	}))
}

// publishers are the hosts that have, or may have, Services. Those that lose an address come first: another host waits for it.
func (s *scope) publishers(on map[string][]*target) []string {
	names := slices.DeleteFunc(slices.Collect(maps.Keys(s.hosts)), func(name string) bool { return len(on[name]) == 0 && !s.mayPublish(name) })
	slices.SortFunc(names, func(a, b string) int {
		return cmp.Or(order.TrueFirst(s.loses(a, on[a]), s.loses(b, on[b])), cmp.Compare(a, b))
	})
	return names
}

// loses reports whether a host has to give up an address.
func (s *scope) loses(name string, keeps []*target) bool {
	kept := 0
	for _, t := range keeps {
		if t.claim != nil && slices.Contains(s.records[t.claim.Name], name) {
			kept++
		}
	}
	return s.recorded[name] > kept
}

// awayWith handles the Services of a host that is not connected. It continues to publish them if it runs.
func (r *Reconciler) awayWith(ctx context.Context, s *scope, h *host, targets []*target) {
	if !h.lost && len(targets) > 0 {
		s.lookAgain(h.wait) // No event follows when the host is silent, or lost.
		return
	}
	for _, t := range targets {
		r.refuse(ctx, s, t.service, "its host is not connected, and no other host can publish it")
	}
}

// applyTo sets the Services of one host. It reports whether the host accepted the list, so that it has no other address.
func (r *Reconciler) applyTo(ctx context.Context, s *scope, v *view, name string, targets []*target) (accepted bool, err error) {
	var services []*hostpb.PublishedService
	for _, t := range targets {
		t.machines = s.hosts[name].targets(nodesOf(t.service, t.family, v.eligible, v.slices), t.family)
		services = append(services, published(t.service, t.address, t.machines))
	}
	slices.SortFunc(services, func(a, b *hostpb.PublishedService) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Address, b.Address))
	})
	refused, err := r.set(ctx, s, name, services)
	if err != nil {
		s.asked = false
		s.unsettled = s.unsettled || s.mayHavePorts(name)
		for _, t := range targets {
			t.unknown, s.trouble[nameOf(t.service)] = true, err.Error()
		}
		return false, reconciling.IgnoreWaiting(err)
	}
	for _, t := range targets {
		why := refused[t.place()]
		if why != "" && t.from != nil {
			r.moveLater(ctx, s, t, why)
			continue
		}
		if why != "" {
			r.refuse(ctx, s, t.service, why)
			err = errors.Join(err, fmt.Errorf("service %s: %s", nameOf(t.service), why)) // No event follows when the address becomes free.
			continue
		}
		t.done = true
		if t.from != nil {
			err = errors.Join(err, r.recordHosts(ctx, s, t.claim, withNew(s.records[t.claim.Name], name, false)))
		}
	}
	return true, err
}

// moveLater leaves an address to a host that does not answer the manager while another host cannot have it: the former host may only be
// cut off from the manager. The status of the Service stays as it is. The new host tries again.
func (r *Reconciler) moveLater(ctx context.Context, s *scope, t *target, why string) {
	t.unknown = true
	s.lookAgain(t.from.retry)
	if t.from.lost {
		r.refuse(ctx, s, t.service, fmt.Sprintf("host %s is not connected, and host %s cannot take its address: %s", t.from.name, t.host, why))
	}
}

// release deletes the claims of Services that no longer have an address, and lets the Services go. left is the reason why
// something remains, or "".
func (r *Reconciler) release(ctx context.Context, s *scope, v *view) (left string, err error) {
	keep := s.kept()
	for _, name := range slices.Sorted(maps.Keys(s.claims)) {
		if keep[name] && s.claims[name].DeletionTimestamp.IsZero() {
			continue
		}
		why, e := r.releaseClaim(ctx, s, s.claims[name])
		left, err = cmp.Or(left, why), errors.Join(err, e)
	}
	err = errors.Join(err, r.freeUnclaimed(ctx, s))
	if !s.optedIn() {
		left = cmp.Or(left, s.portsLeft())
	}
	for i := range v.services {
		service := &v.services[i]
		needs := func(claim string) bool { return keep[claim] || s.claims[claim] != nil }
		if !marked(service) || slices.ContainsFunc(claimNames(s.capstan.Name, service), needs) || s.unsettled {
			continue
		}
		err = errors.Join(err, r.unmark(ctx, s, service))
	}
	return left, err
}

// kept are the names of the claims that the chosen Services need, and the marks of those without a claim. Services of type NodePort have
// neither. A claim from a former pool is not kept: a new one follows its deletion.
func (s *scope) kept() map[string]bool {
	keep := map[string]bool{}
	for _, service := range s.chosen.accepted {
		if isNodePort(service.Service) {
			continue
		}
		if usesHostPorts(service.Service) {
			keep[claimNames(s.capstan.Name, service.Service)[0]] = true // its mark; there is no claim
			continue
		}
		for _, family := range service.families {
			name := claimName(s.capstan.Name, service.Service, family)
			claim := s.claims[name]
			keep[name] = claim == nil || claim.Spec.PoolRef == s.pool(family)
		}
	}
	return keep
}

// releaseClaim deletes a claim when no host has its address any more. Hosts that do not exist any more count as hosts without it.
func (r *Reconciler) releaseClaim(ctx context.Context, s *scope, claim *capiipamv1.IPAddressClaim) (left string, err error) {
	for _, name := range s.records[claim.Name] {
		if s.hosts[name] == nil {
			continue
		}
		return fmt.Sprintf("Host %s may still publish the Service %.320s: it is not connected, or it refused the request to stop publishing. If it is permanently lost, annotate the CapstanHost with %s",
			name, claim.Annotations[infrav1.ServiceAnnotation], infrav1.HostAbandonedAnnotation), nil
	}
	if err := r.freeAddress(ctx, client.ObjectKeyFromObject(claim)); err != nil {
		return "", err
	}
	if claim.DeletionTimestamp.IsZero() {
		uid := claim.UID
		err = client.IgnoreNotFound(r.LiveClient.Delete(ctx, claim, client.Preconditions{UID: &uid}))
	}
	return fmt.Sprintf("IPAddressClaim %s is being deleted", claim.Name), err // Its end is an event.
}
