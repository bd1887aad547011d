package controlplane

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/cluster-api/util/secret"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	"capstan.dev/capstan/internal/kubeconfig"
)

// Cluster API core, clusterctl and other providers load the kubeconfigs of workload clusters with their own loaders.
// They read the files that a kubeconfig names, and some run its programs. The author of the Secret may have fewer
// rights than they have.
//
// config/control-plane/webhook/kubeconfig.yaml has match conditions: the API server asks only for Secrets with the suffix
// -kubeconfig whose content changes. All others are written whether the manager serves or not.

// kubeconfigWebhook refuses kubeconfigs of workload clusters that make their readers run programs or read files.
type kubeconfigWebhook struct{}

func setupKubeconfigWebhook(mgr ctrl.Manager) error {
	return ctrl.NewWebhookManagedBy(mgr, &corev1.Secret{}).WithValidator(kubeconfigWebhook{}).Complete()
}

// ValidateCreate checks a new Secret.
func (kubeconfigWebhook) ValidateCreate(_ context.Context, s *corev1.Secret) (admission.Warnings, error) {
	if err := kubeconfig.Harmless(s.Data[secret.KubeconfigDataName]); err != nil {
		return nil, fmt.Errorf("%w. Managers read this Secret with their own rights. An administrator can switch this check off for a namespace with the label %s=%s",
			err, KubeconfigCheckLabel, kubeconfigCheckDisabled)
	}
	return nil, nil
}

// ValidateUpdate checks a changed Secret.
func (w kubeconfigWebhook) ValidateUpdate(ctx context.Context, _, s *corev1.Secret) (admission.Warnings, error) {
	return w.ValidateCreate(ctx, s)
}

// ValidateDelete allows every deletion.
func (kubeconfigWebhook) ValidateDelete(context.Context, *corev1.Secret) (admission.Warnings, error) {
	return nil, nil
}

const (
	// KubeconfigCheckLabel of a Namespace: with the value "disabled", the kubeconfigs of its clusters are not checked.
	KubeconfigCheckLabel    = "controlplane.capstan.dev/kubeconfig-check"
	kubeconfigCheckDisabled = "disabled"
)
