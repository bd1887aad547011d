package stall

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

func TestAdvance(t *testing.T) {
	type ranks = map[string]int
	for name, test := range map[string]struct {
		before []ranks
		now    ranks
		want   bool
	}{
		"nothing exists":           {nil, ranks{}, false},
		"a part without a rank":    {nil, ranks{"a": 0}, false},
		"a first part":             {nil, ranks{"a": 1}, true},
		"the same ranks":           {[]ranks{{"a": 1, "b": 2}}, ranks{"a": 1, "b": 2}, false},
		"one part is further":      {[]ranks{{"a": 1, "b": 2}}, ranks{"a": 2, "b": 2}, true},
		"another part":             {[]ranks{{"a": 1}}, ranks{"a": 1, "b": 1}, true},
		"a part falls back":        {[]ranks{{"a": 2}}, ranks{"a": 1}, false},
		"a part returns":           {[]ranks{{"a": 2}, {"a": 0}}, ranks{"a": 2}, false},
		"further than ever":        {[]ranks{{"a": 2}, {"a": 0}, {"a": 1}}, ranks{"a": 3}, true},
		"one falls back, one gets": {[]ranks{{"a": 2, "b": 1}}, ranks{"a": 1, "b": 2}, true},
	} {
		f := Furthest{}
		for _, before := range test.before {
			f.Advance(before)
		}
		if got := f.Advance(test.now); got != test.want {
			t.Errorf("%s: %v, want %v", name, got, test.want)
		}
	}
}

// TestContext: the limit begins anew with each advance, and the end counts as a time limit.
func TestContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		ctx, advance, cancel := Context(t.Context(), time.Minute)
		defer cancel()
		for range 3 {
			time.Sleep(50 * time.Second)
			advance()
		}
		<-ctx.Done()
		if took, want := time.Since(start), 150*time.Second+time.Minute; took != want {
			t.Errorf("ended after %s, want %s", took, want)
		}
		if cause := context.Cause(ctx); !Stalled(ctx) || !errors.Is(cause, context.DeadlineExceeded) || cause.Error() != "no progress for 1m0s" {
			t.Errorf("cause: %v", cause)
		}
	})
}

// TestOtherEnds: a canceled context and one without a limit are not stalled.
func TestOtherEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		unlimited, advance, end := Context(t.Context(), 0)
		advance()
		canceled, advance, cancel := Context(t.Context(), time.Minute)
		cancel()
		advance()
		time.Sleep(time.Hour)
		if unlimited.Err() != nil || !errors.Is(context.Cause(canceled), context.Canceled) || Stalled(canceled) {
			t.Errorf("without a limit: %v; canceled: %v", context.Cause(unlimited), context.Cause(canceled))
		}
		end()
	})
}
