package config_test

import (
	"context"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/cmd/clusterctl/client/yamlprocessor"
	"sigs.k8s.io/controller-runtime/pkg/client"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/testenv"
)

// given contains the variables that `clusterctl generate cluster` sets, and the variables that a user must set.
func given(namespace string) map[string]string {
	return map[string]string{
		"CLUSTER_NAME": "demo", "NAMESPACE": namespace, "KUBERNETES_VERSION": "v1.36.3",
		"CONTROL_PLANE_MACHINE_COUNT": "1", "WORKER_MACHINE_COUNT": "2", "CAPSTAN_MACHINE_CIDR": "10.200.8.0/21", "CAPSTAN_MACHINE_IPV6_CIDR": "fd00:200:8::/64",
	}
}

// CTL-09, CTL-16: templates use the common variables. The other variables have the prefix CAPSTAN_ and are documented.
// Only variables without a sensible default have none.
func TestVariablesOfTemplates_CTL09(t *testing.T) {
	common := []string{"CLUSTER_NAME", "NAMESPACE", "KUBERNETES_VERSION", "CONTROL_PLANE_MACHINE_COUNT", "WORKER_MACHINE_COUNT"}
	documentation := document(t)
	for _, file := range assets(t, "cluster-template*.yaml") {
		variables, err := yamlprocessor.NewSimpleProcessor().GetVariableMap(asset(t, file))
		if err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		for _, name := range common {
			if _, ok := variables[name]; !ok {
				t.Errorf("%s does not use %s", file, name)
			}
			if !strings.Contains(documentation, "`"+name+"`") {
				t.Errorf("docs/clusterctl.md does not contain %s", name)
			}
			delete(variables, name)
		}
		for name, value := range variables {
			switch {
			case name == "CLUSTER_CLASS_NAMESPACE": // CTL-18
			case !strings.HasPrefix(name, "CAPSTAN_"):
				t.Errorf("%s: %s does not have the prefix of Capstan", file, name)
			case !strings.Contains(documentation, "`"+name+"`"):
				t.Errorf("%s: docs/clusterctl.md does not contain %s", file, name)
			case value == nil && given("")[name] == "":
				t.Errorf("%s: %s has no default", file, name)
			}
		}
		if !strings.Contains(documentation, "`"+strings.TrimSuffix(strings.TrimPrefix(file, "cluster-template-"), ".yaml")+"`") && file != "cluster-template.yaml" {
			t.Errorf("docs/clusterctl.md does not contain %s", file)
		}
	}
}

// CTL-09, CTL-17: all objects of a template are in one namespace, and the template contains all referenced objects.
func TestTemplatesAreComplete(t *testing.T) {
	class := process(t, asset(t, "clusterclass-capstan.yaml"), nil)
	for _, file := range assets(t, "cluster-template*.yaml") {
		objects := process(t, asset(t, file), given("somewhere"))
		for _, o := range objects {
			if o.GetNamespace() != "somewhere" {
				t.Errorf("%s: %s %s is in %q", file, o.GetKind(), o.GetName(), o.GetNamespace())
			}
			references(o.Object, func(field, kind, name string) {
				if !contains(objects, kind, name) {
					t.Errorf("%s: %s of %s %s references the %s %s, which is missing", file, field, o.GetKind(), o.GetName(), kind, name)
				}
			})
		}
		if file == "cluster-template-topology.yaml" {
			name, _, _ := unstructured.NestedString(objects[0].Object, "spec", "topology", "classRef", "name")
			if !contains(class, "ClusterClass", name) {
				t.Errorf("the class %s is missing", name)
			}
		}
	}
}

func contains(objects []*unstructured.Unstructured, kind, name string) bool {
	for _, o := range objects {
		if o.GetKind() == kind && o.GetName() == name {
			return true
		}
	}
	return false
}

// references calls found for every reference to an object by kind and name.
func references(in any, found func(field, kind, name string)) {
	switch in := in.(type) {
	case map[string]any:
		for field, value := range in {
			if ref, ok := value.(map[string]any); ok && strings.HasSuffix(strings.ToLower(field), "ref") && ref["kind"] != nil {
				found(field, ref["kind"].(string), ref["name"].(string))
			}
			references(value, found)
		}
	case []any:
		for _, value := range in {
			references(value, found)
		}
	}
}

