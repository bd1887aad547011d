//go:build e2e

package v1beta1

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	bootstrapv1beta1 "capstan.dev/capstan/api/bootstrap/v1beta1"
	infrav1beta1 "capstan.dev/capstan/api/infrastructure/v1beta1"
	"capstan.dev/capstan/test/e2e/harness"
)

// inV1Beta1 reads all objects of a kind in v1beta1.
func inV1Beta1[T any](t *testing.T, kind string) []T {
	t.Helper()
	var list struct {
		Items []T `json:"items"`
	}
	if err := json.Unmarshal([]byte(plane.MustKubectl(t, "-n", namespace, "get", kind, "-o", "json")), &list); err != nil {
		t.Fatal(err)
	}
	if len(list.Items) == 0 {
		t.Errorf("found no %s", kind)
	}
	return list.Items
}

// checkObjects reads the objects of a running cluster in v1beta1. It compares them with the Nodes, and with the objects
// of Cluster API, which core filled from the same version (IC-01, IM-01, IM-02, IM-03, IM-07, MP-01, MP-02, MP-03,
// MP-04, MP-08, BC-01, BC-02).
func checkObjects(t *testing.T, c *harness.Cluster) {
	t.Helper()
	cluster := &clusterv1.Cluster{}
	if err := plane.Client.Get(t.Context(), client.ObjectKey{Namespace: c.Namespace, Name: c.Name}, cluster); err != nil {
		t.Fatal(err)
	}
	for _, found := range inV1Beta1[infrav1beta1.CapstanCluster](t, "capstanclusters.v1beta1.infrastructure.capstan.dev") {
		if endpoint := found.Spec.ControlPlaneEndpoint; !endpoint.IsValid() || endpoint.Host != cluster.Spec.ControlPlaneEndpoint.Host || endpoint.Port != cluster.Spec.ControlPlaneEndpoint.Port {
			t.Errorf("IC-01: the endpoint is %v, that of the Cluster %v", endpoint, cluster.Spec.ControlPlaneEndpoint)
		}
	}
	machines := machinesByName(t, c)
	providerIDs := checkMachines(t, c, machines)
	checkMachinePools(t, providerIDs)
	for _, template := range inV1Beta1[infrav1beta1.CapstanMachineTemplate](t, "capstanmachinetemplates.v1beta1.infrastructure.capstan.dev") {
		want := template.Spec.Template.Spec.Memory
		if got := template.Status.Capacity.Memory(); want == nil || got.Cmp(*want) != 0 || template.Status.NodeInfo.Architecture == "" {
			t.Errorf("IM-07: %s has the memory %v and the capacity %v, and %+v", template.Name, want, template.Status.Capacity, template.Status.NodeInfo)
		}
	}
	for _, template := range inV1Beta1[bootstrapv1beta1.CapstanConfigTemplate](t, "capstanconfigtemplates.v1beta1.bootstrap.capstan.dev") {
		if template.Spec.Template.ObjectMeta.Labels[clusterv1.ClusterNameLabel] != c.Name {
			t.Errorf("BC-01: %s has the metadata %v", template.Name, template.Spec.Template.ObjectMeta)
		}
	}
	compared := 0
	for _, config := range inV1Beta1[bootstrapv1beta1.CapstanConfig](t, "capstanconfigs.v1beta1.bootstrap.capstan.dev") {
		m, ok := machines[config.Name]
		if !ok {
			continue // of the pool
		}
		compared++
		if m.Spec.Bootstrap.DataSecretName == nil || config.Status.DataSecretName != *m.Spec.Bootstrap.DataSecretName || config.Status.DataSecretName == "" {
			t.Errorf("BC-02: %s names the Secret %q, its Machine %v", config.Name, config.Status.DataSecretName, m.Spec.Bootstrap.DataSecretName)
		}
	}
	if compared != 2 {
		t.Errorf("BC-02: %d configurations belong to Machines, want 2", compared)
	}
}

