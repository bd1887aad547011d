// Package webhook validates rules that CEL in the CRDs cannot express: templates may change only in a dry run of the topology controller,
// networks depend on other objects, CapstanMachines change by updates in place only, and the labels and annotations of CapstanMachinePools
// have no bound in number.
//
// Layer: reconciler. Allowed imports: api, library, contract.
package webhook

import (
	"context"
	"errors"
	"fmt"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/conversion"
	"capstan.dev/capstan/internal/infrastructure/network"
	"capstan.dev/capstan/internal/reconciling"
)

// +kubebuilder:webhook:verbs=create;update,path=/validate-infrastructure-capstan-dev-v1beta2-capstancluster,mutating=false,failurePolicy=fail,matchPolicy=Equivalent,groups=infrastructure.capstan.dev,resources=capstanclusters,versions=v1beta2,name=validation.capstancluster.infrastructure.capstan.dev,sideEffects=None,admissionReviewVersions=v1
// +kubebuilder:webhook:verbs=create;update,path=/validate-infrastructure-capstan-dev-v1beta2-capstanclustertemplate,mutating=false,failurePolicy=fail,matchPolicy=Equivalent,groups=infrastructure.capstan.dev,resources=capstanclustertemplates,versions=v1beta2,name=validation.capstanclustertemplate.infrastructure.capstan.dev,sideEffects=None,admissionReviewVersions=v1
// +kubebuilder:webhook:verbs=create;update,path=/validate-infrastructure-capstan-dev-v1beta2-capstanmachinetemplate,mutating=false,failurePolicy=fail,matchPolicy=Equivalent,groups=infrastructure.capstan.dev,resources=capstanmachinetemplates,versions=v1beta2,name=validation.capstanmachinetemplate.infrastructure.capstan.dev,sideEffects=None,admissionReviewVersions=v1

// SetupWithManager adds the webhooks, those of the conversion to v1beta1 included. They serve all namespaces, although
// the manager's cache may have only one. They therefore read from the API server: one Cluster for each new network.
func SetupWithManager(mgr ctrl.Manager) error {
	return errors.Join(
		ctrl.NewWebhookManagedBy(mgr, &infrav1.CapstanCluster{}).WithConverter(conversion.CapstanCluster).
			WithDefaulter(&Cluster{}).WithValidator(&Cluster{Client: mgr.GetAPIReader()}).Complete(),
		ctrl.NewWebhookManagedBy(mgr, &infrav1.CapstanClusterTemplate{}).WithConverter(conversion.CapstanClusterTemplate).
			WithValidator(ClusterTemplate{}).Complete(),
		ctrl.NewWebhookManagedBy(mgr, &infrav1.CapstanMachine{}).WithConverter(conversion.CapstanMachine).
			WithValidator(Machine{}).Complete(),
		ctrl.NewWebhookManagedBy(mgr, &infrav1.CapstanMachineTemplate{}).WithConverter(conversion.CapstanMachineTemplate).
			WithValidator(MachineTemplate{}).Complete(),
		setupMachinePools(mgr),
	)
}

// Cluster validates the networks of CapstanClusters.
type Cluster struct{ Client client.Reader }

var _ admission.Validator[*infrav1.CapstanCluster] = &Cluster{}

// ValidateCreate implements admission.Validator.
func (v *Cluster) ValidateCreate(ctx context.Context, c *infrav1.CapstanCluster) (admission.Warnings, error) {
	return nil, v.validate(ctx, c)
}

// ValidateUpdate implements admission.Validator.
func (v *Cluster) ValidateUpdate(ctx context.Context, before, c *infrav1.CapstanCluster) (admission.Warnings, error) {
	// An invalid object must not block its own deletion.
	if !c.DeletionTimestamp.IsZero() {
		return nil, nil
	}
	was, is := before.Spec.Network, c.Spec.Network
	if was == is {
		return nil, nil
	}
	if before.AllowsBoot() {
		return nil, reconciling.Invalid(infrav1.GroupVersion.WithKind(infrav1.ClusterKind), c.Name, field.ErrorList{field.Forbidden(field.NewPath("spec", "network"),
			fmt.Sprintf("cannot be changed from %s: machines and certificates have addresses of it", was))})
	}
	return nil, v.validate(ctx, c)
}

// ValidateDelete implements admission.Validator.
func (v *Cluster) ValidateDelete(context.Context, *infrav1.CapstanCluster) (admission.Warnings, error) {
	return nil, nil
}

// validate compares the machine network with the Cluster's networks if the Cluster exists. Otherwise the reconciler reports the
// same problem later in the condition NetworkReady.
func (v *Cluster) validate(ctx context.Context, c *infrav1.CapstanCluster) error {
	cluster := &clusterv1.Cluster{}
	if name := clusterName(c); name != "" {
		if err := v.Client.Get(ctx, client.ObjectKey{Namespace: c.Namespace, Name: name}, cluster); client.IgnoreNotFound(err) != nil {
			return apierrors.NewInternalError(err)
		}
	}
	n := cluster.Spec.ClusterNetwork
	err := network.Validate(c.Spec.Network, n.Pods.CIDRBlocks, n.Services.CIDRBlocks)
	if err == nil {
		err = network.CheckEndpoint(c.Spec.Network, c.Spec.ControlPlaneEndpoint.Host, c.Spec.LoadBalancer.BindAddress)
	}
	if err != nil {
		return reconciling.Invalid(infrav1.GroupVersion.WithKind(infrav1.ClusterKind), c.Name, field.ErrorList{field.Invalid(field.NewPath("spec", "network"), c.Spec.Network.String(), err.Error())})
	}
	return nil
}

