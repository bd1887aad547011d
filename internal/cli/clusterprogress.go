package cli

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/polarity"
)

// view is a Cluster and all of its objects, of all providers.
type view struct {
	cluster *unstructured.Unstructured
	objects []*unstructured.Unstructured
}

// assessment is the progress of a cluster.
type assessment struct {
	steps []step
	// blockers describe the problems of the cluster, a cause before its consequences.
	blockers []string
	done     bool
}

// assess derives the progress of a cluster from the status of its objects.
func assess(v view) assessment {
	if v.cluster == nil {
		return assessment{steps: []step{{name: "cluster"}}}
	}
	c := v.cluster.Object
	initialized, _, _ := unstructured.NestedBool(c, "status", "initialization", "controlPlaneInitialized")
	controlPlane, workers := replicasOf(c, "controlPlane"), replicasOf(c, "workers")
	available := conditionStatus(v.cluster, "Available") == "True"

	a := assessment{steps: []step{
		v.infrastructure(),
		{name: "control plane answers", done: initialized},
		{name: "control plane machines", done: controlPlane.complete(), note: controlPlane.String()},
		{name: "workers", done: initialized && workers.complete(), note: workers.String()},
		{name: "cluster available", done: available},
	}}
	a.done = !slices.ContainsFunc(a.steps, func(s step) bool { return !s.done })
	if !a.done {
		a.blockers = blockers(v)
	}
	return a
}

// infrastructure is complete when machines may boot. A CapstanCluster shows this before the Cluster.
func (v view) infrastructure() step {
	done, _, _ := unstructured.NestedBool(v.cluster.Object, "status", "initialization", "infrastructureProvisioned")
	note := endpoint(v.cluster.Object)
	for _, o := range v.objects {
		if o.GetKind() == "CapstanCluster" && conditionStatus(o, infrav1.BootAllowedCondition) == "True" {
			done, note = true, cmp.Or(note, endpoint(o.Object))
		}
	}
	return step{name: "infrastructure", done: done, note: note}
}

// replicas are the numbers of machines of a part of a cluster. desired is -1 before it is known.
type replicas struct{ desired, ready, available int64 }

func replicasOf(cluster map[string]any, part string) replicas {
	get := func(field string) int64 {
		n, _, _ := unstructured.NestedInt64(cluster, "status", part, field)
		return n
	}
	r := replicas{get("desiredReplicas"), get("readyReplicas"), get("availableReplicas")}
	if _, found, _ := unstructured.NestedInt64(cluster, "status", part, "desiredReplicas"); !found {
		r.desired = -1
	}
	return r
}

// complete reports whether all desired machines are ready. It is false before their number is known.
func (r replicas) complete() bool { return r.desired >= 0 && r.ready >= r.desired }

func (r replicas) String() string {
	if r.desired < 0 {
		return ""
	}
	return fmt.Sprintf("%d of %d ready", r.ready, r.desired)
}

func endpoint(cluster map[string]any) string {
	host, _, _ := unstructured.NestedString(cluster, "spec", "controlPlaneEndpoint", "host")
	port, _, _ := unstructured.NestedInt64(cluster, "spec", "controlPlaneEndpoint", "port")
	if host == "" {
		return ""
	}
	return fmt.Sprintf("%s:%d", host, port)
}

// condition is a condition in the form of the v1beta2 contract, which all providers use.
type condition struct {
	kind, status, reason, message string
	// since is the time of the last change of the status.
	since time.Time
}

func conditionsOf(o *unstructured.Unstructured) []condition {
	list, _, _ := unstructured.NestedSlice(o.Object, "status", "conditions")
	var out []condition
	for _, item := range list {
		fields, ok := item.(map[string]any)
		if !ok {
			continue
		}
		get := func(name string) string { s, _ := fields[name].(string); return s }
		since, _ := time.Parse(time.RFC3339, get("lastTransitionTime")) // zero without a time
		out = append(out, condition{get("type"), get("status"), get("reason"), get("message"), since})
	}
	return out
}

func conditionStatus(o *unstructured.Unstructured, kind string) string {
	for _, c := range conditionsOf(o) {
		if c.kind == kind {
			return c.status
		}
	}
	return ""
}

// summaries lists the conditions that summarize others.
var summaries = []string{"Ready", "Available"}

// blockers describes the first blocking condition of each object. Objects that are closer to the machine come first,
// because their problems cause those of the others.
func blockers(v view) []string {
	objects := slices.Clone(v.objects)
	if v.cluster != nil { // it is nil before the first answer of the API server
		objects = append(objects, v.cluster)
	}
	slices.SortStableFunc(objects, func(a, b *unstructured.Unstructured) int {
		return cmp.Or(cmp.Compare(distance(a), distance(b)), cmp.Compare(a.GetKind(), b.GetKind()), cmp.Compare(a.GetName(), b.GetName()))
	})
	var out []string
	seen := map[string]bool{}
	for _, o := range objects {
		c, found := blocking(conditionsOf(o))
		if !found || seen[c.message] {
			continue // The object only repeats the message of another one.
		}
		if c.message != "" {
			seen[c.message] = true
		}
		out = append(out, fmt.Sprintf("%s %s: %s", o.GetKind(), o.GetName(), c))
	}
	return out
}

func (c condition) String() string {
	text := c.kind + " is " + c.status
	if c.reason != "" {
		text += " (" + c.reason + ")"
	}
	if c.message != "" {
		text += ": " + strings.ReplaceAll(strings.TrimPrefix(c.message, "* "), "\n", " ")
	}
	return text
}

// blocking returns the first condition that describes a problem, if there is one. A summary comes last: it repeats other
// conditions. A condition that is False is no problem if it normally is False, or if its purpose is fulfilled.
func blocking(all []condition) (condition, bool) {
	var summary *condition
	for _, c := range all {
		switch {
		case c.kind == "Paused" && c.status == "True":
			return c, true
		case c.status != "False" || polarity.FalseIsGood(c.kind, c.reason):
		case slices.Contains(summaries, c.kind):
			summary = &c
		default:
			return c, true
		}
	}
	if summary != nil {
		return *summary, true
	}
	return condition{}, false
}

// distance of an object's kind from the machine: lower is closer.
func distance(o *unstructured.Unstructured) int {
	group, _, _ := strings.Cut(o.GetAPIVersion(), "/")
	switch kind := o.GetKind(); {
	case strings.HasPrefix(group, "infrastructure.") || strings.HasPrefix(group, "ipam."):
		return 0
	case strings.HasPrefix(group, "bootstrap."):
		return 1
	case strings.HasPrefix(group, "controlplane."):
		return 2
	case kind == "Machine":
		return 3
	case kind == "Cluster":
		return 5
	}
	return 4
}
