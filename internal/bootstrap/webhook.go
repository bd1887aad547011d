package bootstrap

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"regexp"
	"strings"
	"unicode"

	metav1validation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	kubeletapis "k8s.io/kubelet/pkg/apis"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	"capstan.dev/capstan/internal/bootstrap/render"
	"capstan.dev/capstan/internal/conversion"
	"capstan.dev/capstan/internal/inplace"
	"capstan.dev/capstan/internal/node/nodeconfig"
	"capstan.dev/capstan/internal/reconciling"
	"capstan.dev/capstan/internal/stored"
)

// SetupWebhooksWithManager adds the webhooks of the bootstrap provider. They check rules that CEL in the CRDs cannot
// express.
func SetupWebhooksWithManager(mgr ctrl.Manager) error {
	if err := ctrl.NewWebhookManagedBy(mgr, &bootstrapv1.CapstanConfig{}).WithConverter(conversion.CapstanConfig).
		WithValidator(webhook{}).Complete(); err != nil {
		return err
	}
	return ctrl.NewWebhookManagedBy(mgr, &bootstrapv1.CapstanConfigTemplate{}).WithConverter(conversion.CapstanConfigTemplate).
		WithValidator(templateWebhook{}).Complete()
}

// +kubebuilder:webhook:path=/validate-bootstrap-capstan-dev-v1beta2-capstanconfig,mutating=false,failurePolicy=fail,sideEffects=None,matchPolicy=Equivalent,groups=bootstrap.capstan.dev,resources=capstanconfigs,verbs=create;update,versions=v1beta2,name=validation.capstanconfig.bootstrap.capstan.dev,admissionReviewVersions=v1

// webhook validates CapstanConfigs.
type webhook struct{}

// ValidateCreate checks a new config.
func (webhook) ValidateCreate(_ context.Context, obj *bootstrapv1.CapstanConfig) (admission.Warnings, error) {
	warnings, errs := ValidateSpec(obj.Spec, field.NewPath("spec"))
	return warnings, reconciling.Invalid(bootstrapv1.GroupVersion.WithKind(bootstrapv1.ConfigKind), obj.Name, errs)
}

// ValidateUpdate checks a changed config. A change has no effect on existing data. While an update in place is in progress, it
// allows only changes that can be made in place (ALL-17).
func (webhook) ValidateUpdate(_ context.Context, before, obj *bootstrapv1.CapstanConfig) (admission.Warnings, error) {
	if !obj.DeletionTimestamp.IsZero() {
		return nil, nil
	}
	if stored.Equal(before.Spec, obj.Spec) {
		return nil, nil // An object of a former version can violate rules of this one. Its metadata must still be writable.
	}
	path := field.NewPath("spec")
	warnings, errs := ValidateSpec(obj.Spec, path)
	if _, updating := obj.Annotations[clusterv1.UpdateInProgressAnnotation]; updating {
		for _, change := range inplace.Blocking(inplace.Config(before.Spec, obj.Spec)) {
			errs = append(errs, field.Forbidden(path, change.String()))
		}
	}
	return warnings, reconciling.Invalid(bootstrapv1.GroupVersion.WithKind(bootstrapv1.ConfigKind), obj.Name, errs)
}

// ValidateDelete allows every deletion.
func (webhook) ValidateDelete(context.Context, *bootstrapv1.CapstanConfig) (admission.Warnings, error) {
	return nil, nil
}

