package controlplane

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	clusterv1beta1 "sigs.k8s.io/cluster-api/api/core/v1beta1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	controlplanev1beta1 "capstan.dev/capstan/api/controlplane/v1beta1"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/testenv"
)

// TestTemplateInV1Beta1_CP12: a template in v1beta1 has the timeouts of v1beta2 and keeps its metadata.
func TestTemplateInV1Beta1_CP12(t *testing.T) {
	key := metav1.ObjectMeta{Namespace: env.Namespace(t), Name: "old"}
	old := &controlplanev1beta1.CapstanControlPlaneTemplate{ObjectMeta: key}
	old.Spec.Template.ObjectMeta.Labels = map[string]string{"row": "CP-12"}
	timeouts := &old.Spec.Template.Spec.MachineTemplate
	timeouts.NodeDrainTimeout = &metav1.Duration{Duration: 10 * time.Minute}
	timeouts.NodeVolumeDetachTimeout, timeouts.NodeDeletionTimeout = &metav1.Duration{Duration: 700 * time.Second}, &metav1.Duration{Duration: 800 * time.Second}
	if err := env.Client.Create(t.Context(), old); err != nil {
		t.Fatal(err)
	}
	hub := &controlplanev1.CapstanControlPlaneTemplate{ObjectMeta: key}
	if err := env.Client.Get(t.Context(), client.ObjectKeyFromObject(hub), hub); err != nil {
		t.Fatal(err)
	}
	template := hub.Spec.Template
	deletion := template.Spec.MachineTemplate.Spec.Deletion
	if template.ObjectMeta.Labels["row"] != "CP-12" || ptr.Deref(deletion.NodeDrainTimeoutSeconds, 0) != 600 ||
		ptr.Deref(deletion.NodeVolumeDetachTimeoutSeconds, 0) != 700 || ptr.Deref(deletion.NodeDeletionTimeoutSeconds, 0) != 800 {
		t.Errorf("in v1beta2: %+v", template)
	}
}

// TestV1Beta1 (CP-03, CP-06, CP-09, CP-10, CP-11): a control plane that is written in v1beta1 can be read in v1beta2, and fields
// with other names are converted. The same defaults and rules apply.
func TestV1Beta1(t *testing.T) {
	ctx := t.Context()
	old := &controlplanev1beta1.CapstanControlPlane{ObjectMeta: metav1.ObjectMeta{Namespace: env.Namespace(t), Name: "old"}}
	old.Spec.Version = "1.36.3"
	old.Spec.MachineTemplate = controlplanev1beta1.MachineTemplate{
		InfrastructureRef: corev1.ObjectReference{APIVersion: "infrastructure.capstan.dev/v1beta1", Kind: "CapstanMachineTemplate", Name: "demo"},
		NodeDrainTimeout:  &metav1.Duration{Duration: 10 * time.Minute},
	}
	for want, change := range map[string]func(*controlplanev1beta1.CapstanControlPlane){
		"from 0s to 2147483647s": func(cp *controlplanev1beta1.CapstanControlPlane) {
			cp.Spec.MachineTemplate.NodeDeletionTimeout = &metav1.Duration{Duration: -time.Millisecond}
		},
		"name must be the name of a template": func(cp *controlplanev1beta1.CapstanControlPlane) {
			cp.Spec.MachineTemplate.InfrastructureRef.Name = ""
		},
		"apiVersion must be a group and a version": func(cp *controlplanev1beta1.CapstanControlPlane) {
			cp.Spec.MachineTemplate.InfrastructureRef.APIVersion = "v1"
		},
		"infrastructureRef.namespace: expected the namespace of the control plane": func(cp *controlplanev1beta1.CapstanControlPlane) {
			cp.Spec.MachineTemplate.InfrastructureRef.Namespace = "elsewhere"
		},
		"replicas must be odd": func(cp *controlplanev1beta1.CapstanControlPlane) { cp.Spec.Replicas = ptr.To[int32](2) },
		"spec.version":         func(cp *controlplanev1beta1.CapstanControlPlane) { cp.Spec.Version = "newest" },
	} {
		bad := old.DeepCopy()
		change(bad)
		testenv.Refused(t, env.Client.Create(ctx, bad), want)
	}
	if err := env.Client.Create(ctx, old); err != nil {
		t.Fatal(err)
	}
	hub := &controlplanev1.CapstanControlPlane{ObjectMeta: metav1.ObjectMeta{Namespace: old.Namespace, Name: old.Name}}
	if err := testenv.ChangeStatus(ctx, env.Client, hub, func(cp *controlplanev1.CapstanControlPlane) {
		cp.Status.Replicas, cp.Status.AvailableReplicas, cp.Status.UpToDateReplicas = ptr.To[int32](3), ptr.To[int32](1), ptr.To[int32](2)
		cp.Status.Initialization.ControlPlaneInitialized = ptr.To(true)
		cp.Status.Conditions = []metav1.Condition{
			{Type: clusterv1.AvailableCondition, Status: metav1.ConditionTrue, Reason: "Available", LastTransitionTime: metav1.Now()},
			{Type: clusterv1.ReadyCondition, Status: metav1.ConditionFalse, Reason: "NotReady", LastTransitionTime: metav1.Now()},
		}
	}); err != nil {
		t.Fatal(err)
	}
	machine := hub.Spec.MachineTemplate.Spec
	want := clusterv1.ContractVersionedObjectReference{APIGroup: "infrastructure.capstan.dev", Kind: "CapstanMachineTemplate", Name: "demo"}
	if machine.InfrastructureRef != want || ptr.Deref(machine.Deletion.NodeDrainTimeoutSeconds, 0) != 600 ||
		ptr.Deref(hub.Spec.Replicas, 0) != 1 || hub.Spec.Version != "v1.36.3" {
		t.Errorf("CP-06: %+v", hub.Spec)
	}
	if err := env.Client.Get(ctx, client.ObjectKeyFromObject(old), old); err != nil {
		t.Fatal(err)
	}
	if ref := old.Spec.MachineTemplate.InfrastructureRef; ref.APIVersion != "infrastructure.capstan.dev/v1beta1" || ref.Namespace != old.Namespace {
		t.Errorf("CP-06: %+v", ref)
	}
	changed := old.DeepCopy()
	changed.Spec.MachineTemplate.InfrastructureRef.Namespace = "elsewhere"
	testenv.Refused(t, env.Client.Update(ctx, changed), "found elsewhere")
	s := old.Status
	if ptr.Deref(s.UnavailableReplicas, 0) != 2 || ptr.Deref(s.UpdatedReplicas, 0) != 2 {
		t.Errorf("CP-03: %+v", s)
	}
	if !ptr.Deref(s.Initialized, false) || !ptr.Deref(s.Ready, false) {
		t.Errorf("CP-09: %+v", s)
	}
	if len(s.Conditions) != 2 || s.Conditions[0].Type != clusterv1beta1.ReadyCondition || s.Conditions[0].Severity != clusterv1beta1.ConditionSeverityWarning {
		t.Errorf("CP-10: %+v", s.Conditions)
	}
	if err := env.Client.Status().Update(ctx, old); err != nil {
		t.Errorf("CP-10: a status write of a client that uses v1beta1: %v", err)
	}
	if s.FailureReason != nil || s.FailureMessage != nil {
		t.Errorf("CP-11: %v, %v", s.FailureReason, s.FailureMessage)
	}
}
