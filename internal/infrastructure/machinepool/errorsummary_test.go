package machinepool

import (
	"errors"
	"fmt"
	"strings"
	"testing"
)

// A condition contains the first error and the number of errors.
func TestSummary(t *testing.T) {
	one, two := errors.New("one"), errors.New("two")
	for name, tt := range map[string]struct {
		err  error
		want string
	}{
		"one":     {one, "one"},
		"joined":  {errors.Join(one), "one"},
		"wrapped": {fmt.Errorf("in: %w", errors.Join(one, two)), "in: one\ntwo"},
		"several": {errors.Join(errors.Join(one, two), two), "3 changes failed; the first: one"},
		"long":    {errors.New(strings.Repeat("ä", 2000)), strings.Repeat("ä", 512) + "…"},
	} {
		if got := summary(tt.err); got != tt.want {
			t.Errorf("%s: got %q, want %q", name, got, tt.want)
		}
	}
}
