package extension

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"

	jsonpatch "github.com/evanphx/json-patch/v5"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	hooks "sigs.k8s.io/cluster-api/api/runtime/hooks/v1alpha1"
	"sigs.k8s.io/cluster-api/util/conditions"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
)

// templates returns a MachineSet with its templates.
func templates(version, policy string, infra, config string) hooks.CanUpdateMachineSetRequestObjects {
	out := hooks.CanUpdateMachineSetRequestObjects{
		InfrastructureMachineTemplate: raw(infrav1.GroupVersion.String(), "CapstanMachineTemplate", `{"template":{"spec":`+infra+`}}`),
		BootstrapConfigTemplate:       raw(bootstrapv1.GroupVersion.String(), "CapstanConfigTemplate", `{"template":{"spec":`+config+`}}`),
	}
	out.MachineSet.Annotations = map[string]string{infrav1.InPlaceAnnotation: policy}
	out.MachineSet.Spec.Template.Spec.Version = version
	return out
}

func raw(apiVersion, kind, spec string) runtime.RawExtension {
	return runtime.RawExtension{Raw: []byte(`{"apiVersion":"` + apiVersion + `","kind":"` + kind + `","metadata":{"name":"x"},"spec":` + spec + `}`)}
}

// merged applies a patch as core does.
func merged(t *testing.T, in []byte, patch hooks.Patch) map[string]any {
	t.Helper()
	out := in
	if patch.IsDefined() {
		if patch.PatchType != hooks.JSONMergePatchType {
			t.Fatalf("patch of type %s", patch.PatchType)
		}
		var err error
		if out, err = jsonpatch.MergePatch(in, patch.Patch); err != nil {
			t.Fatal(err)
		}
	}
	object := map[string]any{}
	if err := json.Unmarshal(out, &object); err != nil {
		t.Fatal(err)
	}
	return object
}

func same(t *testing.T, what string, current, desired []byte, patch hooks.Patch) bool {
	t.Helper()
	a, _ := json.Marshal(merged(t, current, patch)["spec"])
	b, _ := json.Marshal(merged(t, desired, hooks.Patch{})["spec"])
	if !bytes.Equal(a, b) {
		t.Logf("%s: %s instead of %s", what, a, b)
		return false
	}
	return true
}

// Row ALL-17: the answer about a MachineSet makes its templates equal if every change can be made in place, and changes nothing
// otherwise. Without a policy nothing is updated in place, and the policy Only stops the rollout.
func TestCanUpdateMachineSet_ALL17(t *testing.T) {
	const memory1, memory2 = `{"memory":"1Gi","cpus":2}`, `{"memory":"2Gi"}`
	for name, test := range map[string]struct {
		policy           string
		version          string
		infra, config    string
		inPlace, failure bool
		message          string
	}{
		"a version":                     {policy: "Prefer", version: "v1.36.3", infra: memory1, config: `{}`, inPlace: true},
		"all at once":                   {policy: "Only", version: "v1.36.3", infra: memory2, config: `{"updateCommands":["true"],"kubelet":{"extraArgs":[{"name":"v","value":"2"}]}}`, inPlace: true},
		"no policy":                     {version: "v1.36.3", infra: memory1, config: `{}`, message: "is not Prefer or Only"},
		"Never":                         {policy: "Never", version: "v1.36.3", infra: memory1, config: `{}`, message: "is not Prefer or Only"},
		"another policy":                {policy: "only", version: "v1.36.3", infra: memory1, config: `{}`, failure: true, message: "must be Never, Prefer or Only"},
		"a downgrade":                   {policy: "Prefer", version: "v1.34.1", infra: memory1, config: `{}`, message: "cannot go back"},
		"two minor versions, Only":      {policy: "Only", version: "v1.37.0", infra: memory1, config: `{}`, failure: true, message: "one minor version at a time"},
		"a command, Prefer":             {policy: "Prefer", version: "v1.35.4", infra: memory1, config: `{"preCommands":["x"]}`, message: "preCommands"},
		"an image and a version, Only":  {policy: "Only", version: "v1.36.3", infra: `{"image":"other"}`, config: `{}`, failure: true, message: "image"},
		"a spec that is none, Prefer":   {policy: "Prefer", version: "v1.36.3", infra: `"text"`, config: `{}`, message: "CapstanMachineTemplate"},
		"a field of another type, Only": {policy: "Only", version: "v1.36.3", infra: `{"cpus":"many"}`, config: `{}`, failure: true, message: "cpus"},
	} {
		t.Run(name, func(t *testing.T) {
			req := &hooks.CanUpdateMachineSetRequest{
				Current: templates("v1.35.4", "", memory1, `{}`), Desired: templates(test.version, test.policy, test.infra, test.config),
			}
			resp := &hooks.CanUpdateMachineSetResponse{}
			canUpdateMachineSet(t.Context(), req, resp)
			if (resp.Status == hooks.ResponseStatusFailure) != test.failure || !strings.Contains(resp.Message, test.message) {
				t.Errorf("status %s, message %q", resp.Status, resp.Message)
			}
			if patched := resp.MachineSetPatch.IsDefined() || resp.InfrastructureMachineTemplatePatch.IsDefined() || resp.BootstrapConfigTemplatePatch.IsDefined(); patched != test.inPlace {
				t.Fatalf("patches: %v", patched)
			}
			if !test.inPlace {
				return
			}
			current, _ := json.Marshal(req.Current.MachineSet)
			desired, _ := json.Marshal(req.Desired.MachineSet)
			if !same(t, "MachineSet", current, desired, resp.MachineSetPatch) ||
				!same(t, "CapstanMachineTemplate", req.Current.InfrastructureMachineTemplate.Raw, req.Desired.InfrastructureMachineTemplate.Raw, resp.InfrastructureMachineTemplatePatch) ||
				!same(t, "CapstanConfigTemplate", req.Current.BootstrapConfigTemplate.Raw, req.Desired.BootstrapConfigTemplate.Raw, resp.BootstrapConfigTemplatePatch) {
				t.Error("the patched templates differ from the desired ones")
			}
		})
	}
}

