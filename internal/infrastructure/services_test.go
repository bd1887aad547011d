package infrastructure_test

import (
	"cmp"
	"maps"
	"net"
	"slices"
	"strings"
	"testing"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
)

// publishing is a cluster on some hosts that publishes its Services. The API server of the tests is its workload cluster too.
type publishing struct {
	*box
	hosts []rackHost
	nodes []string
	api   *apiRelay
}

func newPublishing(t *testing.T, hosts int, change func(*infrav1.CapstanCluster)) *publishing {
	t.Helper()
	b := newNamespace(t)
	p := &publishing{box: b, hosts: b.rack(hosts)}
	p.api = newAPIRelay(t, env.Endpoint().String())
	relay := p.api.Addr().(*net.TCPAddr)
	endpoint := clusterv1.APIEndpoint{Host: relay.IP.String(), Port: int32(relay.Port)}
	b.addCluster(func(c *clusterv1.Cluster) { c.Spec.ControlPlaneEndpoint = endpoint }, func(c *infrav1.CapstanCluster) {
		c.Spec.LoadBalancer.HostName = p.hosts[0].Name
		if change != nil {
			change(c)
		}
	})
	kubeconfig, err := clientcmd.Write(clientcmdapi.Config{
		Clusters:       map[string]*clientcmdapi.Cluster{"c": {Server: "https://" + endpoint.String(), CertificateAuthorityData: env.Config.CAData}},
		AuthInfos:      map[string]*clientcmdapi.AuthInfo{"u": {Token: env.Config.BearerToken}},
		Contexts:       map[string]*clientcmdapi.Context{"x": {Cluster: "c", AuthInfo: "u"}},
		CurrentContext: "x",
	})
	b.Expect(err).NotTo(HaveOccurred())
	b.create(&corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: b.namespace, Name: b.cluster.Name + "-kubeconfig", Labels: map[string]string{clusterv1.ClusterNameLabel: b.cluster.Name}},
		Data:       map[string][]byte{"value": kubeconfig},
	})
	b.provisioned()
	for _, h := range p.hosts {
		m := b.placedOn(h)
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: m.Name}}
		b.create(node)
		t.Cleanup(func() { b.Expect(env.Client.Delete(ctx, node)).To(Succeed()) })
		p.nodes = append(p.nodes, m.Name)
		p.ready(m.Name, corev1.ConditionTrue)
	}
	update(b, b.capstan, func(c *infrav1.CapstanCluster) {
		c.Spec.Services.LoadBalancer = &infrav1.ServiceLoadBalancerSpec{AddressesFromPool: pools[0]}
	})
	return p
}

func (p *publishing) ready(node string, status corev1.ConditionStatus) {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node}}
	p.get(n)
	before := n.DeepCopy()
	n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: status}}
	p.Expect(env.Client.Status().Patch(ctx, n, client.MergeFrom(before))).To(Succeed())
}

func (p *publishing) addService(name string, change func(*corev1.Service)) *corev1.Service {
	s := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: p.namespace, Name: name},
		Spec: corev1.ServiceSpec{
			Type:  corev1.ServiceTypeLoadBalancer,
			Ports: []corev1.ServicePort{{Name: "a", Port: 80, TargetPort: intstr.FromInt(8080)}, {Name: "b", Port: 53, Protocol: corev1.ProtocolUDP}},
		},
	}
	if change != nil {
		change(s)
	}
	p.create(s)
	return s
}

// allow lets the namespace publish addresses on hosts.
func (p *publishing) allow(networks ...string) {
	for _, h := range p.hosts {
		update(p.box, h.CapstanHost, func(h *infrav1.CapstanHost) {
			h.Spec.Services = nil
			if len(networks) > 0 {
				h.Spec.Services = &infrav1.HostServices{Addresses: networks, AllowedNamespaces: infrav1.AllowedNamespaces{Names: []string{p.namespace}}}
			}
		})
	}
}

// claims returns the claims for Services by the name of the Service.
func (p *publishing) claims() map[string]*capiipamv1.IPAddressClaim {
	list, out := &capiipamv1.IPAddressClaimList{}, map[string]*capiipamv1.IPAddressClaim{}
	p.Expect(env.Client.List(ctx, list, client.InNamespace(p.namespace))).To(Succeed())
	for i := range list.Items {
		_, name, _ := strings.Cut(list.Items[i].Annotations[infrav1.ServiceAnnotation], "/")
		out[name] = &list.Items[i]
	}
	return out
}

