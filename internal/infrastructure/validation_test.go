package infrastructure_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
)

// rule is an object that is accepted, or refused with a message.
type rule struct {
	obj client.Object
	why string // empty: accepted
}

type rules map[string]rule

// Every rule of the CRDs and webhooks refuses its invalid objects with a helpful message.
func TestValidation(t *testing.T) {
	t.Parallel()
	b := newNamespace(t)
	checkRules(t, clusterRules(b.namespace))
	checkRules(t, machineRules(b.namespace))
	checkRules(t, hostRules(b.namespace))
}

func checkRules(t *testing.T, all rules) {
	t.Helper()
	for name, tc := range all {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			err := env.Client.Create(ctx, tc.obj)
			if tc.why != "" {
				g.Expect(err).To(MatchError(ContainSubstring(tc.why)))
				return
			}
			g.Expect(err).NotTo(HaveOccurred())
			g.Expect(env.Client.Delete(ctx, tc.obj)).To(Succeed())
		})
	}
}

func clusterRules(namespace string) rules {
	cluster := func(change func(*infrav1.CapstanClusterSpec)) client.Object {
		c := &infrav1.CapstanCluster{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: unique("v")}}
		change(&c.Spec)
		return c
	}
	return rules{
		"cluster": {obj: cluster(func(*infrav1.CapstanClusterSpec) {})},
		"cluster with all": {obj: cluster(func(s *infrav1.CapstanClusterSpec) {
			s.Network.MachineCIDR, s.LoadBalancer = "10.1.8.0/21", infrav1.LoadBalancerSpec{Mode: "Managed", BindAddress: "2001:db8::1", Port: 6443}
		})},
		"cluster, malformed CIDR":       {obj: cluster(func(s *infrav1.CapstanClusterSpec) { s.Network.MachineCIDR = "10.200.8.0x21" }), why: "must be a network without host bits"},
		"cluster, host bits":            {obj: cluster(func(s *infrav1.CapstanClusterSpec) { s.Network.MachineCIDR = "10.200.8.1/21" }), why: "must be a network without host bits"},
		"cluster, too small a network":  {obj: cluster(func(s *infrav1.CapstanClusterSpec) { s.Network.MachineCIDR = "10.200.8.0/30" }), why: "/29 or larger"},
		"cluster, IPv6 machine network": {obj: cluster(func(s *infrav1.CapstanClusterSpec) { s.Network.MachineCIDR = "fd00:1::/64" })},
		"cluster, two IPv6 networks": {obj: cluster(func(s *infrav1.CapstanClusterSpec) {
			s.Network.MachineCIDR, s.Network.MachineIPv6CIDR = "fd00:1::/64", "fd00:2::/64"
		}), why: "machineCIDR must be IPv4 if machineIPv6CIDR is set"},
		"cluster, IPv4 endpoint of IPv6 machines": {obj: cluster(func(s *infrav1.CapstanClusterSpec) {
			s.Network.MachineCIDR, s.LoadBalancer.BindAddress = "fd00:1::/64", "192.0.2.10"
		}), why: "the control plane endpoint 192.0.2.10 is IPv4"},
		"cluster, dual stack":       {obj: cluster(func(s *infrav1.CapstanClusterSpec) { s.Network.MachineIPv6CIDR = "fd00:1::/64" })},
		"cluster, IPv6 host bits":   {obj: cluster(func(s *infrav1.CapstanClusterSpec) { s.Network.MachineIPv6CIDR = "fd00:1::1/64" }), why: "machineIPv6CIDR must be an IPv6 network without host bits"},
		"cluster, IPv4 as IPv6":     {obj: cluster(func(s *infrav1.CapstanClusterSpec) { s.Network.MachineIPv6CIDR = "10.1.0.0/24" }), why: "machineIPv6CIDR must be an IPv6 network"},
		"cluster, IPv6 loopback":    {obj: cluster(func(s *infrav1.CapstanClusterSpec) { s.Network.MachineIPv6CIDR = "::/64" }), why: "loopback"},
		"cluster, bind address":     {obj: cluster(func(s *infrav1.CapstanClusterSpec) { s.LoadBalancer.BindAddress = "here" }), why: "bindAddress must be an IP address"},
		"cluster, bind to all":      {obj: cluster(func(s *infrav1.CapstanClusterSpec) { s.LoadBalancer.BindAddress = "0.0.0.0" }), why: "bindAddress must be a unicast address of the host"},
		"cluster, mode":             {obj: cluster(func(s *infrav1.CapstanClusterSpec) { s.LoadBalancer.Mode = "Some" }), why: "Unsupported value"},
		"cluster, port":             {obj: cluster(func(s *infrav1.CapstanClusterSpec) { s.LoadBalancer.Port = 65536 }), why: "less than or equal to 65535"},
		"cluster, id":               {obj: cluster(func(s *infrav1.CapstanClusterSpec) { s.ID = "An Id that is none" }), why: "should match"},
		"cluster, many values":      {obj: cluster(func(s *infrav1.CapstanClusterSpec) { s.HostSelector = expressions(1, 65) }), why: "hostSelector may have"},
		"cluster, many expressions": {obj: cluster(func(s *infrav1.CapstanClusterSpec) { s.HostSelector = expressions(17, 1) }), why: "hostSelector may have"},
		"cluster, many labels":      {obj: cluster(func(s *infrav1.CapstanClusterSpec) { s.HostSelector = matchLabels(65) }), why: "hostSelector may have"},
		"cluster, pool":             {obj: cluster(func(s *infrav1.CapstanClusterSpec) { s.LoadBalancer.AddressFromPool = &pools[0] })},
		"cluster, pool and bind address": {obj: cluster(func(s *infrav1.CapstanClusterSpec) {
			s.LoadBalancer = infrav1.LoadBalancerSpec{AddressFromPool: &pools[0], BindAddress: "192.0.2.1"}
		}), why: "addressFromPool and bindAddress cannot be set together"},
		"cluster, pool and no load balancer": {obj: cluster(func(s *infrav1.CapstanClusterSpec) {
			s.LoadBalancer = infrav1.LoadBalancerSpec{AddressFromPool: &pools[0], Mode: infrav1.LoadBalancerExternal}
		}), why: "addressFromPool requires mode Managed"},
		"cluster, address without pool": {obj: cluster(func(s *infrav1.CapstanClusterSpec) { s.LoadBalancer.Address = "10.200.8.2" }), why: "address is set by the controller"},
	}
}

