package pki

import (
	"crypto/x509"
	"fmt"
	"time"
)

// maxLife bounds the validity of all leaf certificates, for example 12m. Only `make test-expiry` sets it, with the linker.
// TestNoBoundInReleases proves that it is empty in all other builds.
var maxLife string

// bound is maxLife as a duration, or zero if there is no bound.
var bound = parseBound(maxLife)

func parseBound(text string) time.Duration {
	if text == "" {
		return 0
	}
	d, err := time.ParseDuration(text)
	if err != nil || d <= 0 {
		panic(fmt.Sprintf("internal/pki.maxLife was linked as %q: expected a positive duration", text))
	}
	return d
}

// MaxLife is the longest validity of leaf certificates in this build, or zero if there is no bound.
func MaxLife() time.Duration { return bound }

// Life returns the validity, or the longest one of this build if that is shorter.
func Life(validity time.Duration) time.Duration { return shorter(validity, bound) }

// CheckEvery returns the interval between two checks of certificates: usual, or less in a build with a bound.
func CheckEvery(usual time.Duration) time.Duration { return shorter(usual, bound/24) }

func shorter(d, limit time.Duration) time.Duration {
	if limit > 0 {
		return min(d, limit)
	}
	return d
}

// RenewAt returns the time at which a certificate should be renewed: after two thirds of its lifetime.
func RenewAt(c *x509.Certificate) time.Time { return Due(c.NotBefore, c.NotAfter) }

// Due is the end of two thirds of a lifetime.
func Due(notBefore, notAfter time.Time) time.Time {
	return notBefore.Add(notAfter.Sub(notBefore) * 2 / 3)
}

// Validity returns the validity with which this package created a certificate: its lifetime without Backdate, at least a
// minute.
func Validity(c *x509.Certificate) time.Duration {
	return max(time.Minute, c.NotAfter.Sub(c.NotBefore)-Backdate)
}

// ValidAt reports whether a certificate is valid at this time. A clock that was ahead creates certificates that are not yet valid.
func ValidAt(c *x509.Certificate, now time.Time) bool {
	return !now.Before(c.NotBefore) && now.Before(c.NotAfter)
}