// provide gives the claim of a Service an address.
func (p *publishing) provide(service, address string) {
	p.t.Helper()
	p.Eventually(func() map[string]*capiipamv1.IPAddressClaim { return p.claims() }).Should(HaveKey(service))
	p.fulfil(p.claims()[service], address, 24, "")
}

// on returns how a host publishes a Service: its machines' nodes, "none" without a machine, or "" if it does not publish it.
func (p *publishing) on(h int, service string) func() string {
	return func() string {
		s := p.hosts[h].fake.Services(p.capstan.Spec.ID)[p.namespace+"/"+service]
		switch {
		case s == nil:
			return ""
		case len(s.GetMachines()) == 0:
			return "none"
		}
		return strings.Join(s.GetMachines(), " ")
	}
}

func (p *publishing) address(h int) string {
	m := &infrav1.CapstanMachine{ObjectMeta: metav1.ObjectMeta{Namespace: p.namespace, Name: p.nodes[h]}}
	p.get(m)
	return m.Spec.Network.Addresses[0].Address
}

func (p *publishing) ingress(s *corev1.Service) func() string {
	return func() string {
		p.get(s)
		if len(s.Status.LoadBalancer.Ingress) == 0 {
			return ""
		}
		return s.Status.LoadBalancer.Ingress[0].IP
	}
}

// told waits for an event on a Service.
func (p *publishing) told(s *corev1.Service, text string) {
	p.t.Helper()
	p.Eventually(func() (all []string) {
		list := &corev1.EventList{}
		p.Expect(env.Client.List(ctx, list, client.InNamespace(p.namespace))).To(Succeed())
		for _, e := range list.Items {
			if e.InvolvedObject.UID == s.UID {
				all = append(all, e.Type+" "+e.Reason+": "+e.Message)
			}
		}
		return all
	}).Should(ContainElement(ContainSubstring(text)))
}

// A Service is published only with the permission of a host, gets its address, and loses it with the permission, with the
// Service, and with the opt-in of the cluster. The test is not parallel: its cluster sees the Services of all tests.
func TestServices(t *testing.T) {
	p := newPublishing(t, 2, nil)
	web := p.addService("web", nil)
	foreign := p.addService("foreign", func(s *corev1.Service) { s.Spec.LoadBalancerClass = ptr.To("example.com/lb") })
	p.provide("web", "203.0.113.100")
	message := p.condition(p.capstan, infrav1.ServicesPublishedCondition, metav1.ConditionFalse, infrav1.ServicesNotPublishedReason)
	p.Eventually(func() string {
		message = p.condition(p.capstan, infrav1.ServicesPublishedCondition, metav1.ConditionFalse, infrav1.ServicesNotPublishedReason)
		return message
	}).Should(ContainSubstring(p.namespace + "/web: no host allows the namespace to publish the address 203.0.113.100"))
	p.told(web, "Warning NotPublished: no host allows")
	p.Expect(p.on(0, "web")()+p.on(1, "web")()).To(BeEmpty(), "published without a permission")

	p.allow("203.0.113.96/28")
	p.Eventually(p.ingress(web)).Should(Equal("203.0.113.100"))
	p.condition(p.capstan, infrav1.ServicesPublishedCondition, metav1.ConditionTrue, infrav1.ServicesPublishedReason)
	p.told(web, "Normal Published: Clients reach the Service at 203.0.113.100")
	p.Expect(p.on(0, "web")() == "").NotTo(Equal(p.on(1, "web")() == ""), "published on one host")
	p.get(foreign)
	p.Expect(foreign.Finalizers).To(BeEmpty())
	p.Expect(slices.Collect(maps.Keys(p.claims()))).To(ConsistOf("web"))
	p.followsNodes(web)
	p.followsEndpoints()
	p.followsSpec(web)
	p.addressInUse()
	p.hostRestarts()
	p.hostIsSilent(web)
	p.deletedServiceLetsGo(web)
	p.permissionEnds()
	p.optOutEnds()
	p.clusterIsDeleted()
}