func machineRules(namespace string) rules {
	machine := func(change func(*infrav1.CapstanMachineSpec)) client.Object {
		m := &infrav1.CapstanMachine{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: unique("v")}}
		change(&m.Spec)
		return m
	}
	disk := func(size string) func(*infrav1.CapstanMachineSpec) {
		return func(s *infrav1.CapstanMachineSpec) { s.Disk.Size = ptr.To(resource.MustParse(size)) }
	}
	address := func(a infrav1.InterfaceAddress) func(*infrav1.CapstanMachineSpec) {
		return func(s *infrav1.CapstanMachineSpec) { s.Network.Addresses = []infrav1.InterfaceAddress{a} }
	}
	return rules{
		"machine":                      {obj: machine(func(s *infrav1.CapstanMachineSpec) { s.CPUs, s.Memory = 2, ptr.To(resource.MustParse("512Mi")) })},
		"machine, image":               {obj: machine(func(s *infrav1.CapstanMachineSpec) { s.Image = "debian-13.1_a" })},
		"machine, image with a path":   {obj: machine(func(s *infrav1.CapstanMachineSpec) { s.Image = "../etc" }), why: "should match"},
		"machine, hidden image":        {obj: machine(func(s *infrav1.CapstanMachineSpec) { s.Image = ".new" }), why: "should match"},
		"machine, long image":          {obj: machine(func(s *infrav1.CapstanMachineSpec) { s.Image = strings.Repeat("a", 64) }), why: "63"},
		"machine, pids limit":          {obj: machine(func(s *infrav1.CapstanMachineSpec) { s.PidsLimit = 1023 }), why: "greater than or equal to 1024"},
		"machine, memory":              {obj: machine(func(s *infrav1.CapstanMachineSpec) { s.Memory = ptr.To(resource.MustParse("511Mi")) }), why: "memory must be at least 512Mi"},
		"machine, memory in bytes":     {obj: machine(func(s *infrav1.CapstanMachineSpec) { s.Memory = resource.NewQuantity(1<<30, resource.DecimalSI) })},
		"machine, memory with a point": {obj: machine(func(s *infrav1.CapstanMachineSpec) { s.Memory = ptr.To(resource.MustParse("1.5Gi")) })},
		"machine, disk":                {obj: machine(disk("2Gi"))},
		"machine, small disk":          {obj: machine(disk("2047Mi")), why: "disk.size must be at least 2Gi and at most 64Ti"},
		"machine, large disk":          {obj: machine(disk("65Ti")), why: "disk.size must be at least 2Gi and at most 64Ti"},
		"machine, selector":            {obj: machine(func(s *infrav1.CapstanMachineSpec) { s.HostSelector = expressions(16, 64) })},
		"machine, many expressions":    {obj: machine(func(s *infrav1.CapstanMachineSpec) { s.HostSelector = expressions(17, 1) }), why: "hostSelector may have"},
		"machine, many values":         {obj: machine(func(s *infrav1.CapstanMachineSpec) { s.HostSelector = expressions(1, 65) }), why: "hostSelector may have"},
		"machine, labels":              {obj: machine(func(s *infrav1.CapstanMachineSpec) { s.HostSelector = matchLabels(64) })},
		"machine, many labels":         {obj: machine(func(s *infrav1.CapstanMachineSpec) { s.HostSelector = matchLabels(65) }), why: "hostSelector may have"},
		"machine, tolerates all":       {obj: machine(tolerations(infrav1.HostToleration{Operator: "Exists"}))},
		"machine, tolerates":           {obj: machine(tolerations(infrav1.HostToleration{Key: "a", Value: "b", Effect: "NoSchedule"}))},
		"machine, tolerates nothing":   {obj: machine(tolerations(infrav1.HostToleration{Value: "b"})), why: "operator must be Exists if key is empty"},
		"machine, tolerates twice":     {obj: machine(tolerations(infrav1.HostToleration{Key: "a", Operator: "Exists", Value: "b"})), why: "value must be empty if operator is Exists"},
		"machine, toleration effect":   {obj: machine(tolerations(infrav1.HostToleration{Key: "a", Effect: "NoExecute"})), why: "Unsupported value"},
		"machine, many tolerations":    {obj: machine(tolerations(make([]infrav1.HostToleration, 33)...)), why: "32"},
		"machine, processors":          {obj: machine(func(s *infrav1.CapstanMachineSpec) { s.CPUs = -1 }), why: "greater than or equal to 1"},
		"machine, addresses":           {obj: machine(address(infrav1.InterfaceAddress{Address: "10.200.8.2", Prefix: 21, Gateway: "10.200.8.1"}))},
		"machine, address":             {obj: machine(address(infrav1.InterfaceAddress{Address: "10.200.8", Prefix: 21})), why: "address must be an IP address"},
		"machine, gateway":             {obj: machine(address(infrav1.InterfaceAddress{Address: "10.200.8.2", Prefix: 21, Gateway: "router"})), why: "gateway must be an IP address"},
		"machine, prefix":              {obj: machine(address(infrav1.InterfaceAddress{Address: "10.200.8.2", Prefix: 129})), why: "less than or equal to 128"},
		"machine, pool":                {obj: machine(func(s *infrav1.CapstanMachineSpec) { s.Network.AddressesFromPools = pools[:1] })},
		"machine, two pools":           {obj: machine(func(s *infrav1.CapstanMachineSpec) { s.Network.AddressesFromPools = pools })},
		"machine, one pool twice": {obj: machine(func(s *infrav1.CapstanMachineSpec) {
			s.Network.AddressesFromPools = []infrav1.IPPoolReference{pools[0], pools[0]}
		}), why: "the two pools must differ"},
	}
}

