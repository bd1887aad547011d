package conversion

import (
	"cmp"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	clusterv1beta1 "sigs.k8s.io/cluster-api/api/core/v1beta1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/polarity"
	"capstan.dev/capstan/internal/shorten"
)

// underWay lists the reasons of conditions that become true without help.
var underWay = []string{
	infrav1.MachineStartingReason, infrav1.BootstrapRunningReason, infrav1.ServicesStartingReason, clusterv1.DeletingReason,
}

// terminal lists the reasons of a CapstanMachine's conditions that describe a permanent failure. MachineFailed is not
// one of them, because capstand starts such a machine again.
var terminal = []string{infrav1.MachineLostReason, infrav1.BootstrapFailedReason}

// legacy derives Cluster API's v1beta1 conditions (ALL-09), sorted by type except for Ready, which is first.
func legacy(conditions []metav1.Condition) clusterv1beta1.Conditions {
	var out clusterv1beta1.Conditions
	for _, c := range conditions {
		out = append(out, clusterv1beta1.Condition{
			Type: clusterv1beta1.ConditionType(c.Type), Status: corev1.ConditionStatus(c.Status), Severity: severity(c),
			LastTransitionTime: c.LastTransitionTime, Reason: c.Reason, Message: shorten.ConditionMessage(c.Message),
		})
	}
	slices.SortStableFunc(out, func(a, b clusterv1beta1.Condition) int {
		return cmp.Or(cmp.Compare(rank(a.Type), rank(b.Type)), cmp.Compare(a.Type, b.Type))
	})
	return out
}

func rank(t clusterv1beta1.ConditionType) int {
	if t == clusterv1beta1.ReadyCondition {
		return 0
	}
	return 1
}

// severity classifies a condition that is False. Error: a failure that only a replacement ends. Info: a condition that
// waits or is in progress, or for which False is normal. Warning: all other conditions.
func severity(c metav1.Condition) clusterv1beta1.ConditionSeverity {
	switch {
	case c.Status != metav1.ConditionFalse:
		return clusterv1beta1.ConditionSeverityNone
	case slices.Contains(terminal, c.Reason):
		return clusterv1beta1.ConditionSeverityError
	case polarity.FalseIsGood(c.Type, c.Reason), slices.Contains(underWay, c.Reason), strings.HasPrefix(c.Reason, "Waiting"):
		return clusterv1beta1.ConditionSeverityInfo
	}
	return clusterv1beta1.ConditionSeverityWarning
}

// failure derives failureReason and failureMessage of a CapstanMachine (ALL-16) from the first condition with a terminal
// reason. It skips Ready, whose message summarizes others.
func failure(conditions []metav1.Condition) (reason, message *string) {
	for _, c := range conditions {
		if c.Type != clusterv1.ReadyCondition && c.Status == metav1.ConditionFalse && slices.Contains(terminal, c.Reason) {
			return ptr.To(c.Reason), ptr.To(shorten.ConditionMessage(cmp.Or(c.Message, c.Reason)))
		}
	}
	return nil, nil
}