// The record of the hosts is an annotation of a claim, which users of the namespace can change. Without the record, a host gives up the
// address all the same, before the claim is deleted.
func TestRemovedRecord(t *testing.T) {
	p := newPublishing(t, 2, nil)
	p.allow("203.0.113.96/28")
	web := p.addService("unrecorded", nil)
	p.provide("unrecorded", "203.0.113.104")
	p.Eventually(p.ingress(web)).Should(Equal("203.0.113.104"))
	h := p.where("unrecorded")

	update(p.box, p.cluster, func(c *clusterv1.Cluster) { c.Spec.Paused = ptr.To(true) })
	p.condition(p.capstan, clusterv1.PausedCondition, metav1.ConditionTrue, clusterv1.PausedReason)
	update(p.box, p.claims()["unrecorded"], func(c *capiipamv1.IPAddressClaim) { delete(c.Annotations, infrav1.ServiceHostsAnnotation) })
	p.delete(web)
	update(p.box, web, func(s *corev1.Service) { s.Finalizers = nil })
	p.gone(web)
	p.Expect(p.on(h, "unrecorded")()).NotTo(BeEmpty())
	update(p.box, p.cluster, func(c *clusterv1.Cluster) { c.Spec.Paused = nil })
	p.Eventually(p.on(h, "unrecorded")).Should(BeEmpty())
	p.unclaim("unrecorded")
}

// IPAM-07: an IPAddress that was removed by force is created again after its claim has named it. The claim does not change then, and the
// new IPAddress is the event for the Service.
func TestServiceAddressAfterItsClaim_IPAM07(t *testing.T) {
	p := newPublishing(t, 1, nil)
	p.allow("203.0.113.96/28")
	web := p.addService("late", nil)
	p.Eventually(p.claims).Should(HaveKey("late"))
	claim := p.claims()["late"]
	p.names(claim)
	p.Eventually(func() string {
		return p.condition(p.capstan, infrav1.ServicesPublishedCondition, metav1.ConditionFalse, infrav1.ServicesNotPublishedReason)
	}).Should(ContainSubstring("is not to be seen yet"))
	p.settled(p.capstan)
	p.fulfil(claim, "203.0.113.105", 24, "")
	p.Eventually(p.ingress(web)).Should(Equal("203.0.113.105"))
	p.delete(web)
	p.unclaim("late")
	p.gone(web)
}

// A Service with both families has an address from each pool, with machines of the same family, and one of them can fail.
func TestDualStackServices(t *testing.T) {
	p := newPublishing(t, 2, func(c *infrav1.CapstanCluster) { c.Spec.Network.MachineIPv6CIDR = sixCIDR })
	update(p.box, p.capstan, func(c *infrav1.CapstanCluster) { c.Spec.Services.LoadBalancer.IPv6AddressesFromPool = pools[1] })
	p.allow("203.0.113.96/28")
	web := p.addService("dual", func(s *corev1.Service) {
		s.Spec.IPFamilyPolicy = ptr.To(corev1.IPFamilyPolicyRequireDualStack)
		s.Spec.LoadBalancerSourceRanges = []string{"198.51.100.0/24", "2001:db8:9::/64"}
	})
	shown := func() (all []string) {
		p.get(web)
		for _, i := range web.Status.LoadBalancer.Ingress {
			all = append(all, i.IP)
		}
		return all
	}
	p.provideFrom(pools[0], "203.0.113.100")
	p.Eventually(shown).Should(Equal([]string{"203.0.113.100"}), "an address does not wait for the other one")
	p.provideFrom(pools[1], "2001:db8::100")
	p.told(web, "Warning NotPublished: no host allows the namespace to publish the address 2001:db8::100")
	p.Expect(shown()).To(Equal([]string{"203.0.113.100"}))

	p.allow("203.0.113.96/28", "2001:db8::100/120")
	p.Eventually(shown).Should(Equal([]string{"203.0.113.100", "2001:db8::100"}))
	p.condition(p.capstan, infrav1.ServicesPublishedCondition, metav1.ConditionTrue, infrav1.ServicesPublishedReason)
	for address, ranges := range map[string]string{"203.0.113.100": "198.51.100.0/24", "2001:db8::100": "2001:db8:9::/64"} {
		s := cmp.Or(p.hosts[0].fake.ServiceAt(p.capstan.Spec.ID, address), p.hosts[1].fake.ServiceAt(p.capstan.Spec.ID, address))
		p.Expect(s.GetSourceRanges()).To(Equal([]string{ranges}))
		p.Expect(s.GetMachines()).To(HaveLen(1))
		p.Expect(strings.Contains(s.GetMachines()[0], ":")).To(Equal(strings.Contains(address, ":")), "a machine of the family of "+address)
	}

	update(p.box, web, func(s *corev1.Service) {
		s.Spec.IPFamilyPolicy, s.Spec.IPFamilies = ptr.To(corev1.IPFamilyPolicySingleStack), s.Spec.IPFamilies[:1]
	})
	p.Eventually(shown).Should(Equal([]string{"203.0.113.100"}))
	p.Eventually(func() int { return len(p.serviceClaims()) }).Should(Equal(1), "the claim of the former address goes")
	p.delete(web)
	p.Eventually(p.serviceClaims).Should(BeEmpty())
	p.gone(web)
}

