package controlplane

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/blang/semver/v4"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/bootstrap"
	"capstan.dev/capstan/internal/bootstrap/render"
	"capstan.dev/capstan/internal/controlplane/model"
	"capstan.dev/capstan/internal/conversion"
	"capstan.dev/capstan/internal/manager/replace"
	"capstan.dev/capstan/internal/reconciling"
	"capstan.dev/capstan/internal/stored"
)

// SetupWebhooksWithManager adds the webhooks of the control plane provider. They check rules that CEL in the CRDs
// cannot express.
func SetupWebhooksWithManager(mgr ctrl.Manager) error {
	if err := ctrl.NewWebhookManagedBy(mgr, &controlplanev1.CapstanControlPlane{}).
		WithConverter(conversion.CapstanControlPlane(versionOf(mgr.GetClient()))).
		WithDefaulter(webhook{}).WithValidator(webhook{}).Complete(); err != nil {
		return err
	}
	if err := ctrl.NewWebhookManagedBy(mgr, &controlplanev1.CapstanControlPlaneTemplate{}).
		WithConverter(conversion.CapstanControlPlaneTemplate).
		WithValidator(templateWebhook{}).Complete(); err != nil {
		return err
	}
	return setupKubeconfigWebhook(mgr)
}

// +kubebuilder:webhook:path=/mutate-controlplane-capstan-dev-v1beta2-capstancontrolplane,mutating=true,failurePolicy=fail,sideEffects=None,matchPolicy=Equivalent,groups=controlplane.capstan.dev,resources=capstancontrolplanes,verbs=create;update,versions=v1beta2,name=default.capstancontrolplane.controlplane.capstan.dev,admissionReviewVersions=v1
// +kubebuilder:webhook:path=/validate-controlplane-capstan-dev-v1beta2-capstancontrolplane,mutating=false,failurePolicy=fail,sideEffects=None,matchPolicy=Equivalent,groups=controlplane.capstan.dev,resources=capstancontrolplanes,verbs=create;update,versions=v1beta2,name=validation.capstancontrolplane.controlplane.capstan.dev,admissionReviewVersions=v1

// webhook defaults and validates CapstanControlPlanes.
type webhook struct{}

// Default sets the defaults: one replica, and a rolling update with one additional machine (CP-03). It adds a missing v to the version
// (CP-05), changes no other value, and restores the fields that a replacement from a manifest removes.
func (webhook) Default(ctx context.Context, obj *controlplanev1.CapstanControlPlane) error {
	spec, before := &obj.Spec, &controlplanev1.CapstanControlPlane{}
	if replaced, err := replace.Restore(ctx, obj, before, controlplanev1.ControlPlaneFinalizer); err != nil {
		return apierrors.NewBadRequest(err.Error())
	} else if replaced {
		replace.Field(&spec.Replicas, before.Spec.Replicas) // An autoscaler may have set it.
	}
	if spec.Replicas == nil {
		spec.Replicas = ptr.To[int32](1)
	}
	spec.Version = model.WantedVersion(obj)
	strategy := &spec.Rollout.Strategy
	if strategy.Type == "" {
		strategy.Type = controlplanev1.RollingUpdateStrategyType
	}
	if strategy.RollingUpdate.MaxSurge == nil {
		strategy.RollingUpdate.MaxSurge = ptr.To(intstr.FromInt32(1))
	}
	return nil
}

// ValidateCreate checks a new control plane.
func (webhook) ValidateCreate(_ context.Context, obj *controlplanev1.CapstanControlPlane) (admission.Warnings, error) {
	warnings, errs := validateSpec(obj)
	return warnings, reconciling.Invalid(controlplanev1.GroupVersion.WithKind(controlplanev1.ControlPlaneKind), obj.Name, errs)
}

