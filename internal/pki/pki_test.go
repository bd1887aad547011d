package pki

import (
	"crypto/x509"
	"testing"
	"time"
)

// A certificate is valid from its start to its end. A clock that is ahead creates certificates that are not yet valid.
func TestValidAt(t *testing.T) {
	begin := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	c := &x509.Certificate{NotBefore: begin, NotAfter: begin.Add(time.Hour)}
	for after, want := range map[time.Duration]bool{-time.Second: false, 0: true, time.Minute: true, time.Hour: false} {
		if got := ValidAt(c, begin.Add(after)); got != want {
			t.Errorf("%s after its start: %v", after, got)
		}
	}
}
