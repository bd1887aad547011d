package host

import (
	"testing"

	"capstan.dev/capstan/internal/host/conformance"
	"capstan.dev/capstan/internal/host/network/ownnet"
)

func TestConformance(t *testing.T) {
	if !ownnet.Run(t) {
		return
	}
	h := onBox(t)
	h.config.BalancerUID = 65534
	conformance.Test(t, h, conformance.Features{LoadBalancers: true, Version: goodSpec().KubernetesVersion})
}
