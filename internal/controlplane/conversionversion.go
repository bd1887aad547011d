package controlplane

import (
	"context"
	"strings"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/contract"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	controlplanev1beta1 "capstan.dev/capstan/api/controlplane/v1beta1"
	"capstan.dev/capstan/internal/conversion"
)

// ownGroup is the API group of Capstan's infrastructure, whose kinds have a v1beta1 as the control plane has.
const ownGroup = "infrastructure.capstan.dev"

// versionOf returns the version that the CRD of a kind names for Cluster API's newest contract, as core chooses it. A
// kind without such a CRD gets v1beta1: a user can write any kind, and an error would fail the list of all control planes.
func versionOf(c client.Reader) conversion.VersionOf {
	return func(ctx context.Context, kind schema.GroupKind) string {
		if kind.Group == ownGroup {
			return controlplanev1beta1.GroupVersion.Version
		}
		crd := &metav1.PartialObjectMetadata{}
		crd.SetGroupVersionKind(apiextensionsv1.SchemeGroupVersion.WithKind("CustomResourceDefinition"))
		if err := c.Get(ctx, client.ObjectKey{Name: contract.CalculateCRDName(kind.Group, kind.Kind)}, crd); err != nil {
			ctrl.LoggerFrom(ctx).V(4).Info("A reference has no CRD", "kind", kind, "cause", err.Error())
		}
		for _, contract := range []string{"v1beta2", "v1beta1"} {
			if versions := crd.Labels[clusterv1.GroupVersion.Group+"/"+contract]; versions != "" {
				return versions[strings.LastIndex(versions, "_")+1:]
			}
		}
		return controlplanev1beta1.GroupVersion.Version
	}
}
