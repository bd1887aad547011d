package pool

import (
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
	"capstan.dev/capstan/internal/ipam/alloc"
	"capstan.dev/capstan/internal/ipam/ledger"
)

// IPAM-02: Ready summarizes the other conditions.
func TestReady(t *testing.T) {
	free := ledger.View{Total: alloc.U128{Lo: 10}, Free: alloc.One}
	full := ledger.View{Total: alloc.U128{Lo: 10}}
	waiting := full
	waiting.Waiting = 3
	invalid := free
	invalid.Invalid = field.ErrorList{field.Required(field.NewPath("spec"), "")}
	tests := map[string]struct {
		facts facts
		want  string
	}{
		"free":                 {facts{view: free}, ipamv1.ReadyReason},
		"full, no claim waits": {facts{view: full}, ipamv1.ReadyReason},
		"full, claims wait":    {facts{view: waiting}, ipamv1.ExhaustedReason},
		"invalid":              {facts{view: invalid}, ipamv1.InvalidSpecReason},
		"overlap reported":     {facts{view: free, overlaps: []overlap{{}}}, ipamv1.ReadyReason},
		"overlap refused":      {facts{view: free, overlaps: []overlap{{}, {refused: true}}}, ipamv1.OverlapRefusedReason},
		"arriving":             {facts{view: free, arriving: true}, ipamv1.ArrivingFromMoveReason},
		"deleting":             {facts{view: invalid, deleting: true}, ipamv1.DeletingReason},
	}
	for name, tt := range tests {
		conditions := conditionsOf(tt.facts)
		ready := conditions[len(conditions)-1]
		if ready.Type != ipamv1.ReadyCondition || ready.Reason != tt.want || (ready.Status == metav1.ConditionTrue) != (tt.want == ipamv1.ReadyReason) {
			t.Errorf("%s: got %+v, want %s", name, ready, tt.want)
		}
	}
}

// IPAM-06: a moved pool allocates new addresses after a time without arrivals.
func TestArrivalLeft(t *testing.T) {
	const settle = 30 * time.Second
	tests := map[string]struct {
		quiet, addressQuiet, age time.Duration
		global, paused           bool
		want                     time.Duration
	}{
		"just arrived":                 {quiet: time.Hour, want: settle},
		"addresses arrive":             {quiet: 5 * time.Second, age: time.Minute, want: 25 * time.Second},
		"quiet":                        {quiet: settle, age: time.Minute, want: 0},
		"a Cluster is paused":          {quiet: time.Minute, age: time.Minute, paused: true, want: settle},
		"just before the limit":        {quiet: time.Minute, age: ledger.LongestArrival - time.Second, paused: true, want: time.Second},
		"paused longer than the limit": {quiet: time.Minute, age: ledger.LongestArrival, paused: true, want: -30 * time.Second},

		"claims of a global pool arrive":     {quiet: 5 * time.Second, addressQuiet: time.Hour, age: time.Minute, global: true, want: 25 * time.Second},
		"claims arrive after the limit":      {quiet: 5 * time.Second, addressQuiet: time.Hour, age: ledger.LongestArrival, global: true, want: settle - ledger.LongestArrival},
		"addresses arrive after the limit":   {quiet: 5 * time.Second, addressQuiet: 5 * time.Second, age: ledger.LongestArrival, global: true, want: 25 * time.Second},
		"claims of the pool's own namespace": {quiet: 5 * time.Second, addressQuiet: time.Hour, age: ledger.LongestArrival, want: 25 * time.Second},
	}
	for name, tt := range tests {
		view := ledger.View{Quiet: tt.quiet, AddressQuiet: tt.addressQuiet}
		if got := arrivalLeft(settle, tt.age, view, tt.global, tt.paused); got != tt.want {
			t.Errorf("%s: got %v, want %v", name, got, tt.want)
		}
	}
}
