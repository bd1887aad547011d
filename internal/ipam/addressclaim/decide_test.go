package addressclaim

import (
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"

	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
)

// IPAM-04b, IPAM-05a.
func TestGateOf(t *testing.T) {
	claim := func(change func(*capiipamv1.IPAddressClaim)) *capiipamv1.IPAddressClaim {
		c := &capiipamv1.IPAddressClaim{Spec: capiipamv1.IPAddressClaimSpec{ClusterName: "c"}}
		if change != nil {
			change(c)
		}
		return c
	}
	deleting := func(c *capiipamv1.IPAddressClaim) { c.DeletionTimestamp = ptr.To(metav1.NewTime(time.Unix(1, 0))) }
	label := func(c *capiipamv1.IPAddressClaim) {
		c.Spec.ClusterName, c.Labels = "", map[string]string{clusterv1.ClusterNameLabel: "c"}
	}
	running := &clusterv1.Cluster{}
	pausedBySpec := &clusterv1.Cluster{Spec: clusterv1.ClusterSpec{Paused: ptr.To(true)}}
	pausedByAnnotation := &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{clusterv1.PausedAnnotation: ""}}}
	tests := map[string]struct {
		claim   *capiipamv1.IPAddressClaim
		cluster *clusterv1.Cluster
		want    gate
	}{
		"running":              {claim(nil), running, open},
		"no cluster name":      {claim(func(c *capiipamv1.IPAddressClaim) { c.Spec.ClusterName = "" }), nil, open},
		"no cluster":           {claim(nil), nil, clusterMissing},
		"no cluster, by label": {claim(label), nil, clusterMissing},
		"cluster gone":         {claim(deleting), nil, open},
		"paused by spec":       {claim(nil), pausedBySpec, paused},
		"paused by annotation": {claim(label), pausedByAnnotation, paused},
		"paused deletion":      {claim(deleting), pausedBySpec, paused},
		"paused claim": {claim(func(c *capiipamv1.IPAddressClaim) {
			c.Annotations = map[string]string{clusterv1.PausedAnnotation: ""}
		}), running, paused},
	}
	for name, tt := range tests {
		if got := gateOf(tt.claim, tt.cluster); got != tt.want {
			t.Errorf("%s: got %v, want %v", name, got, tt.want)
		}
	}
}

func TestRelationOf(t *testing.T) {
	ref := capiipamv1.IPPoolReference{APIGroup: "ipam.capstan.dev", Kind: "CapstanIPPool", Name: "p"}
	claim := &capiipamv1.IPAddressClaim{
		ObjectMeta: metav1.ObjectMeta{UID: "new", Annotations: map[string]string{ipamv1.OriginUIDAnnotation: "before-move"}},
		Spec:       capiipamv1.IPAddressClaimSpec{PoolRef: ref},
	}
	owned := func(uid types.UID) *capiipamv1.IPAddress {
		ip := &capiipamv1.IPAddress{Spec: capiipamv1.IPAddressSpec{PoolRef: ref}}
		if uid != "" {
			ip.OwnerReferences = []metav1.OwnerReference{{APIVersion: capiipamv1.GroupVersion.String(), Kind: "IPAddressClaim", UID: uid, Controller: ptr.To(true)}}
		}
		return ip
	}
	other := owned("new")
	other.Spec.PoolRef.Name = "q"
	controlled := func(apiVersion, kind string) *capiipamv1.IPAddress {
		ip := owned("earlier")
		ip.OwnerReferences[0].APIVersion, ip.OwnerReferences[0].Kind = apiVersion, kind
		return ip
	}
	deleted := owned("")
	deleted.DeletionTimestamp = ptr.To(metav1.NewTime(time.Unix(1, 0)))
	tests := map[string]struct {
		ip   *capiipamv1.IPAddress
		want relation
	}{
		"created before the claim and deleted": {deleted, leftover},
		"none":                                 {nil, none},
		"created for the claim":                {owned("new"), ours},
		"created before the claim":             {owned(""), adoptive},
		"restored together with the claim":     {owned("before-move"), adoptive},
		"of an earlier claim of the same name": {owned("earlier"), leftover},
		"owner with another API version":       {controlled("ipam.cluster.x-k8s.io/v1alpha1", "IPAddressClaim"), leftover},
		"of another pool":                      {other, foreign},
		"of another kind":                      {controlled("v1", "ConfigMap"), foreign},
		"of another group":                     {controlled("example.com/v1", "IPAddressClaim"), foreign},
	}
	for name, tt := range tests {
		got := relationOf(claim, tt.ip)
		if got != tt.want {
			t.Errorf("%s: got %v, want %v", name, got, tt.want)
		}
		if got == foreign && !strings.Contains(inTheWay(claim, tt.ip), "use another name for this claim") {
			t.Errorf("%s: unclear message %q", name, inTheWay(claim, tt.ip))
		}
	}
	claim.Status.AddressRef.Name = "a"
	if got := relationOf(claim, deleted); got != adoptive {
		t.Errorf("a deleted IPAddress that the claim names: %v", got)
	}
}

