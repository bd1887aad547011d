package extension

import (
	"context"
	"encoding/json"
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	hooks "sigs.k8s.io/cluster-api/api/runtime/hooks/v1alpha1"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/controller-runtime/pkg/client"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
)

// retrySeconds is the pause between two questions of core about an update that runs.
const retrySeconds = 5

// Updater answers the hook UpdateMachine.
type Updater struct{ Client client.Reader }

// UpdateMachine reports the state of the update that the CapstanMachine and the CapstanConfig of the request ask for.
func (u Updater) UpdateMachine(ctx context.Context, req *hooks.UpdateMachineRequest, resp *hooks.UpdateMachineResponse) {
	phase, message, err := u.state(ctx, req)
	resp.Status, resp.Message = hooks.ResponseStatusSuccess, message
	switch {
	case err != nil:
		resp.Status, resp.Message = hooks.ResponseStatusFailure, err.Error()
	case phase != infrav1.UpdateSucceeded:
		resp.RetryAfterSeconds = retrySeconds
	}
}

// state reads the update of the request's machine. An error is a failure of the update, or of the request.
func (u Updater) state(ctx context.Context, req *hooks.UpdateMachineRequest) (infrav1.UpdatePhase, string, error) {
	var infra, configRef metav1.PartialObjectMetadata
	if err := json.Unmarshal(req.Desired.InfrastructureMachine.Raw, &infra); err != nil {
		return "", "", fmt.Errorf("expected a CapstanMachine in the request: %w", err)
	}
	if err := json.Unmarshal(req.Desired.BootstrapConfig.Raw, &configRef); err != nil {
		return "", "", fmt.Errorf("expected a CapstanConfig in the request: %w", err)
	}
	if infra.GroupVersionKind().GroupKind() != infrav1.GroupVersion.WithKind(infrav1.MachineKind).GroupKind() ||
		configRef.GroupVersionKind().GroupKind() != bootstrapv1.GroupVersion.WithKind(bootstrapv1.ConfigKind).GroupKind() {
		return "", "", fmt.Errorf("expected a CapstanMachine and a CapstanConfig in the request, found a %s and a %s", infra.Kind, configRef.Kind)
	}
	machine, config := &infrav1.CapstanMachine{}, &bootstrapv1.CapstanConfig{}
	if err := u.Client.Get(ctx, client.ObjectKey{Namespace: infra.Namespace, Name: infra.Name}, machine); err != nil {
		return "", "", err
	}
	if err := u.Client.Get(ctx, client.ObjectKey{Namespace: configRef.Namespace, Name: configRef.Name}, config); err != nil {
		return "", "", err
	}
	return state(&req.Desired.Machine, machine, config)
}

// state decides about an update. A phase counts only if the update has the versions of all three objects: the reports of an
// earlier update remain in status.
func state(desired *clusterv1.Machine, machine *infrav1.CapstanMachine, config *bootstrapv1.CapstanConfig) (infrav1.UpdatePhase, string, error) {
	update, data := machine.Status.Update, config.Status.Update
	current := update.ObservedGeneration == machine.Generation && update.KubernetesVersion == desired.Spec.Version &&
		update.ConfigUpdateID == data.ID && data.ObservedGeneration == config.Generation && data.KubernetesVersion == desired.Spec.Version
	updating := conditions.Get(machine, infrav1.UpdatingCondition)
	if updating != nil && updating.ObservedGeneration == machine.Generation && updating.Reason == infrav1.UpdateRefusedReason {
		return "", "", fmt.Errorf("the update is refused: %s", updating.Message)
	}
	switch {
	case current && (update.Phase == infrav1.UpdateFailed || update.Phase == infrav1.UpdateRolledBack):
		return "", "", fmt.Errorf("the update ended without success (%s): %s", update.Phase, update.Message)
	case current && update.Phase == infrav1.UpdateSucceeded:
		return infrav1.UpdateSucceeded, "", nil
	case updating != nil && updating.Reason != infrav1.NotUpdatingReason:
		return infrav1.UpdateRunning, updating.Message, nil
	}
	return infrav1.UpdatePending, "Waiting for the controllers of CapstanMachines and CapstanConfigs", nil
}
