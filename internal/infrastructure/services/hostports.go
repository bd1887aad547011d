package services

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/infrastructure/placement"
	"capstan.dev/capstan/internal/selection"
)

// usesHostPorts reports whether a Service has ports of the hosts' own addresses.
func usesHostPorts(s *corev1.Service) bool {
	return isNodePort(s) || ptr.Deref(s.Spec.LoadBalancerClass, "") == infrav1.ServiceHostPortsClass
}

// isNodePort reports whether a Service has the type NodePort. The API server gives such a Service no status, and other controllers remove
// finalizers of load balancers from it, so Capstan does not change it.
func isNodePort(s *corev1.Service) bool { return s.Spec.Type == corev1.ServiceTypeNodePort }

// portOutside is the port at which clients reach a port of a Service.
func portOutside(s *corev1.Service, p corev1.ServicePort) int32 {
	if isNodePort(s) {
		return p.NodePort
	}
	return p.Port
}

// hostPorts are the ports of a host that a namespace may publish, and the addresses that have them.
type hostPorts struct {
	// supported: the host's capstand can publish them.
	supported bool
	permitted []infrav1.HostPorts
	addresses map[corev1.IPFamily]netip.Addr
}

// portsOf returns the ports that the clusters of a namespace may publish at the own addresses of a host.
func portsOf(h *infrav1.CapstanHost, ns *corev1.Namespace) hostPorts {
	out := hostPorts{addresses: map[corev1.IPFamily]netip.Addr{}}
	services := h.Spec.Services
	if services == nil || !placement.Admits(h, ns.Name, ns.Labels) {
		return out
	}
	for _, text := range services.HostAddresses {
		if address, err := netip.ParseAddr(text); err == nil {
			out.addresses[familyOf(address)] = address
		}
	}
	for _, p := range services.HostPorts {
		if selection.Namespace(p.AllowedNamespaces.Names, p.AllowedNamespaces.Selector, ns.Name, ns.Labels) {
			out.permitted = append(out.permitted, p)
		}
	}
	return out
}

// permits reports whether a port is authorised.
func (h hostPorts) permits(protocol corev1.Protocol, port int32) bool {
	return slices.ContainsFunc(h.permitted, func(p infrav1.HostPorts) bool {
		return string(p.Protocol) == string(protocol) && p.Port <= port && port <= max(p.Port, p.EndPort)
	})
}

// has reports whether the host has an address of its own among those of its ports.
func (h hostPorts) has(address netip.Addr) bool { return h.addresses[familyOf(address)] == address }

// portsFlaw returns why a host cannot publish the ports of a Service, or "".
func (h *host) portsFlaw(s *corev1.Service) string {
	missing := h.unauthorised(s)
	switch {
	case len(missing) > 0:
		return fmt.Sprintf("does not authorise %s for the namespace: use an authorised port, or add it to spec.services.hostPorts of the CapstanHost", strings.Join(missing, ", "))
	case !h.ports.supported:
		return "has a capstand that cannot publish ports of the host: upgrade it"
	case len(h.portAddresses(s)) == 0:
		return fmt.Sprintf("has no address of the families %v in spec.services.hostAddresses", s.Spec.IPFamilies)
	}
	return ""
}

// unauthorised are the ports of a Service that the host does not authorise.
func (h *host) unauthorised(s *corev1.Service) (out []string) {
	for _, p := range s.Spec.Ports {
		if port := portOutside(s, p); !h.ports.permits(p.Protocol, port) {
			out = append(out, fmt.Sprintf("%s port %d", p.Protocol, port))
		}
	}
	return out
}

// portAddresses are the addresses of the host at which it can publish a Service.
func (h *host) portAddresses(s *corev1.Service) (out []netip.Addr) {
	for _, family := range s.Spec.IPFamilies {
		if address, ok := h.ports.addresses[family]; ok {
			out = append(out, address)
		}
	}
	return out
}

// place is a port of an address.
type portPlace struct {
	address  netip.Addr
	protocol corev1.Protocol
	port     int32
}

// portPlaces are the places that a Service takes on a host. It takes a port for both families, so that the port means one Service.
func (h *host) portPlaces(s *corev1.Service) (out []portPlace) {
	for _, address := range h.ports.addresses {
		for _, p := range s.Spec.Ports {
			out = append(out, portPlace{address, p.Protocol, portOutside(s, p)})
		}
	}
	return out
}

// heldPlaces returns the places among some that a Service has, as its status shows. It reads the status once: the API server of the cluster
// decides about its length.
func heldPlaces(s *corev1.Service, among []portPlace) (out []portPlace) {
	is := map[portPlace]bool{}
	for _, p := range among {
		is[p] = true
	}
	for _, i := range s.Status.LoadBalancer.Ingress {
		address, err := netip.ParseAddr(i.IP)
		if err != nil {
			continue
		}
		for _, have := range i.Ports {
			if p := (portPlace{address, have.Protocol, have.Port}); is[p] {
				out = append(out, p)
				is[p] = false
			}
		}
	}
	return out
}

