package hostpb

import (
	"testing"
	"time"
)

// The documentation promises that the API shows the loss of a host within 20 s. gRPC raises smaller times of a client to 10 s.
func TestLossIsShownInTime(t *testing.T) {
	const promised, grpcMinimum, report = 20 * time.Second, 10 * time.Second, 2 * time.Second
	if sum := max(DefaultKeepalive.Idle, grpcMinimum) + DefaultKeepalive.Answer + report; sum > promised {
		t.Errorf("the loss of a host is noticed and shown after %s; want %s at most", sum, promised)
	}
}

// A host stops announcing its addresses before a manager moves them, and one lost pulse stops nothing.
func TestPulses(t *testing.T) {
	if PulseLease >= Silence || PulseLease < 2*Silence/3 {
		t.Errorf("a host announces for %s after a pulse, and a manager moves addresses after %s", PulseLease, Silence)
	}
}
