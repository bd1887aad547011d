package machinepool

import (
	"errors"
	"fmt"
	"strings"
	"testing"
)

// A condition has room for one error, whatever there are.
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
		"long":    {errors.New(strings.Repeat("ä", 2000)), strings.Repeat("ä", 512) + " …"},
	} {
		if got := summary(tt.err); got != tt.want {
			t.Errorf("%s: got %q, wanted %q", name, got, tt.want)
		}
	}
}
