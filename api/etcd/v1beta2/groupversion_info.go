// Package v1beta2 contains the etcd.capstan.dev API: the members of a cluster's own etcd. It lives in
// workload clusters only: the first control plane machine installs it there, the machines tell the state
// of their members in it, and the control plane provider tells its wishes. So the provider needs neither
// a way to etcd nor one to the hosts, and works with machines of any infrastructure.
// +kubebuilder:object:generate=true
// +groupName=etcd.capstan.dev
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