func (p *publishing) serviceClaims() (out []capiipamv1.IPAddressClaim) {
	list := &capiipamv1.IPAddressClaimList{}
	p.Expect(env.Client.List(ctx, list, client.InNamespace(p.namespace))).To(Succeed())
	return slices.DeleteFunc(list.Items, func(c capiipamv1.IPAddressClaim) bool { return c.Annotations[infrav1.ServiceAnnotation] == "" })
}

// provideFrom gives the only claim of a pool an address.
func (p *publishing) provideFrom(pool infrav1.IPPoolReference, address string) {
	p.t.Helper()
	var claim *capiipamv1.IPAddressClaim
	p.Eventually(func() bool {
		all := p.serviceClaims()
		i := slices.IndexFunc(all, func(c capiipamv1.IPAddressClaim) bool { return c.Spec.PoolRef.Name == pool.Name })
		if i >= 0 {
			claim = &all[i]
		}
		return i >= 0
	}).Should(BeTrue())
	p.fulfil(claim, address, 64, "")
}

// where returns the host that publishes a Service.
func (p *publishing) where(service string) int {
	p.t.Helper()
	found := -1
	p.Eventually(func() int {
		found = slices.IndexFunc(p.hosts, func(h rackHost) bool { return h.fake.Services(p.capstan.Spec.ID)[p.namespace+"/"+service] != nil })
		return found
	}).ShouldNot(Equal(-1))
	return found
}

func (p *publishing) followsNodes(web *corev1.Service) {
	h := p.where("web")
	p.Eventually(p.on(h, "web")).Should(Equal(p.address(h)))
	p.ready(p.nodes[h], corev1.ConditionUnknown)
	p.Eventually(p.on(1-h, "web")).Should(Equal(p.address(1-h)), "moves to the host with a ready Node")
	p.Eventually(p.on(h, "web")).Should(BeEmpty())
	p.ready(p.nodes[1-h], corev1.ConditionUnknown)
	p.Eventually(p.on(1-h, "web")).Should(Equal("none"))
	p.ready(p.nodes[1-h], corev1.ConditionTrue) // The first Node that is ready would get the Service.
	p.Eventually(p.on(1-h, "web")).Should(Equal(p.address(1 - h)))
	p.ready(p.nodes[h], corev1.ConditionTrue)
	p.Expect(p.ingress(web)()).To(Equal("203.0.113.100"))
	p.Eventually(func() string { return p.claims()["web"].Annotations[infrav1.ServiceHostsAnnotation] }).Should(Equal(p.hosts[1-h].Name))
}

func (p *publishing) followsEndpoints() {
	local := p.addService("local", func(s *corev1.Service) { s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal })
	p.provide("local", "203.0.113.101")
	p.Eventually(p.ingress(local)).Should(Equal("203.0.113.101"))
	h := p.where("local")
	p.Expect(p.on(h, "local")()).To(Equal("none"), "without endpoints")
	endpoints := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: p.namespace, Name: "local", Labels: map[string]string{discoveryv1.LabelServiceName: "local"}},
		AddressType: discoveryv1.AddressTypeIPv4, Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"192.168.0.5"}, NodeName: &p.nodes[1-h]}},
	}
	p.create(endpoints)
	p.Eventually(p.on(1-h, "local")).Should(Equal(p.address(1 - h)))
	p.Eventually(p.on(h, "local")).Should(BeEmpty())
	p.Expect(p.ingress(local)()).To(Equal("203.0.113.101"))
}

