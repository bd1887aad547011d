// Package v1beta2 has the pools of Capstan's IPAM provider, group
// ipam.capstan.dev. The version's name is that of the Cluster API contract
// which the kinds satisfy.
//
// +kubebuilder:object:generate=true
// +groupName=ipam.capstan.dev
//
// Layer: api. Allowed imports: none.
package v1beta2

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

var (
	// GroupVersion identifies the kinds of this package.
	GroupVersion = schema.GroupVersion{Group: "ipam.capstan.dev", Version: "v1beta2"}

	// SchemeBuilder collects the functions that register these kinds.
	SchemeBuilder = runtime.NewSchemeBuilder(addKnownTypes)

	// AddToScheme registers the kinds of this package with a scheme.
	AddToScheme = SchemeBuilder.AddToScheme
)

func addKnownTypes(scheme *runtime.Scheme) error {
	scheme.AddKnownTypes(GroupVersion,
		&CapstanIPPool{}, &CapstanIPPoolList{},
		&GlobalCapstanIPPool{}, &GlobalCapstanIPPoolList{})
	metav1.AddToGroupVersion(scheme, GroupVersion)
	return nil
}
