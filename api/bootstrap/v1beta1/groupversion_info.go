// Package v1beta1 contains the bootstrap configurations of bootstrap.capstan.dev for Cluster API's v1beta1
// contract. Version v1beta2 is the hub and the storage version. This version has the same spec unless the contract names
// other fields, and a status that is a view of v1beta2's: conditions, failureReason and failureMessage are derived when
// the API server converts the object, and a client that writes them changes nothing.
//
// The version is deprecated: use v1beta2. Cluster API v1.16 (April 2027) no longer reads the v1beta1 contract.
// +kubebuilder:object:generate=true
// +groupName=bootstrap.capstan.dev
//
// Layer: api. Allowed imports: none.
package v1beta1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

var (
	// GroupVersion is the group and version of the types in this package.
	GroupVersion = schema.GroupVersion{Group: "bootstrap.capstan.dev", Version: "v1beta1"}

	schemeBuilder = runtime.NewSchemeBuilder(addKnownTypes)

	// AddToScheme adds the types in this package to a scheme.
	AddToScheme = schemeBuilder.AddToScheme

	objectTypes = []runtime.Object{}
)

func addKnownTypes(scheme *runtime.Scheme) error {
	scheme.AddKnownTypes(GroupVersion, objectTypes...)
	metav1.AddToGroupVersion(scheme, GroupVersion)
	return nil
}
