package model

import (
	"cmp"
	"slices"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util"
)

// DomainsKnown reports whether the failure domains are final. Infrastructure may publish its endpoint before them, and a
// Machine that is created in between would have no failure domain.
func (cp *ControlPlane) DomainsKnown() bool {
	if cp.InfraCluster == nil {
		return ptr.Deref(cp.Cluster.Status.Initialization.InfrastructureProvisioned, false) || !cp.Cluster.Spec.InfrastructureRef.IsDefined()
	}
	provisioned, _, _ := unstructured.NestedBool(cp.InfraCluster.Object, "status", "initialization", "provisioned")
	ready, _, _ := unstructured.NestedBool(cp.InfraCluster.Object, "status", "ready") // the contract v1beta1
	return provisioned || ready || len(cp.FailureDomains()) > 0
}

// FailureDomains returns those of the Cluster or, before core has copied them, those of the infrastructure's object.
func (cp *ControlPlane) FailureDomains() []clusterv1.FailureDomain {
	if len(cp.Cluster.Status.FailureDomains) > 0 || cp.InfraCluster == nil {
		return cp.Cluster.Status.FailureDomains
	}
	return domainsOf(cp.InfraCluster)
}

// domainsOf reads status.failureDomains: a list, or a map by name as in the contract v1beta1. Invalid entries are ignored.
func domainsOf(infraCluster *unstructured.Unstructured) []clusterv1.FailureDomain {
	var out []clusterv1.FailureDomain
	if err := util.UnstructuredUnmarshalField(infraCluster, &out, "status", "failureDomains"); err == nil {
		return out
	}
	byName := map[string]clusterv1.FailureDomain{}
	if err := util.UnstructuredUnmarshalField(infraCluster, &byName, "status", "failureDomains"); err != nil {
		return nil
	}
	out = nil
	for name, d := range byName {
		d.Name = name
		out = append(out, d)
	}
	slices.SortFunc(out, func(a, b clusterv1.FailureDomain) int { return cmp.Compare(a.Name, b.Name) })
	return out
}

// FailureDomainOf returns the failure domain that the infrastructure reports for a Machine, otherwise the one that was
// requested.
func FailureDomainOf(m *clusterv1.Machine) string {
	return cmp.Or(m.Status.FailureDomain, m.Spec.FailureDomain)
}