// portsPlan contains the hosts of Services with ports of the hosts.
type portsPlan struct {
	targets []*target
	// refused contains the reasons why Services are not published on a host that could have them, or on any host.
	refused map[*corev1.Service]string
}

func (p *portsPlan) serves(s *corev1.Service, address netip.Addr) bool {
	return slices.ContainsFunc(p.targets, func(t *target) bool { return t.service == s && t.address == address })
}

// planPorts publishes each Service on all connected hosts that have machines of the cluster and authorise all its ports. A Service that
// has a port on a host keeps it; otherwise the first one in the order of services gets it. A host that is away keeps its ports.
func planPorts(services []accepted, hosts map[string]*host) portsPlan {
	p := portsPlanner{
		services: services, plan: portsPlan{refused: map[*corev1.Service]string{}}, taken: map[portPlace]*corev1.Service{},
		published: map[*corev1.Service]bool{}, flaws: map[*corev1.Service][]string{},
	}
	for _, name := range slices.Sorted(maps.Keys(hosts)) {
		switch h := hosts[name]; {
		case !h.connected:
			p.plan.targets = append(p.plan.targets, h.keptPorts(services, p.published)...)
		case len(h.machines) > 0:
			p.publish(h)
		}
	}
	p.refuseOthers()
	return p.plan
}

// portsPlanner makes a plan, host by host.
type portsPlanner struct {
	services  []accepted
	plan      portsPlan
	taken     map[portPlace]*corev1.Service
	published map[*corev1.Service]bool
	// candidates is the number of hosts that could publish Services, and flaws are the reasons why some of them cannot publish a Service.
	candidates int
	flaws      map[*corev1.Service][]string
}

// publish gives the Services their ports on a connected host.
func (p *portsPlanner) publish(h *host) {
	p.candidates++
	var able []*corev1.Service
	for _, s := range p.services {
		if why := h.portsFlaw(s.Service); why != "" {
			p.flaws[s.Service] = append(p.flaws[s.Service], "host "+h.name+" "+why)
			continue
		}
		able = append(able, s.Service)
	}
	h.keepHeld(able, p.taken)
	for _, s := range able {
		targets, why := h.takePorts(s, p.taken, p.plan.serves)
		if why != "" {
			p.plan.refused[s] = why
			continue
		}
		p.published[s] = true
		p.plan.targets = append(p.plan.targets, targets...)
	}
}

// refuseOthers refuses the Services that no host publishes.
func (p *portsPlanner) refuseOthers() {
	for _, s := range p.services {
		switch all := p.flaws[s.Service]; {
		case p.published[s.Service] || p.plan.refused[s.Service] != "":
		case p.candidates == 0:
			p.plan.refused[s.Service] = "no connected host runs a machine of the cluster"
		default:
			p.plan.refused[s.Service] = strings.Join(all[:min(3, len(all))], "; ")
		}
	}
}

// keptPorts are the Services that a host publishes while it is away, as far as their status shows. Services without a status have its
// ports if the host authorises them. It is lost after a time.
func (h *host) keptPorts(services []accepted, published map[*corev1.Service]bool) (out []*target) {
	if h.lost {
		return nil
	}
	for _, s := range services {
		for _, address := range h.portAddresses(s.Service) {
			if slices.Contains(ingress(s.Service), address.String()) || isNodePort(s.Service) && len(h.unauthorised(s.Service)) == 0 {
				out = append(out, &target{service: s.Service, family: familyOf(address), address: address, host: h.name})
				published[s.Service] = true
			}
		}
	}
	return out
}

// keepHeld notes the places that Services have already, before others can take them.
func (h *host) keepHeld(services []*corev1.Service, taken map[portPlace]*corev1.Service) {
	for _, s := range services {
		for _, p := range heldPlaces(s, h.portPlaces(s)) {
			if taken[p] != nil {
				continue
			}
			for _, address := range h.ports.addresses { // The Service has the port of the other family too.
				taken[portPlace{address, p.protocol, p.port}] = s
			}
		}
	}
}

// takePorts gives a Service its places on a host, or returns the reason why it cannot have them.
func (h *host) takePorts(s *corev1.Service, taken map[portPlace]*corev1.Service, served func(*corev1.Service, netip.Addr) bool) (out []*target, why string) {
	places := h.portPlaces(s)
	for _, p := range places {
		if by := taken[p]; by != nil && by != s {
			return nil, fmt.Sprintf("on host %s, the Service %s/%s has %s port %d: use another port, or delete that Service", h.name, by.Namespace, by.Name, p.protocol, p.port)
		}
	}
	for _, p := range places {
		taken[p] = s
	}
	for _, address := range h.portAddresses(s) {
		if served(s, address) { // by another host of the same box
			continue
		}
		out = append(out, &target{service: s, family: familyOf(address), address: address, host: h.name})
	}
	return out, ""
}