func hostRules(namespace string) rules {
	host := func(change func(*infrav1.CapstanHostSpec)) client.Object {
		h := &infrav1.CapstanHost{ObjectMeta: metav1.ObjectMeta{Name: unique("v")}, Spec: infrav1.CapstanHostSpec{
			Address: "unix:///nothing", AllowedNamespaces: &infrav1.AllowedNamespaces{Names: []string{namespace}},
		}}
		change(&h.Spec)
		return h
	}
	nothing := &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: corev1.LabelMetadataName, Operator: metav1.LabelSelectorOpDoesNotExist}}}
	return rules{
		"host, taints":      {obj: host(taints("gpu", "example.com/gpu"))},
		"host, taint twice": {obj: host(taints("gpu", "gpu")), why: "Duplicate value"},
		"host, taint key":   {obj: host(taints("a b")), why: "should match"},
		"host on a socket":  {obj: host(func(*infrav1.CapstanHostSpec) {})},
		"host, TCP": {obj: host(func(s *infrav1.CapstanHostSpec) {
			s.Address, s.CredentialsRef = "[2001:db8::1]:7443", infrav1.SecretReference{Namespace: "a", Name: "b"}
		})},
		"host, no address": {obj: host(func(s *infrav1.CapstanHostSpec) { s.Address = "" }), why: "expected an address, or connection FromHost"},
		"host, dials": {obj: host(func(s *infrav1.CapstanHostSpec) {
			s.Address, s.Connection, s.CredentialsRef = "", infrav1.HostConnectionFromHost, infrav1.SecretReference{Namespace: "a", Name: "b"}
		})},
		"host, dials without credentials": {obj: host(func(s *infrav1.CapstanHostSpec) { s.Address, s.Connection = "", infrav1.HostConnectionFromHost }), why: "expected an address, or connection FromHost"},
		"host, dials with an address":     {obj: host(func(s *infrav1.CapstanHostSpec) { s.Connection = infrav1.HostConnectionFromHost }), why: "expected an address, or connection FromHost"},
		"host, unknown connection":        {obj: host(func(s *infrav1.CapstanHostSpec) { s.Connection = "FromNobody" }), why: "supported values"},
		"host, malformed address":         {obj: host(func(s *infrav1.CapstanHostSpec) { s.Address = "http://host/" }), why: "address must be unix:///path/to/socket or host:port"},
		"host, relative socket":           {obj: host(func(s *infrav1.CapstanHostSpec) { s.Address = "unix:relative" }), why: "address must be"},
		"host, TCP without credentials":   {obj: host(func(s *infrav1.CapstanHostSpec) { s.Address = "host:7443" }), why: "credentialsRef is required"},
		"host, empty allowed namespaces":  {obj: host(func(s *infrav1.CapstanHostSpec) { s.AllowedNamespaces = &infrav1.AllowedNamespaces{} }), why: "at least 1 properties"},
		"host, no name of a namespace":    {obj: hostWithoutNames(), why: "at least 1 items"},
		"host, a selector of nothing":     {obj: host(func(s *infrav1.CapstanHostSpec) { s.AllowedNamespaces = &infrav1.AllowedNamespaces{Selector: nothing} })},
	}
}

