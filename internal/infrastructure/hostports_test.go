package infrastructure_test

import (
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
)

// authorise lets the namespace publish ports at the own address of a host, or none.
func (p *publishing) authorise(h int, address string, ports ...int32) {
	update(p.box, p.hosts[h].CapstanHost, func(host *infrav1.CapstanHost) {
		host.Spec.Services = nil
		if len(ports) == 0 {
			return
		}
		host.Spec.Services = &infrav1.HostServices{HostAddresses: []string{address}}
		for _, port := range ports {
			protocol := infrav1.HostPortTCP
			if port == 53 {
				protocol = infrav1.HostPortUDP
			}
			host.Spec.Services.HostPorts = append(host.Spec.Services.HostPorts, infrav1.HostPorts{
				Protocol: protocol, Port: port, AllowedNamespaces: infrav1.AllowedNamespaces{Names: []string{p.namespace}},
			})
		}
	})
}

func (p *publishing) portService(name string, port int32) *corev1.Service {
	return p.addService(name, func(s *corev1.Service) {
		s.Spec.LoadBalancerClass = ptr.To(infrav1.ServiceHostPortsClass)
		s.Spec.Ports[0].Port = port
		if port != 80 {
			s.Spec.Ports = s.Spec.Ports[:1]
		}
	})
}

// shows returns the addresses of a Service.
func (p *publishing) shows(s *corev1.Service) func() string {
	return func() string {
		p.get(s)
		var all []string
		for _, i := range s.Status.LoadBalancer.Ingress {
			all = append(all, i.IP)
		}
		return strings.Join(all, " ")
	}
}

func (p *publishing) portHosts() string {
	p.get(p.capstan)
	return p.capstan.Annotations[infrav1.HostPortHostsAnnotation]
}

// A Service has ports of the hosts' own addresses only where they are authorised for the namespace, and loses them with the
// authorisation, with the Service, and with the opt-in of the cluster. The test is not parallel: its cluster sees the Services of all tests.
func TestHostPorts(t *testing.T) {
	p := newPublishing(t, 2, nil)
	for _, h := range p.hosts {
		h.fake.SetInfo(func(i *hostpb.HostInfo) { i.HostPorts = true })
	}
	web := p.portService("web", 80)
	p.told(web, "Warning NotPublished: the cluster does not publish Services of the class capstan.dev/host-ports")
	update(p.box, p.capstan, func(c *infrav1.CapstanCluster) { c.Spec.Services.LoadBalancer.HostPorts = ptr.To(true) })
	p.told(web, "does not authorise TCP port 80, UDP port 53 for the namespace")
	p.authorise(0, "192.0.2.1", 80)
	p.told(web, "does not authorise UDP port 53 for the namespace")
	p.Expect(p.on(0, "web")()+p.on(1, "web")()+p.portHosts()).To(BeEmpty(), "published without a permission")

	p.authorise(0, "192.0.2.1", 80, 53, 81)
	p.Eventually(p.shows(web)).Should(Equal("192.0.2.1"))
	p.Expect(web.Status.LoadBalancer.Ingress[0].IPMode).To(HaveValue(Equal(corev1.LoadBalancerIPModeProxy)))
	p.Expect(web.Status.LoadBalancer.Ingress[0].Ports).To(Equal([]corev1.PortStatus{{Port: 80, Protocol: corev1.ProtocolTCP}, {Port: 53, Protocol: corev1.ProtocolUDP}}))
	p.condition(p.capstan, infrav1.ServicesPublishedCondition, metav1.ConditionTrue, infrav1.ServicesPublishedReason)
	p.told(web, "Normal Published: Clients reach the Service at 192.0.2.1")
	p.Expect(p.on(0, "web")()).To(Equal(p.address(0)))
	p.Expect(p.hosts[0].fake.Services(p.capstan.Spec.ID)[p.namespace+"/web"].GetHostPorts()).To(BeTrue())
	p.Expect(p.portHosts()).To(Equal(p.hosts[0].Name))
	p.Expect(p.claims()).NotTo(HaveKey("web"))

	p.portsInUse(web)
	p.authorise(1, "192.0.2.2", 80, 53)
	p.Eventually(p.shows(web)).Should(Equal("192.0.2.1 192.0.2.2"))
	p.authorise(0, "")
	p.Eventually(p.shows(web)).Should(Equal("192.0.2.2"))
	p.Expect(p.on(0, "web")()).To(BeEmpty(), "the permission of the host ended")
	p.Eventually(p.portHosts).Should(Equal(p.hosts[1].Name))
	p.ready(p.nodes[1], corev1.ConditionUnknown)
	p.Eventually(p.shows(web)).Should(BeEmpty())
	p.told(web, "no host that authorises its ports has a machine that serves it")
	p.ready(p.nodes[1], corev1.ConditionTrue)
	p.Eventually(p.shows(web)).Should(Equal("192.0.2.2"))

	p.withdrawWithoutAPIServer(web)
	p.delete(web)
	p.gone(web)
	p.Expect(p.on(1, "web")()).To(BeEmpty(), "a deleted Service")
	p.Eventually(p.portHosts).Should(BeEmpty())
	p.nodePorts()
	p.portsEndWhileAway()
}