// clusterName is the owner's, else the label's.
func clusterName(c *infrav1.CapstanCluster) string {
	for _, ref := range c.OwnerReferences {
		if gv, err := schema.ParseGroupVersion(ref.APIVersion); err == nil && gv.Group == clusterv1.GroupVersion.Group && ref.Kind == "Cluster" {
			return ref.Name
		}
	}
	return c.Labels[clusterv1.ClusterNameLabel]
}

// ClusterTemplate keeps CapstanClusterTemplates as they are (ALL-10).
type ClusterTemplate struct{}

var _ admission.Validator[*infrav1.CapstanClusterTemplate] = ClusterTemplate{}

// ValidateCreate implements admission.Validator.
func (ClusterTemplate) ValidateCreate(_ context.Context, t *infrav1.CapstanClusterTemplate) (admission.Warnings, error) {
	spec := t.Spec.Template.Spec
	var errs field.ErrorList
	path := field.NewPath("spec", "template", "spec")
	if spec.ID != "" {
		errs = append(errs, field.Forbidden(path.Child("id"), "each cluster gets an id of its own"))
	}
	if spec.LoadBalancer.Address != "" {
		errs = append(errs, field.Forbidden(path.Child("loadBalancer", "address"), "each cluster gets an address of its own"))
	}
	if spec.LoadBalancer.HostID != "" {
		errs = append(errs, field.Forbidden(path.Child("loadBalancer", "hostID"), "it is written by the controller"))
	}
	if len(spec.LoadBalancerHosts) > 0 {
		errs = append(errs, field.Forbidden(path.Child("loadBalancerHosts"), "they are written by the controller"))
	}
	if spec.Network.Overlay != (infrav1.NetworkOverlay{}) {
		errs = append(errs, field.Forbidden(path.Child("network", "overlay"), "each cluster gets an overlay of its own"))
	}
	err := network.Validate(spec.Network, nil, nil)
	if err == nil {
		err = network.CheckEndpoint(spec.Network, spec.LoadBalancer.BindAddress)
	}
	if err != nil {
		errs = append(errs, field.Invalid(path.Child("network"), spec.Network.String(), err.Error()))
	}
	errs = append(errs, t.Spec.Template.ObjectMeta.Validate(field.NewPath("spec", "template", "metadata"))...)
	return nil, reconciling.Invalid(infrav1.GroupVersion.WithKind(infrav1.ClusterTemplateKind), t.Name, errs)
}

// ValidateUpdate implements admission.Validator.
func (ClusterTemplate) ValidateUpdate(ctx context.Context, before, t *infrav1.CapstanClusterTemplate) (admission.Warnings, error) {
	return nil, reconciling.UnchangedTemplate(ctx, infrav1.GroupVersion.WithKind(infrav1.ClusterTemplateKind), t, field.NewPath("spec"), equality.Semantic.DeepEqual(before.Spec, t.Spec))
}

// ValidateDelete implements admission.Validator.
func (ClusterTemplate) ValidateDelete(context.Context, *infrav1.CapstanClusterTemplate) (admission.Warnings, error) {
	return nil, nil
}

// MachineTemplate keeps CapstanMachineTemplates as they are (ALL-10).
type MachineTemplate struct{}

var _ admission.Validator[*infrav1.CapstanMachineTemplate] = MachineTemplate{}

// ValidateCreate implements admission.Validator.
func (MachineTemplate) ValidateCreate(_ context.Context, t *infrav1.CapstanMachineTemplate) (admission.Warnings, error) {
	spec := t.Spec.Template.Spec
	var errs field.ErrorList
	path := field.NewPath("spec", "template", "spec")
	const own = "each machine gets its own"
	if spec.ID != "" {
		errs = append(errs, field.Forbidden(path.Child("id"), own))
	}
	if spec.ProviderID != "" {
		errs = append(errs, field.Forbidden(path.Child("providerID"), own))
	}
	if spec.HostID != "" {
		errs = append(errs, field.Forbidden(path.Child("hostID"), own))
	}
	if len(spec.Network.Addresses) > 0 {
		errs = append(errs, field.Forbidden(path.Child("network", "addresses"), own))
	}
	errs = append(errs, t.Spec.Template.ObjectMeta.Validate(field.NewPath("spec", "template", "metadata"))...)
	return nil, reconciling.Invalid(infrav1.GroupVersion.WithKind(infrav1.MachineTemplateKind), t.Name, errs)
}

// ValidateUpdate implements admission.Validator.
func (MachineTemplate) ValidateUpdate(ctx context.Context, before, t *infrav1.CapstanMachineTemplate) (admission.Warnings, error) {
	return nil, reconciling.UnchangedTemplate(ctx, infrav1.GroupVersion.WithKind(infrav1.MachineTemplateKind), t, field.NewPath("spec"), equality.Semantic.DeepEqual(before.Spec, t.Spec))
}

// ValidateDelete implements admission.Validator.
func (MachineTemplate) ValidateDelete(context.Context, *infrav1.CapstanMachineTemplate) (admission.Warnings, error) {
	return nil, nil
}