// hostWithoutNames returns a host with an empty list of namespaces. A Go client would write it without the list.
func hostWithoutNames() client.Object {
	obj := &unstructured.Unstructured{Object: map[string]any{"spec": map[string]any{
		"address": "unix:///nothing", "allowedNamespaces": map[string]any{"names": []any{}},
	}}}
	obj.SetGroupVersionKind(infrav1.GroupVersion.WithKind("CapstanHost"))
	obj.SetName(unique("v"))
	return obj
}

// expressions returns a selector with n expressions of so many values each.
func expressions(n, values int) *metav1.LabelSelector {
	out := &metav1.LabelSelector{}
	for range n {
		e := metav1.LabelSelectorRequirement{Key: "a", Operator: metav1.LabelSelectorOpIn}
		for i := range values {
			e.Values = append(e.Values, fmt.Sprint(i))
		}
		out.MatchExpressions = append(out.MatchExpressions, e)
	}
	return out
}

func tolerations(all ...infrav1.HostToleration) func(*infrav1.CapstanMachineSpec) {
	return func(s *infrav1.CapstanMachineSpec) { s.HostTolerations = all }
}

func taints(keys ...string) func(*infrav1.CapstanHostSpec) {
	return func(s *infrav1.CapstanHostSpec) {
		for _, key := range keys {
			s.Taints = append(s.Taints, infrav1.HostTaint{Key: key, Effect: infrav1.HostTaintNoSchedule})
		}
	}
}

func matchLabels(n int) *metav1.LabelSelector {
	out := &metav1.LabelSelector{MatchLabels: map[string]string{}}
	for i := range n {
		out.MatchLabels[fmt.Sprint("a", i)] = ""
	}
	return out
}

// TestHugeExponent: a quantity whose conversion needs minutes and gigabytes is refused before its conversion.
func TestHugeExponent(t *testing.T) {
	t.Parallel()
	g := NewWithT(t)
	for _, size := range []string{"1e-2147483647", "1E-99999999", "1e9"} {
		for field, spec := range map[string]map[string]any{"memory": {"memory": size}, "disk.size": {"disk": map[string]any{"size": size}}} {
			obj := &unstructured.Unstructured{Object: map[string]any{"spec": spec}}
			obj.SetGroupVersionKind(infrav1.GroupVersion.WithKind("CapstanMachine"))
			obj.SetNamespace(env.Namespace(t))
			obj.SetName("greedy")
			start := time.Now()
			g.Expect(env.Client.Create(ctx, obj)).To(MatchError(ContainSubstring(field + " must be a number without exponent")))
			g.Expect(time.Since(start)).To(BeNumerically("<", 20*time.Second))
		}
	}
}

