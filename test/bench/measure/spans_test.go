package measure

import (
	"reflect"
	"testing"
	"time"
)

func TestCosts(t *testing.T) {
	second := func(n int) time.Time { return time.Unix(int64(n), 0) }
	span := func(id, parent, name string, start, end int) Span {
		return Span{ID: id, Parent: parent, Name: name, Start: second(start), End: second(end)}
	}
	seconds := func(n int) time.Duration { return time.Duration(n) * time.Second }
	cost := func(name string, count, total, longest, critical int) SpanCost {
		return SpanCost{name, count, seconds(total), seconds(longest), seconds(critical)}
	}
	for name, test := range map[string]struct {
		spans []Span
		want  []SpanCost
	}{
		"no spans": {nil, []SpanCost{cost(betweenSpans, 0, 0, 0, 10)}},
		"one after the other, with a gap": {
			[]Span{span("1", "", "a", 1, 4), span("2", "", "b", 6, 9)},
			[]SpanCost{cost(betweenSpans, 0, 0, 0, 4), cost("a", 1, 3, 3, 3), cost("b", 1, 3, 3, 3)},
		},
		"a call takes the time of its reconcile": {
			[]Span{span("1", "", "reconcile", 0, 10), span("2", "1", "call", 2, 8)},
			[]SpanCost{cost("call", 1, 6, 6, 6), cost("reconcile", 1, 10, 10, 4), cost(betweenSpans, 0, 0, 0, 0)},
		},
		"a short one beside a long one": {
			[]Span{span("1", "", "reconcile", 0, 3), span("2", "", "boot", 2, 9), span("3", "", "reconcile", 5, 6)},
			[]SpanCost{cost("boot", 1, 7, 7, 7), cost("reconcile", 2, 4, 3, 2), cost(betweenSpans, 0, 0, 0, 1)},
		},
		"of two at a time, the later one counts": {
			[]Span{span("1", "", "short", 0, 3), span("2", "", "long", 0, 10)},
			[]SpanCost{cost("long", 1, 10, 10, 10), cost("short", 1, 3, 3, 0), cost(betweenSpans, 0, 0, 0, 0)},
		},
		"a boot outlives the call that started it": {
			[]Span{span("1", "", "call", 0, 2), span("2", "1", "boot", 1, 10)},
			[]SpanCost{cost("boot", 1, 9, 9, 9), cost("call", 1, 2, 2, 1), cost(betweenSpans, 0, 0, 0, 0)},
		},
		"what has not ended was not waited for": {
			[]Span{span("1", "", "a", 0, 4), span("2", "", "open", 5, 12)},
			[]SpanCost{cost(betweenSpans, 0, 0, 0, 6), cost("a", 1, 4, 4, 4), cost("open", 1, 7, 7, 0)},
		},
		"other clusters": {
			[]Span{span("1", "", "before", -2, 1), span("2", "", "after", 10, 11), span("3", "", "a", 0, 10)},
			[]SpanCost{cost("a", 1, 10, 10, 10), cost(betweenSpans, 0, 0, 0, 0)},
		},
		"the same name": {
			[]Span{span("1", "", "a", 0, 2), span("2", "", "a", 2, 10), span("3", "", "empty", 5, 5)},
			[]SpanCost{cost("a", 2, 10, 8, 10), cost(betweenSpans, 0, 0, 0, 0), cost("empty", 1, 0, 0, 0)},
		},
	} {
		if got := Costs(test.spans, second(0), second(10)); !reflect.DeepEqual(got, test.want) {
			t.Errorf("%s:\n%+v, want\n%+v", name, got, test.want)
		}
	}
}