// ValidateUpdate checks a changed control plane. One that is being deleted may always be changed, so that its deletion can
// finish.
func (webhook) ValidateUpdate(_ context.Context, before, obj *controlplanev1.CapstanControlPlane) (admission.Warnings, error) {
	if !obj.DeletionTimestamp.IsZero() {
		return nil, nil
	}
	was := before.Spec.DeepCopy()
	was.Version = model.WantedVersion(before) // Former versions did not add the v.
	if stored.Equal(*was, obj.Spec) {
		return nil, nil // An object of a former version can violate rules of this one. Its annotations must still be writable.
	}
	warnings, errs := validateSpec(obj)
	return warnings, reconciling.Invalid(controlplanev1.GroupVersion.WithKind(controlplanev1.ControlPlaneKind), obj.Name, append(errs, validateChange(before, obj)...))
}

// ValidateDelete allows every deletion.
func (webhook) ValidateDelete(context.Context, *controlplanev1.CapstanControlPlane) (admission.Warnings, error) {
	return nil, nil
}

// warnAboutExpiry warns about certificatesExpiryDays with an external etcd: only etcd members report the expiry of the certificates of
// their machines. A refusal would stop the move of existing clusters.
func warnAboutExpiry(rollout controlplanev1.RolloutSpec, cluster bootstrapv1.ClusterConfiguration, spec *field.Path) admission.Warnings {
	if rollout.Before.CertificatesExpiryDays == 0 || len(cluster.Etcd.External.Endpoints) == 0 {
		return nil
	}
	return admission.Warnings{spec.Child("rollout", "before", "certificatesExpiryDays").String() + " has no effect with an external etcd"}
}

func validateSpec(obj *controlplanev1.CapstanControlPlane) (admission.Warnings, field.ErrorList) {
	spec := field.NewPath("spec")
	warnings, errs := bootstrap.ValidateSpec(obj.Spec.Config, spec.Child("config"))
	warnings = append(warnings, warnAboutExpiry(obj.Spec.Rollout, obj.Spec.Config.Cluster, spec)...)
	if _, err := render.Version(obj.Spec.Version); err != nil {
		errs = append(errs, field.Invalid(spec.Child("version"), obj.Spec.Version, err.Error()))
	}
	errs = append(errs, validateNaming(obj.Spec.MachineNaming, obj.Name, spec)...)
	errs = append(errs, validateBackup(obj.Spec.Backup, spec)...)
	errs = append(errs, obj.Spec.MachineTemplate.ObjectMeta.Validate(spec.Child("machineTemplate", "metadata"))...)
	return warnings, append(errs, validateManifests(obj.Spec.Manifests, spec)...)
}

func validateNaming(naming controlplanev1.MachineNamingSpec, name string, path *field.Path) field.ErrorList {
	if naming.Template == "" {
		return nil
	}
	path = path.Child("machineNaming", "template")
	if _, err := renderName(naming.Template, "cluster", name, "abcde"); err != nil {
		return field.ErrorList{field.Invalid(path, naming.Template, err.Error())}
	}
	if template, err := parseNaming(naming.Template); err != nil || !template.Uses(randomField) {
		return field.ErrorList{field.Invalid(path, naming.Template, "must contain {{ .random }}, so that names are unique")}
	}
	return nil
}

func validateManifests(manifests []controlplanev1.Manifest, path *field.Path) field.ErrorList {
	var errs field.ErrorList
	for i, m := range manifests {
		if m.Content == "" {
			continue
		}
		if _, err := parseManifest([]byte(m.Content)); err != nil {
			errs = append(errs, field.Invalid(path.Child("manifests").Index(i).Child("content"), field.OmitValueType{}, err.Error()))
		}
	}
	return errs
}

func validateBackup(backup controlplanev1.BackupSpec, path *field.Path) field.ErrorList {
	if _, err := model.ParseSchedule(backup.Schedule); err != nil {
		return field.ErrorList{field.Invalid(path.Child("backup", "schedule"), backup.Schedule, err.Error())}
	}
	return nil
}