// Identity, placement, endpoint and network cannot change.
func TestDecisionsAreFinal(t *testing.T) {
	t.Parallel()
	b := newBox(t).provisioned()
	_, m := b.addMachine(nil, nil)
	b.running(m)
	b.get(b.capstan)
	for name, tc := range map[string]struct {
		change func() error
		why    string
	}{
		"machine id":      {change: func() error { return changed(m, func(m *infrav1.CapstanMachine) { m.Spec.ID = "another-id" }) }, why: "id is written once"},
		"no id":           {change: func() error { return changed(m, func(m *infrav1.CapstanMachine) { m.Spec.ID = "" }) }, why: "id is written once"},
		"no spec":         {change: func() error { return withoutSpec(m) }, why: "spec cannot be removed"},
		"no cluster spec": {change: func() error { return withoutSpec(b.capstan) }, why: "spec cannot be removed"},
		"provider id":     {change: func() error { return changed(m, func(m *infrav1.CapstanMachine) { m.Spec.ProviderID = "capstan://x" }) }, why: "providerID cannot be changed"},
		"host":            {change: func() error { return changed(m, func(m *infrav1.CapstanMachine) { m.Spec.HostName = "other" }) }, why: "a machine cannot move to another host"},
		"its address": {change: func() error {
			return changed(m, func(m *infrav1.CapstanMachine) { m.Spec.Network.Addresses[0].Address = b.address(200) })
		}, why: "network.addresses cannot be changed"},
		"no addresses": {change: func() error { return changed(m, func(m *infrav1.CapstanMachine) { m.Spec.Network.Addresses = nil }) }, why: "network.addresses cannot be changed"},
		"its pools": {change: func() error {
			return changed(m, func(m *infrav1.CapstanMachine) {
				m.Spec.Network.AddressesFromPools = []infrav1.IPPoolReference{{APIGroup: "ipam.capstan.dev", Kind: "CapstanIPPool", Name: "p"}}
			})
		}, why: "network.addressesFromPools cannot be changed"},
		"cluster id": {change: func() error { return changed(b.capstan, func(c *infrav1.CapstanCluster) { c.Spec.ID = "another-id" }) }, why: "id is written once"},
		"endpoint": {change: func() error {
			return changed(b.capstan, func(c *infrav1.CapstanCluster) { c.Spec.ControlPlaneEndpoint.Host = "other" })
		}, why: "the host of controlPlaneEndpoint cannot be changed"},
		"its port": {change: func() error {
			return changed(b.capstan, func(c *infrav1.CapstanCluster) { c.Spec.ControlPlaneEndpoint.Port = 1 })
		}, why: "the port of controlPlaneEndpoint cannot be changed"},
		"no endpoint": {change: func() error {
			return changed(b.capstan, func(c *infrav1.CapstanCluster) { c.Spec.ControlPlaneEndpoint = clusterv1.APIEndpoint{} })
		}, why: "cannot be changed"},
		"its network": {change: func() error {
			return changed(b.capstan, func(c *infrav1.CapstanCluster) { c.Spec.Network.MachineCIDR = "10.1.0.0/21" })
		}, why: "machines and certificates have addresses of it"},
		"other fields": {change: func() error {
			return changed(b.capstan, func(c *infrav1.CapstanCluster) { c.Spec.HostSelector = &metav1.LabelSelector{} })
		}},
	} {
		t.Run(name, func(t *testing.T) {
			err := tc.change()
			if tc.why == "" && err != nil || tc.why != "" && (err == nil || !strings.Contains(err.Error(), tc.why)) {
				t.Errorf("got %v, want %q", err, tc.why)
			}
		})
	}
}

// withoutSpec removes the spec of an object, which the rules of the spec do not see.
func withoutSpec(obj client.Object) error {
	return env.Client.Patch(ctx, obj.DeepCopyObject().(client.Object), client.RawPatch(types.JSONPatchType, []byte(`[{"op":"remove","path":"/spec"}]`)), client.DryRunAll)
}

func changed[T client.Object](obj T, change func(T)) error {
	after := obj.DeepCopyObject().(T)
	change(after)
	return env.Client.Patch(ctx, after, client.MergeFrom(obj), client.DryRunAll)
}

// The webhook compares the network with the networks of the Cluster, if the Cluster exists.
func TestOverlapIsRefusedEarly(t *testing.T) {
	t.Parallel()
	b := newNamespace(t)
	b.addHost(nil)
	b.addCluster(nil, nil)
	c := &infrav1.CapstanCluster{
		ObjectMeta: metav1.ObjectMeta{Namespace: b.namespace, Name: unique("v"), Labels: map[string]string{clusterv1.ClusterNameLabel: b.cluster.Name}},
		Spec:       infrav1.CapstanClusterSpec{Network: infrav1.ClusterNetworkSpec{MachineCIDR: "192.168.8.0/21"}},
	}
	b.Expect(env.Client.Create(ctx, c)).To(MatchError(ContainSubstring("pod network 192.168.0.0/16 overlaps machine network 192.168.8.0/21")))
}
