package reconciling

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
)

func TestRunSteps(t *testing.T) {
	broken := errors.New("broken")
	waiting := fmt.Errorf("%w: for a host", ErrWaiting)
	for name, test := range map[string]struct {
		results   []error
		ran       int
		err, kept error
	}{
		"no step":       {},
		"all complete":  {results: []error{nil, nil}, ran: 2},
		"one waits":     {results: []error{nil, waiting, nil}, ran: 2, err: waiting},
		"one is broken": {results: []error{broken, nil}, ran: 1, err: broken, kept: broken},
	} {
		var ran []int
		var steps []func(context.Context, *[]int) error
		for i, result := range test.results {
			steps = append(steps, func(_ context.Context, ran *[]int) error {
				*ran = append(*ran, i)
				return result
			})
		}
		err := RunSteps(t.Context(), &ran, steps...)
		if !errors.Is(err, test.err) || len(ran) != test.ran || !slices.IsSorted(ran) {
			t.Errorf("%s: ran %v, %v", name, ran, err)
		}
		if kept := IgnoreWaiting(err); !errors.Is(kept, test.kept) {
			t.Errorf("%s: kept %v", name, kept)
		}
	}
}
