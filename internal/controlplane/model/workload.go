package model

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	etcdv1 "capstan.dev/capstan/api/etcd/v1beta2"
)

// leaseDuration is for how long a Lease that is renewed every ten seconds, as those of API servers and of etcd's care are,
// proves that its holder is alive.
const leaseDuration = etcdv1.CareLeaseDuration

// Workload is the state of the control plane inside its workload cluster. It is read live, because irreversible decisions
// depend on it. Watches only start a reconciliation.
type Workload struct {
	// Err is the reason why the workload cluster could not be read.
	Err error
	// Members by name. Missing: the cluster does not have the kind EtcdMember, so that its machines report no members.
	Members map[string]etcdv1.EtcdMember
	Missing bool
	// Care is the last renewal of the Lease of the agent that manages etcd membership. APIServers are the last renewals of
	// the API servers' Leases by host name.
	Care       Renewal
	APIServers map[string]Renewal
}

// NotAsked is the state of a workload cluster before the first request.
func NotAsked() *Workload { return &Workload{Err: errors.New("no request was sent yet")} }

// unknown returns the reason why the current state of etcd is not known; "" when it is known.
func (w *Workload) unknown(stacked bool, now time.Time) string {
	switch {
	case w.Err != nil:
		return "cannot read the state of the machines from the workload cluster: " + w.Err.Error()
	case !stacked:
		return ""
	case w.Missing || len(w.Members) == 0:
		return "the machines do not report their etcd members yet"
	case w.Care.At.IsZero():
		return "no agent manages the etcd membership yet"
	}
	switch w.Care.Alive(now) {
	case metav1.ConditionFalse:
		return fmt.Sprintf("no agent has managed the etcd membership since %s", w.Care.At.UTC().Format(time.RFC3339))
	case metav1.ConditionUnknown:
		return fmt.Sprintf("it is not known yet whether an agent manages the etcd membership: the Lease %s has not been renewed since it was first read", etcdv1.CareLeaseName)
	}
	return ""
}

// apiServer returns the health of the API server on the machine with one of the names.
func (w *Workload) apiServer(names []string, now time.Time) metav1.ConditionStatus {
	if w.Err != nil {
		return metav1.ConditionUnknown
	}
	out := metav1.ConditionFalse
	for _, name := range names {
		switch w.APIServers[name].Alive(now) {
		case metav1.ConditionTrue:
			return metav1.ConditionTrue
		case metav1.ConditionUnknown:
			out = metav1.ConditionUnknown
		}
	}
	return out
}

// served reports whether the API server on the machine with one of the names has worked, or the workload cluster cannot
// be reached.
func (w *Workload) served(names []string) bool {
	return w.Err != nil || slices.ContainsFunc(names, func(name string) bool { return !w.APIServers[name].At.IsZero() })
}

// Stale returns the time for which the data remains current; 0 when it is outdated. A missing renewal is no event, so that
// the cluster has to be read again.
func (w *Workload) Stale(now time.Time) time.Duration {
	oldest := w.Care.At
	for _, renewed := range w.APIServers {
		if renewed.Alive(now) == metav1.ConditionTrue && (oldest.IsZero() || renewed.At.Before(oldest)) {
			oldest = renewed.At
		}
	}
	return max(0, leaseDuration+time.Second-now.Sub(oldest))
}

func (w *Workload) sortedMembers() []etcdv1.EtcdMember {
	out := make([]etcdv1.EtcdMember, 0, len(w.Members))
	for _, m := range w.Members {
		out = append(out, m)
	}
	slices.SortFunc(out, func(a, b etcdv1.EtcdMember) int { return strings.Compare(a.Name, b.Name) })
	return out
}
