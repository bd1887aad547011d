package reconciling

import (
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
)

// SetCondition sets a condition of an object. The format and its arguments are those of the message.
func SetCondition(obj conditions.Setter, kind string, status metav1.ConditionStatus, reason, format string, args ...any) {
	conditions.Set(obj, metav1.Condition{Type: kind, Status: status, Reason: reason, Message: fmt.Sprintf(format, args...)})
}

// KeepCondition shows that a condition, if the object has it, is about the current spec too. It is for a step that has nothing to do:
// kubectl wait takes a condition of an earlier generation as not met.
func KeepCondition(obj conditions.Setter, kind string) {
	if c := conditions.Get(obj, kind); c != nil {
		conditions.Set(obj, *c)
	}
}

// ShowBlocked reports that the deletion of an object of the infrastructure provider waits, and why.
func ShowBlocked(obj conditions.Setter, format string, args ...any) {
	SetCondition(obj, clusterv1.DeletingCondition, metav1.ConditionTrue, infrav1.DeletionBlockedReason, format, args...)
}
