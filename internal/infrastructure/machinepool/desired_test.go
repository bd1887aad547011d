package machinepool

import (
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
)

func TestResolveBudget(t *testing.T) {
	value := func(s string) *intstr.IntOrString {
		if s == "" {
			return nil
		}
		return ptr.To(intstr.Parse(s))
	}
	for _, tc := range []struct {
		surge, unavailable string
		replicas           int
		want               budget
		invalid            bool
	}{
		{replicas: 3, want: budget{1, 0}},
		{surge: "2", unavailable: "1", replicas: 3, want: budget{2, 1}},
		{surge: "25%", replicas: 10, want: budget{3, 0}},
		{surge: "0", unavailable: "25%", replicas: 10, want: budget{0, 2}},
		{surge: "0", unavailable: "25%", replicas: 3, want: budget{0, 1}}, // Rounded down to 0, no machine could be replaced.
		{surge: "0%", unavailable: "0%", replicas: 0, want: budget{0, 1}},
		{surge: "many", replicas: 3, invalid: true},
		{unavailable: "some", replicas: 3, invalid: true},
	} {
		got, invalid := resolveBudget(infrav1.MachinePoolRollingUpdate{MaxSurge: value(tc.surge), MaxUnavailable: value(tc.unavailable)}, tc.replicas)
		if got != tc.want || (invalid != nil) != tc.invalid {
			t.Errorf("surge %q, unavailable %q of %d: %+v %v, want %+v", tc.surge, tc.unavailable, tc.replicas, got, invalid, tc.want)
		}
	}
}

// Machines with volumes are deleted before their successors are created.
func TestBudgetWithVolumes(t *testing.T) {
	for from, want := range map[budget]budget{{1, 0}: {0, 1}, {2, 3}: {0, 3}, {0, 1}: {0, 1}} {
		if got := from.withVolumes(); got != want {
			t.Errorf("%+v: got %+v, want %+v", from, got, want)
		}
	}
}

// MP-09
func TestChecks(t *testing.T) {
	domains := []clusterv1.FailureDomain{{Name: "x"}, {Name: "y"}}
	for name, tc := range map[string]struct {
		got  *invalid
		want string // part of the message; empty for none
	}{
		"replicas":          {checkReplicas(0), ""},
		"negative":          {checkReplicas(-1), "-1"},
		"too many":          {checkReplicas(10001), "10000"},
		"domains":           {checkDomains([]string{"y", "x"}, domains), ""},
		"no domains":        {checkDomains(nil, nil), ""},
		"unknown domain":    {checkDomains([]string{"mars"}, domains), "mars, but the cluster has x, y"},
		"one is known":      {checkDomains([]string{"mars", "y"}, domains), ""},
		"a cluster of none": {checkDomains([]string{"x"}, nil), "x, but the cluster has none"},
		"version":           {checkVersion("v1.36.3", []string{"v1.35.0", "v1.36.3"}), ""},
		"no version":        {checkVersion("", []string{"v1.36.3"}), `""`},
		"malformed version": {checkVersion("1.x", []string{"v1.36.3"}), "1.x"},
		"absent version":    {checkVersion("v1.37.0", []string{"v1.36.3"}), "can run v1.36.3"},
		"no hosts":          {checkVersion("v1.37.0", nil), "none"},
	} {
		if (tc.got == nil) != (tc.want == "") || tc.got != nil && !strings.Contains(tc.got.message, tc.want) {
			t.Errorf("%s: %+v, want %q", name, tc.got, tc.want)
		}
	}
}

// The hash is stored with machines. If a release of Capstan changed it, every machine would be replaced.
func TestSpecHashStaysTheSame(t *testing.T) {
	spec := infrav1.CapstanMachineSpec{CPUs: 2, Memory: ptr.To(resource.MustParse("1Gi"))}
	got, err := specHash(spec, "v1.36.3", "demo-1")
	if err != nil {
		t.Fatal(err)
	}
	const want = "650f00403ea711f2"
	if got != want {
		t.Errorf("hash %s, was %s", got, want)
	}
	for _, other := range []func() (string, error){
		func() (string, error) {
			return specHash(infrav1.CapstanMachineSpec{CPUs: 3, Memory: spec.Memory}, "v1.36.3", "demo-1")
		},
		func() (string, error) { return specHash(spec, "v1.36.4", "demo-1") },
		func() (string, error) { return specHash(spec, "v1.36.3", "demo-2") },
	} {
		if h, _ := other(); h == got {
			t.Error("different machines have the same hash")
		}
	}
}

// TestSkew: kubelets never have a newer minor version than an API server.
func TestSkew(t *testing.T) {
	machine := func(version, from string) clusterv1.Machine {
		m := clusterv1.Machine{}
		m.Spec.Version = version
		if from != "" {
			m.Annotations = map[string]string{controlplanev1.UpdateFromAnnotation: from}
		}
		return m
	}
	for name, tc := range map[string]struct {
		wanted, skips string
		controlPlane  []clusterv1.Machine
		waits         bool
	}{
		"the same version":              {"v1.36.3", "", []clusterv1.Machine{machine("v1.36.3", "")}, false},
		"an older pool":                 {"v1.35.4", "", []clusterv1.Machine{machine("v1.36.3", "")}, false},
		"a newer pool":                  {"v1.36.3", "", []clusterv1.Machine{machine("v1.35.4", "")}, true},
		"a newer patch":                 {"v1.36.3", "", []clusterv1.Machine{machine("v1.36.0", "")}, false},
		"a newer major":                 {"v2.0.0", "", []clusterv1.Machine{machine("v1.36.0", "")}, true},
		"a rollout":                     {"v1.36.3", "", []clusterv1.Machine{machine("v1.36.3", ""), machine("v1.35.4", "")}, true},
		"an update in place":            {"v1.36.3", "", []clusterv1.Machine{machine("v1.36.3", "v1.35.4")}, true},
		"no control plane Machines":     {"v1.36.3", "", nil, false},
		"a control plane of no version": {"v1.36.3", "", []clusterv1.Machine{machine("", "")}, false},
		"a pool of no version":          {"", "", []clusterv1.Machine{machine("v1.36.3", "")}, false},
		"all checks skipped":            {"v1.36.3", "All", []clusterv1.Machine{machine("v1.35.4", "")}, false},
		"this check skipped":            {"v1.36.3", "ControlPlaneIsStable, KubernetesVersionSkew", []clusterv1.Machine{machine("v1.35.4", "")}, false},
		"another check skipped":         {"v1.36.3", "ControlPlaneIsStable", []clusterv1.Machine{machine("v1.35.4", "")}, true},
	} {
		mp := &clusterv1.MachinePool{}
		mp.Spec.Template.Spec.Version = tc.wanted
		mp.Annotations = map[string]string{clusterv1.MachineSetSkipPreflightChecksAnnotation: tc.skips}
		if got := checkSkew(mp, tc.controlPlane); (got != nil) != tc.waits {
			t.Errorf("%s: %v", name, got)
		}
	}
	leaving := machine("v1.35.4", "")
	leaving.DeletionTimestamp = &metav1.Time{Time: time.Unix(1, 0)}
	mp := &clusterv1.MachinePool{}
	mp.Spec.Template.Spec.Version = "v1.36.3"
	if got := checkSkew(mp, []clusterv1.Machine{leaving}); got == nil || !strings.Contains(got.message, "is being deleted") {
		t.Errorf("a Machine that is being deleted: %v", got)
	}
}
