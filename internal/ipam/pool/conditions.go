package pool

import (
	"fmt"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
	"capstan.dev/capstan/internal/ipam/ledger"
)

// facts is the input of the decisions about conditions of a pool.
type facts struct {
	view     ledger.View
	overlaps []overlap
	deleting bool
	arriving bool
}

// conditionsOf decides the conditions of a pool (row IPAM-02). The last one is Ready, which summarizes the others.
func conditionsOf(f facts) []metav1.Condition {
	valid := validCondition(f)
	available := availableCondition(f)
	overlapping := overlapCondition(f.overlaps)
	return []metav1.Condition{
		pausedCondition(false), valid, available, inRangeCondition(f), overlapping,
		readyCondition(f, valid, available, overlapping),
	}
}

// pausedCondition returns the condition Paused of a pool with or without the annotation (ALL-08).
func pausedCondition(is bool) metav1.Condition {
	c := metav1.Condition{Type: clusterv1.PausedCondition, Status: metav1.ConditionFalse, Reason: clusterv1.NotPausedReason}
	if is {
		c.Status, c.Reason, c.Message = metav1.ConditionTrue, clusterv1.PausedReason, "the pool has the annotation "+clusterv1.PausedAnnotation
	}
	return c
}

func condition(kind string, ok bool, yes, no, message string) metav1.Condition {
	c := metav1.Condition{Type: kind, Status: metav1.ConditionTrue, Reason: yes}
	if !ok {
		c.Status, c.Reason, c.Message = metav1.ConditionFalse, no, message
	}
	return c
}

func validCondition(f facts) metav1.Condition {
	message := ""
	if err := f.view.Invalid.ToAggregate(); err != nil {
		message = err.Error()
	}
	return condition(ipamv1.SpecValidCondition, message == "", ipamv1.ValidReason, ipamv1.InvalidSpecReason, message)
}

func availableCondition(f facts) metav1.Condition {
	message := fmt.Sprintf("all %s addresses are in use, reserved, resting or drained, and %d claims wait: release some or add a range", f.view.Total, f.view.Waiting)
	return condition(ipamv1.AddressesAvailableCondition, !f.view.Free.IsZero(), ipamv1.AvailableReason, ipamv1.ExhaustedReason, message)
}

func inRangeCondition(f facts) metav1.Condition {
	message := fmt.Sprintf("%d allocated addresses are not in the spec: they stay with their claims until the claims are deleted or the spec contains them again", f.view.OutOfRange)
	return condition(ipamv1.AddressesInRangeCondition, f.view.OutOfRange == 0, ipamv1.InRangeReason, ipamv1.OutOfRangeReason, message)
}

func overlapCondition(overlaps []overlap) metav1.Condition {
	c := condition(ipamv1.NotOverlappingCondition, len(overlaps) == 0, ipamv1.NotOverlappingReason, ipamv1.OverlappingReason, describeOverlaps(overlaps))
	for _, o := range overlaps {
		if o.refused {
			c.Reason = ipamv1.OverlapRefusedReason
		}
	}
	return c
}

// mostNamed is the maximum number of overlapping pools in a message.
const mostNamed = 5

func describeOverlaps(overlaps []overlap) string {
	var parts []string
	for i, o := range overlaps {
		if i == mostNamed {
			parts = append(parts, fmt.Sprintf("and %d more", len(overlaps)-mostNamed))
			break
		}
		parts = append(parts, o.String())
	}
	return strings.Join(parts, "; ")
}

// readyCondition is False if the pool cannot serve its claims. A full pool without waiting claims is ready.
func readyCondition(f facts, valid, available, overlapping metav1.Condition) metav1.Condition {
	c := metav1.Condition{Type: ipamv1.ReadyCondition, Status: metav1.ConditionFalse}
	switch {
	case f.deleting:
		c.Reason = ipamv1.DeletingReason
		c.Message = fmt.Sprintf("being deleted: waiting for %d addresses to be released", f.view.Addresses)
	case valid.Status == metav1.ConditionFalse:
		c.Reason, c.Message = valid.Reason, valid.Message
	case overlapping.Reason == ipamv1.OverlapRefusedReason:
		c.Reason, c.Message = overlapping.Reason, overlapping.Message
	case f.arriving:
		c.Reason = ipamv1.ArrivingFromMoveReason
		c.Message = "came from another management cluster: no address is allocated until its existing addresses have arrived"
	case available.Status == metav1.ConditionFalse && f.view.Waiting > 0:
		c.Reason, c.Message = available.Reason, available.Message
	default:
		c.Status, c.Reason = metav1.ConditionTrue, ipamv1.ReadyReason
	}
	return c
}

// arrivalLeft returns the time until a pool from another management cluster may allocate new addresses. clusterctl
// creates the pool first and its addresses last, and keeps every Cluster paused until the end. The wait for Clusters is
// bounded, because a Cluster may also be paused for other reasons. So is the wait for the claims of a global pool, because
// every tenant can create claims that look like copies. Only an administrator can create its IPAddresses.
func arrivalLeft(settle, age time.Duration, view ledger.View, global, clusterPaused bool) time.Duration {
	if clusterPaused && age < ledger.LongestArrival {
		return min(settle, ledger.LongestArrival-age)
	}
	quiet := view.Quiet
	if global && age >= ledger.LongestArrival {
		quiet = view.AddressQuiet
	}
	return settle - min(quiet, age)
}
