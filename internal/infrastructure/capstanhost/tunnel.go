package capstanhost

import (
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/cluster-api/util/conditions"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/reconciling"
	"capstan.dev/capstan/internal/shorten"
)

// maxProblems bounds the message about the tunnels of a host that reports nonsense.
const maxProblems = 1024

// showTunnel sets the condition TunnelReady, or removes it if the host has no network across hosts.
func showTunnel(host *infrav1.CapstanHost, info *hostpb.HostInfo) {
	switch problems := info.GetTunnelProblems(); {
	case host.Status.TunnelAddress == "":
		conditions.Delete(host, infrav1.HostTunnelReadyCondition)
	case len(problems) > 0:
		reconciling.SetCondition(host, infrav1.HostTunnelReadyCondition, metav1.ConditionFalse, infrav1.HostTunnelBrokenReason,
			"%s", shorten.To(strings.Join(problems, "; "), maxProblems))
	default:
		reconciling.SetCondition(host, infrav1.HostTunnelReadyCondition, metav1.ConditionTrue, infrav1.HostTunnelReadyReason, "")
	}
}