// nodePorts: a Service of type NodePort has its node port at the hosts' own addresses, after its cluster opted in and where the port is
// authorised. Capstan does not change the Service.
func (p *publishing) nodePorts() {
	node := p.addService("node", func(s *corev1.Service) {
		s.Spec.Type, s.Spec.LoadBalancerClass = corev1.ServiceTypeNodePort, nil
		s.Spec.Ports = s.Spec.Ports[:1]
		s.Spec.Ports[0].NodePort = 30081
	})
	created := node.ResourceVersion
	p.authorise(0, "192.0.2.1", 30081)
	other := p.portService("other", 30081)
	p.Eventually(p.shows(other)).Should(Equal("192.0.2.1"), "the cluster publishes no node ports yet")
	p.delete(other)
	p.gone(other)
	p.Expect(p.on(0, "node")()).To(BeEmpty())

	publish := func(ports bool) {
		update(p.box, p.capstan, func(c *infrav1.CapstanCluster) { c.Spec.Services.LoadBalancer.NodePorts = &ports })
	}
	publish(true)
	p.Eventually(p.on(0, "node")).Should(Equal(p.address(0)))
	published := p.hosts[0].fake.Services(p.capstan.Spec.ID)[p.namespace+"/node"].GetPorts()
	p.Expect(published).To(HaveLen(1))
	p.Expect([]uint32{published[0].GetPort(), published[0].GetNodePort()}).To(Equal([]uint32{30081, 30081}))
	p.Eventually(p.portHosts).Should(Equal(p.hosts[0].Name))
	p.told(node, "Normal Published: Clients reach the Service at 192.0.2.1")
	p.get(node)
	p.Expect(node.Finalizers).To(BeEmpty())
	p.Expect(node.Annotations).To(BeEmpty())
	p.Expect(node.ResourceVersion).To(Equal(created), "somebody changed the Service")

	p.authorise(0, "192.0.2.1", 30082)
	p.Eventually(p.on(0, "node")).Should(BeEmpty(), "the permission ended")
	p.told(node, "does not authorise TCP port 30081")
	p.authorise(0, "192.0.2.1", 30081)
	p.Eventually(p.on(0, "node")).Should(Equal(p.address(0)))
	publish(false)
	p.Eventually(p.on(0, "node")).Should(BeEmpty(), "the cluster opted out")
	publish(true)
	p.Eventually(p.on(0, "node")).Should(Equal(p.address(0)))
	p.delete(node)
	p.Eventually(p.on(0, "node")).Should(BeEmpty(), "a deleted Service")
	p.Eventually(p.portHosts).Should(BeEmpty())
}

