// Package polarity decides whether a condition that is False is a problem. It imports nothing but the API.
//
// Layer: library. Allowed imports: api.
package polarity

import (
	"slices"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
)

// negative lists the types of conditions that are False in a healthy object, those of Cluster API's objects included.
var negative = []string{
	clusterv1.PausedCondition, clusterv1.DeletingCondition, clusterv1.RollingOutCondition, clusterv1.ScalingUpCondition,
	clusterv1.ScalingDownCondition, clusterv1.RemediatingCondition, clusterv1.MachineUpdatingCondition,
	"HasRemediateMachineAnnotation", "ClassVersionOutdated",
	controlplanev1.CertificateAuthorityRotatingCondition, infrav1.CertificatesExpiringCondition,
}

// finished lists the reasons of conditions that became False because their purpose is fulfilled.
var finished = []string{bootstrapv1.BootstrapTokenRemovedReason}

// FalseIsGood reports whether a condition of this type is no problem when it is False with this reason.
func FalseIsGood(kind, reason string) bool {
	return slices.Contains(negative, kind) || slices.Contains(finished, reason)
}
