package controlplane

import (
	"context"
	"strings"
	"testing"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/contract"
	"sigs.k8s.io/controller-runtime/pkg/client"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/internal/testenv/testcluster"
)

// foreignGroup is the API group of most infrastructure providers. A provider with its own group must aggregate its role into
// the role of the control plane provider (config/control-plane/rbac/infrastructure_role.yaml).
const foreignGroup = "infrastructure.cluster.x-k8s.io"

// foreign returns an object of an infrastructure provider that follows the contract and shares no code with Capstan.
func foreign(kind, namespace, name string, spec map[string]any) *unstructured.Unstructured {
	out := &unstructured.Unstructured{Object: map[string]any{"spec": spec}}
	out.SetAPIVersion(foreignGroup + "/v1beta7")
	out.SetKind(kind)
	out.SetNamespace(namespace)
	out.SetName(name)
	return out
}

// installForeign creates kinds without a schema. Only the contract label of their CRD names the version.
func installForeign(t *testing.T, kinds ...string) {
	t.Helper()
	for _, kind := range kinds {
		crd := &apiextensionsv1.CustomResourceDefinition{}
		crd.Name = contract.CalculateCRDName(foreignGroup, kind)
		crd.Labels = map[string]string{"cluster.x-k8s.io/v1beta2": "v1beta7"}
		plural, _, _ := strings.Cut(crd.Name, ".")
		crd.Spec = apiextensionsv1.CustomResourceDefinitionSpec{
			Group: foreignGroup, Scope: apiextensionsv1.NamespaceScoped,
			Names: apiextensionsv1.CustomResourceDefinitionNames{Kind: kind, ListKind: kind + "List", Plural: plural, Singular: strings.ToLower(kind)},
			Versions: []apiextensionsv1.CustomResourceDefinitionVersion{{
				Name: "v1beta7", Served: true, Storage: true,
				Schema: &apiextensionsv1.CustomResourceValidation{OpenAPIV3Schema: &apiextensionsv1.JSONSchemaProps{Type: "object", XPreserveUnknownFields: ptr.To(true)}},
			}},
		}
		content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(crd)
		if err != nil {
			t.Fatal(err)
		}
		obj := &unstructured.Unstructured{Object: content}
		obj.SetGroupVersionKind(apiextensionsv1.SchemeGroupVersion.WithKind("CustomResourceDefinition"))
		if err := env.Client.Create(context.Background(), obj); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = env.Client.Delete(context.Background(), obj) })
		expect.True(t, kind+" is served", func() bool {
			list := &unstructured.UnstructuredList{}
			list.SetAPIVersion(foreignGroup + "/v1beta7")
			list.SetKind(kind + "List")
			return env.Client.List(context.Background(), list) == nil
		})
	}
}

// TestForeignInfrastructure (CP-02, CP-17, ALL-05): the control plane creates its machines with another infrastructure provider.
// It uses only the contract and the rights of its role. It reads the endpoint there, and creates for each Machine an
// infrastructure machine from the template, in the failure domain of the Machine and owned by it.
func TestForeignInfrastructure(t *testing.T) {
	installForeign(t, "OtherCluster", "OtherMachine", "OtherMachineTemplate")
	cluster := testcluster.New(t, env, func(c *clusterv1.Cluster) {
		c.Spec.InfrastructureRef = clusterv1.ContractVersionedObjectReference{APIGroup: foreignGroup, Kind: "OtherCluster", Name: "demo"}
	})
	infra := foreign("OtherCluster", cluster.Namespace, "demo", map[string]any{})
	infra.SetOwnerReferences([]metav1.OwnerReference{cluster.OwnerRef()})
	cluster.Create(infra)
	template := foreign("OtherMachineTemplate", cluster.Namespace, "large", map[string]any{"template": map[string]any{
		"metadata": map[string]any{"labels": map[string]any{"rack": "7"}}, "spec": map[string]any{"flavor": "large"},
	}})
	cluster.Create(template)
	cp := cluster.ControlPlane(func(cp *controlplanev1.CapstanControlPlane) {
		cp.Spec.MachineTemplate.Spec.InfrastructureRef = clusterv1.ContractVersionedObjectReference{APIGroup: foreignGroup, Kind: "OtherMachineTemplate", Name: "large"}
	})
	cluster.Becomes(t, cp, "waits for the endpoint", func() bool {
		return testcluster.Has(cp, controlplanev1.InitializedCondition, metav1.ConditionFalse, "endpoint is not known")
	})
	cluster.Change(infra, func() {
		infra.Object["spec"] = map[string]any{"controlPlaneEndpoint": map[string]any{"host": somewhere.Host, "port": int64(somewhere.Port)}}
		infra.Object["status"] = map[string]any{"failureDomains": []any{map[string]any{"name": "east", "controlPlane": true}}}
	})

	var made *unstructured.Unstructured
	expect.True(t, "a machine of the other provider, owned by its Machine", func() bool {
		machines := machinesOf(t, cluster)
		if len(machines) == 0 {
			return false
		}
		m := &machines[0]
		made = foreign("OtherMachine", cluster.Namespace, m.Name, nil)
		ref := m.Spec.InfrastructureRef
		return cluster.Get(made) == nil && metav1.IsControlledBy(made, m) &&
			ref.APIGroup == foreignGroup && ref.Kind == "OtherMachine" && ref.Name == m.Name && m.Spec.FailureDomain == "east"
	})
	flavor, _, _ := unstructured.NestedString(made.Object, "spec", "flavor")
	if flavor != "large" || made.GetLabels()["rack"] != "7" || made.GetLabels()[clusterv1.ClusterNameLabel] != "demo" ||
		made.GetAnnotations()[clusterv1.TemplateClonedFromNameAnnotation] != "large" {
		t.Errorf("made %v", made.Object)
	}
	expect.True(t, "the Cluster owns the template", func() bool {
		return cluster.Get(template) == nil && len(template.GetOwnerReferences()) == 1
	})

	// Objects of a failed attempt are removed.
	if err := env.Client.Delete(context.Background(), cp); err != nil {
		t.Fatal(err)
	}
	expect.True(t, "the Machine is being deleted", func() bool {
		for _, m := range machinesOf(t, cluster) {
			if m.DeletionTimestamp.IsZero() {
				return false
			}
		}
		return true
	})
	if err := env.Client.Get(context.Background(), client.ObjectKeyFromObject(template), template); err != nil {
		t.Errorf("the template was deleted: %v", err)
	}
}