// CTL-10, CTL-17: the class contains no variables of clusterctl and no namespaces. Each referenced object exists and is
// used once. Row CTL-16.
func TestClusterClass_CTL10(t *testing.T) {
	owner := map[string]string{}
	for _, file := range assets(t, "clusterclass-*.yaml") {
		if v := variable.FindString(string(asset(t, file))); v != "" {
			t.Errorf("%s has the variable %s", file, v)
		}
		objects := process(t, asset(t, file), nil)
		unused := map[string]bool{}
		for _, o := range objects {
			if o.GetNamespace() != "" {
				t.Errorf("%s: %s %s has a namespace", file, o.GetKind(), o.GetName())
			}
			id := o.GetKind() + " " + o.GetName()
			if owner[id] != "" {
				t.Errorf("%s is in %s and in %s", id, owner[id], file)
			}
			owner[id], unused[id] = file, true
		}
		if want := strings.TrimSuffix(strings.TrimPrefix(file, "clusterclass-"), ".yaml"); objects[0].GetKind() != "ClusterClass" || objects[0].GetName() != want {
			t.Errorf("the first object of %s is the %s %s", file, objects[0].GetKind(), objects[0].GetName())
		}
		if !strings.Contains(page(t, "clusterclass.md"), "`"+file+"`") {
			t.Errorf("docs/clusterclass.md does not contain %s", file)
		}
		delete(unused, "ClusterClass "+objects[0].GetName())
		references(objects[0].Object, func(field, kind, name string) {
			if !unused[kind+" "+name] {
				t.Errorf("%s: %s references %s %s, which is missing or used twice", file, field, kind, name)
			}
			delete(unused, kind+" "+name)
		})
		for id := range unused {
			t.Errorf("%s: no object uses %s", file, id)
		}
		class := typed[clusterv1.ClusterClass](t, objects[0])
		documentation := document(t)
		for _, v := range class.Spec.Variables {
			if !strings.Contains(documentation, "`"+v.Name+"`") {
				t.Errorf("docs/clusterctl.md does not contain the variable %s of the class", v.Name)
			}
		}
	}
}

// CTL-18: a topology can reference a class in another namespace.
func TestClassNamespace_CTL18(t *testing.T) {
	for name, want := range map[string]string{"": "here", "classes": "classes"} {
		values := given("here")
		if name != "" {
			values["CLUSTER_CLASS_NAMESPACE"] = name
		}
		cluster := process(t, asset(t, "cluster-template-topology.yaml"), values)[0]
		if got, _, _ := unstructured.NestedString(cluster.Object, "spec", "topology", "classRef", "namespace"); got != want {
			t.Errorf("%q: the class is read from %q, want %q", name, got, want)
		}
	}
}

// CTL-09, CTL-10: an API server with Capstan's CRDs accepts the objects of the release. Those of the installers come last, because they
// change the API server.
func TestObjectsAreAccepted(t *testing.T) {
	env, err := testenv.Start(testenv.Options{AddToScheme: []func(*runtime.Scheme) error{infrav1.AddToScheme, controlplanev1.AddToScheme, bootstrapv1.AddToScheme}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := env.Stop(); err != nil {
			t.Error(err)
		}
	})
	t.Run("templates", func(t *testing.T) { testTemplates(t, env) })
	t.Run("installers", func(t *testing.T) { testInstallers(t, env) })
}

// The API server accepts all objects unchanged, so no field is misspelt.
func testTemplates(t *testing.T, env *testenv.Env) {
	namespace := env.Namespace(t)
	for _, file := range append(assets(t, "cluster-template*.yaml"), assets(t, "clusterclass-*.yaml")...) {
		for _, o := range process(t, asset(t, file), given(namespace)) {
			o.SetNamespace(namespace)
			if err := env.Client.Create(context.Background(), o, client.DryRunAll, client.FieldValidation("Strict")); err != nil {
				t.Errorf("%s: %s %s: %v", file, o.GetKind(), o.GetName(), err)
			}
		}
	}
}