// Machines of other providers are not updated in place, and a failure domain does not change.
func TestCanUpdateMachine_ALL17(t *testing.T) {
	ours := hooks.CanUpdateMachineRequestObjects{
		InfrastructureMachine: raw(infrav1.GroupVersion.String(), "CapstanMachine", `{"id":"12345678","hostName":"a","memory":"1Gi"}`),
		BootstrapConfig:       raw(bootstrapv1.GroupVersion.String(), "CapstanConfig", `{"role":"Worker"}`),
	}
	ours.Machine.Spec.Version, ours.Machine.Spec.FailureDomain = "v1.35.4", "a"
	for name, test := range map[string]struct {
		change  func(*hooks.CanUpdateMachineRequestObjects)
		message string
	}{
		"a version": {change: func(o *hooks.CanUpdateMachineRequestObjects) { o.Machine.Spec.Version = "v1.36.3" }},
		"memory": {change: func(o *hooks.CanUpdateMachineRequestObjects) {
			o.InfrastructureMachine = raw(infrav1.GroupVersion.String(), "CapstanMachine", `{"id":"12345678","hostName":"a","memory":"2Gi"}`)
		}},
		"a failure domain": {change: func(o *hooks.CanUpdateMachineRequestObjects) { o.Machine.Spec.FailureDomain = "b" }, message: "failureDomain"},
		"another bootstrap provider": {change: func(o *hooks.CanUpdateMachineRequestObjects) {
			o.BootstrapConfig = raw("bootstrap.cluster.x-k8s.io/v1beta2", "KubeadmConfig", `{}`)
		}, message: "KubeadmConfig"},
		"another group": {change: func(o *hooks.CanUpdateMachineRequestObjects) {
			o.InfrastructureMachine = raw("infrastructure.example.com/v1", "CapstanMachine", `{}`)
		}, message: "infrastructure.example.com"},
		"no bootstrap configuration": {change: func(o *hooks.CanUpdateMachineRequestObjects) { o.BootstrapConfig = runtime.RawExtension{} }, message: "found no object"},
	} {
		t.Run(name, func(t *testing.T) {
			req := &hooks.CanUpdateMachineRequest{Current: ours, Desired: *ours.DeepCopy()}
			test.change(&req.Desired)
			resp := &hooks.CanUpdateMachineResponse{}
			canUpdateMachine(t.Context(), req, resp)
			if resp.Status != hooks.ResponseStatusSuccess || !strings.Contains(resp.Message, test.message) || resp.MachinePatch.IsDefined() != (test.message == "") {
				t.Fatalf("%+v", resp)
			}
			if test.message == "" && !same(t, "CapstanMachine", req.Current.InfrastructureMachine.Raw, req.Desired.InfrastructureMachine.Raw, resp.InfrastructureMachinePatch) {
				t.Error("the patched CapstanMachine differs")
			}
		})
	}
}

