package fakehost

import (
	"testing"

	"capstan.dev/capstan/internal/host/conformance"
)

func TestConformance(t *testing.T) {
	conformance.Test(t, New(t), conformance.Features{LoadBalancers: true, Version: "v1.36.3"})
}
