package cli

import (
	"cmp"
	"fmt"
	"slices"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/cli/diagnosis"
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
	available := diagnosis.Status(v.cluster, "Available") == "True"

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
		if o.GetKind() == "CapstanCluster" && diagnosis.Status(o, infrav1.BootAllowedCondition) == "True" {
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

// blockers describes the problems of a cluster, a cause before its consequences.
func blockers(v view) []string {
	objects := slices.Clone(v.objects)
	if v.cluster != nil { // it is nil before the first answer of the API server
		objects = append(objects, v.cluster)
	}
	return diagnosis.Blockers(objects)
}
