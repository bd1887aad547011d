package conversion

import (
	"context"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/apitesting/fuzzer"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	runtimeserializer "k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/utils/ptr"
	clusterv1beta1 "sigs.k8s.io/cluster-api/api/core/v1beta1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	utilconversion "sigs.k8s.io/cluster-api/util/conversion"
	"sigs.k8s.io/controller-runtime/pkg/webhook/conversion"
	"sigs.k8s.io/randfill"

	bootstrapv1beta1 "capstan.dev/capstan/api/bootstrap/v1beta1"
	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1beta1 "capstan.dev/capstan/api/controlplane/v1beta1"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	infrav1beta1 "capstan.dev/capstan/api/infrastructure/v1beta1"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
)

// rounds is the number of random objects per kind and direction.
const rounds = 200

func v1beta1Of(context.Context, schema.GroupKind) string { return "v1beta1" }

// TestRoundTrip converts random objects of every kind to the other version and back (ALL-09, IC-02, IC-04, IM-04, CP-03,
// CP-06, CP-09, CP-10, BC-03). It fails if the conversion loses a field that is no view, and if the conditions of v1beta1 have other types
// than those from which they are derived.
func TestRoundTrip(t *testing.T) {
	scheme := testScheme(t)
	filler := utilconversion.GetFuzzer(scheme, fillers)
	for kind, construct := range map[string]func(*runtime.Scheme) (conversion.Converter, error){
		"infrastructure.capstan.dev/CapstanCluster":             CapstanCluster,
		"infrastructure.capstan.dev/CapstanClusterTemplate":     CapstanClusterTemplate,
		"infrastructure.capstan.dev/CapstanMachine":             CapstanMachine,
		"infrastructure.capstan.dev/CapstanMachineTemplate":     CapstanMachineTemplate,
		"infrastructure.capstan.dev/CapstanMachinePool":         CapstanMachinePool,
		"infrastructure.capstan.dev/CapstanMachinePoolTemplate": CapstanMachinePoolTemplate,
		"bootstrap.capstan.dev/CapstanConfig":                   CapstanConfig,
		"bootstrap.capstan.dev/CapstanConfigTemplate":           CapstanConfigTemplate,
		"controlplane.capstan.dev/CapstanControlPlane":          CapstanControlPlane(v1beta1Of),
		"controlplane.capstan.dev/CapstanControlPlaneTemplate":  CapstanControlPlaneTemplate,
	} {
		t.Run(kind, func(t *testing.T) {
			converter, err := construct(scheme)
			if err != nil {
				t.Fatal(err)
			}
			group, name, _ := strings.Cut(kind, "/")
			for _, from := range []string{"v1beta1", "v1beta2"} {
				to := map[string]string{"v1beta1": "v1beta2", "v1beta2": "v1beta1"}[from]
				for range rounds {
					before := object(t, scheme, group, from, name)
					filler.Fill(before)
					before.GetObjectKind().SetGroupVersionKind(schema.GroupVersionKind{Group: group, Version: from, Kind: name})
					there, back := object(t, scheme, group, to, name), object(t, scheme, group, from, name)
					for _, step := range [][2]runtime.Object{{before.DeepCopyObject(), there}, {there, back}} {
						if err := converter.ConvertObject(t.Context(), step[0], step[1]); err != nil {
							t.Fatal(err)
						}
					}
					for _, o := range []runtime.Object{there, back} {
						checkConditionTypes(t, o)
					}
					withoutViews(before)
					withoutViews(back)
					if !equality.Semantic.DeepEqual(before, back) {
						t.Fatalf("%s changed in the conversion to %s and back: %s", from, to, cmp.Diff(before, back))
					}
				}
			}
		})
	}
}

