package model

import (
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
)

// TestVictim (CP-16): the same Machines always give the same victim, and failure domains are balanced.
func TestVictim(t *testing.T) {
	domains := []clusterv1.FailureDomain{{Name: "x"}, {Name: "y"}}
	for _, c := range []struct{ machines, in, want string }{
		{"a:v b:v c:v", "x y y", "b"},
		{"a:v b:v c:v", "y y x", "a"},
		{"a:v b:v c:v", "x y gone", "c"},
		{"a:v b:v c:vm", "y y x", "c"},
		{"a:v b:vo c:vm", "y y x", "c"},
		{"a:vm b:vom c:v", "y y x", "b"},
		{"a:v b:v c:vo", "y y x", "c"},
		{"a:v b:v c:vf", "y y x", "c"},
		{"a:vo b:vo c:u", "y y x", "a"},
		{"a:vo b:v c:-", "x y y", "c"},
		{"a:vo b:s c:-", "x y y", "b"},
		{"a:vm b:vo c:-", "x y y", "a"},
		{"a:vo b:v c:i", "x y y", "c"},
		{"a:vo b:v c:i stray-c:v", "x y y", "a"},
	} {
		f := build(c.machines)
		for n, domain := range strings.Fields(c.in) {
			f.Instances[n].Machine.Spec.FailureDomain = domain
		}
		if got := f.victim(f.active(), domains); got.Name() != c.want {
			t.Errorf("%s in %s: got %s, want %s", c.machines, c.in, got.Name(), c.want)
		}
	}
}

// TestPlace (CP-16): the domain with the fewest remaining Machines is chosen, then with the fewest Machines, then by name.
func TestPlace(t *testing.T) {
	domains := []clusterv1.FailureDomain{{Name: "z"}, {Name: "x"}, {Name: "y"}}
	for _, c := range []struct{ machines, in, want string }{
		{"", "", "x"}, {"a:v", "x", "y"}, {"a:v b:v", "x y", "z"}, {"a:v b:v c:v", "x y z", "x"},
		{"a:vo b:v c:v", "x y z", "x"}, {"a:vo b:vo c:v", "x x y", "z"}, {"a:v b:vd", "x y", "z"}, {"a:v", "gone", "x"},
	} {
		var machines []*clusterv1.Machine
		old := map[string][]string{}
		f := build(c.machines)
		for n, domain := range strings.Fields(c.in) {
			f.Instances[n].Machine.Spec.FailureDomain = domain
			machines = append(machines, f.Instances[n].Machine)
			old[f.Instances[n].Name()] = f.Instances[n].Outdated
		}
		if got := PlaceMachine(domains, machines, old); got != c.want {
			t.Errorf("%s in %s: got %s, want %s", c.machines, c.in, got, c.want)
		}
	}
	if PlaceMachine(nil, nil, nil) != "" {
		t.Error("a domain where there is none")
	}
}

// TestLimitsHosts (CP-16): a machine that some hosts cannot run gets no failure domain.
func TestLimitsHosts(t *testing.T) {
	for name, c := range map[string]struct {
		spec infrav1.CapstanMachineSpec
		want bool
	}{
		"nothing":                 {},
		"its size":                {spec: infrav1.CapstanMachineSpec{CPUs: 2}},
		"a selector of all hosts": {spec: infrav1.CapstanMachineSpec{HostSelector: &metav1.LabelSelector{}}},
		"the image of all hosts":  {spec: infrav1.CapstanMachineSpec{Image: "host"}},
		"labels":                  {infrav1.CapstanMachineSpec{HostSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"disk": "ssd"}}}, true},
		"expressions":             {infrav1.CapstanMachineSpec{HostSelector: &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: "disk", Operator: "Exists"}}}}, true},
		"tolerations":             {infrav1.CapstanMachineSpec{HostTolerations: []infrav1.HostToleration{{Operator: infrav1.HostTolerationExists}}}, true},
		"an image":                {infrav1.CapstanMachineSpec{Image: "debian-13"}, true},
		"a host":                  {infrav1.CapstanMachineSpec{HostName: "a"}, true},
		"mounts":                  {infrav1.CapstanMachineSpec{HostMounts: []infrav1.HostMount{{}}}, true},
		"devices":                 {infrav1.CapstanMachineSpec{Devices: []infrav1.MachineDevice{{}}}, true},
		"volumes":                 {infrav1.CapstanMachineSpec{Volumes: []infrav1.MachineVolume{{}}}, true},
	} {
		if got := LimitsHosts(c.spec); got != c.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}
