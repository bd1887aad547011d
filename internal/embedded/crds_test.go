package embedded

import (
	"encoding/json"
	"testing"
	"time"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"capstan.dev/capstan/config"
	"capstan.dev/capstan/internal/testenv/expect"
)

// TestCRDsToApply (ALL-14): a new CRD has the annotation of the migrators, an unchanged one is not applied, and a changed one keeps
// the annotation that it has.
func TestCRDsToApply(t *testing.T) {
	type crd = apiextensionsv1.CustomResourceDefinition
	kinds := ourCRDs(t)
	for name, c := range map[string]struct {
		// server changes the CRD of the API server. It is nil if the API server has none.
		server func(*crd)
		// applied is the annotation of the CRD that is applied, or "none".
		applied string
	}{
		"new":                           {nil, "1"},
		"unchanged":                     {func(*crd) {}, "none"},
		"unchanged, migrated":           {func(c *crd) { c.Annotations[migrated] = "7" }, "none"},
		"another schema, migrated":      {func(c *crd) { c.Annotations[migrated] = "7"; c.Spec.Versions[0].Schema = nil }, "7"},
		"another storage version":       {func(c *crd) { c.Annotations[migrated] = "1"; c.Spec.Versions[0].Storage = !c.Spec.Versions[0].Storage }, "1"},
		"a version more":                {func(c *crd) { c.Spec.Versions = append(c.Spec.Versions, c.Spec.Versions[0]) }, ""},
		"another authority of webhooks": {func(c *crd) { c.Spec.Conversion = &apiextensionsv1.CustomResourceConversion{Strategy: "Other"} }, ""},
		"without a label":               {func(c *crd) { c.Labels = nil }, ""},
		"another annotation":            {func(c *crd) { c.Annotations["controller-gen.kubebuilder.io/version"] = "old" }, ""},
		"being deleted":                 {func(c *crd) { c.DeletionTimestamp = &metav1.Time{Time: time.Unix(1, 0)} }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			for _, kind := range kinds {
				existing := crds{}
				if c.server != nil {
					served := serverCopy(t, kind)
					c.server(&served)
					existing[kind.GetName()] = served
				}
				applied, err := existing.toApply([]*unstructured.Unstructured{kind})
				expect.NoError(t, err)
				got := "none"
				if len(applied) == 1 {
					got = applied[0].GetAnnotations()[migrated]
				}
				if got != c.applied {
					t.Errorf("%s: applied with %q, want %q", kind.GetName(), got, c.applied)
				}
			}
		})
	}
}

func ourCRDs(t *testing.T) (kinds []*unstructured.Unstructured) {
	t.Helper()
	providers, err := loadOurs(config.FS, "v0.0.0")
	expect.NoError(t, err)
	for _, p := range providers {
		objects, err := p.install(webhooks{port: 1, caBundle: []byte("authority")})
		expect.NoError(t, err)
		for _, o := range objects {
			if o.GetKind() == "CustomResourceDefinition" {
				kinds = append(kinds, o)
			}
		}
	}
	if len(kinds) < 10 {
		t.Fatalf("%d CRDs, want all of ours", len(kinds))
	}
	return kinds
}

// serverCopy returns the CRD as the API server returns it.
func serverCopy(t *testing.T, kind *unstructured.Unstructured) (crd apiextensionsv1.CustomResourceDefinition) {
	t.Helper()
	data, err := kind.MarshalJSON()
	expect.NoError(t, err)
	expect.NoError(t, json.Unmarshal(data, &crd))
	apiextensionsv1.SetObjectDefaults_CustomResourceDefinition(&crd)
	crd.Generation = 3
	return crd
}

// TestNotEstablished: only CRDs that the API server did not serve yet are waited for.
func TestNotEstablished(t *testing.T) {
	kind := func(name string) *unstructured.Unstructured {
		o := &unstructured.Unstructured{Object: map[string]any{}}
		o.SetName(name)
		return o
	}
	condition := func(status apiextensionsv1.ConditionStatus) (c apiextensionsv1.CustomResourceDefinition) {
		c.Status.Conditions = []apiextensionsv1.CustomResourceDefinitionCondition{{Type: apiextensionsv1.Established, Status: status}}
		return c
	}
	existing := crds{"served": condition(apiextensionsv1.ConditionTrue), "accepted": condition(apiextensionsv1.ConditionFalse), "stored": {}}
	left := existing.notEstablished([]*unstructured.Unstructured{kind("served"), kind("accepted"), kind("stored"), kind("new")})
	if len(left) != 3 || left[0].GetName() != "accepted" || left[1].GetName() != "stored" || left[2].GetName() != "new" {
		t.Errorf("waits for %v", left)
	}
}
