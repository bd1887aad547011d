package cluster

import (
	"fmt"
	"slices"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
)

// IC-04: a domain is for control planes as long as one of its hosts takes such machines.
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
	for name, tc := range map[string]struct {
		hosts []infrav1.CapstanHost
		want  []string
	}{
		"none":                       {},
		"by name, sorted":            {[]infrav1.CapstanHost{host("b", "", nil), host("a", "", nil)}, []string{"a true", "b true"}},
		"one of several is enough":   {[]infrav1.CapstanHost{host("a", "r", full), host("b", "r", nil), host("c", "r", workersOnly)}, []string{"r true"}},
		"takes no more":              {[]infrav1.CapstanHost{host("a", "r", full), host("b", "r", workersOnly)}, []string{"r false"}},
		"is being deleted":           {[]infrav1.CapstanHost{host("a", "r", leaving), host("b", "s", nil)}, []string{"r false", "s true"}},
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
