package dashboard

import (
	"slices"
	"strings"
	"unicode/utf8"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
)

const (
	// maxObjects is the number of objects of a kind that the page keeps.
	maxObjects = 2000
	// maxEvents is the number of events that the page keeps, the newest ones.
	maxEvents = 200
	// maxText is the length of a text in bytes, maxItems that of a list or map. CRDs permit far more.
	maxText, maxItems = 1024, 64
	// maxDepth is the depth of a field.
	maxDepth = 6
)

const (
	infraGroup   = "infrastructure.capstan.dev"
	ipamGroup    = "ipam.capstan.dev"
	controlGroup = "controlplane.capstan.dev"
	coreGroup    = "cluster.x-k8s.io"
	addressGroup = "ipam.cluster.x-k8s.io"
)

// kind is a kind of object that the page needs.
type kind struct {
	schema.GroupKind
	// title is the name of the kind for users, in the plural.
	title string
	// keep lists the fields that are kept, besides the identity and the conditions.
	keep []string
	// events: only the newest objects are kept.
	events bool
}

func of(group, name, title string, keep ...string) *kind {
	return &kind{GroupKind: schema.GroupKind{Group: group, Kind: name}, title: title, keep: keep}
}

var (
	poolFields   = []string{"spec.subnets", "status.addresses"}
	configFields = []string{"status.initialization"}

	hosts           = of(infraGroup, "CapstanHost", "Hosts", "spec.address", "spec.failureDomain", "spec.unschedulable", "spec.drain", "spec.taints", "status.capacity", "status.allocatable", "status.machines", "status.versions", "status.system", "status.unknownMachines")
	capstanMachines = of(infraGroup, "CapstanMachine", "Machines on hosts", "spec.hostName", "spec.cpus", "spec.memory", "status.addresses", "status.failureDomain", "status.restarts", "status.update")
	clusters        = of(coreGroup, "Cluster", "Clusters", "spec.controlPlaneEndpoint", "spec.controlPlaneRef", "spec.topology.version", "spec.topology.classRef", "spec.paused", "status.phase", "status.controlPlane", "status.workers")
	machines        = of(coreGroup, "Machine", "Machines", "spec.clusterName", "spec.infrastructureRef", "spec.bootstrap.configRef", "spec.version", "status.phase", "status.nodeRef", "status.nodeInfo.kubeletVersion", "status.failureDomain", "status.addresses")
	deployments     = of(coreGroup, "MachineDeployment", "Machine deployments", "spec.clusterName", "spec.replicas", "spec.template.spec.version", "status.replicas", "status.readyReplicas", "status.upToDateReplicas", "status.phase")
	machinePools    = of(coreGroup, "MachinePool", "Machine pools", "spec.clusterName", "spec.replicas", "spec.template.spec.version", "status.replicas", "status.readyReplicas", "status.upToDateReplicas", "status.phase")
	controlPlanes   = of(controlGroup, "CapstanControlPlane", "Control planes", "spec.replicas", "spec.version", "status.replicas", "status.readyReplicas", "status.upToDateReplicas", "status.version")
	pools           = of(ipamGroup, "CapstanIPPool", "IP pools", poolFields...)
	globalPools     = of(ipamGroup, "GlobalCapstanIPPool", "Global IP pools", poolFields...)
	addresses       = of(addressGroup, "IPAddress", "IP addresses", "spec.address", "spec.poolRef", "spec.claimRef")
	eventsKind      = &kind{GroupKind: schema.GroupKind{Kind: "Event"}, title: "Events", events: true, keep: []string{"involvedObject", "type", "reason", "message", "count", "series", "lastTimestamp", "eventTime"}}
)

// kinds are all kinds that the page reads. Those that are not named contribute the waits of a cluster.
var kinds = []*kind{
	hosts, clusters, machines, capstanMachines, controlPlanes, deployments, machinePools, pools, globalPools, addresses, eventsKind,
	of(infraGroup, "CapstanCluster", "Infrastructure of clusters"),
	of(infraGroup, "CapstanMachinePool", "Capstan machine pools"),
	of("bootstrap.capstan.dev", "CapstanConfig", "Configurations of machines", configFields...),
	of(coreGroup, "MachineSet", "Machine sets"),
	of(coreGroup, "MachineHealthCheck", "Health checks"),
	of(addressGroup, "IPAddressClaim", "Claims of addresses", "spec.poolRef"),
}

// keptLabels and keptAnnotations are used by the page and package diagnosis.
var (
	keptLabels = []string{
		clusterv1.ClusterNameLabel, clusterv1.MachineControlPlaneLabel, clusterv1.MachineDeploymentNameLabel, clusterv1.MachinePoolNameLabel,
	}
	keptAnnotations = []string{clusterv1.UpdateInProgressAnnotation}
)

// trim returns the part of an object that the page keeps. Tenants write objects, so each part has a limit.
func trim(o *unstructured.Unstructured, k *kind) *unstructured.Unstructured {
	out := &unstructured.Unstructured{Object: map[string]any{}}
	keep := slices.Concat([]string{
		"apiVersion", "kind", "metadata.name", "metadata.namespace", "metadata.uid", "metadata.creationTimestamp",
		"metadata.deletionTimestamp", "status.conditions",
	}, k.keep)
	for _, path := range keep {
		names := strings.Split(path, ".")
		if value, found, err := unstructured.NestedFieldNoCopy(o.Object, names...); found && err == nil && value != nil {
			_ = unstructured.SetNestedField(out.Object, bounded(value, maxDepth), names...) // fails only below a field that is no map
		}
	}
	if labels := chosen(o.GetLabels(), keptLabels); len(labels) > 0 {
		out.SetLabels(labels)
	}
	if annotations := chosen(o.GetAnnotations(), keptAnnotations); len(annotations) > 0 {
		out.SetAnnotations(annotations)
	}
	return out
}

func chosen(all map[string]string, names []string) map[string]string {
	out := map[string]string{}
	for _, name := range names {
		if value, found := all[name]; found {
			out[name] = clip(value)
		}
	}
	return out
}

// bounded returns a copy of a value of JSON that is not larger than the limits.
func bounded(value any, depth int) any {
	if depth == 0 {
		return nil
	}
	switch v := value.(type) {
	case string:
		return clip(v)
	case []any:
		out := make([]any, 0, min(len(v), maxItems))
		for _, item := range v[:min(len(v), maxItems)] {
			out = append(out, bounded(item, depth-1))
		}
		return out
	case map[string]any:
		out := map[string]any{}
		for name, item := range v {
			if len(out) == maxItems {
				break
			}
			out[clip(name)] = bounded(item, depth-1)
		}
		return out
	}
	return value
}

// clip shortens a text to maxText bytes, between two characters.
func clip(text string) string {
	if len(text) <= maxText {
		return text
	}
	end := maxText
	for end > 0 && !utf8.RuneStart(text[end]) {
		end--
	}
	return strings.Clone(text[:end]) + "…"
}