// derived returns the fields of a v1beta1 object that every reading conversion derives from the conditions of v1beta2; nil for others.
func derived(o runtime.Object) (conditions *clusterv1beta1.Conditions, from []metav1.Condition, reason, message **string) {
	switch o := o.(type) {
	case *infrav1beta1.CapstanCluster:
		return &o.Status.Conditions, o.Status.V1Beta2.Conditions, &o.Status.FailureReason, &o.Status.FailureMessage
	case *infrav1beta1.CapstanMachine:
		return &o.Status.Conditions, o.Status.V1Beta2.Conditions, &o.Status.FailureReason, &o.Status.FailureMessage
	case *infrav1beta1.CapstanMachinePool:
		return &o.Status.Conditions, o.Status.V1Beta2.Conditions, &o.Status.FailureReason, &o.Status.FailureMessage
	case *bootstrapv1beta1.CapstanConfig:
		return &o.Status.Conditions, o.Status.V1Beta2.Conditions, &o.Status.FailureReason, &o.Status.FailureMessage
	case *controlplanev1beta1.CapstanControlPlane:
		return &o.Status.Conditions, o.Status.V1Beta2.Conditions, &o.Status.FailureReason, &o.Status.FailureMessage
	}
	return nil, nil, nil, nil
}

// checkConditionTypes checks that each condition of v1beta2 is exactly one condition of v1beta1, whose list is a map of types.
func checkConditionTypes(t *testing.T, o runtime.Object) {
	t.Helper()
	conditions, from, _, _ := derived(o)
	if conditions == nil {
		return
	}
	var want, got []string
	for _, c := range from {
		want = append(want, c.Type)
	}
	for _, c := range *conditions {
		got = append(got, string(c.Type))
	}
	slices.Sort(want)
	slices.Sort(got)
	if !slices.Equal(want, got) {
		t.Fatalf("%T has the conditions %q, want %q", o, got, want)
	}
}

// withoutViews removes the fields of v1beta1 that clients cannot write. Other tests check their values.
func withoutViews(o runtime.Object) {
	conditions, _, reason, message := derived(o)
	if conditions == nil {
		return
	}
	*conditions, *reason, *message = nil, nil, nil
	if cp, ok := o.(*controlplanev1beta1.CapstanControlPlane); ok {
		cp.Status.Ready, cp.Status.UnavailableReplicas, cp.Status.ExternalManagedControlPlane = nil, nil, false
	}
}

func testScheme(t *testing.T) *runtime.Scheme {
	t.Helper()
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{
		infrav1.AddToScheme, infrav1beta1.AddToScheme, bootstrapv1.AddToScheme, bootstrapv1beta1.AddToScheme,
		controlplanev1.AddToScheme, controlplanev1beta1.AddToScheme,
	} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	return scheme
}

// object returns an empty object with the kind that the conversion webhook sets.
func object(t *testing.T, scheme *runtime.Scheme, group, version, kind string) runtime.Object {
	t.Helper()
	gvk := schema.GroupVersionKind{Group: group, Version: version, Kind: kind}
	o, err := scheme.New(gvk)
	if err != nil {
		t.Fatal(err)
	}
	o.GetObjectKind().SetGroupVersionKind(gvk)
	return o
}

