package capstanhost

import "testing"

// status.fencing never contains a value that may not be in effect.
func TestNextFencing(t *testing.T) {
	for _, tc := range []struct {
		wanted, recorded, inEffect int32
		want                       fencingStep
	}{
		{0, 0, 0, fencingDone},
		{60, 0, 0, fencingSend},
		{60, 0, 60, fencingRecord},
		{60, 60, 60, fencingDone},
		{600, 60, 60, fencingForget}, // before the host gets the new value
		{600, 0, 60, fencingSend},
		{0, 60, 60, fencingForget},
		{0, 0, 60, fencingSend},
		{60, 60, 0, fencingForget}, // the host was installed again
		{60, 60, 120, fencingForget},
	} {
		if got := nextFencing(tc.wanted, tc.recorded, tc.inEffect); got != tc.want {
			t.Errorf("%+v: %v", tc, got)
		}
	}
}
