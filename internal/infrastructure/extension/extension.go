// Package extension serves the hooks of Cluster API's runtime SDK for updates in place: CanUpdateMachine, CanUpdateMachineSet
// and UpdateMachine. The first two are pure functions of their requests. The last one reads the state of an update, which the
// reconciler of CapstanMachines drives: a caller of the hooks changes nothing.
//
// Layer: reconciler. Allowed imports: api, library, contract.
package extension

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	jsonpatch "github.com/evanphx/json-patch/v5"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	hooks "sigs.k8s.io/cluster-api/api/runtime/hooks/v1alpha1"
	"sigs.k8s.io/cluster-api/exp/runtime/server"
	"sigs.k8s.io/controller-runtime/pkg/client"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/inplace"
)

// Setup adds the hooks to a server. live reads from the API server: a stale answer could end an update too early.
func Setup(s *server.Server, live client.Reader) error {
	return errors.Join(
		s.AddExtensionHandler(server.ExtensionHandler{Name: "can-update-machine", Hook: hooks.CanUpdateMachine, HandlerFunc: canUpdateMachine}),
		s.AddExtensionHandler(server.ExtensionHandler{Name: "can-update-machine-set", Hook: hooks.CanUpdateMachineSet, HandlerFunc: canUpdateMachineSet}),
		s.AddExtensionHandler(server.ExtensionHandler{Name: "update-machine", Hook: hooks.UpdateMachine, HandlerFunc: Updater{Client: live}.UpdateMachine}),
	)
}

// canUpdateMachine answers with patches for all changes of a machine, if every change can be made in place, and with none
// otherwise.
func canUpdateMachine(_ context.Context, req *hooks.CanUpdateMachineRequest, resp *hooks.CanUpdateMachineResponse) {
	var current, desired machineSpecs
	err := errors.Join(
		decode(req.Current.InfrastructureMachine, req.Current.BootstrapConfig, &current, infrav1.MachineKind, bootstrapv1.ConfigKind, "spec"),
		decode(req.Desired.InfrastructureMachine, req.Desired.BootstrapConfig, &desired, infrav1.MachineKind, bootstrapv1.ConfigKind, "spec"),
	)
	current.machine, desired.machine = req.Current.Machine.Spec, req.Desired.Machine.Spec
	resp.Status = hooks.ResponseStatusSuccess
	if err != nil {
		resp.Message = err.Error()
		return
	}
	if blocking := differences(current, desired); blocking != "" {
		resp.Message = blocking
		return
	}
	resp.MachinePatch = versionPatch(desired.machine.Version, "spec")
	resp.InfrastructureMachinePatch, err = specPatch(current.infraRaw, desired.infraRaw, "spec")
	if err == nil {
		resp.BootstrapConfigPatch, err = specPatch(current.configRaw, desired.configRaw, "spec")
	}
	failed(&resp.CommonResponse, err)
}

// canUpdateMachineSet is canUpdateMachine for the templates of a MachineSet, under the policy of its MachineDeployment.
func canUpdateMachineSet(_ context.Context, req *hooks.CanUpdateMachineSetRequest, resp *hooks.CanUpdateMachineSetResponse) {
	resp.Status = hooks.ResponseStatusSuccess
	policy := req.Desired.MachineSet.Annotations[infrav1.InPlaceAnnotation]
	switch policy {
	case "", "Never":
		resp.Message = fmt.Sprintf("the annotation %s is not Prefer or Only", infrav1.InPlaceAnnotation)
		return
	case "Prefer", "Only":
	default:
		failed(&resp.CommonResponse, fmt.Errorf("the annotation %s must be Never, Prefer or Only", infrav1.InPlaceAnnotation))
		return
	}
	var current, desired machineSpecs
	path := []string{"spec", "template", "spec"}
	err := errors.Join(
		decode(req.Current.InfrastructureMachineTemplate, req.Current.BootstrapConfigTemplate, &current, infrav1.MachineTemplateKind, bootstrapv1.ConfigTemplateKind, path...),
		decode(req.Desired.InfrastructureMachineTemplate, req.Desired.BootstrapConfigTemplate, &desired, infrav1.MachineTemplateKind, bootstrapv1.ConfigTemplateKind, path...),
	)
	current.machine, desired.machine = req.Current.MachineSet.Spec.Template.Spec, req.Desired.MachineSet.Spec.Template.Spec
	if err == nil {
		if blocking := differences(current, desired); blocking != "" {
			err = errors.New(blocking)
		}
	}
	if err != nil {
		// Without patches core replaces the machines. A failure stops the rollout.
		resp.Message = err.Error()
		if policy == "Only" {
			failed(&resp.CommonResponse, fmt.Errorf("the annotation %s is Only: %w", infrav1.InPlaceAnnotation, err))
		}
		return
	}
	resp.MachineSetPatch = versionPatch(desired.machine.Version, path...)
	resp.InfrastructureMachineTemplatePatch, err = specPatch(current.infraRaw, desired.infraRaw, path...)
	if err == nil {
		resp.BootstrapConfigTemplatePatch, err = specPatch(current.configRaw, desired.configRaw, path...)
	}
	failed(&resp.CommonResponse, err)
}

