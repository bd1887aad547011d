package embedded

import (
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/mod/semver"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	clusterctlv1 "sigs.k8s.io/cluster-api/cmd/clusterctl/api/v1alpha3"
	clusterctlconfig "sigs.k8s.io/cluster-api/cmd/clusterctl/config"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/manifest"
	"capstan.dev/capstan/internal/version"
)

// provider is a provider as in clusterctl's inventory, with its objects.
type provider struct {
	// name without the type, for example capstan.
	name      string
	kind      clusterctlv1.ProviderType
	namespace string
	version   string
	objects   []*unstructured.Unstructured
}

// label is the value of clusterctl's provider label, for example infrastructure-capstan.
func (p provider) label() string { return clusterctlv1.ManifestLabel(p.name, p.kind) }

// webhooks is the address of a manager's webhooks for the API server.
type webhooks struct {
	port     int
	caBundle []byte
}

// ourProviders maps the folders of config/ to providers.
var ourProviders = []struct {
	folder    string
	kind      clusterctlv1.ProviderType
	namespace string
}{
	{"infrastructure", clusterctlv1.InfrastructureProviderType, managerNamespace},
	{"control-plane", clusterctlv1.ControlPlaneProviderType, "capstan-control-plane-system"},
	{"bootstrap", clusterctlv1.BootstrapProviderType, "capstan-bootstrap-system"},
	{"ipam", clusterctlv1.IPAMProviderType, "capstan-ipam-system"},
}

// loadCore reads the components of Cluster API core, as clusterctl would install them.
func loadCore(a Assets) (provider, error) {
	entries, err := os.ReadDir(a.CoreComponents())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return provider{}, err
	}
	var versions []string
	for _, e := range entries {
		if semver.IsValid(e.Name()) {
			versions = append(versions, e.Name())
		}
	}
	if len(versions) == 0 {
		return provider{}, fmt.Errorf("expected the manifests of Cluster API below %s, found none: %s", a.CoreComponents(), version.InstallPrograms)
	}
	slices.SortFunc(versions, semver.Compare)
	version := versions[len(versions)-1]
	data, err := os.ReadFile(filepath.Join(a.CoreComponents(), version, "core-components.yaml"))
	if err != nil {
		return provider{}, err
	}
	objects, err := manifest.Parse(data)
	return provider{name: "cluster-api", kind: clusterctlv1.CoreProviderType, namespace: coreNamespace, version: version, objects: objects}, err
}

// loadOurs reads Capstan's providers from config/<provider>/{crd/bases,rbac,webhook}, and the registration of the API of machines.
// It omits a provider without CRDs.
func loadOurs(config fs.FS, version string) ([]provider, error) {
	var providers []provider
	for _, o := range ourProviders {
		objects, err := generatedObjects(config, o.folder)
		if err != nil {
			return nil, err
		}
		if len(objects) == 0 {
			continue
		}
		objects = complete(objects, o.folder, o.namespace)
		for _, object := range objects {
			if err := convert(object); err != nil {
				return nil, fmt.Errorf("%s: %w", object.GetName(), err)
			}
		}
		providers = append(providers, provider{name: "capstan", kind: o.kind, namespace: o.namespace, version: version, objects: objects})
	}
	return providers, nil
}

// generatedObjects reads the objects in the folder of a provider, without the files of kustomize.
func generatedObjects(config fs.FS, folder string) (out []*unstructured.Unstructured, err error) {
	for _, pattern := range []string{"crd/bases/*.yaml", "rbac/*.yaml", "webhook/*.yaml", "runtime/apiservice.yaml"} {
		files, err := fs.Glob(config, path.Join(folder, pattern))
		if err != nil {
			return nil, err
		}
		for _, file := range files {
			if path.Base(file) == "kustomization.yaml" || path.Base(file) == "kustomizeconfig.yaml" {
				continue
			}
			data, err := fs.ReadFile(config, file)
			if err != nil {
				return nil, err
			}
			objects, err := manifest.Parse(data)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", file, err)
			}
			out = append(out, objects...)
		}
	}
	return out, nil
}

