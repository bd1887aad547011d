//go:build e2e

package main

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"sync"
	"text/tabwriter"
	"time"
)

// rememberedFaults is the number of faults that are shown when an invariant is violated.
const rememberedFaults = 10

// report counts the work of a run.
type report struct {
	seed  uint64
	began time.Time

	mu         sync.Mutex
	faults     map[string]int
	without    map[string]int // faults without a victim
	operations map[operationKind]int
	last       []string
	watches    int
	writes     int
	rests      []time.Duration
}

func newReport(seed uint64) *report {
	return &report{seed: seed, began: time.Now(), faults: map[string]int{}, without: map[string]int{}, operations: map[operationKind]int{}}
}

func (r *report) fault(f fault, name string, at time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.faults[fmt.Sprint(f.Kind, "\t", f.Target)]++
	r.last = append(r.last, fmt.Sprintf("%s %v: %s", at.UTC().Format("15:04:05.000"), f, name))
	r.last = r.last[max(0, len(r.last)-rememberedFaults):]
}

func (r *report) skipped(f fault) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.without[fmt.Sprint(f.Kind, "\t", f.Target)]++
}

func (r *report) operation(op operation) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.operations[op.Kind]++
}

func (r *report) watched() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.watches++
}

func (r *report) written(n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.writes += n
}

func (r *report) rested(took time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.rests = append(r.rests, took)
}

func (r *report) lastFaults() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.last)
}

// print writes the figures of the run.
func (r *report) print(to io.Writer) {
	r.mu.Lock()
	defer r.mu.Unlock()
	w := tabwriter.NewWriter(to, 0, 0, 2, ' ', 0)
	defer func() { _ = w.Flush() }()
	fmt.Fprintf(w, "\nseed %d, %s\n", r.seed, time.Since(r.began).Round(time.Second))
	fmt.Fprintf(w, "\nfaults injected\t\t%d\n", total(r.faults))
	for _, kind := range slices.Sorted(maps.Keys(r.faults)) {
		fmt.Fprintf(w, "  %s\t%d\n", kind, r.faults[kind])
	}
	fmt.Fprintf(w, "faults without a victim\t\t%d\n", total(r.without))
	fmt.Fprintf(w, "\noperations\t\t%d\n", total(r.operations))
	for _, kind := range slices.Sorted(maps.Keys(r.operations)) {
		fmt.Fprintf(w, "  %s\t\t%d\n", kind, r.operations[kind])
	}
	fmt.Fprintf(w, "\nchecks at rest\t\t%d\nchecks under faults\t\t%d\nacknowledged writes\t\t%d\n", len(r.rests), r.watches, r.writes)
	if len(r.rests) > 0 {
		slices.Sort(r.rests)
		fmt.Fprintf(w, "recovery after\t\tmedian %.1f s, longest %.1f s\n", r.rests[len(r.rests)/2].Seconds(), r.rests[len(r.rests)-1].Seconds())
	}
}

func total[K comparable](counts map[K]int) (n int) {
	for _, v := range counts {
		n += v
	}
	return n
}