// ValidateSpec checks the spec of a config, also as part of other objects. It warns about suspect settings with which a machine starts: a
// refusal would stop the move of existing clusters.
func ValidateSpec(spec bootstrapv1.CapstanConfigSpec, path *field.Path) (admission.Warnings, field.ErrorList) {
	warnings, errs := validateFiles(spec.Files, path.Child("files"))
	labels := path.Child("node", "labels")
	errs = append(errs, metav1validation.ValidateLabels(spec.Node.Labels, labels)...)
	for name := range spec.Node.Labels {
		if forbiddenNodeLabel(name) {
			errs = append(errs, field.Forbidden(labels.Key(name), "Kubernetes refuses this label from a kubelet: set it on the Machine, and Cluster API copies it to the Node"))
		}
	}
	apiServer := path.Child("cluster", "apiServer")
	errs = append(errs, validateDocument(spec.Cluster.APIServer.AuditPolicy, "audit.k8s.io", "Policy", apiServer.Child("auditPolicy"))...)
	errs = append(errs, validateDocument(spec.Cluster.APIServer.Authentication, "apiserver.config.k8s.io", "AuthenticationConfiguration", apiServer.Child("authentication"))...)
	warnings = append(warnings, warnAboutNames(spec.Cluster.APIServer.CertSANs, apiServer.Child("certSANs"))...)
	errs = append(errs, validateArguments(spec.Kubelet.ExtraArgs, path.Child("kubelet"), nodeconfig.CheckKubeletArg)...)
	errs = append(errs, validateArguments(spec.Cluster.APIServer.ExtraArgs, apiServer, nodeconfig.CheckAPIServerArg)...)
	errs = append(errs, validateArguments(spec.Cluster.Etcd.ExtraArgs, path.Child("cluster", "etcd"), nodeconfig.CheckEtcdArg)...)
	for i, v := range spec.Cluster.Etcd.Env {
		errs = append(errs, invalid(path.Child("cluster", "etcd", "env").Index(i), nodeconfig.CheckEtcdVariable(nodeconfig.Arg{Name: v.Name, Value: v.Value}))...)
	}
	return warnings, append(errs, validateSettings(spec, path)...)
}

// validateFiles checks paths and inline content. The content of a Secret or ConfigMap is checked later, and reported by a condition.
func validateFiles(files []bootstrapv1.File, path *field.Path) (warnings admission.Warnings, errs field.ErrorList) {
	left := int64(render.MaxUnpacked)
	for i, f := range files {
		errs = append(errs, invalid(path.Index(i), render.CheckFile(f, &left))...)
		if strings.ContainsFunc(f.Path, unicode.IsControl) {
			warnings = append(warnings, path.Index(i).Child("path").String()+" contains a control character")
		}
	}
	if left < 0 {
		warnings = append(warnings, fmt.Sprintf("%s: only the first %d MiB of the unpacked content were checked", path, render.MaxUnpacked>>20))
	}
	return warnings, errs
}

var dnsName = regexp.MustCompile(`^([*][.])?[a-zA-Z0-9_]([-a-zA-Z0-9_]*[a-zA-Z0-9_])?([.][a-zA-Z0-9_]([-a-zA-Z0-9_]*[a-zA-Z0-9_])?)*$`)

// warnAboutNames warns about names in a certificate with which no client connects.
func warnAboutNames(names []string, path *field.Path) (warnings admission.Warnings) {
	for i, name := range names {
		if net.ParseIP(name) == nil && !dnsName.MatchString(name) {
			warnings = append(warnings, path.Index(i).String()+" has no effect: expected a DNS name or an IP address, without a scheme and a port, for example api.example.com")
		}
	}
	return warnings
}

// validateArguments checks the arguments of a component with the function that the machine uses.
func validateArguments(arguments []bootstrapv1.Arg, component *field.Path, check func(nodeconfig.Arg) error) field.ErrorList {
	var errs field.ErrorList
	for i, a := range arguments {
		errs = append(errs, invalid(component.Child("extraArgs").Index(i), check(nodeconfig.Arg{Name: a.Name, Value: a.Value}))...)
	}
	return errs
}

// invalid returns the error of a field without its value, which can be a secret; nil without an error.
func invalid(at *field.Path, err error) field.ErrorList {
	if err == nil {
		return nil
	}
	return field.ErrorList{field.Invalid(at, field.OmitValueType{}, err.Error())}
}

