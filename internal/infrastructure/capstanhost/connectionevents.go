package capstanhost

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/cluster-api/util/conditions"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
)

// connection returns a copy of the condition Connected: setting a condition changes it in place.
func connection(host *infrav1.CapstanHost) metav1.Condition {
	if c := conditions.Get(host, infrav1.HostConnectedCondition); c != nil {
		return *c
	}
	return metav1.Condition{}
}

// recordConnection records the end and the return of the connection to a host: the condition has only the last change. The first
// connection of a manager after its start is not recorded.
func (r *Reconciler) recordConnection(host *infrav1.CapstanHost, before metav1.Condition) {
	switch now := connection(host); {
	case now.Status == metav1.ConditionFalse && before.Reason != now.Reason:
		r.recorder.Eventf(host, nil, corev1.EventTypeWarning, now.Reason, "Connect", "%s", now.Message)
	case now.Status == metav1.ConditionTrue && before.Status == metav1.ConditionFalse:
		r.recorder.Eventf(host, nil, corev1.EventTypeNormal, infrav1.HostConnectedReason, "Connect", "The manager is connected to capstand again")
	}
}
