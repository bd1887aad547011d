//go:build e2e

package clusterctl

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	shipped "capstan.dev/capstan/templates"
	"capstan.dev/capstan/test/e2e/harness"
)

// everyVariable sets all variables of the class except the sizes.
const everyVariable = `
    variables:
    - {name: podNetwork, value: None}
    - {name: kubeProxy, value: None}
    - {name: localVolumes, value: StorageClass}
    - {name: machineCIDR, value: 10.231.0.0/24}
    - {name: machineIPv6CIDR, value: "fd00:10:231::/64"}
    - {name: endpointPool, value: {name: endpoints}}
    - {name: addressPool, value: {kind: GlobalCapstanIPPool, name: machines}}
`

// ownSettings are settings in a user's copy of the class for which the class has no variable.
var ownSettings = strings.NewReplacer(
	"name: capstan\n", "name: own\n",
	"name: capstan-", "name: own-",
	"      config:\n        cluster: #", "      config:\n        preCommands: [sysctl -n vm.swappiness]\n        kubelet: {extraArgs: [{name: v, value: \"3\"}]}\n        cluster:\n          certificateValidityDays: 90 #",
	"        mode: Managed\n", "        mode: Managed\n        port: 7443\n",
)

// setVariables creates a cluster with every variable of the class, and checks the objects that the topology controller
// creates. The class is a user's copy with additional settings. The patches of the class must preserve them. The pools
// do not exist, so that no machine starts.
func setVariables(t *testing.T, namespace string) {
	t.Helper()
	c := &harness.Cluster{Plane: plane, Namespace: namespace, Name: "variables"}
	t.Cleanup(func() { c.Delete(t) })
	class, err := shipped.FS.ReadFile("clusterclass-capstan.yaml")
	if err != nil {
		t.Fatal(err)
	}
	mustKubectl(t, admin(plane), ownSettings.Replace(string(class)), "-n", namespace, "apply", "-f", "-")
	mustKubectl(t, admin(plane), fmt.Sprintf(`
apiVersion: cluster.x-k8s.io/v1beta2
kind: Cluster
metadata: {name: variables, namespace: %s}
spec:
  clusterNetwork: {pods: {cidrBlocks: [10.244.0.0/16]}, services: {cidrBlocks: [10.96.0.0/16]}}
  topology:
    classRef: {name: own}
    version: %s
    controlPlane: {replicas: 1}
    workers:
      machineDeployments: [{class: worker, name: md-0, replicas: 0}]
      machinePools: [{class: worker, name: mp-0, replicas: 0}]
`, namespace, harness.FormerMinor(t))+everyVariable, "apply", "-f", "-")
	harness.Eventually(t, "the objects of the topology", 3*time.Minute, func(ctx context.Context) error { return checkVariables(ctx, c) })
}

// checkVariables returns an error for the object that does not match the variables.
func checkVariables(ctx context.Context, c *harness.Cluster) error {
	of := []client.ListOption{client.InNamespace(c.Namespace), client.MatchingLabels{clusterv1.ClusterNameLabel: c.Name, clusterv1.ClusterTopologyOwnedLabel: ""}}
	clusters, controlPlanes := &infrav1.CapstanClusterList{}, &controlplanev1.CapstanControlPlaneList{}
	machineTemplates, pools := &infrav1.CapstanMachineTemplateList{}, &infrav1.CapstanMachinePoolList{}
	for _, list := range []client.ObjectList{clusters, controlPlanes, machineTemplates, pools} {
		if err := plane.Client.List(ctx, list, of...); err != nil {
			return err
		}
	}
	if len(clusters.Items) != 1 || len(controlPlanes.Items) != 1 || len(machineTemplates.Items) != 2 || len(pools.Items) != 1 {
		return fmt.Errorf("got %d, %d, %d and %d objects", len(clusters.Items), len(controlPlanes.Items), len(machineTemplates.Items), len(pools.Items))
	}
	spec := clusters.Items[0].Spec
	if want := (infrav1.ClusterNetworkSpec{MachineCIDR: "10.231.0.0/24", MachineIPv6CIDR: "fd00:10:231::/64"}); spec.Network != want {
		return fmt.Errorf("the CapstanCluster has the network %+v, want %+v", spec.Network, want)
	}
	if from := spec.LoadBalancer.AddressFromPool; spec.LoadBalancer.Port != 7443 || from == nil || *from != (infrav1.IPPoolReference{APIGroup: "ipam.capstan.dev", Kind: "CapstanIPPool", Name: "endpoints"}) {
		return fmt.Errorf("the CapstanCluster has %+v", spec)
	}
	if config := controlPlanes.Items[0].Spec.Config.Cluster; config.PodNetwork != bootstrapv1.PodNetworkNone || config.KubeProxy != bootstrapv1.KubeProxyNone ||
		config.LocalVolumes != bootstrapv1.LocalVolumesStorageClass {
		return fmt.Errorf("the CapstanControlPlane has %+v", config)
	}
	if config := controlPlanes.Items[0].Spec.Config; len(config.PreCommands) != 1 || len(config.Kubelet.ExtraArgs) != 1 || config.Cluster.CertificateValidityDays != 90 {
		return fmt.Errorf("the template's own settings are lost: %+v", config)
	}
	machines := map[string]infrav1.CapstanMachineSpec{"pool": pools.Items[0].Spec.MachineTemplate.Spec}
	for _, template := range machineTemplates.Items {
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