// validateSettings checks the settings of components with the functions that the machine uses. Values that depend on the networks
// of the Cluster are checked later, and reported by a condition.
func validateSettings(spec bootstrapv1.CapstanConfigSpec, path *field.Path) field.ErrorList {
	var errs field.ErrorList
	check := func(at *field.Path, err error) {
		errs = append(errs, invalid(at, err)...)
	}
	patch := func(object runtime.RawExtension, at *field.Path, verify func(map[string]any) error) {
		if len(object.Raw) == 0 {
			return
		}
		var fields map[string]any
		if err := json.Unmarshal(object.Raw, &fields); err != nil {
			check(at, fmt.Errorf("expected an object: %w", err))
			return
		}
		check(at, verify(fields))
	}
	patch(spec.Kubelet.Configuration, path.Child("kubelet", "configuration"), nodeconfig.CheckKubelet)
	patch(spec.KubeProxy.Configuration, path.Child("kubeProxy", "configuration"), nodeconfig.CheckKubeProxy)
	for i, entry := range spec.Proxy.NoProxy {
		check(path.Child("proxy", "noProxy").Index(i), nodeconfig.CheckNoProxy(entry))
	}
	coreDNS := path.Child("cluster", "coreDNS")
	servers := func(servers []string, at *field.Path) {
		for i, server := range servers {
			_, err := nodeconfig.ParseDNSServer(server)
			check(at.Index(i), err)
		}
	}
	servers(spec.Cluster.CoreDNS.Upstreams, coreDNS.Child("upstreams"))
	for i, stub := range spec.Cluster.CoreDNS.StubDomains {
		servers(stub.Servers, coreDNS.Child("stubDomains").Index(i).Child("servers"))
	}
	for i, r := range spec.Registries {
		if r.CA.Content != "" {
			check(path.Child("registries").Index(i).Child("ca", "content"), render.CheckAuthorities([]byte(r.CA.Content)))
		}
	}
	return errs
}

// forbiddenNodeLabel reports whether the kubelet or the admission plugin NodeRestriction refuses a label.
func forbiddenNodeLabel(name string) bool {
	namespace, _, _ := strings.Cut(name, "/")
	reserved := false
	for _, domain := range []string{"kubernetes.io", "k8s.io"} {
		reserved = reserved || namespace == domain || strings.HasSuffix(namespace, "."+domain)
	}
	return reserved && !kubeletapis.IsKubeletLabel(name)
}

// validateDocument checks the type of an inline document.
func validateDocument(document bootstrapv1.Document, group, kind string, path *field.Path) field.ErrorList {
	if document.Content == "" {
		return nil
	}
	var meta struct{ APIVersion, Kind string }
	if err := render.Document([]byte(document.Content), &meta); err != nil || !strings.HasPrefix(meta.APIVersion, group+"/") || meta.Kind != kind {
		return field.ErrorList{field.Invalid(path.Child("content"), field.OmitValueType{}, fmt.Sprintf("must be a YAML document with an apiVersion of %s and the kind %s", group, kind))}
	}
	return nil
}

// +kubebuilder:webhook:path=/validate-bootstrap-capstan-dev-v1beta2-capstanconfigtemplate,mutating=false,failurePolicy=fail,sideEffects=None,matchPolicy=Equivalent,groups=bootstrap.capstan.dev,resources=capstanconfigtemplates,verbs=create;update,versions=v1beta2,name=validation.capstanconfigtemplate.bootstrap.capstan.dev,admissionReviewVersions=v1

// templateWebhook validates CapstanConfigTemplates, which cannot be changed (ALL-10).
type templateWebhook struct{}

// ValidateCreate checks a new template.
func (templateWebhook) ValidateCreate(_ context.Context, obj *bootstrapv1.CapstanConfigTemplate) (admission.Warnings, error) {
	path := field.NewPath("spec", "template", "spec")
	warnings, errs := ValidateSpec(obj.Spec.Template.Spec, path)
	errs = append(errs, obj.Spec.Template.ObjectMeta.Validate(field.NewPath("spec", "template", "metadata"))...)
	if obj.Spec.Template.Spec.Node.Name != "" {
		errs = append(errs, field.Forbidden(path.Child("node", "name"), "a name cannot be set in a template: every machine needs its own name"))
	}
	return warnings, reconciling.Invalid(bootstrapv1.GroupVersion.WithKind(bootstrapv1.ConfigTemplateKind), obj.Name, errs)
}

// ValidateUpdate refuses all changes except dry runs of the topology controller, which test the effect of a changed
// ClusterClass.
func (templateWebhook) ValidateUpdate(ctx context.Context, before, obj *bootstrapv1.CapstanConfigTemplate) (admission.Warnings, error) {
	return nil, reconciling.UnchangedTemplate(ctx, bootstrapv1.GroupVersion.WithKind(bootstrapv1.ConfigTemplateKind), obj, field.NewPath("spec", "template", "spec"),
		stored.Equal(before.Spec.Template.Spec, obj.Spec.Template.Spec))
}

// ValidateDelete allows every deletion.
func (templateWebhook) ValidateDelete(context.Context, *bootstrapv1.CapstanConfigTemplate) (admission.Warnings, error) {
	return nil, nil
}