// portsInUse: a Service keeps its port, and a host that refuses a port is asked again.
func (p *publishing) portsInUse(web *corev1.Service) {
	second := p.portService("second", 80)
	p.told(second, "the Service "+p.namespace+"/web has TCP port 80")
	p.Expect(p.shows(second)()).To(BeEmpty())
	p.Expect(p.shows(web)()).To(Equal("192.0.2.1"))
	p.delete(second)
	p.gone(second)
	p.hosts[0].fake.Occupy("192.0.2.1", "a program of the host uses TCP port 81")
	third := p.portService("third", 81)
	p.told(third, "Warning NotPublished: a program of the host uses TCP port 81")
	p.Expect(p.shows(third)()).To(BeEmpty())
	p.hosts[0].fake.Occupy("192.0.2.1", "")
	p.Eventually(p.shows(third)).Should(Equal("192.0.2.1"))
	p.delete(third)
	p.gone(third)
	p.Eventually(p.shows(web)).Should(Equal("192.0.2.1"))
}

// withdrawWithoutAPIServer: withdrawn ports close while the API server of the cluster does not answer, and the others stay. The manager
// is first connected to it, and then not.
func (p *publishing) withdrawWithoutAPIServer(web *corev1.Service) {
	p.authorise(1, "192.0.2.2", 80, 53, 81)
	other := p.portService("other", 81)
	p.Eventually(p.shows(other)).Should(Equal("192.0.2.2"))
	second, third := p.portService("second", 80), p.portService("third", 80)
	p.told(second, "/web has TCP port 80")
	p.told(third, "/web has TCP port 80")
	p.api.while(func() {
		p.authorise(1, "192.0.2.2", 81)
		// The new events on two refused Services would take ten seconds each.
		p.Eventually(p.on(1, "web"), 15*time.Second).Should(BeEmpty(), "withdrawn while the API server does not answer")
		p.Expect(p.on(1, "other")()).To(Equal(p.address(1)), "still authorised")
	})
	for _, s := range []*corev1.Service{second, third} {
		p.delete(s)
		p.gone(s)
	}
	p.Eventually(p.shows(web)).Should(BeEmpty())
	p.authorise(1, "192.0.2.2", 80, 53, 81)
	p.Eventually(p.shows(web)).Should(Equal("192.0.2.2"))

	p.connectable(false)
	p.Eventually(func() string { // The end of the connection is no event here.
		update(p.box, p.capstan, func(c *infrav1.CapstanCluster) {
			metav1.SetMetaDataAnnotation(&c.ObjectMeta, "example.com/look", time.Now().String())
		})
		return conditions.GetReason(p.capstan, infrav1.ServicesPublishedCondition)
	}).Should(Equal(infrav1.WorkloadNotConnectedReason))
	p.authorise(1, "192.0.2.2", 80, 53)
	p.Eventually(p.on(1, "other")).Should(BeEmpty(), "withdrawn while the manager is not connected")
	p.condition(p.capstan, infrav1.ServicesPublishedCondition, metav1.ConditionUnknown, infrav1.WorkloadNotConnectedReason)
	p.Expect(p.on(1, "web")()).To(Equal(p.address(1)), "still authorised")
	p.authorise(1, "")
	p.Eventually(p.portHosts).Should(BeEmpty())
	p.Expect(p.on(1, "web")()).To(BeEmpty(), "withdrawn while the manager is not connected")
	p.authorise(1, "192.0.2.2", 80, 53)
	p.connectable(true)
	p.Eventually(p.shows(other)).Should(BeEmpty())
	p.Eventually(p.on(1, "web")).Should(Equal(p.address(1)))
	p.delete(other)
	p.gone(other)
}

// connectable lets the manager connect to the API server of the cluster, or end its connection. The manager connects to clusters with a
// control plane of Capstan only after their first API server answered.
func (p *publishing) connectable(yes bool) {
	update(p.box, p.cluster, func(c *clusterv1.Cluster) {
		c.Spec.ControlPlaneRef = clusterv1.ContractVersionedObjectReference{APIGroup: controlplanev1.GroupVersion.Group, Kind: "CapstanControlPlane", Name: c.Name}
	})
	before := p.cluster.DeepCopy()
	p.cluster.Status.Initialization.ControlPlaneInitialized = ptr.To(yes)
	p.Expect(env.Client.Status().Patch(ctx, p.cluster, client.MergeFrom(before))).To(Succeed())
}

