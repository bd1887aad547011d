package cli

import (
	"os"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/yaml"

	"capstan.dev/capstan/templates"
)

// rendered returns the cluster of a flavor and its ClusterClass.
func rendered(t *testing.T, flavor string, environment map[string]string) (o clusterOptions, class, objects []*unstructured.Unstructured) {
	t.Helper()
	o = clusterOptions{name: "demo", namespace: "team", kubernetesVersion: "v1.36.3", controlPlanes: 1, workers: 2, flavor: flavor}
	data, err := o.template(templates.FS, nil)
	if err != nil {
		t.Fatal(err)
	}
	objects, err = o.process(data, func(name string) (string, bool) { value, found := environment[name]; return value, found })
	if err != nil {
		t.Fatal(err)
	}
	if class, err = o.class(templates.FS, objects); err != nil {
		t.Fatal(err)
	}
	return o, class, objects
}

// TestClassOfCluster: the class is returned with its templates, in the namespace of the Cluster's reference. The class
// itself is last.
func TestClassOfCluster(t *testing.T) {
	for name, test := range map[string]struct {
		flavor      string
		environment map[string]string
		namespace   string
	}{
		"no class":                          {"", nil, ""},
		"in the namespace of the reference": {"topology", nil, "team"},
		"in the namespace of the user":      {"topology", map[string]string{"CLUSTER_CLASS_NAMESPACE": "classes"}, "classes"},
	} {
		t.Run(name, func(t *testing.T) {
			_, class, _ := rendered(t, test.flavor, test.environment)
			if (test.namespace == "") != (len(class) == 0) {
				t.Fatalf("got %d objects", len(class))
			}
			for i, u := range class {
				if u.GetNamespace() != test.namespace || (u.GetKind() == "ClusterClass") != (i == len(class)-1) {
					t.Errorf("object %d is %s %s/%s", i, u.GetKind(), u.GetNamespace(), u.GetName())
				}
			}
		})
	}
	o, _, objects := rendered(t, "topology", nil)
	for _, u := range objects {
		if u.GetKind() == "Cluster" {
			_ = unstructured.SetNestedField(u.Object, "of-somebody-else", "spec", "topology", "classRef", "name")
		}
	}
	if class, err := o.class(templates.FS, objects); class != nil || err != nil {
		t.Errorf("a class of another provider: %v, %v", class, err)
	}
}

// TestCreateClass: a missing class is created before the Cluster. An existing class is not changed.
func TestCreateClass(t *testing.T) {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{corev1.AddToScheme, clusterv1.AddToScheme} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	o, class, objects := rendered(t, "topology", nil)
	kinds := func(m *management) (made []string) {
		for _, u := range slices.Concat(class, objects) {
			got := &unstructured.Unstructured{}
			got.SetGroupVersionKind(u.GroupVersionKind())
			if m.client.Get(t.Context(), client.ObjectKeyFromObject(u), got) == nil {
				made = append(made, u.GetKind())
			}
		}
		return made
	}

	missing := &management{client: fake.NewClientBuilder().WithScheme(scheme).Build()}
	if err := missing.createCluster(t.Context(), o, class, objects); err != nil {
		t.Fatal(err)
	}
	if made := kinds(missing); len(made) != len(class)+len(objects) {
		t.Errorf("created %v", made)
	}

	own := &clusterv1.ClusterClass{}
	own.Namespace, own.Name = "team", "capstan"
	there := &management{client: fake.NewClientBuilder().WithScheme(scheme).WithObjects(own).Build()}
	if err := there.createCluster(t.Context(), o, class, objects); err != nil {
		t.Fatal(err)
	}
	if made := kinds(there); !slices.Equal(made, []string{"ClusterClass", "Cluster"}) {
		t.Errorf("created besides the class: %v", made)
	}
	if err := there.client.Get(t.Context(), client.ObjectKeyFromObject(own), own); err != nil || len(own.Spec.Variables) > 0 {
		t.Errorf("the class was changed: %v, %v", own.Spec, err)
	}
}

// TestRoleOfWorkstation: the first Role of docs/workstation.md permits the objects of each flavor.
func TestRoleOfWorkstation(t *testing.T) {
	page, err := os.ReadFile("../../docs/workstation.md")
	if err != nil {
		t.Fatal(err)
	}
	_, block, _ := strings.Cut(string(page), "```yaml\n")
	block, _, _ = strings.Cut(block, "\n---\n")
	role := &rbacv1.Role{}
	if err := yaml.UnmarshalStrict([]byte(block), role); err != nil {
		t.Fatal(err)
	}
	permits := func(u *unstructured.Unstructured, verb string) bool {
		resource, _ := meta.UnsafeGuessKindToResource(u.GroupVersionKind())
		return slices.ContainsFunc(role.Rules, func(r rbacv1.PolicyRule) bool {
			return slices.Contains(r.APIGroups, resource.Group) && slices.Contains(r.Verbs, verb) &&
				(slices.Contains(r.Resources, "*") || slices.Contains(r.Resources, resource.Resource))
		})
	}
	for _, flavor := range append(flavors(templates.FS), "") {
		_, class, objects := rendered(t, flavor, map[string]string{"CAPSTAN_MACHINE_CIDR": "10.0.0.0/24", "CAPSTAN_MACHINE_IPV6_CIDR": "fd00::/64"})
		for _, u := range append(class, objects...) {
			for _, verb := range []string{"get", "create", "patch"} {
				if !permits(u, verb) {
					t.Errorf("flavor %q: the Role does not permit %s of %s", flavor, verb, u.GetKind())
				}
			}
		}
	}
}
