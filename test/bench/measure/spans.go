package measure

import (
	"cmp"
	"encoding/hex"
	"fmt"
	"io"
	"slices"
	"time"

	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"

	"capstan.dev/capstan/internal/testenv/otlpreceiver"
)

// betweenSpans is the name of the time without a span: a part that sends no spans works, for example the kubelet or Cluster API core.
const betweenSpans = "(no span)"

// Span is an interval of a trace.
type Span struct {
	ID, Parent, Name string
	Start, End       time.Time
}

// SpanCost is the cost of the spans of one name.
type SpanCost struct {
	Name           string
	Count          int
	Total, Longest time.Duration
	// Critical is the part of the critical path that belongs to these spans, without the spans below them.
	Critical time.Duration
}

// SpansOf converts received spans. Both sides of a call have the same name, so theirs has the side in front of it.
func SpansOf(received []otlpreceiver.Span) []Span {
	sides := map[tracepb.Span_SpanKind]string{tracepb.Span_SPAN_KIND_CLIENT: "client ", tracepb.Span_SPAN_KIND_SERVER: "server "}
	spans := make([]Span, 0, len(received))
	for _, s := range received {
		spans = append(spans, Span{
			ID: hex.EncodeToString(s.SpanId), Parent: hex.EncodeToString(s.ParentSpanId), Name: sides[s.Kind] + s.Name,
			Start: time.Unix(0, int64(s.StartTimeUnixNano)), End: time.Unix(0, int64(s.EndTimeUnixNano)),
		})
	}
	return spans
}

// Costs returns the cost of the spans that began between two times, with the largest part of the critical path first. At each moment,
// the path belongs to the running span that ends last, because the end waits for it, and there to the innermost one. A span that has
// not ended at the end was not waited for.
func Costs(spans []Span, from, to time.Time) []SpanCost {
	spans = slices.DeleteFunc(slices.Clone(spans), func(s Span) bool { return s.Start.Before(from) || !s.Start.Before(to) })
	costs := map[string]*SpanCost{betweenSpans: {Name: betweenSpans}}
	moments := []time.Time{from, to}
	for _, s := range spans {
		c, found := costs[s.Name]
		if !found {
			c = &SpanCost{Name: s.Name}
			costs[s.Name] = c
		}
		c.Count++
		c.Total += s.End.Sub(s.Start)
		c.Longest = max(c.Longest, s.End.Sub(s.Start))
		if !s.End.After(to) {
			moments = append(moments, s.Start, s.End)
		}
	}
	slices.SortFunc(moments, time.Time.Compare)
	tree := below(slices.DeleteFunc(spans, func(s Span) bool { return s.End.After(to) }))
	for i, moment := range moments[:len(moments)-1] {
		costs[running(tree, moment)].Critical += moments[i+1].Sub(moment)
	}
	result := make([]SpanCost, 0, len(costs))
	for _, c := range costs {
		result = append(result, *c)
	}
	slices.SortFunc(result, func(a, b SpanCost) int {
		return cmp.Or(cmp.Compare(b.Critical, a.Critical), cmp.Compare(b.Total, a.Total), cmp.Compare(a.Name, b.Name))
	})
	return result
}

// running returns the name of the span to which the critical path belongs from a moment on.
func running(tree map[string][]Span, moment time.Time) string {
	of := Span{Name: betweenSpans}
	for {
		var last *Span
		for i, s := range tree[of.ID] {
			if !s.Start.After(moment) && s.End.After(moment) && (last == nil || s.End.After(last.End)) {
				last = &tree[of.ID][i]
			}
		}
		if last == nil {
			return of.Name
		}
		of = *last
	}
}

// below returns the spans by the span that contains them. A span that outlives its parent, as the boot of a machine outlives the call
// that started it, is at the top: below the empty id.
func below(spans []Span) map[string][]Span {
	byID := map[string]Span{}
	for _, s := range spans {
		byID[s.ID] = s
	}
	tree := map[string][]Span{}
	for _, s := range spans {
		parent, found := byID[s.Parent]
		if !found || s.Start.Before(parent.Start) || s.End.After(parent.End) {
			parent.ID = ""
		}
		tree[parent.ID] = append(tree[parent.ID], s)
	}
	return tree
}

// PrintCosts prints a table of costs. share is the part of the critical path.
func PrintCosts(w io.Writer, costs []SpanCost) {
	var path time.Duration
	for _, c := range costs {
		path += c.Critical
	}
	fmt.Fprintf(w, "%-50s %6s %9s %9s %6s\n", "span", "count", "total", "longest", "share")
	for _, c := range costs {
		fmt.Fprintf(w, "%-50s %6d %7.2f s %7.2f s %4.0f %%\n", c.Name, c.Count, c.Total.Seconds(), c.Longest.Seconds(),
			100*c.Critical.Seconds()/path.Seconds())
	}
}