// complete adapts generated objects for an installation beside other providers: it adds a namespace and unique names. In this
// plane one manager has the roles that the managers of the components have.
func complete(objects []*unstructured.Unstructured, folder, namespace string) []*unstructured.Unstructured {
	out := []*unstructured.Unstructured{object("v1", "Namespace", "", namespace, nil)}
	for _, o := range objects {
		if ofJoinTokens(o) {
			out = append(out, o)
			continue
		}
		switch o.GetKind() {
		case "ClusterRoleBinding", "RoleBinding":
			kind, _, _ := unstructured.NestedString(o.Object, "roleRef", "kind")
			role, _, _ := unstructured.NestedString(o.Object, "roleRef", "name")
			if o.GetKind() == "ClusterRoleBinding" {
				o = binding(o.GetKind(), "", kind, unique(role, folder))
			} else {
				o = binding(o.GetKind(), namespace, kind, role)
			}
		case "MutatingWebhookConfiguration", "ValidatingWebhookConfiguration":
			o.SetName(unique(o.GetName(), folder))
		case "Role":
			o.SetNamespace(namespace)
		case "ClusterRole":
			o.SetName(unique(o.GetName(), folder))
		}
		out = append(out, o)
	}
	return out
}

// ofJoinTokens reports whether an object gives join tokens of hosts their rights. It is the same in every management plane.
func ofJoinTokens(o *unstructured.Unstructured) bool {
	return o.GetName() == infrav1.HostJoinServiceAccount
}

// convert sets the manager's conversion webhook in a CRD with several versions, as kustomize does for a release.
func convert(o *unstructured.Unstructured) error {
	if versions, _, _ := unstructured.NestedSlice(o.Object, "spec", "versions"); o.GetKind() != "CustomResourceDefinition" || len(versions) < 2 {
		return nil
	}
	return unstructured.SetNestedMap(o.Object, map[string]any{
		"strategy": "Webhook",
		"webhook": map[string]any{
			"clientConfig":             map[string]any{"service": map[string]any{"name": "webhook-service", "namespace": "system", "path": "/convert"}},
			"conversionReviewVersions": []any{"v1"},
		},
	}, "spec", "conversion")
}

// unique adds the provider to a generated name, so that providers have different names.
func unique(name, folder string) string {
	if strings.HasPrefix(name, "capstan-") {
		return name
	}
	return "capstan-" + folder + "-" + name
}

// aggregateLabel marks the roles whose rules are added to the role of Cluster API core.
const aggregateLabel = "cluster.x-k8s.io/aggregate-to-manager"

func binding(kind, namespace, roleKind, role string) *unstructured.Unstructured {
	return object("rbac.authorization.k8s.io/v1", kind, namespace, role, map[string]any{
		"roleRef":  map[string]any{"apiGroup": "rbac.authorization.k8s.io", "kind": roleKind, "name": role},
		"subjects": []any{map[string]any{"kind": "ServiceAccount", "namespace": managerNamespace, "name": managerServiceAccount}},
	})
}

func object(apiVersion, kind, namespace, name string, content map[string]any) *unstructured.Unstructured {
	o := &unstructured.Unstructured{Object: map[string]any{}}
	for k, v := range content {
		o.Object[k] = v
	}
	o.SetAPIVersion(apiVersion)
	o.SetKind(kind)
	o.SetNamespace(namespace)
	o.SetName(name)
	return o
}

// install adapts the objects of a provider for the embedded plane: it removes objects that only pods need, sets loopback
// addresses of webhooks, and adds clusterctl's labels.
func (p provider) install(w webhooks) ([]*unstructured.Unstructured, error) {
	var out []*unstructured.Unstructured
	for _, o := range p.objects {
		switch o.GetKind() {
		case "Deployment", "Service", "ServiceAccount", "Certificate", "Issuer":
			if !ofJoinTokens(o) {
				continue
			}
		}
		o = o.DeepCopy()
		annotations := o.GetAnnotations()
		delete(annotations, "cert-manager.io/inject-ca-from")
		o.SetAnnotations(annotations)
		if err := w.rewrite(o); err != nil {
			return nil, fmt.Errorf("%s %s: %w", o.GetKind(), o.GetName(), err)
		}
		if o.GetKind() == "APIService" {
			out = append(out, p.labelled(loopbackService()))
		}
		out = append(out, p.labelled(o))
	}
	return out, nil
}

// labelled adds clusterctl's labels.
func (p provider) labelled(o *unstructured.Unstructured) *unstructured.Unstructured {
	return setLabels(o, map[string]string{clusterctlv1.ClusterctlLabel: "", clusterv1.ProviderNameLabel: p.label()})
}

// loopbackService is the Service of an APIService. An APIService cannot have a URL.
func loopbackService() *unstructured.Unstructured {
	return object("v1", "Service", managerNamespace, accessService, map[string]any{
		"spec": map[string]any{"type": "ExternalName", "externalName": "127.0.0.1"},
	})
}

