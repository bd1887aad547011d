package pool

import (
	"slices"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
)

// made returns a pool of namespace "n" that was created the given number of seconds after 1970. A pool with 0 is not
// stored yet.
func made(name string, at int64, overlap ipamv1.OverlapPolicy, addresses ipamv1.AddressRange) *ipamv1.CapstanIPPool {
	p := &ipamv1.CapstanIPPool{
		ObjectMeta: metav1.ObjectMeta{Namespace: "n", Name: name},
		Spec: ipamv1.CapstanIPPoolSpec{
			Overlap: overlap,
			Subnets: []ipamv1.Subnet{{CIDR: "10.0.0.0/24", Ranges: []ipamv1.AddressRange{addresses}}},
		},
	}
	if at > 0 {
		p.CreationTimestamp = metav1.NewTime(time.Unix(at, 0))
	}
	return p
}

// Two pools have addresses in common and at least one of them refuses overlaps: only the younger one is refused.
func TestOverlapsOf(t *testing.T) {
	const report, refuse = ipamv1.ReportOverlap, ipamv1.RefuseOverlap
	elsewhere := made("b", 2, refuse, "10.0.0.101-10.0.0.110")
	v6 := made("b", 2, refuse, "")
	v6.Spec.Subnets = []ipamv1.Subnet{{CIDR: "fd00::/64"}}
	invalid := made("b", 2, refuse, "10.0.0.9-10.0.0.1")
	tests := map[string]struct {
		of, other *ipamv1.CapstanIPPool
		want      []string
	}{
		"both report":         {made("a", 1, report, "10.0.0.1-10.0.0.9"), made("b", 2, report, "10.0.0.5-10.0.0.20"), []string{"has 10.0.0.5-10.0.0.9 in common with CapstanIPPool/n/b"}},
		"the older refuses":   {made("a", 1, refuse, "10.0.0.1-10.0.0.9"), made("b", 2, report, "10.0.0.5-10.0.0.20"), []string{"has 10.0.0.5-10.0.0.9 in common with CapstanIPPool/n/b"}},
		"the younger refuses": {made("a", 1, report, "10.0.0.1-10.0.0.9"), made("b", 2, refuse, "10.0.0.5-10.0.0.20"), []string{"has 10.0.0.5-10.0.0.9 in common with CapstanIPPool/n/b"}},
		"the pool is younger, the older one refuses overlaps": {
			made("a", 2, report, "10.0.0.1-10.0.0.9"), made("b", 1, refuse, "10.0.0.5-10.0.0.20"),
			[]string{"has 10.0.0.5-10.0.0.9 in common with CapstanIPPool/n/b, which is refused: change one of them"},
		},
		"the pool is younger and refuses overlaps": {
			made("a", 2, refuse, "10.0.0.1-10.0.0.9"), made("b", 1, report, "10.0.0.5-10.0.0.20"),
			[]string{"has 10.0.0.5-10.0.0.9 in common with CapstanIPPool/n/b, which is refused: change one of them"},
		},
		"nothing in common":      {made("a", 1, refuse, "10.0.0.1-10.0.0.9"), elsewhere, nil},
		"another address family": {made("a", 1, refuse, "10.0.0.1-10.0.0.9"), v6, nil},
		"invalid":                {made("a", 1, refuse, "10.0.0.1-10.0.0.9"), invalid, nil},
		"the pool is invalid":    {invalid, made("a", 1, refuse, "10.0.0.1-10.0.0.9"), nil},
		"itself":                 {made("a", 1, refuse, "10.0.0.1-10.0.0.9"), made("a", 1, refuse, "10.0.0.1-10.0.0.9"), nil},
	}
	for name, tt := range tests {
		var got []string
		for _, o := range overlapsOf(tt.of, []ipamv1.Pool{tt.other}, Compile) {
			got = append(got, o.String())
		}
		if !slices.Equal(got, tt.want) {
			t.Errorf("%s: got %q, want %q", name, got, tt.want)
		}
	}
}

