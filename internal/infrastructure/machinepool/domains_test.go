package machinepool

import (
	"slices"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/event"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/reconciling"
)

// closing are the changes after which a host takes no machines.
var closing = map[string]func(*infrav1.CapstanHost){
	"is unschedulable": func(h *infrav1.CapstanHost) { h.Spec.Unschedulable = ptr.To(true) },
	"is drained":       func(h *infrav1.CapstanHost) { h.Spec.Drain = ptr.To(true) },
	"is rebooted":      func(h *infrav1.CapstanHost) { h.Spec.RebootRequestedAt = metav1.NewTime(epoch) },
	"is being deleted": func(h *infrav1.CapstanHost) { h.DeletionTimestamp = ptr.To(metav1.NewTime(epoch)) },
	"is lost": func(h *infrav1.CapstanHost) {
		reconciling.SetCondition(h, infrav1.HostConnectedCondition, metav1.ConditionFalse, infrav1.HostUnreachableReason, "")
	},
}

// hostIn returns a host in a failure domain, after the changes.
func hostIn(domain string, changes ...func(*infrav1.CapstanHost)) infrav1.CapstanHost {
	h := infrav1.CapstanHost{Spec: infrav1.CapstanHostSpec{FailureDomain: domain}, Status: infrav1.CapstanHostStatus{Versions: []string{"v1.35.4", "v1.36.3"}}}
	for _, change := range changes {
		change(&h)
	}
	return h
}

// TestOpenDomains: new machines go only to failure domains with a host that takes them.
func TestOpenDomains(t *testing.T) {
	tainted := func(h *infrav1.CapstanHost) {
		h.Spec.Taints = []infrav1.HostTaint{{Key: "gpu", Effect: infrav1.HostTaintNoSchedule}}
	}
	former := func(h *infrav1.CapstanHost) { h.Status.Versions = []string{"v1.35.4"} }
	tolerant := infrav1.CapstanMachineSpec{HostTolerations: []infrav1.HostToleration{{Key: "gpu", Operator: infrav1.HostTolerationExists}}}
	volumes := infrav1.CapstanMachineSpec{Volumes: []infrav1.MachineVolume{{Name: "data"}}}
	type test struct {
		hosts   []infrav1.CapstanHost
		machine infrav1.CapstanMachineSpec
		want    []string
	}
	tests := map[string]test{
		"all":                    {hosts: []infrav1.CapstanHost{hostIn("x"), hostIn("y")}, want: []string{"x", "y"}},
		"no hosts":               {want: []string{"x", "y"}},
		"a domain not listed":    {hosts: []infrav1.CapstanHost{hostIn("x"), hostIn("other")}, want: []string{"x"}},
		"a host not reached":     {hosts: []infrav1.CapstanHost{hostIn("x"), hostIn("far")}, want: []string{"x"}},
		"repels the machines":    {hosts: []infrav1.CapstanHost{hostIn("x", tainted), hostIn("y")}, want: []string{"y"}},
		"without the version":    {hosts: []infrav1.CapstanHost{hostIn("x", former), hostIn("y")}, want: []string{"y"}},
		"all are closed":         {hosts: []infrav1.CapstanHost{hostIn("x", closing["is drained"]), hostIn("y", closing["is drained"])}, want: []string{"x", "y"}},
		"the machines tolerate":  {hosts: []infrav1.CapstanHost{hostIn("x", tainted)}, machine: tolerant, want: []string{"x"}},
		"a volume keeps a place": {hosts: []infrav1.CapstanHost{hostIn("x", closing["is drained"]), hostIn("y")}, machine: volumes, want: []string{"x", "y"}},
		"without its abandoned":  {hosts: []infrav1.CapstanHost{hostIn("y")}, machine: volumes, want: []string{"y"}},
	}
	for name, change := range closing {
		tests["one "+name] = test{hosts: []infrav1.CapstanHost{hostIn("x", change), hostIn("y")}, want: []string{"y"}}
		tests["one of two "+name] = test{hosts: []infrav1.CapstanHost{hostIn("x", change), hostIn("x")}, want: []string{"x"}}
	}
	known := []clusterv1.FailureDomain{{Name: "other"}, {Name: "x"}, {Name: "y"}}
	for name, tc := range tests {
		want := desired{version: "v1.36.3", domains: []string{"y", "x", "far"}}
		if got := openDomains(want, known, tc.hosts, tc.machine); !slices.Equal(got, tc.want) {
			t.Errorf("%s: %v, want %v", name, got, tc.want)
		}
		if got := missingDomains(want.domains, known); !slices.Equal(got, []string{"far"}) {
			t.Errorf("%s: missing %v", name, got)
		}
	}
}

// TestWaitsInAClosedDomain: a machine that waits for a host in a closed domain is replaced as soon as another domain is open, or the pool
// requires no domain. One with a host stays.
func TestWaitsInAClosedDomain(t *testing.T) {
	wanted := []string{"a", "b"}
	for name, tc := range map[string]struct {
		host          string
		domains, open []string
		want          bool
	}{
		"its domain is open":              {domains: wanted, open: []string{"a", "b"}},
		"another domain is open":          {domains: wanted, open: []string{"b"}, want: true},
		"it has a host":                   {host: "h", domains: wanted, open: []string{"b"}},
		"no domain is required":           {want: true},
		"no domain is, and it has a host": {host: "h"},
	} {
		m := &infrav1.CapstanMachine{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{infrav1.MachineFailureDomainAnnotation: "a"}}}
		m.Spec.HostName = tc.host
		d := desired{domains: tc.domains, open: tc.open}
		if got := d.outdated(member{capstan: m}); got != tc.want {
			t.Errorf("%s: outdated %v, want %v", name, got, tc.want)
		}
	}
}

// TestHostCloses: a host that takes no machines any more is an event, also if only its status shows it.
func TestHostCloses(t *testing.T) {
	open := hostIn("x")
	for name, change := range closing {
		closed := hostIn("x", change)
		if !hostChanged().Update(event.UpdateEvent{ObjectOld: &open, ObjectNew: &closed}) || !hostChanged().Update(event.UpdateEvent{ObjectOld: &closed, ObjectNew: &open}) {
			t.Errorf("a host that %s is no event", name)
		}
	}
	if hostChanged().Update(event.UpdateEvent{ObjectOld: &open, ObjectNew: &open}) {
		t.Error("a host without a change is an event")
	}
}
