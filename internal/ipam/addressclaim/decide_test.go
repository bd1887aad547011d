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
	tests := map[string]struct {
		ip   *capiipamv1.IPAddress
		want relation
	}{
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