// validateChange checks the changed fields and their new values.
func validateChange(before, obj *controlplanev1.CapstanControlPlane) field.ErrorList {
	spec := field.NewPath("spec")
	errs := validateVersionChange(before.Spec.Version, obj.Spec.Version, spec.Child("version"))
	etcd := spec.Child("config", "cluster", "etcd", "external")
	if (len(before.Spec.Config.Cluster.Etcd.External.Endpoints) > 0) != (len(obj.Spec.Config.Cluster.Etcd.External.Endpoints) > 0) {
		errs = append(errs, field.Forbidden(etcd, "etcd cannot be moved into or out of the machines: the cluster's data would stay behind"))
	}
	if (&model.ControlPlane{Object: before}).Initialized() { // A move or a restore of the management cluster loses the status.
		cluster := spec.Child("config", "cluster")
		errs = append(errs, validateClusterChange(before.Spec.Config.Cluster, obj.Spec.Config.Cluster, cluster)...)
		errs = append(errs, validateEncryptionChange(before.Spec.Config.Cluster.Encryption, obj.Spec.Config.Cluster.Encryption, staysAlone(before, obj), cluster.Child("encryption"))...)
	}
	// In the middle of an upgrade some Machines still have the former version.
	if len(errs) == 0 && before.Spec.Version != obj.Spec.Version && len(before.Status.Versions) > 0 {
		errs = append(errs, validateVersionChange(before.Status.Versions[0].Version, obj.Spec.Version, spec.Child("version"))...)
	}
	return errs
}

// validateClusterChange refuses changes that a rollout cannot apply to the whole cluster: some machines would have them and
// others not.
func validateClusterChange(before, after bootstrapv1.ClusterConfiguration, path *field.Path) field.ErrorList {
	var errs field.ErrorList
	if cmp.Or(before.PodNetwork, bootstrapv1.PodNetworkRoutes) != cmp.Or(after.PodNetwork, bootstrapv1.PodNetworkRoutes) {
		errs = append(errs, field.Forbidden(path.Child("podNetwork"), "the pod network of an existing cluster cannot change, because pods of machines with different pod networks cannot reach each other: create a new cluster"))
	}
	if cmp.Or(before.KubeProxy, bootstrapv1.KubeProxyNFTables) != cmp.Or(after.KubeProxy, bootstrapv1.KubeProxyNFTables) {
		errs = append(errs, field.Forbidden(path.Child("kubeProxy"), "the proxy of an existing cluster cannot change, because workers keep theirs: create a new cluster"))
	}
	return errs
}

// staysAlone reports whether a change of the API server reaches the whole cluster at once: there is one machine, and it is updated
// in place. In every other rollout, API servers before and after the change run at the same time.
func staysAlone(before, after *controlplanev1.CapstanControlPlane) bool {
	one := func(replicas *int32) bool { return ptr.Deref(replicas, 1) == 1 }
	return one(before.Spec.Replicas) && one(after.Spec.Replicas) && one(before.Status.Replicas) && after.Spec.Rollout.Strategy.InPlace == controlplanev1.InPlaceOnly
}

// validateEncryptionChange allows any change to a configuration of the user, and more encrypted resources if no API server runs
// that could not read them. Other changes would make stored data unreadable.
func validateEncryptionChange(before, after bootstrapv1.EncryptionSpec, alone bool, path *field.Path) field.ErrorList {
	const why = "the existing data in etcd would become unreadable: set an encryption.configuration that reads both; the current key is in the Secret <cluster>-encryption"
	if after.Configuration.Secret.Name != "" {
		return nil
	}
	was, is := model.EncryptionMode(before), model.EncryptionMode(after)
	if before.Configuration.Secret.Name != "" || was != is && was != bootstrapv1.EncryptionNone {
		return field.ErrorList{field.Forbidden(path, why)}
	}
	had, has := model.EncryptedResources(before), model.EncryptedResources(after)
	for _, resource := range had {
		if !slices.Contains(has, resource) {
			return field.ErrorList{field.Forbidden(path.Child("resources"), fmt.Sprintf("%s are encrypted, and must stay among the resources: %s", resource, why))}
		}
	}
	for _, resource := range has {
		if !slices.Contains(had, resource) && !alone {
			return field.ErrorList{field.Forbidden(path, fmt.Sprintf("API servers with the former encryption setting cannot read the %s that the new setting encrypts: %s", resource, model.TwoStepsOrAlone))}
		}
	}
	return nil
}