func failed(resp *hooks.CommonResponse, err error) {
	if err != nil {
		resp.Status, resp.Message = hooks.ResponseStatusFailure, err.Error()
	}
}

// machineSpecs are the specs of a machine, or those of templates.
type machineSpecs struct {
	machine clusterv1.MachineSpec
	infra   infrav1.CapstanMachineSpec
	config  bootstrapv1.CapstanConfigSpec

	infraRaw, configRaw any
}

// decode reads the specs from the objects of a request. Objects of other providers are an error.
func decode(infra, config runtime.RawExtension, out *machineSpecs, infraKind, configKind string, path ...string) error {
	var err error
	if out.infraRaw, err = decodeSpec(infra, infrav1.GroupVersion.Group, infraKind, &out.infra, path); err != nil {
		return err
	}
	out.configRaw, err = decodeSpec(config, bootstrapv1.GroupVersion.Group, configKind, &out.config, path)
	return err
}

func decodeSpec(in runtime.RawExtension, group, kind string, out any, path []string) (any, error) {
	object := map[string]any{}
	if err := json.Unmarshal(in.Raw, &object); err != nil {
		return nil, fmt.Errorf("expected a %s of %s, found no object", kind, group)
	}
	var meta metav1.TypeMeta
	_ = json.Unmarshal(in.Raw, &meta)
	if gv, err := schema.ParseGroupVersion(meta.APIVersion); err != nil || gv.Group != group || meta.Kind != kind {
		return nil, fmt.Errorf("expected a %s of %s, found a %s of %q: this extension updates Capstan's machines only", kind, group, meta.Kind, meta.APIVersion)
	}
	var spec any = object
	for _, name := range path {
		parent, _ := spec.(map[string]any)
		spec = parent[name]
	}
	if spec == nil {
		spec = map[string]any{}
	}
	raw, err := json.Marshal(spec)
	if err != nil {
		return nil, err
	}
	if err := json.Unmarshal(raw, out); err != nil {
		return nil, fmt.Errorf("%s of the %s: %w", strings.Join(path, "."), kind, err)
	}
	return spec, nil
}

// differences returns the changes that need another machine, or "".
func differences(current, desired machineSpecs) string {
	changes := append(inplace.Machine(current.infra, desired.infra), inplace.Config(current.config, desired.config)...)
	changes = append(changes, inplace.Version(current.machine.Version, desired.machine.Version), inplace.FailureDomain(current.machine.FailureDomain, desired.machine.FailureDomain))
	var out []string
	for _, change := range inplace.Blocking(changes) {
		out = append(out, change.String())
	}
	return strings.Join(out, "; ")
}

// versionPatch sets the version of a machine.
func versionPatch(version string, path ...string) hooks.Patch {
	return mergePatch(map[string]any{"version": version}, path)
}

// specPatch changes one spec to another.
func specPatch(current, desired any, path ...string) (hooks.Patch, error) {
	from, err := json.Marshal(current)
	if err != nil {
		return hooks.Patch{}, err
	}
	to, err := json.Marshal(desired)
	if err != nil {
		return hooks.Patch{}, err
	}
	change, err := jsonpatch.CreateMergePatch(from, to)
	if err != nil || string(change) == "{}" {
		return hooks.Patch{}, err
	}
	return mergePatch(json.RawMessage(change), path), nil
}

func mergePatch(content any, path []string) hooks.Patch {
	for i := len(path) - 1; i >= 0; i-- {
		content = map[string]any{path[i]: content}
	}
	data, _ := json.Marshal(content) //nolint:errchkjson // plain data
	return hooks.Patch{PatchType: hooks.JSONMergePatchType, Patch: data}
}
