package overlay

import (
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
)

func TestChooseAddress(t *testing.T) {
	taken, networks := map[string]bool{}, OfFamily([]string{"203.0.113.64/30", "2001:db8::/126", "198.51.100.6/31"}, false)
	for range 6 {
		a, err := ChooseAddress("id", networks, taken)
		if err != nil || taken[a] {
			t.Fatalf("%q, %v, taken %v", a, err, taken)
		}
		taken[a] = true
	}
	for _, want := range []string{"203.0.113.64", "203.0.113.67", "198.51.100.6", "198.51.100.7"} {
		if !taken[want] {
			t.Errorf("%s was not chosen: %v", want, taken)
		}
	}
	if a, err := ChooseAddress("id", networks, taken); err == nil {
		t.Errorf("%s, although none is free", a)
	}
	six := OfFamily([]string{"203.0.113.64/30", "2001:db8::5/128", "2001:db8::fffe/127", "2001:db8::/64"}, true)
	for range 3 {
		a, err := ChooseAddress("id", six, taken)
		if err != nil || taken[a] {
			t.Fatalf("%q, %v, taken %v", a, err, taken)
		}
		taken[a] = true
	}
	if !taken["2001:db8::5"] || !taken["2001:db8::fffe"] || !taken["2001:db8::ffff"] {
		t.Errorf("of %v, these were chosen: %v", six, taken)
	}
}

// ALL-18: a virtual address belongs to the cluster whose machines may boot, even if another one is older.
func TestRivalEndpoint_ALL18(t *testing.T) {
	cluster := func(uid types.UID, second int64, running bool) infrav1.CapstanCluster {
		c := infrav1.CapstanCluster{ObjectMeta: metav1.ObjectMeta{UID: uid, CreationTimestamp: metav1.Unix(second, 0)}}
		c.Spec.ControlPlaneEndpoint.Host = "203.0.113.64"
		if running {
			c.Status.Conditions = []metav1.Condition{{Type: infrav1.BootAllowedCondition, Status: metav1.ConditionTrue}}
		}
		return c
	}
	owner, older := cluster("owner", 2, true), cluster("older", 1, false)
	all := []infrav1.CapstanCluster{owner, older}
	if r := RivalEndpoint(&older, all); r == nil || r.UID != "owner" {
		t.Errorf("the older one has the rival %v", r)
	}
	if r := RivalEndpoint(&owner, all); r != nil {
		t.Errorf("the owner has the rival %v", r.UID)
	}
	other := cluster("other", 3, false)
	other.Spec.ControlPlaneEndpoint.Host = "203.0.113.65"
	if r := RivalEndpoint(&other, all); r != nil {
		t.Errorf("another address has the rival %v", r.UID)
	}
}
