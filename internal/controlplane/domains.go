package controlplane

import (
	"cmp"
	"slices"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util"
)

// domainsKnown says whether it is certain which failure domains there are. Infrastructure may show its endpoint before
// them, and a Machine that is made in between stands anywhere.
func (s *scope) domainsKnown() bool {
	if s.infraCluster == nil {
		return ptr.Deref(s.cluster.Status.Initialization.InfrastructureProvisioned, false) || !s.cluster.Spec.InfrastructureRef.IsDefined()
	}
	provisioned, _, _ := unstructured.NestedBool(s.infraCluster.Object, "status", "initialization", "provisioned")
	ready, _, _ := unstructured.NestedBool(s.infraCluster.Object, "status", "ready") // the contract v1beta1
	return provisioned || ready || len(failureDomains(s)) > 0
}

// failureDomains are the Cluster's, or, before core has copied them, the infrastructure's own.
func failureDomains(s *scope) []clusterv1.FailureDomain {
	if len(s.cluster.Status.FailureDomains) > 0 || s.infraCluster == nil {
		return s.cluster.Status.FailureDomains
	}
	return domainsOf(s.infraCluster)
}

// domainsOf reads status.failureDomains: a list, or a map by name as in the contract v1beta1. Entries that cannot be
// read are left out.
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

// domainOf is the failure domain of a Machine: the one that its infrastructure has put it in, else the one that it is
// to be put in.
func domainOf(m *clusterv1.Machine) string {
	return cmp.Or(m.Status.FailureDomain, m.Spec.FailureDomain)
}
