package cli

import (
	"testing"
	"time"

	"capstan.dev/capstan/internal/host/credentials"
)

// TestTokenTerms: the output of the command has the time at which the token ends.
func TestTokenTerms(t *testing.T) {
	now := time.Date(2026, 3, 1, 3, 0, 0, 5, time.UTC)
	for ttl, code := range map[time.Duration]int{time.Hour: exitOK, 0: exitUsage, 48 * time.Hour: exitUsage} {
		o := tokenOptions{ttl: ttl}
		o.terms.Hosts, o.terms.Validity.Duration = 1, credentials.DefaultValidity
		err := o.begin(now)
		if end := now.Add(ttl).Truncate(time.Second); !o.terms.Expires.Time.Equal(end) || (err == nil) != (code == exitOK) || err != nil && exitCode(err) != code {
			t.Errorf("a token of %s ends at %s: %v", ttl, o.terms.Expires, err)
		}
	}
}
