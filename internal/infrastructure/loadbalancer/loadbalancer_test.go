package loadbalancer_test

import (
	"slices"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/infrastructure/loadbalancer"
)

func machine(name, infra string, labels map[string]string) clusterv1.Machine {
	m := clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}}
	m.Spec.InfrastructureRef = clusterv1.ContractVersionedObjectReference{Kind: "CapstanMachine", Name: infra}
	return m
}

func capstanMachine(name, id, address string, deleting bool) infrav1.CapstanMachine {
	m := infrav1.CapstanMachine{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: infrav1.CapstanMachineSpec{ID: id}}
	if address != "" {
		m.Spec.Network.Addresses = []infrav1.InterfaceAddress{{Address: address, Prefix: 21}}
	}
	if deleting {
		now := metav1.Now()
		m.DeletionTimestamp = &now
	}
	return m
}

// IM-06: the machines that are backends of the load balancer.
func TestBackends_IM06(t *testing.T) {
	cluster := func(port int32) *clusterv1.Cluster {
		return &clusterv1.Cluster{Spec: clusterv1.ClusterSpec{ClusterNetwork: clusterv1.ClusterNetwork{APIServerPort: port}}}
	}
	controlPlane := map[string]string{clusterv1.MachineControlPlaneLabel: ""}
	draining := machine("draining", "i-draining", controlPlane)
	now := metav1.Now()
	draining.DeletionTimestamp = &now
	machines := []clusterv1.Machine{
		machine("b", "i-b", controlPlane), machine("a", "i-a", controlPlane), machine("worker", "i-worker", nil), draining,
		machine("leaving", "i-leaving", controlPlane), machine("new", "i-new", controlPlane), machine("unknown", "i-unknown", controlPlane),
	}
	infra := []infrav1.CapstanMachine{
		capstanMachine("i-b", "2", "10.0.0.3", false), capstanMachine("i-a", "1", "10.0.0.2", false),
		capstanMachine("i-worker", "3", "10.0.0.4", false), capstanMachine("i-draining", "4", "10.0.0.5", false),
		capstanMachine("i-leaving", "5", "10.0.0.6", true), capstanMachine("i-new", "", "", false),
		capstanMachine("i-stranger", "6", "10.0.0.7", false),
	}
	for port, want := range map[int32][]string{
		0:    {"i-a 10.0.0.2:6443", "i-b 10.0.0.3:6443", "i-draining 10.0.0.5:6443"},
		8443: {"i-a 10.0.0.2:8443", "i-b 10.0.0.3:8443", "i-draining 10.0.0.5:8443"},
	} {
		var got []string
		for _, b := range loadbalancer.Backends(cluster(port), infrav1.ClusterNetworkSpec{MachineCIDR: "10.0.0.0/21"}, machines, infra) {
			got = append(got, b.GetName()+" "+b.GetAddress())
		}
		if !slices.Equal(got, want) {
			t.Errorf("Backends: got %q, want %q", got, want)
		}
	}
}

// Machines with an address outside of the cluster's network are no backends: a tenant can write each address into a CapstanMachine.
func TestBackendsOfTheNetwork(t *testing.T) {
	networks := map[string]infrav1.ClusterNetworkSpec{
		"IPv4": {MachineCIDR: "10.0.0.0/21"}, "IPv6": {MachineCIDR: "fd00::/64"}, "LAN": {MachineCIDR: "10.0.0.0/21", LAN: infrav1.ClusterLAN{Name: "lan"}}, "none": {},
	}
	for address, want := range map[string][]string{
		"10.0.0.9":    {"IPv4", "LAN"},
		"10.0.0.1":    {"LAN"}, // the gateway of a network without a LAN
		"fd00::5":     {"IPv6"},
		"127.0.0.1":   nil,
		"10.0.8.1":    nil,
		"::1":         nil,
		"not an IP":   nil,
		"10.0.7.255":  {"LAN"},
		"203.0.113.1": nil,
	} {
		machines := []clusterv1.Machine{machine("a", "i-a", map[string]string{clusterv1.MachineControlPlaneLabel: ""})}
		infra := []infrav1.CapstanMachine{capstanMachine("i-a", "1", address, false)}
		var got []string
		for name, network := range networks {
			if len(loadbalancer.Backends(&clusterv1.Cluster{}, network, machines, infra)) > 0 {
				got = append(got, name)
			}
		}
		if slices.Sort(got); !slices.Equal(got, want) {
			t.Errorf("%s: a backend in %q, want %q", address, got, want)
		}
	}
}

// IC-10: the port of the load balancer follows from the spec.
func TestPort_IC10(t *testing.T) {
	c := &infrav1.CapstanCluster{}
	if p := loadbalancer.Port(c); p != 6443 {
		t.Error(p)
	}
	c.Spec.ControlPlaneEndpoint.Port = 7443
	if p := loadbalancer.Port(c); p != 7443 {
		t.Error(p)
	}
	c.Spec.LoadBalancer.Port = 8443
	if p := loadbalancer.Port(c); p != 8443 {
		t.Error(p)
	}
}