// validateVersionChange allows one minor version up at a time, and none back, as Kubernetes does.
func validateVersionChange(before, after string, path *field.Path) field.ErrorList {
	from, errFrom := semver.ParseTolerant(before)
	to, errTo := semver.ParseTolerant(after)
	switch {
	case errFrom != nil || errTo != nil || from.EQ(to):
		return nil
	case from.Major != to.Major || to.Minor > from.Minor+1:
		return field.ErrorList{field.Forbidden(path, fmt.Sprintf("Kubernetes goes up one minor version at a time: from %s to a v%d.%d first", before, from.Major, from.Minor+1))}
	case to.Minor < from.Minor:
		return field.ErrorList{field.Forbidden(path, fmt.Sprintf("Kubernetes cannot go back from %s to %s", before, after))}
	}
	return nil
}

// +kubebuilder:webhook:path=/validate-controlplane-capstan-dev-v1beta2-capstancontrolplanetemplate,mutating=false,failurePolicy=fail,sideEffects=None,matchPolicy=Equivalent,groups=controlplane.capstan.dev,resources=capstancontrolplanetemplates,verbs=create;update,versions=v1beta2,name=validation.capstancontrolplanetemplate.controlplane.capstan.dev,admissionReviewVersions=v1

// templateWebhook validates CapstanControlPlaneTemplates, which cannot be changed (ALL-10).
type templateWebhook struct{}

// ValidateCreate checks a new template.
func (templateWebhook) ValidateCreate(_ context.Context, obj *controlplanev1.CapstanControlPlaneTemplate) (admission.Warnings, error) {
	template := field.NewPath("spec", "template")
	spec := template.Child("spec")
	warnings, errs := bootstrap.ValidateSpec(obj.Spec.Template.Spec.Config, spec.Child("config"))
	warnings = append(warnings, warnAboutExpiry(obj.Spec.Template.Spec.Rollout, obj.Spec.Template.Spec.Config.Cluster, spec)...)
	errs = append(errs, obj.Spec.Template.ObjectMeta.Validate(template.Child("metadata"))...)
	errs = append(errs, obj.Spec.Template.Spec.MachineTemplate.ObjectMeta.Validate(spec.Child("machineTemplate", "metadata"))...)
	errs = append(errs, validateNaming(obj.Spec.Template.Spec.MachineNaming, "control-plane", spec)...)
	errs = append(errs, validateBackup(obj.Spec.Template.Spec.Backup, spec)...)
	errs = append(errs, validateManifests(obj.Spec.Template.Spec.Manifests, spec)...)
	return warnings, reconciling.Invalid(controlplanev1.GroupVersion.WithKind(controlplanev1.ControlPlaneTemplateKind), obj.Name, errs)
}

// ValidateUpdate refuses changes, except in a dry run of the topology controller, which tries a change of a ClusterClass.
func (templateWebhook) ValidateUpdate(ctx context.Context, before, obj *controlplanev1.CapstanControlPlaneTemplate) (admission.Warnings, error) {
	return nil, reconciling.UnchangedTemplate(ctx, controlplanev1.GroupVersion.WithKind(controlplanev1.ControlPlaneTemplateKind), obj, field.NewPath("spec", "template", "spec"),
		stored.Equal(before.Spec.Template.Spec, obj.Spec.Template.Spec))
}

// ValidateDelete allows every deletion.
func (templateWebhook) ValidateDelete(context.Context, *controlplanev1.CapstanControlPlaneTemplate) (admission.Warnings, error) {
	return nil, nil
}