// fillers restrict random objects to valid ones.
func fillers(runtimeserializer.CodecFactory) []any {
	return []any{
		func(in *infrav1.CapstanClusterStatus, c randfill.Continue) {
			c.FillNoCustom(in)
			in.FailureDomains = domainsToHub(domainsFromHub(in.FailureDomains)) // Names are sorted and unique, and controlPlane is set.
		},
		func(in *[]metav1.Condition, c randfill.Continue) { // Types are unique.
			*in = nil
			for _, kind := range []string{clusterv1.AvailableCondition, clusterv1.PausedCondition, clusterv1.ReadyCondition} {
				if c.Bool() {
					condition := metav1.Condition{}
					c.Fill(&condition)
					condition.Type = kind
					*in = append(*in, condition)
				}
			}
		},
		func(in *controlplanev1beta1.CapstanControlPlaneStatus, c randfill.Continue) {
			c.FillNoCustom(in)
			if ptr.Deref(in.Version, "") == "" {
				in.Version = nil
			}
		},
		func(in *controlplanev1beta1.CapstanControlPlane, c randfill.Continue) {
			c.FillNoCustom(in)
			ref := &in.Spec.MachineTemplate.InfrastructureRef
			*ref = corev1.ObjectReference{APIVersion: "infrastructure.capstan.dev/v1beta1", Kind: ref.Kind, Namespace: in.Namespace, Name: ref.Name}
		},
		func(in *clusterv1.ContractVersionedObjectReference, c randfill.Continue) {
			c.FillNoCustom(in)
			in.APIGroup = "infrastructure.capstan.dev"
		},
		func(in *controlplanev1.MachineDeletionSpec, c randfill.Continue) {
			c.FillNoCustom(in)
			for _, s := range []*int32{in.NodeDrainTimeoutSeconds, in.NodeVolumeDetachTimeoutSeconds, in.NodeDeletionTimeoutSeconds} {
				if s != nil {
					*s &= math.MaxInt32
				}
			}
		},
		func(in *metav1.Duration, c randfill.Continue) {
			in.Duration = time.Duration(c.Int31()) * time.Second
		},
	}
}

var _ fuzzer.FuzzerFuncs = fillers

