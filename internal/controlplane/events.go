package controlplane

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/cluster-api/util/conditions"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
)

// recorder records events of control planes.
type recorder struct{ events.EventRecorder }

// event records an event of the control plane.
func (r *recorder) event(s *scope, kind, reason, action, format string, args ...any) {
	if r.EventRecorder != nil { // A test without a manager has none.
		r.Eventf(s.Object, nil, kind, reason, action, format, args...)
	}
}

// recordQuorum records events when etcd has lost its majority, and when it has it again.
func (r *recorder) recordQuorum(s *scope, before *controlplanev1.CapstanControlPlane) {
	lost := func(cp *controlplanev1.CapstanControlPlane) bool {
		return conditions.GetReason(cp, controlplanev1.EtcdClusterHealthyCondition) == controlplanev1.QuorumLostReason
	}
	switch was, is := lost(before), lost(s.Object); {
	case is && !was:
		r.event(s, corev1.EventTypeWarning, controlplanev1.QuorumLostReason, "Observe", "%s", conditions.GetMessage(s.Object, controlplanev1.EtcdClusterHealthyCondition))
	case was && !is:
		r.event(s, corev1.EventTypeNormal, "QuorumRegained", "Observe", "etcd may have its majority again; see EtcdClusterHealthy")
	}
}
