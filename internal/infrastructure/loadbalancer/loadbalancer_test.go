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
		capstanMachine("i-worker", "3", "10.0.0.4", false), capstanMachine("i-draining", "4", "fd00::5", false),
		capstanMachine("i-leaving", "5", "10.0.0.6", true), capstanMachine("i-new", "", "", false),
		capstanMachine("i-stranger", "6", "10.0.0.7", false),
	}
	for port, want := range map[int32][]string{
		0:    {"i-a 10.0.0.2:6443", "i-b 10.0.0.3:6443", "i-draining [fd00::5]:6443"},
		8443: {"i-a 10.0.0.2:8443", "i-b 10.0.0.3:8443", "i-draining [fd00::5]:8443"},
	} {
		var got []string
		for _, b := range loadbalancer.Backends(cluster(port), machines, infra) {
			got = append(got, b.GetName()+" "+b.GetAddress())
		}
		if !slices.Equal(got, want) {
			t.Errorf("Backends: got %q, want %q", got, want)
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
