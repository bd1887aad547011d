package network_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	utilnet "k8s.io/apimachinery/pkg/util/net"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/infrastructure/network"
	"capstan.dev/capstan/internal/overhead"
)

func TestChooseVNI(t *testing.T) {
	first, err := network.ChooseVNI("one", nil, 0)
	if err != nil || first < overhead.MinVNI || first > overhead.MaxVNI {
		t.Fatalf("%d, %v", first, err)
	}
	if again, _ := network.ChooseVNI("one", nil, 0); again != first {
		t.Errorf("%d, then %d", first, again)
	}
	if other, _ := network.ChooseVNI("two", nil, 0); other == first {
		t.Errorf("two clusters start at %d", other)
	}
	if next, _ := network.ChooseVNI("one", map[int32]bool{first: true, first + 1: true}, 0); next != first+2 {
		t.Errorf("taken: %d, want %d", next, first+2)
	}
	if next, _ := network.ChooseVNI("one", map[int32]bool{first + 1: true}, first); next != first+2 {
		t.Errorf("refused: %d, want %d", next, first+2)
	}
	if next, _ := network.ChooseVNI("one", nil, overhead.MaxVNI); next != overhead.MinVNI {
		t.Errorf("behind the last: %d", next)
	}
}

func TestChoosePort(t *testing.T) {
	ports := *utilnet.ParsePortRangeOrDie("20000-20002")
	first, err := network.ChoosePort("one", ports, nil, 0)
	if err != nil || !ports.Contains(int(first)) {
		t.Fatalf("%d, %v", first, err)
	}
	second, _ := network.ChoosePort("one", ports, map[int32]bool{first: true}, 0)
	third, _ := network.ChoosePort("one", ports, map[int32]bool{first: true}, second)
	if got := slices.Sorted(slices.Values([]int32{first, second, third})); !slices.Equal(got, []int32{20000, 20001, 20002}) {
		t.Errorf("%v", got)
	}
	if _, err := network.ChoosePort("one", ports, map[int32]bool{20000: true, 20001: true, 20002: true}, 0); err == nil || !strings.Contains(err.Error(), "--endpoint-port-range") {
		t.Errorf("all taken: %v", err)
	}
}

func TestRival(t *testing.T) {
	at := func(minute int) metav1.Time { return metav1.NewTime(time.Unix(int64(minute)*60, 0)) }
	cluster := func(uid string, vni int32, minute int, running bool) infrav1.CapstanCluster {
		c := infrav1.CapstanCluster{ObjectMeta: metav1.ObjectMeta{UID: types.UID(uid), CreationTimestamp: at(minute)}}
		c.Spec.Network.Overlay.VNI = vni
		if running {
			c.Status.Conditions = []metav1.Condition{{Type: infrav1.BootAllowedCondition, Status: metav1.ConditionTrue}}
		}
		return c
	}
	for name, tc := range map[string]struct {
		self, other infrav1.CapstanCluster
		refused     bool
	}{
		"no overlay":                        {cluster("b", 0, 2, false), cluster("a", 0, 1, true), false},
		"another identifier":                {cluster("b", 5000, 2, false), cluster("a", 5001, 1, true), false},
		"the same object":                   {cluster("a", 5000, 1, false), cluster("a", 5000, 1, false), false},
		"the older one comes first":         {cluster("b", 5000, 2, false), cluster("a", 5000, 1, false), true},
		"the younger one waits":             {cluster("b", 5000, 1, false), cluster("a", 5000, 2, false), false},
		"equally old: by UID":               {cluster("b", 5000, 1, false), cluster("a", 5000, 1, false), true},
		"an old object does not take a vni": {cluster("b", 5000, 1, false), cluster("a", 5000, 2, true), true},
		"what runs goes on":                 {cluster("b", 5000, 2, true), cluster("a", 5000, 1, false), false},
		"both run: the older one goes on":   {cluster("b", 5000, 2, true), cluster("a", 5000, 1, true), true},
	} {
		if got := network.Rival(&tc.self, []infrav1.CapstanCluster{tc.self, tc.other}); (got != nil) != tc.refused {
			t.Errorf("%s: %v", name, got)
		}
	}
}

func TestChooseVirtualAddress(t *testing.T) {
	taken, networks := map[string]bool{}, network.OfFamily([]string{"203.0.113.64/30", "2001:db8::/126", "198.51.100.6/31"}, false)
	for range 6 {
		a, err := network.ChooseVirtualAddress("id", networks, taken)
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
	if a, err := network.ChooseVirtualAddress("id", networks, taken); err == nil {
		t.Errorf("%s, although none is free", a)
	}
	six := network.OfFamily([]string{"203.0.113.64/30", "2001:db8::5/128", "2001:db8::fffe/127", "2001:db8::/64"}, true)
	for range 3 {
		a, err := network.ChooseVirtualAddress("id", six, taken)
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
	if r := network.RivalEndpoint(&older, all); r == nil || r.UID != "owner" {
		t.Errorf("the older one has the rival %v", r)
	}
	if r := network.RivalEndpoint(&owner, all); r != nil {
		t.Errorf("the owner has the rival %v", r.UID)
	}
	other := cluster("other", 3, false)
	other.Spec.ControlPlaneEndpoint.Host = "203.0.113.65"
	if r := network.RivalEndpoint(&other, all); r != nil {
		t.Errorf("another address has the rival %v", r.UID)
	}
}