// rewrite replaces references to Services by loopback URLs.
func (w webhooks) rewrite(o *unstructured.Unstructured) error {
	switch o.GetKind() {
	case "MutatingWebhookConfiguration", "ValidatingWebhookConfiguration":
		hooks, _, err := unstructured.NestedSlice(o.Object, "webhooks")
		if err != nil {
			return err
		}
		for _, hook := range hooks {
			if err := w.rewriteClientConfig(hook.(map[string]any), "clientConfig"); err != nil {
				return err
			}
		}
		return unstructured.SetNestedSlice(o.Object, hooks, "webhooks")
	case "CustomResourceDefinition":
		if strategy, _, _ := unstructured.NestedString(o.Object, "spec", "conversion", "strategy"); strategy != "Webhook" {
			return nil
		}
		return w.rewriteClientConfig(o.Object, "spec", "conversion", "webhook", "clientConfig")
	case "APIService":
		return errors.Join(
			unstructured.SetNestedMap(o.Object, map[string]any{"namespace": managerNamespace, "name": accessService, "port": int64(w.port)}, "spec", "service"),
			unstructured.SetNestedField(o.Object, base64.StdEncoding.EncodeToString(w.caBundle), "spec", "caBundle"))
	}
	return nil
}

func (w webhooks) rewriteClientConfig(in map[string]any, fields ...string) error {
	servicePath, found, err := unstructured.NestedString(in, append(slices.Clone(fields), "service", "path")...)
	if err != nil || !found {
		return fmt.Errorf("expected a webhook with the path of a Service, found none: %w", err)
	}
	return unstructured.SetNestedMap(in, map[string]any{
		"url":      loopback("https", w.port) + servicePath,
		"caBundle": base64.StdEncoding.EncodeToString(w.caBundle),
	}, fields...)
}

// extensionConfig returns the registration of the manager's hooks for Cluster API core.
func extensionConfig(config fs.FS, w webhooks) (*unstructured.Unstructured, error) {
	data, err := fs.ReadFile(config, "infrastructure/runtime/extensionconfig.yaml")
	if err != nil {
		return nil, err
	}
	objects, err := manifest.Parse(data)
	if err != nil || len(objects) != 1 {
		return nil, fmt.Errorf("expected one ExtensionConfig, found %d objects: %w", len(objects), err)
	}
	o := objects[0]
	o.SetAnnotations(nil) // The authority is known, and no Secret has it.
	return o, unstructured.SetNestedMap(o.Object, map[string]any{
		"url": loopback("https", w.port), "caBundle": base64.StdEncoding.EncodeToString(w.caBundle),
	}, "spec", "clientConfig")
}

// inventory returns the Provider object of clusterctl.
func (p provider) inventory() *unstructured.Unstructured {
	o := object(clusterctlv1.GroupVersion.String(), "Provider", p.namespace, p.label(), map[string]any{
		"providerName": p.name, "type": string(p.kind), "version": p.version,
	})
	return setLabels(o, map[string]string{
		clusterctlv1.ClusterctlLabel:     "",
		clusterctlv1.ClusterctlCoreLabel: clusterctlv1.ClusterctlCoreLabelInventoryValue,
		clusterv1.ProviderNameLabel:      p.label(),
	})
}

// clusterctlObjects returns the CRD of the inventory.
func clusterctlObjects() ([]*unstructured.Unstructured, error) {
	objects, err := manifest.Parse(clusterctlconfig.ClusterctlAPIManifest)
	if err != nil {
		return nil, err
	}
	for _, o := range objects {
		setLabels(o, map[string]string{clusterctlv1.ClusterctlLabel: "", clusterctlv1.ClusterctlCoreLabel: "clusterctl"})
	}
	return objects, nil
}

func setLabels(o *unstructured.Unstructured, labels map[string]string) *unstructured.Unstructured {
	all := o.GetLabels()
	if all == nil {
		all = map[string]string{}
	}
	for k, v := range labels {
		all[k] = v
	}
	o.SetLabels(all)
	return o
}

// aggregate sets the rules of aggregated roles as the controller would, so that managers do not wait for the controller. It is
// only used in the first installation.
func aggregate(objects []*unstructured.Unstructured) []*unstructured.Unstructured {
	var rules []any
	for _, o := range objects {
		if o.GetKind() == "ClusterRole" && o.GetLabels()[aggregateLabel] == "true" {
			own, _, _ := unstructured.NestedSlice(o.Object, "rules")
			rules = append(rules, own...)
		}
	}
	out := slices.Clone(objects)
	for i, o := range out {
		if _, found, _ := unstructured.NestedMap(o.Object, "aggregationRule"); found {
			out[i] = o.DeepCopy()
			out[i].Object["rules"] = rules
		}
	}
	return out
}