// ALL-18: a pool that does not allow the namespace serves only a claim whose address was allocated before. What the claim itself says
// does not count.
func TestIsOut_ALL18(t *testing.T) {
	owned := &capiipamv1.IPAddress{ObjectMeta: metav1.ObjectMeta{OwnerReferences: []metav1.OwnerReference{{Kind: "IPAddressClaim", Controller: ptr.To(true)}}}}
	for name, tt := range map[string]struct {
		ip   *capiipamv1.IPAddress
		want bool
	}{
		"no IPAddress":              {nil, false},
		"written for a later claim": {&capiipamv1.IPAddress{}, false},
		"allocated to a claim":      {owned, true},
	} {
		if got := isOut(tt.ip); got != tt.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

// An IPAddress whose claim is gone is removed, also after the garbage collector has removed the reference to the claim. One that a user
// has created for a later claim stays, and one that a claim can adopt.
func TestAbandoned(t *testing.T) {
	ref := capiipamv1.IPPoolReference{APIGroup: "ipam.capstan.dev", Kind: "CapstanIPPool", Name: "p"}
	claim := func(uid types.UID, pool string) *capiipamv1.IPAddressClaim {
		c := &capiipamv1.IPAddressClaim{ObjectMeta: metav1.ObjectMeta{UID: uid, Annotations: map[string]string{ipamv1.OriginUIDAnnotation: "before-" + string(uid)}}}
		c.Spec.PoolRef = ref
		c.Spec.PoolRef.Name = pool
		return c
	}
	address := func(kind string, uid types.UID, finalizers ...string) *capiipamv1.IPAddress {
		ip := &capiipamv1.IPAddress{ObjectMeta: metav1.ObjectMeta{Finalizers: finalizers}, Spec: capiipamv1.IPAddressSpec{PoolRef: ref}}
		if kind != "" {
			ip.OwnerReferences = []metav1.OwnerReference{{APIVersion: capiipamv1.GroupVersion.String(), Kind: kind, UID: uid, Controller: ptr.To(true)}}
		}
		return ip
	}
	const kind = "IPAddressClaim"
	owned, collected := address(kind, "a", ipamv1.AddressFinalizer), address("", "", ipamv1.AddressFinalizer)
	for name, tt := range map[string]struct {
		claim *capiipamv1.IPAddressClaim
		ip    *capiipamv1.IPAddress
		want  bool
	}{
		"the claim exists":                                  {claim("a", "p"), owned, false},
		"the claim is gone":                                 {nil, owned, true},
		"gone, without the finalizer":                       {nil, address(kind, "a"), true},
		"of an earlier claim":                               {claim("b", "p"), owned, true},
		"of an earlier claim of another pool":               {claim("b", "q"), owned, true},
		"the same claim names another pool":                 {claim("a", "q"), owned, false},
		"of the claim before a move":                        {claim("a", "p"), address(kind, "before-a", ipamv1.AddressFinalizer), false},
		"garbage collector: the claim is gone":              {nil, collected, true},
		"garbage collector: a claim can adopt it":           {claim("b", "p"), collected, false},
		"garbage collector: a claim of another pool exists": {claim("b", "q"), collected, true},
		"by hand, for a later claim":                        {nil, address("", ""), false},
		"by hand, for a later claim, with a finalizer":      {nil, address("", "", "example.com/keep"), false},
		"by hand, with another controller":                  {nil, address("ConfigMap", "c", ipamv1.AddressFinalizer), false},
	} {
		if got := allocated(tt.ip) && abandoned(tt.claim, tt.ip); got != tt.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}
