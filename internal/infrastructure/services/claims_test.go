package services

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/reconciling"
)

// A backup tool restores claims without owner references. Those of machines whose names begin like those of Services, and those of
// users, are not the claims of Services: Capstan would delete them, and their addresses would be free.
func TestClaimsOf(t *testing.T) {
	service := &corev1.Service{ObjectMeta: metav1.ObjectMeta{UID: "5d0f1a52-7f3e-4c0e-8c5c-0d6a3b1c9e11"}}
	four, six := claimName("demo", service, corev1.IPv4Protocol), claimName("demo", service, corev1.IPv6Protocol)
	owner := func(kind, name string) *metav1.OwnerReference {
		return &metav1.OwnerReference{APIVersion: infrav1.GroupVersion.String(), Kind: kind, Name: name, UID: "1", Controller: ptr.To(true)}
	}
	tests := map[string]struct {
		cluster string
		owner   *metav1.OwnerReference
		ours    bool
	}{
		four: {"demo", owner("CapstanCluster", "demo"), true},
		six:  {"demo", nil, true},
		claimName("demo", &corev1.Service{}, corev1.IPv4Protocol): {"demo", owner("CapstanCluster", "other"), false},
		"demo-svc-x7k2p-9fhzq-0":                                  {"demo", nil, false}, // of the MachineDeployment demo-svc
		"demo-svc-0123456789abcdef-0":                             {"demo", nil, false}, // of a machine with an unlucky name
		"demo-svc-0123456789abcde":                                {"demo", nil, false},
		"demo-svc-mail":                                           {"demo", nil, false}, // of a user
		"demo-svc-x7k2p-9fhzq-1":                                  {"demo", owner("CapstanMachine", "demo-svc-x7k2p-9fhzq"), false},
		"demo-endpoint":                                           {"demo", nil, false},
		"demo-svc-fedcba9876543210":                               {"another", nil, false},
	}
	scheme := runtime.NewScheme()
	if err := capiipamv1.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	var all []client.Object
	for name, test := range tests {
		claim := &capiipamv1.IPAddressClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: name, Labels: map[string]string{clusterv1.ClusterNameLabel: test.cluster}}}
		if test.owner != nil {
			claim.OwnerReferences = []metav1.OwnerReference{*test.owner}
		}
		all = append(all, claim)
	}
	c := fake.NewClientBuilder().WithScheme(scheme).WithObjects(all...).Build()
	got, err := claimsOf(t.Context(), c, &infrav1.CapstanCluster{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: "demo"}}, "demo")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range slices.Sorted(maps.Keys(tests)) {
		found := slices.ContainsFunc(got, func(claim capiipamv1.IPAddressClaim) bool { return claim.Name == name })
		if found != tests[name].ours {
			t.Errorf("%s: is a claim of a Service: %v, expected %v", name, found, tests[name].ours)
		}
	}
}

// IPAM-07, ALL-07, ALL-11: claims of Services follow the watch label of the CapstanCluster, and get a lost owner reference back.
func TestAdoptClaims_IPAM07(t *testing.T) {
	scheme := runtime.NewScheme()
	if err := errors.Join(capiipamv1.AddToScheme(scheme), infrav1.AddToScheme(scheme)); err != nil {
		t.Fatal(err)
	}
	claim := &capiipamv1.IPAddressClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: "demo-svc-0123456789abcdef"}, Spec: capiipamv1.IPAddressClaimSpec{ClusterName: "demo"}}
	gone := &capiipamv1.IPAddressClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: "demo-svc-fedcba9876543210"}, Spec: claim.Spec}
	c := fake.NewClientBuilder().WithScheme(scheme).WithObjects(claim).Build()
	capstan := &infrav1.CapstanCluster{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: "demo", UID: "1", Labels: map[string]string{clusterv1.WatchLabel: "blue"}}}
	s := &scope{capstan: capstan, cluster: &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Name: "demo"}}, claims: map[string]*capiipamv1.IPAddressClaim{claim.Name: claim, gone.Name: gone}}
	r := &Reconciler{Options: reconciling.Options{LiveClient: c}}
	if err := r.adoptClaims(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	if err := c.Get(t.Context(), client.ObjectKeyFromObject(claim), claim); err != nil || claim.Labels[clusterv1.WatchLabel] != "blue" || !metav1.IsControlledBy(claim, capstan) {
		t.Errorf("the claim is %+v, %v", claim.ObjectMeta, err)
	}
}

// The cluster of an IPAddress follows from its name. Addresses of machines and of users have other names.
func TestClusterOfAddress(t *testing.T) {
	for name, want := range map[string]string{
		"demo-svc-0123456789abcdef":      "demo",
		"demo-svc-0123456789abcdef-ipv6": "demo",
		"a-svc-b-svc-0123456789abcdef":   "a-svc-b",
		"demo-svc-0123456789abcdef-0":    "",
		"-svc-0123456789abcdef":          "",
		"demo-svc-web":                   "",
		"demo-0":                         "",
	} {
		got := ""
		for _, request := range clusterOfAddress(t.Context(), &capiipamv1.IPAddress{ObjectMeta: metav1.ObjectMeta{Namespace: "n", Name: name}}) {
			got += request.Name
		}
		if got != want {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
}

// Users of a namespace can write any number of hosts into any number of claims. Each claim keeps a bounded number of them. When several
// hosts have no address any more, the claim is written once.
func TestForgedRecords_ALL18(t *testing.T) {
	s := newSite(t)
	var names []string
	for n := range 2 * maxRecorded {
		names = append(names, fmt.Sprint("h-", n))
	}
	for n := range 3 {
		s.Expect(s.management.Create(t.Context(), &capiipamv1.IPAddressClaim{ObjectMeta: metav1.ObjectMeta{
			Namespace: "a", Name: fmt.Sprintf("demo-svc-%016x", n), Labels: map[string]string{clusterv1.ClusterNameLabel: "demo"},
			Annotations: map[string]string{infrav1.ServiceHostsAnnotation: strings.Join(names, ",")},
		}})).To(Succeed())
	}
	of, _ := s.begin()
	kept := map[string][]*hostpb.PublishedService{}
	for _, name := range names[1:] {
		kept[name] = nil
	}
	for name, hosts := range of.records {
		s.Expect(hosts).To(HaveLen(maxRecorded), name)
	}
	s.Expect(of.recorded).To(HaveLen(maxRecorded))
	writes := 0
	s.failing = func(verb string, _ client.Object) error {
		if verb == "patch" {
			writes++
		}
		return nil
	}
	s.Expect(s.recordKept(t.Context(), of, kept)).To(Succeed())
	s.Expect(writes).To(Equal(3))
	s.Expect(s.records()).To(Equal([]string{"h-0", "h-0", "h-0"}))
	s.Expect(of.published("h-0")).To(BeTrue())
	s.Expect(of.published("h-1")).To(BeFalse())
}