// TestConditions derives v1beta1 conditions (ALL-09).
func TestConditions(t *testing.T) {
	now := metav1.Now()
	got := legacy([]metav1.Condition{
		{Type: "ServicesHealthy", Status: "Unknown", Reason: "HostUnreachable", LastTransitionTime: now},
		{Type: "Paused", Status: "False", Reason: "NotPaused", LastTransitionTime: now},
		{Type: "CertificatesExpiring", Status: "False", Reason: "CertificatesNotExpiring", LastTransitionTime: now},
		{Type: "BootstrapTokenAvailable", Status: "False", Reason: "NoLongerNeeded", LastTransitionTime: now},
		{Type: "MachineRunning", Status: "False", Reason: "MachineLost", Message: "gone", LastTransitionTime: now},
		{Type: "HostAssigned", Status: "False", Reason: "NoHost", LastTransitionTime: now},
		{Type: "BootstrapSucceeded", Status: "False", Reason: "WaitingForBootstrapData", LastTransitionTime: now},
		{Type: "Ready", Status: "True", Reason: "Ready", Message: strings.Repeat("ä", 10241), LastTransitionTime: now},
	})
	want := clusterv1beta1.Conditions{
		{Type: "Ready", Status: "True", Reason: "Ready", Message: strings.Repeat("ä", 10239) + "…", LastTransitionTime: now},
		{Type: "BootstrapSucceeded", Status: "False", Severity: "Info", Reason: "WaitingForBootstrapData", LastTransitionTime: now},
		{Type: "BootstrapTokenAvailable", Status: "False", Severity: "Info", Reason: "NoLongerNeeded", LastTransitionTime: now},
		{Type: "CertificatesExpiring", Status: "False", Severity: "Info", Reason: "CertificatesNotExpiring", LastTransitionTime: now},
		{Type: "HostAssigned", Status: "False", Severity: "Warning", Reason: "NoHost", LastTransitionTime: now},
		{Type: "MachineRunning", Status: "False", Severity: "Error", Reason: "MachineLost", Message: "gone", LastTransitionTime: now},
		{Type: "Paused", Status: "False", Severity: "Info", Reason: "NotPaused", LastTransitionTime: now},
		{Type: "ServicesHealthy", Status: "Unknown", Reason: "HostUnreachable", LastTransitionTime: now},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

// TestFailures_ALL16 (ALL-16, MP-09, IC-03, CP-11): only a failure that ends with the deletion of the machine is
// terminal. Failures of all other kinds can be repaired, so their failureReason is empty for all conditions.
func TestFailures_ALL16(t *testing.T) {
	for reason, want := range map[string]bool{
		infrav1.MachineLostReason: true, infrav1.BootstrapFailedReason: true,
		infrav1.MachineFailedReason: false, infrav1.NoHostReason: false, infrav1.MachineHostUnreachableReason: false,
		infrav1.HostMismatchReason: false, infrav1.MachineRestartingReason: false, infrav1.AddressInvalidReason: false,
	} {
		conditions := []metav1.Condition{
			{Type: "Ready", Status: "False", Reason: reason, Message: "summary"},
			{Type: "MachineRunning", Status: "False", Reason: reason, Message: "what happened"},
		}
		machine := &infrav1beta1.CapstanMachine{}
		if err := machineFromHub(t.Context(), &infrav1.CapstanMachine{Status: infrav1.CapstanMachineStatus{Conditions: conditions}}, machine); err != nil {
			t.Fatal(err)
		}
		if got := ptr.Deref(machine.Status.FailureReason, ""); (got == reason) != want || (got != "") != want {
			t.Errorf("%s: failureReason %q", reason, got)
		}
		if got := ptr.Deref(machine.Status.FailureMessage, ""); (got == "what happened") != want {
			t.Errorf("%s: failureMessage %q", reason, got)
		}
		cluster, pool := &infrav1beta1.CapstanCluster{}, &infrav1beta1.CapstanMachinePool{}
		controlPlane, config := &controlplanev1beta1.CapstanControlPlane{}, &bootstrapv1beta1.CapstanConfig{}
		_ = clusterFromHub(t.Context(), &infrav1.CapstanCluster{Status: infrav1.CapstanClusterStatus{Conditions: conditions}}, cluster)
		_ = machinePoolFromHub(t.Context(), &infrav1.CapstanMachinePool{Status: infrav1.CapstanMachinePoolStatus{Conditions: conditions}}, pool)
		controlPlaneFromHub(&controlplanev1.CapstanControlPlane{Status: controlplanev1.CapstanControlPlaneStatus{Conditions: conditions}}, controlPlane)
		_ = configFromHub(t.Context(), &bootstrapv1.CapstanConfig{Status: bootstrapv1.CapstanConfigStatus{Conditions: conditions}}, config)
		if set := slices.DeleteFunc([]*string{cluster.Status.FailureReason, pool.Status.FailureReason, controlPlane.Status.FailureReason, config.Status.FailureReason},
			func(s *string) bool { return s == nil }); len(set) > 0 {
			t.Errorf("%s: %d other kinds have a failureReason", reason, len(set))
		}
	}
}

// TestControlPlaneFields (CP-03, CP-06, CP-09, CP-10) checks the fields that have other names in v1beta1. Row CP-08.
func TestControlPlaneFields(t *testing.T) {
	hub := &controlplanev1.CapstanControlPlane{ObjectMeta: metav1.ObjectMeta{Namespace: "ns"}}
	hub.Spec.Replicas = ptr.To[int32](3)
	machine := &hub.Spec.MachineTemplate.Spec
	machine.InfrastructureRef = clusterv1.ContractVersionedObjectReference{APIGroup: "other.example.com", Kind: "OtherTemplate", Name: "x"}
	machine.Deletion = controlplanev1.MachineDeletionSpec{NodeDrainTimeoutSeconds: ptr.To[int32](600), NodeVolumeDetachTimeoutSeconds: ptr.To[int32](700), NodeDeletionTimeoutSeconds: ptr.To[int32](800)}
	hub.Status = controlplanev1.CapstanControlPlaneStatus{
		Replicas: ptr.To[int32](2), AvailableReplicas: ptr.To[int32](1), UpToDateReplicas: ptr.To[int32](2), Version: "v1.36.3",
		Initialization: controlplanev1.CapstanControlPlaneInitializationStatus{ControlPlaneInitialized: ptr.To(true)},
		Conditions: []metav1.Condition{
			{Type: clusterv1.AvailableCondition, Status: metav1.ConditionTrue, Reason: "Available"},
			{Type: clusterv1.ReadyCondition, Status: metav1.ConditionFalse, Reason: "NotReady", Message: "m"},
		},
	}
	converter, err := CapstanControlPlane(func(_ context.Context, kind schema.GroupKind) string {
		return "v7" + strings.ToLower(kind.Kind)
	})(testScheme(t))
	if err != nil {
		t.Fatal(err)
	}
	hub.SetGroupVersionKind(controlplanev1.GroupVersion.WithKind("CapstanControlPlane"))
	got := &controlplanev1beta1.CapstanControlPlane{}
	got.SetGroupVersionKind(controlplanev1beta1.GroupVersion.WithKind("CapstanControlPlane"))
	if err := converter.ConvertObject(t.Context(), hub, got); err != nil {
		t.Fatal(err)
	}
	want := corev1.ObjectReference{APIVersion: "other.example.com/v7othertemplate", Kind: "OtherTemplate", Namespace: "ns", Name: "x"}
	if ref := got.Spec.MachineTemplate.InfrastructureRef; ref != want {
		t.Errorf("infrastructureRef %+v", ref)
	}
	timeouts := got.Spec.MachineTemplate
	for want, d := range map[int]*metav1.Duration{600: timeouts.NodeDrainTimeout, 700: timeouts.NodeVolumeDetachTimeout, 800: timeouts.NodeDeletionTimeout} {
		if d == nil || d.Duration != time.Duration(want)*time.Second {
			t.Errorf("%v instead of a timeout of %d s", d, want)
		}
	}
	s := got.Status
	if !ptr.Deref(s.Initialized, false) || !ptr.Deref(s.Ready, false) || ptr.Deref(s.UnavailableReplicas, 0) != 2 ||
		ptr.Deref(s.UpdatedReplicas, 0) != 2 || ptr.Deref(s.Version, "") != "v1.36.3" || s.ExternalManagedControlPlane {
		t.Errorf("status %+v", s)
	}
	if diff := cmp.Diff(clusterv1beta1.Conditions{
		{Type: "Ready", Status: "False", Severity: "Warning", Reason: "NotReady", Message: "m"},
		{Type: "Available", Status: "True", Reason: "Available"},
	}, s.Conditions); diff != "" {
		t.Error(diff)
	}
}

// TestUnavailable (CP-03): Machines that do not exist yet are unavailable, and so are those that a smaller spec no longer wants.
func TestUnavailable(t *testing.T) {
	for name, c := range map[string]struct{ wanted, replicas, available, want *int32 }{
		"never reconciled":  {ptr.To[int32](3), nil, nil, nil},
		"none is made":      {ptr.To[int32](3), ptr.To[int32](0), nil, ptr.To[int32](3)},
		"one of three":      {ptr.To[int32](3), ptr.To[int32](1), ptr.To[int32](1), ptr.To[int32](2)},
		"all":               {ptr.To[int32](3), ptr.To[int32](3), ptr.To[int32](3), ptr.To[int32](0)},
		"one more than all": {ptr.To[int32](3), ptr.To[int32](4), ptr.To[int32](4), ptr.To[int32](0)},
		"scaled down":       {ptr.To[int32](1), ptr.To[int32](3), ptr.To[int32](2), ptr.To[int32](1)},
		"default":           {nil, ptr.To[int32](0), nil, ptr.To[int32](1)},
	} {
		if got := unavailable(c.wanted, c.replicas, c.available); !ptr.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", name, ptr.Deref(got, -1), ptr.Deref(c.want, -1))
		}
	}
}

// TestSeconds: the conversion does not shorten a timeout, because 0 means no limit.
func TestSeconds(t *testing.T) {
	for d, want := range map[time.Duration]int32{
		0: 0, time.Millisecond: 1, time.Minute: 60, -time.Millisecond: -1, -time.Hour: -3600, math.MaxInt64: math.MaxInt32,
	} {
		if got := seconds(&metav1.Duration{Duration: d}); *got != want {
			t.Errorf("%s: %d, want %d", d, *got, want)
		}
	}
}
