package measure

import "testing"

func TestProcessors(t *testing.T) {
	before, err := parseProcessors("cpu  100 20 30 400 50 6 7 8 90 10\ncpu0 1 2 3\n")
	if want := (Processors{Busy: 171, Idle: 450}); err != nil || before != want {
		t.Fatalf("got %+v, %v, want %+v", before, err, want)
	}
	after := Processors{Busy: before.Busy + 3, Idle: before.Idle + 1}
	if got := after.BusySince(before); got != 0.75 {
		t.Errorf("busy for %v of the time, want 0.75", got)
	}
	if got := before.BusySince(before); got != 0 {
		t.Errorf("busy for %v of no time, want 0", got)
	}
	for _, bad := range []string{"", "cpu 1 2 3", "intr 1 2 3 4 5 6 7 8", "cpu 1 2 3 x 5 6 7 8"} {
		if p, err := parseProcessors(bad); err == nil {
			t.Errorf("%q gives %+v, want an error", bad, p)
		}
	}
}
