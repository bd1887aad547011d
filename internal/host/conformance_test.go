package host

import (
	"testing"

	"capstan.dev/capstan/internal/host/conformance"
	"capstan.dev/capstan/internal/testenv/testnetns"
)

func TestConformance(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	tunnelAddress(t)
	h := onBox(t)
	h.config.BalancerUID, h.diskBackend = 65534, diskImage
	conformance.Test(t, h, conformance.Features{LoadBalancers: true, Version: goodSpec().KubernetesVersion})
}
