package embedded

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"k8s.io/apiextensions-apiserver/pkg/apihelpers"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/annotations"
)

// migrated is the annotation of Cluster API's CRD migrators: the generation of a CRD whose objects are migrated.
const migrated = clusterv1.CRDMigrationObservedGenerationAnnotation

// crds contains the CRDs of the API server by name.
type crds map[string]apiextensionsv1.CustomResourceDefinition

// crds reads the CRDs of the API server.
func (i *installation) crds(ctx context.Context) (crds, error) {
	var list apiextensionsv1.CustomResourceDefinitionList
	if err := retry(ctx, func(ctx context.Context) error { return i.client.List(ctx, &list) }); err != nil {
		return nil, fmt.Errorf("cannot list the CRDs: %w", err)
	}
	found := crds{}
	for _, crd := range list.Items {
		found[crd.Name] = crd
	}
	return found, nil
}

// toApply returns the CRDs that the API server lacks, or has with another content. It would validate an unchanged CRD again, with
// all its rules. A new CRD has the annotation that its first generation is migrated, because it has no objects. Otherwise the
// migrators would write each CRD a second time. A changed CRD keeps its annotation: it gets another generation, so the migrators
// do their work.
func (c crds) toApply(kinds []*unstructured.Unstructured) ([]*unstructured.Unstructured, error) {
	var out []*unstructured.Unstructured
	for _, kind := range kinds {
		existing, found := c[kind.GetName()]
		if found {
			same, err := unchanged(kind, existing)
			if err != nil {
				return nil, fmt.Errorf("CustomResourceDefinition %s: %w", kind.GetName(), err)
			}
			if same {
				continue
			}
		}
		generation := "1"
		if found {
			generation = existing.Annotations[migrated]
		}
		if generation != "" {
			kind = kind.DeepCopy()
			annotations.AddAnnotations(kind, map[string]string{migrated: generation})
		}
		out = append(out, kind)
	}
	return out, nil
}

// unchanged reports whether the API server has this CRD, apart from the annotation of the migrators.
func unchanged(kind *unstructured.Unstructured, existing apiextensionsv1.CustomResourceDefinition) (bool, error) {
	var want apiextensionsv1.CustomResourceDefinition
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(kind.Object, &want); err != nil {
		return false, err
	}
	apiextensionsv1.SetObjectDefaults_CustomResourceDefinition(&want)
	others := maps.Clone(existing.Annotations)
	delete(others, migrated)
	return existing.DeletionTimestamp == nil && maps.Equal(want.Labels, existing.Labels) && maps.Equal(want.Annotations, others) &&
		equality.Semantic.DeepEqual(want.Spec, existing.Spec), nil
}

// notEstablished returns the CRDs that the API server did not serve yet.
func (c crds) notEstablished(kinds []*unstructured.Unstructured) []*unstructured.Unstructured {
	return slices.DeleteFunc(slices.Clone(kinds), func(kind *unstructured.Unstructured) bool {
		existing := c[kind.GetName()]
		return apihelpers.IsCRDConditionTrue(&existing, apiextensionsv1.Established)
	})
}