func (p *publishing) followsSpec(web *corev1.Service) {
	spec := func() *hostpb.PublishedService {
		return p.hosts[p.where("web")].fake.Services(p.capstan.Spec.ID)[p.namespace+"/web"]
	}
	p.get(web)
	p.Expect(spec().GetPorts()).To(HaveLen(2))
	p.Expect(spec().GetPorts()[1].GetNodePort()).To(Equal(uint32(web.Spec.Ports[1].NodePort)))
	p.Expect(spec().GetPorts()[1].GetProtocol()).To(Equal(hostpb.PublishedPort_UDP))
	update(p.box, web, func(s *corev1.Service) {
		s.Spec.LoadBalancerSourceRanges, s.Spec.Ports = []string{"198.51.100.0/24"}, s.Spec.Ports[:1]
	})
	p.Eventually(func() []string { return spec().GetSourceRanges() }).Should(Equal([]string{"198.51.100.0/24"}))
	p.Expect(spec().GetPorts()).To(HaveLen(1))
}

func (p *publishing) addressInUse() {
	for _, h := range p.hosts {
		h.fake.Occupy("203.0.113.102", "the address belongs to the station 02:00:00:00:00:01")
	}
	taken := p.addService("taken", nil)
	p.provide("taken", "203.0.113.102")
	p.told(taken, "Warning NotPublished: the address belongs to the station")
	p.Expect(p.ingress(taken)()).To(BeEmpty())
	for _, h := range p.hosts {
		h.fake.Occupy("203.0.113.102", "")
	}
	p.Eventually(p.ingress(taken)).Should(Equal("203.0.113.102"))
	p.condition(p.capstan, infrav1.ServicesPublishedCondition, metav1.ConditionTrue, infrav1.ServicesPublishedReason)
	p.delete(taken)
	p.unclaim("taken")
	p.gone(taken)
}

// hostRestarts: a host that is away for a moment keeps its addresses, and gets its Services again.
func (p *publishing) hostRestarts() {
	h := p.where("web")
	fake := p.hosts[h].fake
	calls := fake.Calls("SetServices")
	fake.Stop()
	p.condition(p.hosts[h].CapstanHost, infrav1.HostConnectedCondition, metav1.ConditionFalse, infrav1.HostUnreachableReason)
	fake.Start(p.t)
	p.Eventually(func() int { return fake.Calls("SetServices") }).Should(BeNumerically(">", calls))
	p.Expect(p.where("web")).To(Equal(h))
}

// hostIsSilent: a host that does not answer keeps its addresses as long as a station answers for them, and another host gets them then. The
// status of the Service stays.
func (p *publishing) hostIsSilent(web *corev1.Service) {
	h := p.where("web")
	record := func() string { return p.claims()["web"].Annotations[infrav1.ServiceHostsAnnotation] }
	p.Expect(record()).To(Equal(p.hosts[h].Name))
	p.hosts[1-h].fake.Occupy("203.0.113.100", "the address belongs to the station 02:00:00:00:00:01")
	hangs, tries := make(chan struct{}), p.hosts[1-h].fake.Calls("SetServices")
	p.hosts[h].fake.Before("Pulse", func() { <-hangs })
	p.Eventually(func() int { return p.hosts[1-h].fake.Calls("SetServices") }).Should(BeNumerically(">", tries+1), "the other host tries again")
	p.Expect(record()).To(Equal(p.hosts[h].Name + "," + p.hosts[1-h].Name))
	p.Expect(p.ingress(web)()).To(Equal("203.0.113.100"))
	p.condition(p.capstan, infrav1.ServicesPublishedCondition, metav1.ConditionTrue, infrav1.ServicesPublishedReason)

	p.hosts[1-h].fake.Occupy("203.0.113.100", "")
	p.Eventually(record).Should(Equal(p.hosts[1-h].Name+","+p.hosts[h].Name), "the other host has the address")
	p.Expect(p.ingress(web)()).To(Equal("203.0.113.100"))
	p.Expect(p.on(h, "web")()).NotTo(BeEmpty())
	close(hangs)
	p.hosts[h].fake.Before("Pulse", nil)
	p.Eventually(p.on(h, "web")).Should(BeEmpty(), "the host that answers again gives the address up")
	p.Eventually(record).Should(Equal(p.hosts[1-h].Name))
}