func machinesByName(t *testing.T, c *harness.Cluster) map[string]clusterv1.Machine {
	t.Helper()
	list := &clusterv1.MachineList{}
	if err := plane.Client.List(t.Context(), list, client.InNamespace(c.Namespace), client.MatchingLabels{clusterv1.ClusterNameLabel: c.Name}); err != nil {
		t.Fatal(err)
	}
	machines := map[string]clusterv1.Machine{}
	for _, m := range list.Items {
		machines[m.Name] = m
	}
	return machines
}

// checkMachines returns the provider ids of the machines by their names.
func checkMachines(t *testing.T, c *harness.Cluster, machines map[string]clusterv1.Machine) map[string]string {
	t.Helper()
	ids := map[string]string{}
	for _, found := range inV1Beta1[infrav1beta1.CapstanMachine](t, "capstanmachines.v1beta1.infrastructure.capstan.dev") {
		m, node := machines[found.Name], &corev1.Node{}
		if err := c.Client.Get(t.Context(), client.ObjectKey{Name: found.Name}, node); err != nil {
			t.Fatal(err)
		}
		ids[found.Name] = found.Spec.ProviderID
		if id := found.Spec.ProviderID; id == "" || id != node.Spec.ProviderID || id != m.Spec.ProviderID {
			t.Errorf("IM-01: %s has the provider id %q, its Node %q, its Machine %q", found.Name, id, node.Spec.ProviderID, m.Spec.ProviderID)
		}
		if domain := found.Status.FailureDomain; domain == "" || domain != m.Status.FailureDomain {
			t.Errorf("IM-02: %s is in %q, its Machine in %q", found.Name, domain, m.Status.FailureDomain)
		}
		if addresses := found.Status.Addresses; len(addresses) == 0 || !slices.Equal(addresses, m.Status.Addresses) {
			t.Errorf("IM-03: %s has the addresses %v, its Machine %v", found.Name, addresses, m.Status.Addresses)
		}
	}
	if len(ids) != 3 {
		t.Errorf("got the machines %v, want three", ids)
	}
	return ids
}

// checkMachinePools compares a pool's instances with its machine. It waits, because an instance becomes ready after its
// Machine.
func checkMachinePools(t *testing.T, providerIDs map[string]string) {
	t.Helper()
	harness.Eventually(t, "the machine pool", 2*time.Minute, func(context.Context) error {
		var problems []error
		for _, pool := range inV1Beta1[infrav1beta1.CapstanMachinePool](t, "capstanmachinepools.v1beta1.infrastructure.capstan.dev") {
			problems = append(problems, poolProblems(&pool, providerIDs)...)
		}
		return errors.Join(problems...)
	})
}

func poolProblems(pool *infrav1beta1.CapstanMachinePool, providerIDs map[string]string) (problems []error) {
	if len(pool.Status.Instances) != 1 || pool.Status.Replicas == nil || *pool.Status.Replicas != 1 {
		return []error{fmt.Errorf("MP-01, MP-08: %+v", pool.Status)}
	}
	i := pool.Status.Instances[0]
	id := providerIDs[i.InstanceName]
	if id == "" || i.ProviderID != id || len(i.Addresses) == 0 || i.Version == "" || !ptr.Deref(i.Ready, false) {
		problems = append(problems, fmt.Errorf("MP-01: the instance is %+v (ready: %t), the provider id of its machine %q", i, ptr.Deref(i.Ready, false), id))
	}
	if pool.Status.InfrastructureMachineKind != "CapstanMachine" {
		problems = append(problems, fmt.Errorf("MP-02: the kind of machines is %q", pool.Status.InfrastructureMachineKind))
	}
	if pool.Spec.ProviderID == "" {
		problems = append(problems, errors.New("MP-03: the pool has no provider id"))
	}
	if !slices.Equal(pool.Spec.ProviderIDList, []string{id}) {
		problems = append(problems, fmt.Errorf("MP-04: the provider ids are %v, want %q", pool.Spec.ProviderIDList, id))
	}
	return problems
}
