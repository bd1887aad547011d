package capstanhost

import (
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/events"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
)

// TestConnectionEvents: `kubectl describe capstanhost` shows each loss of a host and its return, and nothing when only the manager restarts.
func TestConnectionEvents(t *testing.T) {
	condition := func(status metav1.ConditionStatus, reason, message string) *metav1.Condition {
		return &metav1.Condition{Type: infrav1.HostConnectedCondition, Status: status, Reason: reason, Message: message}
	}
	connecting := condition(metav1.ConditionUnknown, infrav1.HostConnectingReason, "")
	connected := condition(metav1.ConditionTrue, infrav1.HostConnectedReason, "")
	refused := condition(metav1.ConditionFalse, infrav1.HostUnreachableReason, "connection refused")
	silent := condition(metav1.ConditionFalse, infrav1.HostUnreachableReason, "no answer")
	expired := condition(metav1.ConditionFalse, infrav1.HostCredentialsInvalidReason, "expired")
	for name, test := range map[string]struct {
		before, now *metav1.Condition
		want        string
	}{
		"a new host":                      {nil, connecting, ""},
		"the first connection":            {connecting, connected, ""},
		"a new host without an answer":    {connecting, refused, "Warning Unreachable connection refused"},
		"a loss":                          {connected, refused, "Warning Unreachable connection refused"},
		"no change":                       {refused, refused, ""},
		"another message":                 {refused, silent, ""},
		"another problem":                 {refused, expired, "Warning CredentialsInvalid expired"},
		"the return":                      {refused, connected, "Normal Connected The manager is connected to capstand again"},
		"a manager that has started":      {connected, connecting, ""},
		"invalid credentials at creation": {nil, expired, "Warning CredentialsInvalid expired"},
	} {
		t.Run(name, func(t *testing.T) {
			recorder := events.NewFakeRecorder(1)
			host := &infrav1.CapstanHost{}
			if test.before != nil {
				host.Status.Conditions = []metav1.Condition{*test.before}
			}
			before := connection(host)
			setConnected(host, test.now.Status, test.now.Reason, test.now.Message)
			(&Reconciler{recorder: recorder}).recordConnection(host, before)
			got := ""
			select {
			case got = <-recorder.Events:
			default:
			}
			if got != test.want {
				t.Errorf("event %q, want %q", got, test.want)
			}
		})
	}
}
