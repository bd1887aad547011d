package reconciling

import (
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
)

// ObjectGauge is a gauge with series of objects. Labels name the object, and a last label names one of its series.
type ObjectGauge struct {
	*prometheus.GaugeVec

	mu sync.Mutex
	// shown has the values of the last label by object.
	shown map[string][]string
}

// NewObjectGauge returns an ObjectGauge. Its labels are those of the object and the last one.
func NewObjectGauge(opts prometheus.GaugeOpts, labels []string) *ObjectGauge {
	return &ObjectGauge{GaugeVec: prometheus.NewGaugeVec(opts, labels), shown: map[string][]string{}}
}

// Show sets the series of an object to exactly these values, by their last label. A series that stays is in each scrape. The series of other
// objects are not read: DeletePartialMatch reads all series of the gauge, so reconciles would slow down with the number of objects.
func (g *ObjectGauge) Show(values map[string]float64, object ...string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	key := strings.Join(object, "/")
	for _, last := range g.shown[key] {
		if _, stays := values[last]; !stays {
			g.DeleteLabelValues(append(slices.Clone(object), last)...)
		}
	}
	for last, value := range values {
		g.WithLabelValues(append(slices.Clone(object), last)...).Set(value)
	}
	if len(values) == 0 {
		delete(g.shown, key)
		return
	}
	g.shown[key] = slices.Collect(maps.Keys(values))
}

// Forget removes the series of an object.
func (g *ObjectGauge) Forget(object ...string) { g.Show(nil, object...) }
