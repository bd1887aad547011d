// Package v1beta2 contains the API group etcd.capstan.dev: the members, backups and backup checks of a cluster's
// own etcd. It exists only in workload clusters. The first control plane machine installs it, the machines report
// the state of their members in it, and the control plane provider writes its requests to it. The provider
// therefore needs no connection to etcd or to the hosts, and works with machines of any infrastructure.
//
// +kubebuilder:object:generate=true
// +groupName=etcd.capstan.dev
//
// Layer: api. Allowed imports: none.
package v1beta2

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

var (
	// GroupVersion is the group and version of the types in this package.
	GroupVersion = schema.GroupVersion{Group: "etcd.capstan.dev", Version: "v1beta2"}

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
