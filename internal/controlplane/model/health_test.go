package model

import (
	"errors"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
)

// TestEtcdHealth (CP-10): the condition of etcd as a whole.
func TestEtcdHealth(t *testing.T) {
	good, etcd, other, silent := &Readiness{Ready: true}, &Readiness{Failed: []string{"etcd"}}, &Readiness{Failed: []string{"poststarthook/x"}}, &Readiness{Err: errors.New("no")}
	for _, c := range []struct {
		machines, unknown string
		external          bool
		answer            *Readiness
		status            metav1.ConditionStatus
		reason            string
	}{
		{"a:v b:v c:v", "", false, good, "True", controlplanev1.HealthyReason},
		{"a:v b:v c:l", "", false, good, "True", controlplanev1.HealthyReason},
		{"a:v b:v c:u", "", false, good, "False", controlplanev1.NotHealthyReason},
		{"a:v b:v c:?", "", false, good, "False", controlplanev1.NotHealthyReason},
		{"a:v b:v stray-x:v", "", false, good, "False", controlplanev1.NotHealthyReason},
		{"a:v b:u c:u", "", false, good, "False", controlplanev1.QuorumLostReason},
		{"a:v", "nobody knows", false, good, "Unknown", controlplanev1.HealthUnknownReason},
		{"a:v", "nobody knows", false, etcd, "False", controlplanev1.QuorumLostReason},
		{"a:", "not started", false, etcd, "Unknown", controlplanev1.HealthUnknownReason},
		{"", "", false, etcd, "Unknown", controlplanev1.HealthUnknownReason},
		{"a:v", "nobody knows", false, silent, "Unknown", controlplanev1.WaitingForConnectionReason},
		{"a:", "", true, good, "True", controlplanev1.HealthyReason},
		{"a:", "", true, other, "True", controlplanev1.HealthyReason},
		{"a:", "", true, etcd, "False", controlplanev1.NotHealthyReason},
		{"a:", "", true, silent, "Unknown", controlplanev1.WaitingForConnectionReason},
	} {
		f := build(c.machines)
		f.Unknown, f.Stacked = c.unknown, !c.external
		if got := EtcdHealth(f, c.answer, !strings.HasPrefix(c.unknown, "not started")); got.Status != c.status || got.Reason != c.reason {
			t.Errorf("%+v: got %+v", c, got)
		}
	}
	if got := ComponentsHealth(build("a:v b:va"), good); got.Status != metav1.ConditionFalse || !strings.Contains(got.Message, "Machine b") {
		t.Errorf("%+v", got)
	}
	if got := ComponentsHealth(build("a:v b:v"), other); got.Status != metav1.ConditionFalse {
		t.Errorf("%+v", got)
	}
	if got := ComponentsHealth(build("a:v b:v"), etcd); got.Status != metav1.ConditionTrue {
		t.Errorf("%+v", got)
	}
}
