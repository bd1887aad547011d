package model

import (
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
)

// TestNotOurs: which Machines with the labels belong to a control plane.
// Row ALL-11.
func TestNotOurs(t *testing.T) {
	cp := &controlplanev1.CapstanControlPlane{ObjectMeta: metav1.ObjectMeta{Name: "demo", UID: "now"}}
	cp.Spec.Version = "v1.36.3"
	cluster := &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Name: "demo"}}
	cluster.Spec.ControlPlaneRef = clusterv1.ContractVersionedObjectReference{APIGroup: controlplanev1.GroupVersion.Group, Kind: controlplanev1.ControlPlaneKind, Name: "demo"}
	controlledBy := func(apiVersion, kind, name, uid string) func(m *clusterv1.Machine) {
		return func(m *clusterv1.Machine) {
			m.OwnerReferences = []metav1.OwnerReference{{APIVersion: apiVersion, Kind: kind, Name: name, UID: types.UID(uid), Controller: ptr.To(true)}}
		}
	}
	for name, c := range map[string]struct {
		change    func(m *clusterv1.Machine)
		not, skew string
	}{
		"no owner":            {func(*clusterv1.Machine) {}, "", ""},
		"ours":                {controlledBy("controlplane.capstan.dev/v1beta2", controlplanev1.ControlPlaneKind, "demo", "now"), "", ""},
		"an old version":      {controlledBy("controlplane.capstan.dev/v1alpha1", controlplanev1.ControlPlaneKind, "demo", "now"), "", ""},
		"a former UID":        {controlledBy("controlplane.capstan.dev/v1beta2", controlplanev1.ControlPlaneKind, "demo", "before"), "", ""},
		"another's":           {controlledBy("controlplane.capstan.dev/v1beta2", controlplanev1.ControlPlaneKind, "other", "other"), "controlled by", ""},
		"a MachineSet's":      {controlledBy("cluster.x-k8s.io/v1beta2", "MachineSet", "demo", "set"), "controlled by the MachineSet demo", ""},
		"another cluster's":   {func(m *clusterv1.Machine) { m.Spec.ClusterName = "other" }, "spec.clusterName other", ""},
		"of kubeadm":          {func(m *clusterv1.Machine) { m.Spec.Bootstrap.ConfigRef.Kind = "KubeadmConfig" }, "only Machines with a CapstanConfig", ""},
		"one minor older":     {func(m *clusterv1.Machine) { m.Spec.Version = "v1.35.4" }, "", ""},
		"one minor newer":     {func(m *clusterv1.Machine) { m.Spec.Version = "v1.37.0" }, "", ""},
		"two minors older":    {func(m *clusterv1.Machine) { m.Spec.Version = "v1.34.9" }, "", "within one minor version"},
		"a version of no use": {func(m *clusterv1.Machine) { m.Spec.Version = "" }, "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			m := aMachine("a", "v1.36.3", true)
			m.Spec.ClusterName = "demo"
			m.Spec.Bootstrap.ConfigRef = clusterv1.ContractVersionedObjectReference{APIGroup: "bootstrap.capstan.dev", Kind: "CapstanConfig", Name: "a"}
			c.change(m)
			if got := WhyNotOwned(cp, cluster, m); (got == "") != (c.not == "") || !strings.Contains(got, c.not) {
				t.Errorf("not ours: %q, want %q", got, c.not)
			}
			if got := WhyNotAdoptable(cp, m); (got == "") != (c.skew == "") || !strings.Contains(got, c.skew) {
				t.Errorf("not adoptable: %q, want %q", got, c.skew)
			}
		})
	}
	second := cp.DeepCopy()
	second.Name = "second"
	m := aMachine("a", "v1.36.3", true)
	m.Spec.ClusterName = "demo"
	if WhyNotOwned(second, cluster, m) == "" {
		t.Error("a control plane that its Cluster does not name adopts Machines")
	}
}

// TestMachineOf: the Machine that a member can run on.
func TestMachineOf(t *testing.T) {
	named, byNode, unknown := *aMachine("a", "", true), *aMachine("b", "", true), *aMachine("c", "", true)
	byNode.Status.NodeRef.Name = "node-b"
	named.Status.NodeRef.Name = "a"
	unknown.Labels = map[string]string{clusterv1.MachineControlPlaneLabel: ""}
	unknown.Spec.Bootstrap.DataSecretName = ptr.To("c")
	for _, c := range []struct {
		machines []clusterv1.Machine
		member   string
		want     string
	}{
		{[]clusterv1.Machine{named, byNode}, "a", "a"}, {[]clusterv1.Machine{named, byNode}, "node-b", "b"},
		{[]clusterv1.Machine{named, byNode}, "x", ""}, {[]clusterv1.Machine{named, unknown}, "x", "c"}, {nil, "x", ""},
	} {
		if got := MachineOfMember(c.machines, c.member); got != c.want {
			t.Errorf("%s: got %q, want %q", c.member, got, c.want)
		}
	}
}

func aMachine(name, version string, ready bool) *clusterv1.Machine {
	m := &clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default"}}
	m.Spec.Version = version
	status := metav1.ConditionFalse
	if ready {
		status = metav1.ConditionTrue
	}
	m.Status.Conditions = []metav1.Condition{{Type: clusterv1.ReadyCondition, Status: status}}
	return m
}
