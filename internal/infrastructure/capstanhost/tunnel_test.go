package capstanhost

import (
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/cluster-api/util/conditions"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
)

func TestShowTunnel(t *testing.T) {
	host := &infrav1.CapstanHost{}
	for _, step := range []struct {
		info *hostpb.HostInfo
		want *metav1.Condition
	}{
		{&hostpb.HostInfo{}, nil},
		{&hostpb.HostInfo{TunnelAddress: "192.0.2.1"}, &metav1.Condition{Status: metav1.ConditionTrue, Reason: infrav1.HostTunnelReadyReason}},
		{&hostpb.HostInfo{TunnelAddress: "192.0.2.1", TunnelProblems: []string{"one", "two"}},
			&metav1.Condition{Status: metav1.ConditionFalse, Reason: infrav1.HostTunnelBrokenReason, Message: "one; two"}},
		{&hostpb.HostInfo{TunnelAddress: "192.0.2.1", TunnelProblems: []string{strings.Repeat("x", 1<<20)}},
			&metav1.Condition{Status: metav1.ConditionFalse, Reason: infrav1.HostTunnelBrokenReason, Message: strings.Repeat("x", maxProblems)}},
		{&hostpb.HostInfo{}, nil},
	} {
		setStatus(&host.Status, step.info)
		showTunnel(host, step.info)
		got := conditions.Get(host, infrav1.HostTunnelReadyCondition)
		if (got == nil) != (step.want == nil) || got != nil && (got.Status != step.want.Status || got.Reason != step.want.Reason || got.Message != step.want.Message) {
			t.Errorf("got %.200v, want %.200v", got, step.want)
		}
	}
}