// A change of a pool is refused for new common addresses, and not for those that the pool had before.
func TestRefused(t *testing.T) {
	const report, refuse = ipamv1.ReportOverlap, ipamv1.RefuseOverlap
	v6 := made("a", 1, report, "")
	v6.Spec.Subnets = []ipamv1.Subnet{{CIDR: "fd00::/64"}}
	tests := map[string]struct {
		of, old *ipamv1.CapstanIPPool
		other   ipamv1.OverlapPolicy
		want    string
	}{
		"created":                   {made("a", 0, report, "10.0.0.1-10.0.0.9"), nil, refuse, "has 10.0.0.5-10.0.0.9"},
		"created, both report":      {made("a", 0, report, "10.0.0.1-10.0.0.9"), nil, report, ""},
		"another field changes":     {made("a", 1, report, "10.0.0.1-10.0.0.9"), made("a", 1, report, "10.0.0.1-10.0.0.9"), refuse, ""},
		"fewer common addresses":    {made("a", 1, report, "10.0.0.1-10.0.0.7"), made("a", 1, report, "10.0.0.1-10.0.0.9"), refuse, ""},
		"other addresses are added": {made("a", 1, report, "10.0.0.0-10.0.0.9"), made("a", 1, report, "10.0.0.2-10.0.0.9"), refuse, ""},
		"more common addresses":     {made("a", 1, report, "10.0.0.1-10.0.0.12"), made("a", 1, report, "10.0.0.1-10.0.0.9"), refuse, "has 10.0.0.10-10.0.0.12"},
		"other common addresses":    {made("a", 1, report, "10.0.0.10-10.0.0.12"), made("a", 1, report, "10.0.0.1-10.0.0.9"), refuse, "has 10.0.0.10-10.0.0.12"},
		"the pool refuses now":      {made("a", 1, refuse, "10.0.0.1-10.0.0.9"), made("a", 1, report, "10.0.0.1-10.0.0.9"), report, "has 10.0.0.5-10.0.0.9"},
		"the pool refused before":   {made("a", 1, refuse, "10.0.0.1-10.0.0.9"), made("a", 1, refuse, "10.0.0.1-10.0.0.9"), report, ""},
		"the old spec was invalid":  {made("a", 1, report, "10.0.0.1-10.0.0.9"), made("a", 1, report, "10.0.0.9-10.0.0.1"), refuse, "has 10.0.0.5-10.0.0.9"},
		"the old spec had IPv6":     {made("a", 1, report, "10.0.0.1-10.0.0.9"), v6, refuse, "has 10.0.0.5-10.0.0.9"},
		"the other pool is left":    {made("a", 1, report, "10.0.0.1-10.0.0.4"), made("a", 1, report, "10.0.0.1-10.0.0.9"), refuse, ""},
	}
	for name, tt := range tests {
		var old ipamv1.Pool
		if tt.old != nil {
			old = tt.old
		}
		var want []string
		if tt.want != "" {
			want = []string{tt.want + " in common with CapstanIPPool/n/b, which is refused: change one of them"}
		}
		if got := Refused(tt.of, old, []ipamv1.Pool{made("b", 2, tt.other, "10.0.0.5-10.0.0.20")}, Compile); !slices.Equal(got, want) {
			t.Errorf("%s: got %q, want %q", name, got, want)
		}
	}
}

// Messages do not reveal pools of other namespaces, and such pools do not block each other. A global pool has precedence
// over pools of namespaces, whenever it was created.
func TestOverlapsAcrossNamespaces(t *testing.T) {
	const report, refuse = ipamv1.ReportOverlap, ipamv1.RefuseOverlap
	pool := func(at int64, policy ipamv1.OverlapPolicy) *ipamv1.CapstanIPPool {
		return made("a", at, policy, "10.0.0.1-10.0.0.9")
	}
	global := func(name string, at int64, policy ipamv1.OverlapPolicy) *ipamv1.GlobalCapstanIPPool {
		return &ipamv1.GlobalCapstanIPPool{ObjectMeta: metav1.ObjectMeta{Name: name, CreationTimestamp: metav1.NewTime(time.Unix(at, 0))}, Spec: ipamv1.GlobalCapstanIPPoolSpec{CapstanIPPoolSpec: pool(at, policy).Spec}}
	}
	other := pool(1, refuse)
	other.Namespace = "victim"
	const common, refused = "has 10.0.0.1-10.0.0.9 in common with GlobalCapstanIPPool/", ", which is refused: change one of them"
	for name, tt := range map[string]struct {
		of, other ipamv1.Pool
		want      []string
	}{
		"pool of another namespace":                 {pool(2, refuse), other, nil},
		"global pool and namespaced pool":           {global("g", 2, refuse), pool(1, refuse), nil},
		"younger global pool that refuses overlaps": {pool(1, report), global("g", 2, refuse), []string{common + "g" + refused}},
		"older global pool that reports overlaps":   {pool(2, refuse), global("g", 1, report), []string{common + "g" + refused}},
		"global pool, neither refuses overlaps":     {pool(1, report), global("g", 2, report), []string{common + "g"}},
		"two global pools, the pool is older":       {global("g", 1, refuse), global("h", 2, report), []string{common + "h"}},
		"two global pools, the pool is younger":     {global("g", 2, report), global("h", 1, refuse), []string{common + "h" + refused}},
	} {
		var got []string
		for _, o := range overlapsOf(tt.of, []ipamv1.Pool{tt.other}, Compile) {
			got = append(got, o.String())
		}
		if !slices.Equal(got, tt.want) {
			t.Errorf("%s: got %q, want %q", name, got, tt.want)
		}
	}
}

// Exactly one of two pools is the younger, also if they were created in the same second.
func TestYounger(t *testing.T) {
	tests := map[string]struct{ a, b *ipamv1.CapstanIPPool }{
		"created later":  {made("a", 2, "", ""), made("b", 1, "", "")},
		"not stored yet": {made("a", 0, "", ""), made("b", 1, "", "")},
		"created in the same second: the keys decide": {made("b", 1, "", ""), made("a", 1, "", "")},
	}
	for name, tt := range tests {
		if !younger(tt.a, tt.b) || younger(tt.b, tt.a) {
			t.Errorf("%s: got %v, and %v in the reverse order, want true and false", name, younger(tt.a, tt.b), younger(tt.b, tt.a))
		}
	}
}
