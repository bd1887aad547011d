package hostselection

import (
	"strings"
	"testing"
)

// CTL-13: only two ids that are known and differ are a mismatch.
func TestMismatch_CTL13(t *testing.T) {
	for name, tc := range map[string]struct {
		recorded, actual string
		mismatch         bool
	}{
		"the same":          {"a-host", "a-host", false},
		"another one":       {"a-host", "b-host", true},
		"from before":       {"", "b-host", false},
		"not connected yet": {"a-host", "", false},
	} {
		got := Mismatch("local", tc.recorded, tc.actual)
		if (got != "") != tc.mismatch {
			t.Errorf("%s: %q", name, got)
		}
		for _, word := range []string{"local", tc.recorded, tc.actual, "spec.address"} {
			if tc.mismatch && !strings.Contains(got, word) {
				t.Errorf("%s: no %s in %q", name, word, got)
			}
		}
	}
}
