package model

import (
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
)

// CP-18: the differences that make a Machine outdated, and those that do not.
func TestOutdated(t *testing.T) {
	cp := &controlplanev1.CapstanControlPlane{}
	cp.Spec.Version = "v1.36.3"
	cp.Spec.MachineTemplate.Spec.InfrastructureRef = clusterv1.ContractVersionedObjectReference{APIGroup: "infrastructure.capstan.dev", Kind: "CapstanMachineTemplate", Name: "new"}
	infra := &unstructured.Unstructured{Object: map[string]any{"kind": "CapstanMachine"}}
	infra.SetAnnotations(map[string]string{
		clusterv1.TemplateClonedFromNameAnnotation: "new", clusterv1.TemplateClonedFromGroupKindAnnotation: "CapstanMachineTemplate.infrastructure.capstan.dev",
	})
	config := &bootstrapv1.CapstanConfig{}
	config.Spec.Role = bootstrapv1.RoleInit // The role differs between machines and does not make them outdated.
	if got := Outdated(cp, aMachine("a", "v1.36.3", true), config, infra, time.Now()); got != nil {
		t.Errorf("got %v", got)
	}
	old := infra.DeepCopy()
	old.SetAnnotations(map[string]string{clusterv1.TemplateClonedFromNameAnnotation: "old"})
	changed := config.DeepCopy()
	changed.Spec.PreCommands = []string{"true"}
	got := strings.Join(Outdated(cp, aMachine("a", "v1.36.2", true), changed, old, time.Now()), ";")
	if got != "CapstanConfig is not up-to-date;CapstanMachine is not up-to-date;Version v1.36.2, v1.36.3 required" {
		t.Errorf("got %s", got)
	}
}

// TestOutdatedByTheClock (CP-20): rollout.after and certificates that expire.
func TestOutdatedByTheClock(t *testing.T) {
	now := time.Unix(1000000, 0)
	born := func(age time.Duration, expires time.Duration) *clusterv1.Machine {
		m := &clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{CreationTimestamp: metav1.NewTime(now.Add(-age))}}
		if expires != 0 {
			m.Annotations = map[string]string{clusterv1.MachineCertificatesExpiryDateAnnotation: now.Add(expires).UTC().Format(time.RFC3339)}
		}
		return m
	}
	for _, c := range []struct {
		what    string
		after   time.Duration // since when, before now
		days    int32
		machine *clusterv1.Machine
		want    bool
		next    time.Duration
	}{
		{"older", time.Hour, 0, born(2*time.Hour, 0), true, 0},
		{"younger", time.Hour, 0, born(time.Minute, 0), false, 0},
		{"not yet", -time.Hour, 0, born(time.Minute, 0), false, time.Hour},
		{"soon", 0, 30, born(2*Day, 29*Day), true, 0},
		{"soon, and it was made since: another one's would end with the same authority", 0, 30, born(time.Minute, 29*Day), false, 0},
		{"not so soon", 0, 30, born(time.Minute, 31*Day), false, Day},
		{"nobody knows", 0, 30, born(time.Minute, 0), false, 0},
		{"nobody cares", 0, 0, born(time.Minute, Day), false, 0},
	} {
		cp := &controlplanev1.CapstanControlPlane{}
		if c.after != 0 {
			cp.Spec.Rollout.After = metav1.NewTime(now.Add(-c.after))
		}
		cp.Spec.Rollout.Before.CertificatesExpiryDays = c.days
		if got := Outdated(cp, c.machine, nil, nil, now); (len(got) > 0) != c.want {
			t.Errorf("%s: got %v", c.what, got)
		}
		if got := NextOutdated(cp, []*clusterv1.Machine{c.machine}, now); got != c.next {
			t.Errorf("%s: next after %s", c.what, got)
		}
	}
}

// TestInVain (CP-20): a message names Machines whose certificates a rollout would not improve, and the remedy.
func TestInVain(t *testing.T) {
	now := time.Unix(1000000, 0)
	cp := &controlplanev1.CapstanControlPlane{}
	cp.Spec.Rollout.Before.CertificatesExpiryDays = 30
	machine := func(name string, age, expires time.Duration) *clusterv1.Machine {
		return &clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{
			Name: name, CreationTimestamp: metav1.NewTime(now.Add(-age)),
			Annotations: map[string]string{clusterv1.MachineCertificatesExpiryDateAnnotation: now.Add(expires).UTC().Format(time.RFC3339)},
		}}
	}
	machines := []*clusterv1.Machine{machine("good", Day, 300*Day), machine("old", 100*Day, 20*Day), machine("young", Day, 20*Day)}
	if got := FutileRollouts(cp, machines[:2], now); got != "" {
		t.Error(got)
	}
	if got := FutileRollouts(cp, machines, now); !strings.HasPrefix(got, "Machines young are not replaced") || !strings.Contains(got, "spec.certificates.rotateCAAfter") {
		t.Error(got)
	}
}

// TestNewVersionOfCapstan: fields that this version adds to stored objects of a former version do not replace a Machine. The stored
// forms are compared, and unreadable fields count as equal.
func TestNewVersionOfCapstan(t *testing.T) {
	cp := &controlplanev1.CapstanControlPlane{}
	cp.Spec.Version = "v1.36.3"
	machine := &clusterv1.Machine{}
	machine.Spec.Version = "v1.36.3"
	config := &bootstrapv1.CapstanConfig{}
	config.Spec.Role = bootstrapv1.RoleControlPlane
	config.Spec.PreCommands = []string{} // Empty and missing are the same.
	infra := &unstructured.Unstructured{Object: map[string]any{"kind": "CapstanMachine"}}
	if got := Outdated(cp, machine, config, infra, time.Now()); got != nil {
		t.Errorf("got %v", got)
	}
	if got := Outdated(cp, machine, nil, nil, time.Now()); got != nil {
		t.Errorf("got %v", got)
	}
}
