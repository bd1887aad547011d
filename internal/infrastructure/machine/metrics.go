package machine

import (
	"errors"

	"github.com/prometheus/client_golang/prometheus"
	ctrlmetrics "sigs.k8s.io/controller-runtime/pkg/metrics"

	"capstan.dev/capstan/internal/infrastructure/placement"
)

// Values of the label result of placements.
const (
	placed  = "Placed"
	refused = "Refused"
)

var (
	placements = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "capstan_placement_attempts_total",
		Help: "Attempts to choose a host for a machine by result: Placed, Refused. A machine without a host tries again after changes of hosts.",
	}, []string{"result"})

	refusals = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "capstan_placement_refusals_total",
		Help: "Hosts that did not fit when no host was found, by the first requirement that they do not meet: FailureDomain, Network, LAN, Unavailable, Taint, Version, Image, ControlPlane, HostAccess, CPUs, Memory, Disk, Volume; NotAdmitted if the machine may use no host.",
	}, []string{"reason"})
)

// All series exist from the start, so that an increase to 1 is visible.
func init() {
	ctrlmetrics.Registry.MustRegister(placements, refusals)
	for _, result := range []string{placed, refused} {
		placements.WithLabelValues(result)
	}
	for _, reason := range placement.Reasons {
		refusals.WithLabelValues(string(reason))
	}
}

// countPlacement counts an attempt with the error of placement.Choose.
func countPlacement(err error) {
	var r *placement.Refused
	if !errors.As(err, &r) {
		placements.WithLabelValues(placed).Inc()
		return
	}
	placements.WithLabelValues(refused).Inc()
	for _, reason := range r.Reasons {
		refusals.WithLabelValues(string(reason)).Inc()
	}
}