// Row ALL-17: the hook answers about the update of exactly the desired objects.
func TestState_ALL17(t *testing.T) {
	for name, test := range map[string]struct {
		change func(*clusterv1.Machine, *infrav1.CapstanMachine, *bootstrapv1.CapstanConfig)
		want   infrav1.UpdatePhase
		err    string
	}{
		"succeeded":                  {want: infrav1.UpdateSucceeded},
		"the CapstanMachine changed": {want: infrav1.UpdatePending, change: func(_ *clusterv1.Machine, m *infrav1.CapstanMachine, _ *bootstrapv1.CapstanConfig) { m.Generation++ }},
		"the CapstanConfig changed":  {want: infrav1.UpdatePending, change: func(_ *clusterv1.Machine, _ *infrav1.CapstanMachine, c *bootstrapv1.CapstanConfig) { c.Generation++ }},
		"the version changed": {want: infrav1.UpdatePending, change: func(m *clusterv1.Machine, _ *infrav1.CapstanMachine, _ *bootstrapv1.CapstanConfig) {
			m.Spec.Version = "v1.36.4"
		}},
		"the data changed": {want: infrav1.UpdatePending, change: func(_ *clusterv1.Machine, _ *infrav1.CapstanMachine, c *bootstrapv1.CapstanConfig) {
			c.Status.Update.ID = "other"
		}},
		"the data has another version": {want: infrav1.UpdatePending, change: func(_ *clusterv1.Machine, _ *infrav1.CapstanMachine, c *bootstrapv1.CapstanConfig) {
			c.Status.Update.KubernetesVersion = "v1.35.4"
		}},
		"running": {want: infrav1.UpdateRunning, change: func(_ *clusterv1.Machine, m *infrav1.CapstanMachine, _ *bootstrapv1.CapstanConfig) {
			m.Status.Update.Phase = infrav1.UpdateRunning
			updating(m, infrav1.UpdateRunningReason)
		}},
		"rolled back": {err: "RolledBack", change: func(_ *clusterv1.Machine, m *infrav1.CapstanMachine, _ *bootstrapv1.CapstanConfig) {
			m.Status.Update.Phase = infrav1.UpdateRolledBack
		}},
		"a former failure": {want: infrav1.UpdatePending, change: func(_ *clusterv1.Machine, m *infrav1.CapstanMachine, _ *bootstrapv1.CapstanConfig) {
			m.Status.Update.Phase, m.Generation = infrav1.UpdateFailed, m.Generation+1
		}},
		"no room": {want: infrav1.UpdateRunning, change: func(_ *clusterv1.Machine, m *infrav1.CapstanMachine, _ *bootstrapv1.CapstanConfig) {
			m.Status.Update = infrav1.MachineUpdateStatus{}
			updating(m, infrav1.NoCapacityReason)
		}},
		"refused": {err: "refused", change: func(_ *clusterv1.Machine, m *infrav1.CapstanMachine, _ *bootstrapv1.CapstanConfig) {
			m.Status.Update = infrav1.MachineUpdateStatus{}
			updating(m, infrav1.UpdateRefusedReason)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			desired, m, config := &clusterv1.Machine{}, &infrav1.CapstanMachine{}, &bootstrapv1.CapstanConfig{}
			desired.Spec.Version, m.Generation, config.Generation = "v1.36.3", 7, 3
			m.Status.Update = infrav1.MachineUpdateStatus{ID: "u", Phase: infrav1.UpdateSucceeded, KubernetesVersion: "v1.36.3", ConfigUpdateID: "c", ObservedGeneration: 7}
			config.Status.Update = bootstrapv1.ConfigUpdateStatus{ID: "c", KubernetesVersion: "v1.36.3", ObservedGeneration: 3}
			if test.change != nil {
				test.change(desired, m, config)
			}
			got, _, err := state(desired, m, config)
			if got != test.want || (err != nil) != (test.err != "") || err != nil && !strings.Contains(err.Error(), test.err) {
				t.Errorf("%q, %v", got, err)
			}
		})
	}
}

func updating(m *infrav1.CapstanMachine, reason string) {
	conditions.Set(m, metav1.Condition{Type: infrav1.UpdatingCondition, Status: metav1.ConditionTrue, Reason: reason, Message: "message"})
	m.Status.Conditions[0].ObservedGeneration = m.Generation
}
