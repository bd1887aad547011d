package model

import (
	"fmt"
	"slices"

	"github.com/blang/semver/v4"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
)

// IsReferenced reports whether the Cluster references the control plane.
func IsReferenced(controlPlane *controlplanev1.CapstanControlPlane, cluster *clusterv1.Cluster) bool {
	ref := cluster.Spec.ControlPlaneRef
	return ref.GroupKind() == controlplanev1.ControlPlaneGroupKind && ref.Name == controlPlane.Name
}

// IsController reports whether the control plane is the controller of an object. The reference may have an older version, or
// the UID that the control plane had before it was restored.
func IsController(controlPlane *controlplanev1.CapstanControlPlane, obj metav1.Object) bool {
	return metav1.IsControlledBy(obj, controlPlane) || util.IsControlledBy(obj, controlPlane, controlplanev1.ControlPlaneGroupKind)
}

// WhyNotOwned returns the reason why a Machine with the labels of a control plane does not belong to it, and the remedy; ""
// when it belongs to it.
func WhyNotOwned(controlPlane *controlplanev1.CapstanControlPlane, cluster *clusterv1.Cluster, m *clusterv1.Machine) string {
	controller, ref := metav1.GetControllerOfNoCopy(m), m.Spec.Bootstrap.ConfigRef
	switch {
	case IsController(controlPlane, m):
		return ""
	case controller != nil:
		return fmt.Sprintf("Machine %s has the label %s and is controlled by the %s %s: remove the label or the Machine", m.Name, clusterv1.MachineControlPlaneLabel, controller.Kind, controller.Name)
	case m.Spec.ClusterName != cluster.Name:
		return fmt.Sprintf("Machine %s has the label of the Cluster %s and spec.clusterName %s: correct the label", m.Name, cluster.Name, m.Spec.ClusterName)
	case !IsReferenced(controlPlane, cluster):
		return fmt.Sprintf("Machine %s belongs to the control plane that the Cluster names, %s", m.Name, cluster.Spec.ControlPlaneRef.Name)
	case ref.APIGroup != bootstrapv1.GroupVersion.Group || ref.Kind != bootstrapv1.ConfigKind:
		return fmt.Sprintf("Machine %s has no owner and bootstrap.configRef of kind %q; only Machines with a CapstanConfig can be adopted: remove the label %s or the Machine", m.Name, ref.Kind, clusterv1.MachineControlPlaneLabel)
	}
	return ""
}

// WhyNotAdoptable returns the reason why a Machine without a reference cannot be adopted; "" when it can. The rule is that of
// KubeadmControlPlane.
func WhyNotAdoptable(controlPlane *controlplanev1.CapstanControlPlane, m *clusterv1.Machine) string {
	wanted, errWanted := semver.ParseTolerant(controlPlane.Spec.Version)
	found, errFound := semver.ParseTolerant(m.Spec.Version)
	if errWanted != nil || errFound != nil || util.IsSupportedVersionSkew(wanted, found) {
		return ""
	}
	return fmt.Sprintf("Machine %s has no owner and Kubernetes %s, and can only be adopted within one minor version of spec.version %s: set spec.version to a version at most one minor version from %s", m.Name, m.Spec.Version, controlPlane.Spec.Version, m.Spec.Version)
}

// MachineOfMember returns the name of the Machine on which an etcd member may run; "" without one. Labels and owners do not matter.
func MachineOfMember(machines []clusterv1.Machine, member string) string {
	for i := range machines {
		m := &machines[i]
		if m.Name == member || slices.Contains(namesOf(m), member) {
			return m.Name
		}
	}
	for i := range machines {
		if m := &machines[i]; util.IsControlPlaneMachine(m) && len(namesOf(m)) == 0 && m.Spec.Bootstrap.DataSecretName != nil {
			return m.Name
		}
	}
	return ""
}

// JoinNonEmpty is JoinReasons without the empty parts; "" when all are empty.
func JoinNonEmpty(parts ...string) string {
	return JoinReasons(slices.DeleteFunc(parts, func(part string) bool { return part == "" }))
}
