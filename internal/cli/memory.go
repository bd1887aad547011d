package cli

import (
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
)

// smallestMachine is the memory that each machine has at least.
const smallestMachine = 512 << 20

// warnOfMemory warns of new machines that the hosts have no memory for. limits has the memory limit of each new machine. With
// assumed, the limits are unknown, and each is smallestMachine.
func (a *app) warnOfMemory(limits []int64, assumed bool, hosts []infrav1.CapstanHost) {
	fit, known := fitting(limits, hosts)
	if !known || fit == len(limits) {
		return
	}
	misfit := fmt.Sprintf("with limits of %d MiB together do not fit", sum(limits)>>20)
	if assumed {
		misfit = fmt.Sprintf("do not fit, even with the smallest limit, %d MiB each", smallestMachine>>20)
	}
	a.warn("%d new machines %s: the hosts have free memory for %d of them. The other machines wait for more hosts", len(limits), misfit, fit)
}

func sum(limits []int64) (total int64) {
	for _, limit := range limits {
		total += limit
	}
	return total
}

// fitting returns the number of machines for which the hosts have free memory, the largest ones first. It is unknown without hosts, and if
// one of them does not report its memory.
func fitting(limits []int64, hosts []infrav1.CapstanHost) (machines int, known bool) {
	var free []int64
	for i := range hosts {
		memory, reported := hosts[i].Status.Allocatable[corev1.ResourceMemory]
		if !reported {
			return 0, false
		}
		free = append(free, memory.Value())
	}
	sorted := slices.Clone(limits)
	slices.Sort(sorted)
	for _, limit := range slices.Backward(sorted) {
		if i := slices.IndexFunc(free, func(room int64) bool { return room >= limit }); i >= 0 {
			free[i] -= limit
			machines++
		}
	}
	return machines, len(hosts) > 0
}

// memoryLimits returns the memory limit of each machine of a cluster that a template describes. A machine whose limit is not in the objects
// counts as the smallest one.
func memoryLimits(objects []*unstructured.Unstructured) (limits []int64) {
	of := map[string]int64{} // by kind and name of the infrastructure template
	for _, o := range objects {
		for _, path := range [][]string{{"spec", "template", "spec", "memory"}, {"spec", "machineTemplate", "spec", "memory"}} {
			of[o.GetKind()+o.GetName()] = max(of[o.GetKind()+o.GetName()], quantity(o.Object, path...))
		}
	}
	add := func(machines map[string]any, limit int64, path ...string) {
		n, _, _ := unstructured.NestedInt64(machines, path...)
		limits = append(limits, slices.Repeat([]int64{max(limit, smallestMachine)}, int(n))...)
	}
	for _, o := range objects {
		for _, path := range [][]string{{"spec", "template", "spec", "infrastructureRef"}, {"spec", "machineTemplate", "spec", "infrastructureRef"}} {
			if ref, found, _ := unstructured.NestedStringMap(o.Object, path...); found {
				add(o.Object, of[ref["kind"]+ref["name"]], "spec", "replicas")
			}
		}
		add(o.Object, variableMemory(o.Object, "controlPlaneMachine"), "spec", "topology", "controlPlane", "replicas")
		for _, g := range topologyGroups(o.Object) {
			add(g.object, variableMemory(o.Object, "workerMachine"), g.path...)
		}
	}
	return limits
}

// variableMemory returns the memory in a variable of the ClusterClass capstan; 0 without it.
func variableMemory(cluster map[string]any, name string) int64 {
	variables, _, _ := unstructured.NestedSlice(cluster, "spec", "topology", "variables")
	for _, v := range variables {
		if v, ok := v.(map[string]any); ok && v["name"] == name {
			return quantity(v, "value", "memory")
		}
	}
	return 0
}

// quantity returns the value of a quantity in bytes; 0 without one.
func quantity(object map[string]any, path ...string) int64 {
	value, found, _ := unstructured.NestedFieldNoCopy(object, path...)
	q, err := resource.ParseQuantity(fmt.Sprint(value))
	if !found || err != nil {
		return 0
	}
	return q.Value()
}
