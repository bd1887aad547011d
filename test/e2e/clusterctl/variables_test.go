//go:build e2e

package clusterctl

import (
	"context"
	"fmt"
	"testing"
	"time"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/test/e2e/harness"
)

// everyVariable sets all that the class has beside the sizes.
const everyVariable = `
    variables:
    - {name: podNetwork, value: None}
    - {name: kubeProxy, value: None}
    - {name: machineCIDR, value: 10.231.0.0/24}
    - {name: endpointPool, value: {name: endpoints}}
    - {name: addressPool, value: {kind: GlobalCapstanIPPool, name: machines}}
`

// setVariables makes a cluster with every variable of the class, and looks at what the topology controller made of them.
// Its pools do not exist, so that nothing is started.
func setVariables(t *testing.T, namespace string) {
	t.Helper()
	c := &harness.Cluster{Plane: plane, Namespace: namespace, Name: "variables"}
	t.Cleanup(func() { c.Delete(t) })
	mustKubectl(t, admin(plane), fmt.Sprintf(`
apiVersion: cluster.x-k8s.io/v1beta2
kind: Cluster
metadata: {name: variables, namespace: %s}
spec:
  clusterNetwork: {pods: {cidrBlocks: [10.244.0.0/16]}, services: {cidrBlocks: [10.96.0.0/16]}}
  topology:
    classRef: {name: capstan}
    version: %s
    controlPlane: {replicas: 1}
    workers:
      machineDeployments: [{class: worker, name: md-0, replicas: 0}]
      machinePools: [{class: worker, name: mp-0, replicas: 0}]
`, namespace, harness.FormerMinor(t))+everyVariable, "apply", "-f", "-")
	harness.Eventually(t, "the objects of the topology", 3*time.Minute, func(ctx context.Context) error { return varied(ctx, c) })
}

// varied says which object does not have what the variables say.
func varied(ctx context.Context, c *harness.Cluster) error {
	of := []client.ListOption{client.InNamespace(c.Namespace), client.MatchingLabels{clusterv1.ClusterNameLabel: c.Name, clusterv1.ClusterTopologyOwnedLabel: ""}}
	clusters, controlPlanes := &infrav1.CapstanClusterList{}, &controlplanev1.CapstanControlPlaneList{}
	templates, pools := &infrav1.CapstanMachineTemplateList{}, &infrav1.CapstanMachinePoolList{}
	for _, list := range []client.ObjectList{clusters, controlPlanes, templates, pools} {
		if err := plane.Client.List(ctx, list, of...); err != nil {
			return err
		}
	}
	if len(clusters.Items) != 1 || len(controlPlanes.Items) != 1 || len(templates.Items) != 2 || len(pools.Items) != 1 {
		return fmt.Errorf("there are %d, %d, %d and %d", len(clusters.Items), len(controlPlanes.Items), len(templates.Items), len(pools.Items))
	}
	spec := clusters.Items[0].Spec
	if from := spec.LoadBalancer.AddressFromPool; spec.Network.MachineCIDR != "10.231.0.0/24" || from == nil || *from != (infrav1.IPPoolReference{APIGroup: "ipam.capstan.dev", Kind: "CapstanIPPool", Name: "endpoints"}) {
		return fmt.Errorf("the CapstanCluster has %+v", spec)
	}
	if config := controlPlanes.Items[0].Spec.Config.Cluster; config.PodNetwork != bootstrapv1.PodNetworkNone || config.KubeProxy != bootstrapv1.KubeProxyNone {
		return fmt.Errorf("the CapstanControlPlane has %+v", config)
	}
	machines := map[string]infrav1.CapstanMachineSpec{"pool": pools.Items[0].Spec.MachineTemplate.Spec}
	for _, template := range templates.Items {
		machines[template.Name] = template.Spec.Template.Spec
	}
	for name, machine := range machines {
		from := machine.Network.AddressesFromPools
		if len(from) != 1 || from[0] != (infrav1.IPPoolReference{APIGroup: "ipam.capstan.dev", Kind: "GlobalCapstanIPPool", Name: "machines"}) {
			return fmt.Errorf("%s has addresses from %v", name, from)
		}
	}
	return nil
}