// unclaim removes the address of a deleted claim, as an IPAM provider does. Here nothing collects garbage.
func (p *publishing) unclaim(service string) {
	p.t.Helper()
	p.Eventually(func() map[string]*capiipamv1.IPAddressClaim { return p.claims() }).ShouldNot(HaveKey(service))
}

// deletedServiceLetsGo: the claim goes after the host has given up the address, and the Service after the claim.
func (p *publishing) deletedServiceLetsGo(web *corev1.Service) {
	claim := p.claims()["web"]
	update(p.box, claim, func(c *capiipamv1.IPAddressClaim) { c.Finalizers = []string{"test/keeps"} })
	p.delete(web)
	p.Eventually(func() bool { p.get(claim); return claim.DeletionTimestamp.IsZero() }).Should(BeFalse())
	p.Expect(p.on(0, "web")() + p.on(1, "web")()).To(BeEmpty())
	p.get(web)
	p.Expect(web.DeletionTimestamp.IsZero()).To(BeFalse(), "the Service waits for the claim")
	update(p.box, claim, func(c *capiipamv1.IPAddressClaim) { c.Finalizers = nil })
	p.gone(web)
}

func (p *publishing) permissionEnds() {
	local := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: p.namespace, Name: "local"}}
	p.Eventually(p.ingress(local)).Should(Equal("203.0.113.101"))
	p.allow()
	p.Eventually(func() string { return p.on(0, "local")() + p.on(1, "local")() }).Should(BeEmpty())
	p.Eventually(p.ingress(local)).Should(BeEmpty())
	p.Expect(p.claims()).To(HaveKey("local"))
	p.allow("203.0.113.96/28")
	p.Eventually(p.ingress(local)).Should(Equal("203.0.113.101"))
}

func (p *publishing) optOutEnds() {
	local := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: p.namespace, Name: "local"}}
	before := p.capstan.DeepCopy()
	p.get(before)
	other := before.DeepCopy()
	other.Spec.Services.LoadBalancer.AddressesFromPool.Name = "other"
	p.Expect(env.Client.Patch(ctx, other, client.MergeFrom(before))).To(MatchError(ContainSubstring("addressesFromPool cannot be changed")))
	update(p.box, p.capstan, func(c *infrav1.CapstanCluster) { c.Spec.Services = infrav1.ClusterServicesSpec{} })
	p.unclaim("local")
	p.Eventually(func() []string { p.get(local); return local.Finalizers }).Should(BeEmpty())
	p.Expect(p.ingress(local)()).To(BeEmpty())
	p.Expect(p.on(0, "local")() + p.on(1, "local")()).To(BeEmpty())
	p.Eventually(func() []metav1.Condition { p.get(p.capstan); return p.capstan.Status.Conditions }).
		ShouldNot(ContainElement(HaveField("Type", infrav1.ServicesPublishedCondition)))
	p.delete(local)
	p.gone(local)
}

// clusterIsDeleted: the claims of Services end with the cluster, although its API server cannot be asked any more.
func (p *publishing) clusterIsDeleted() {
	update(p.box, p.capstan, func(c *infrav1.CapstanCluster) {
		c.Spec.Services.LoadBalancer = &infrav1.ServiceLoadBalancerSpec{AddressesFromPool: pools[0]}
	})
	last := p.addService("last", nil)
	p.provide("last", "203.0.113.103")
	p.Eventually(p.ingress(last)).Should(Equal("203.0.113.103"))
	for _, name := range p.nodes {
		m := &infrav1.CapstanMachine{ObjectMeta: metav1.ObjectMeta{Namespace: p.namespace, Name: name}}
		p.delete(m)
		p.gone(m)
	}
	p.delete(p.capstan)
	p.gone(p.capstan)
	p.Expect(p.claims()).NotTo(HaveKey("last"))
	for _, h := range p.hosts {
		p.Expect(h.fake.Services(p.capstan.Spec.ID)).To(BeEmpty())
	}
	update(p.box, last, func(s *corev1.Service) { s.Finalizers = nil })
	p.delete(last)
}
