package cluster

import (
	"fmt"
	"slices"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
)

// IC-04, CP-16: a domain accepts control planes as long as one of its hosts accepts such machines.
func TestFailureDomains_IC04(t *testing.T) {
	host := func(name, domain string, change func(*infrav1.CapstanHost)) infrav1.CapstanHost {
		h := infrav1.CapstanHost{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: infrav1.CapstanHostSpec{FailureDomain: domain}}
		if change != nil {
			change(&h)
		}
		return h
	}
	workersOnly := func(h *infrav1.CapstanHost) { h.Spec.ControlPlane = ptr.To(false) }
	full := func(h *infrav1.CapstanHost) { h.Spec.Unschedulable = ptr.To(true) }
	leaving := func(h *infrav1.CapstanHost) { h.DeletionTimestamp = ptr.To(metav1.Now()) }
	lost := func(h *infrav1.CapstanHost) {
		h.Status.Conditions = []metav1.Condition{{Type: infrav1.HostConnectedCondition, Status: metav1.ConditionFalse, Reason: infrav1.HostUnreachableReason}}
	}
	var many []infrav1.CapstanHost
	var kept []string
	for n := range 101 {
		many = append(many, host(fmt.Sprintf("h%03d", n), "", workersOnly))
		kept = append(kept, fmt.Sprintf("h%03d false", n))
	}
	many[100].Spec.ControlPlane = nil
	kept = append(kept[:99], "h100 true")
	drained := func(h *infrav1.CapstanHost) { h.Spec.Drain = ptr.To(true) }
	for name, tc := range map[string]struct {
		hosts []infrav1.CapstanHost
		want  []string
	}{
		"none":                       {},
		"by name, sorted":            {[]infrav1.CapstanHost{host("b", "", nil), host("a", "", nil)}, []string{"a true", "b true"}},
		"one of several is enough":   {[]infrav1.CapstanHost{host("a", "r", full), host("b", "r", nil), host("c", "r", workersOnly)}, []string{"r true"}},
		"takes no more":              {[]infrav1.CapstanHost{host("a", "r", full), host("b", "r", workersOnly)}, []string{"r false"}},
		"is being deleted":           {[]infrav1.CapstanHost{host("a", "r", leaving), host("b", "s", nil)}, []string{"r false", "s true"}},
		"is drained":                 {[]infrav1.CapstanHost{host("a", "r", drained), host("b", "s", nil)}, []string{"r false", "s true"}},
		"is lost":                    {[]infrav1.CapstanHost{host("a", "r", lost), host("b", "s", nil)}, []string{"r false", "s true"}},
		"one of a domain is lost":    {[]infrav1.CapstanHost{host("a", "r", lost), host("b", "r", nil)}, []string{"r true"}},
		"all are lost":               {[]infrav1.CapstanHost{host("a", "r", lost), host("b", "s", lost)}, []string{"r true", "s true"}},
		"the others take no more":    {[]infrav1.CapstanHost{host("a", "r", lost), host("b", "s", full)}, []string{"r true", "s false"}},
		"too many":                   {many, kept},
		"the only one takes no more": {[]infrav1.CapstanHost{host("a", "", full)}, []string{"a false"}},
	} {
		var got []string
		for _, d := range failureDomains(tc.hosts) {
			got = append(got, fmt.Sprint(d.Name, " ", *d.ControlPlane))
		}
		if !slices.Equal(got, tc.want) {
			t.Errorf("%s: %v, want %v", name, got, tc.want)
		}
	}
}
