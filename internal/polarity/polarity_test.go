package polarity

import "testing"

func TestFalseIsGood(t *testing.T) {
	for _, test := range []struct {
		kind, reason string
		want         bool
	}{
		{"Paused", "NotPaused", true},
		{"ScalingUp", "NotScalingUp", true},
		{"CertificatesExpiring", "CertificatesNotExpiring", true},
		{"CertificateAuthorityRotating", "NotRotating", true},
		{"BootstrapTokenAvailable", "NoLongerNeeded", true},
		{"BootstrapTokenAvailable", "WaitingForConnection", false},
		{"CertificatesAvailable", "CertificatesNotAvailable", false},
		{"Ready", "NotReady", false},
		{"HostAssigned", "NoHost", false},
	} {
		if got := FalseIsGood(test.kind, test.reason); got != test.want {
			t.Errorf("%s is False (%s): good is %v, want %v", test.kind, test.reason, got, test.want)
		}
	}
}