// portsEndWhileAway: the end of the publication waits for a host that is not connected.
func (p *publishing) portsEndWhileAway() {
	last := p.portService("last", 80)
	p.Eventually(p.shows(last)).Should(Equal("192.0.2.2"))
	fake := p.hosts[1].fake
	fake.Stop()
	p.condition(p.hosts[1].CapstanHost, infrav1.HostConnectedCondition, metav1.ConditionFalse, infrav1.HostUnreachableReason)
	update(p.box, p.capstan, func(c *infrav1.CapstanCluster) { c.Spec.Services = infrav1.ClusterServicesSpec{} })
	p.Eventually(func() string {
		return p.condition(p.capstan, infrav1.ServicesPublishedCondition, metav1.ConditionFalse, infrav1.ServicesEndingReason)
	}).Should(ContainSubstring("may still publish ports"))
	fake.Start(p.t)
	p.Eventually(func() []metav1.Condition { p.get(p.capstan); return p.capstan.Status.Conditions }).
		ShouldNot(ContainElement(HaveField("Type", infrav1.ServicesPublishedCondition)))
	p.Expect(p.on(1, "last")() + p.portHosts() + p.shows(last)()).To(BeEmpty())
	p.delete(last)
	p.gone(last)
}

// The API server refuses an authorisation that is not complete.
func TestHostPortsAreValidated(t *testing.T) {
	b := newNamespace(t)
	names := infrav1.AllowedNamespaces{Names: []string{"a"}}
	good := infrav1.HostPorts{Protocol: infrav1.HostPortTCP, Port: 80, EndPort: 90, AllowedNamespaces: names}
	ports := func(change func(*infrav1.HostPorts)) *infrav1.HostServices {
		p := good
		if change != nil {
			change(&p)
		}
		return &infrav1.HostServices{HostAddresses: []string{"192.0.2.1", "2001:db8::1"}, HostPorts: []infrav1.HostPorts{p}}
	}
	for name, c := range map[string]struct {
		services *infrav1.HostServices
		says     string // empty if it is accepted
	}{
		"ports":                      {ports(nil), ""},
		"one port":                   {ports(func(p *infrav1.HostPorts) { p.EndPort = 0 }), ""},
		"nothing":                    {&infrav1.HostServices{}, "should have at least 1 properties"},
		"no addresses":               {&infrav1.HostServices{HostPorts: []infrav1.HostPorts{good}}, "hostAddresses and hostPorts must be set together"},
		"no ports":                   {&infrav1.HostServices{HostAddresses: []string{"192.0.2.1"}}, "hostAddresses and hostPorts must be set together"},
		"namespaces only":            {&infrav1.HostServices{AllowedNamespaces: names}, "addresses and allowedNamespaces must be set together"},
		"two of a family":            {&infrav1.HostServices{HostAddresses: []string{"192.0.2.1", "192.0.2.2"}, HostPorts: []infrav1.HostPorts{good}}, "one IPv4 or one IPv6 address"},
		"a name":                     {&infrav1.HostServices{HostAddresses: []string{"example.com"}, HostPorts: []infrav1.HostPorts{good}}, "one IPv4 or one IPv6 address"},
		"a range that ends":          {ports(func(p *infrav1.HostPorts) { p.EndPort = 79 }), "endPort must be port or a higher one"},
		"a port of 17 bits":          {ports(func(p *infrav1.HostPorts) { p.EndPort = 65536 }), "65535"},
		"no port":                    {ports(func(p *infrav1.HostPorts) { p.Port = 0 }), "port"},
		"another protocol":           {ports(func(p *infrav1.HostPorts) { p.Protocol = "SCTP" }), "Unsupported value"},
		"all namespaces by omission": {ports(func(p *infrav1.HostPorts) { p.AllowedNamespaces = infrav1.AllowedNamespaces{} }), "allowedNamespaces"},
	} {
		h := &infrav1.CapstanHost{ObjectMeta: metav1.ObjectMeta{GenerateName: "ports-"}, Spec: infrav1.CapstanHostSpec{Address: "unix:///nowhere", Services: c.services}}
		err := env.Client.Create(ctx, h, client.DryRunAll)
		if (err == nil) != (c.says == "") || err != nil && !strings.Contains(err.Error(), c.says) {
			b.t.Errorf("%s: %v, want %q", name, err, c.says)
		}
	}
}
