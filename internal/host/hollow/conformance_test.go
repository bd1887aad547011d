package hollow

import (
	"testing"

	"capstan.dev/capstan/internal/host/conformance"
)

func TestConformance(t *testing.T) {
	h, _ := start(t, t.TempDir(), Behaviour{})
	conformance.Test(t, h, conformance.Features{Version: "v1.36.3"})
}
