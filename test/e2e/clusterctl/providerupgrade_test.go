//go:build e2e

package clusterctl

import (
	"context"
	"encoding/json"
	"maps"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"capstan.dev/capstan/test/e2e/harness"
)

// earlierVersion is the release from which the providers are upgraded. testdata contains its files for clusterctl, which
// `hack/release.sh manifests` of commit 5053257 wrote, and their hashes. Its CRDs serve v1beta2 only.
const earlierVersion = "v0.1.0-alpha.1"

// versionedKinds are the kinds that the current release serves in both versions.
var versionedKinds = []string{
	"capstanclusters.infrastructure", "capstanclustertemplates.infrastructure", "capstanmachines.infrastructure", "capstanmachinetemplates.infrastructure",
	"capstanmachinepools.infrastructure", "capstanmachinepooltemplates.infrastructure", "capstancontrolplanes.controlplane",
	"capstancontrolplanetemplates.controlplane", "capstanconfigs.bootstrap", "capstanconfigtemplates.bootstrap",
}

// earlierObjects are objects of the kinds that the tenant's cluster does not contain. They have no owner, so no manager
// changes them.
const earlierObjects = `
apiVersion: infrastructure.capstan.dev/v1beta2
kind: CapstanClusterTemplate
metadata: {name: kept, namespace: tenants}
spec: {template: {spec: {loadBalancer: {mode: Managed, port: 7443}}}}
---
apiVersion: controlplane.capstan.dev/v1beta2
kind: CapstanControlPlaneTemplate
metadata: {name: kept, namespace: tenants}
spec: {template: {spec: {config: {cluster: {podNetwork: None}}, machineTemplate: {spec: {deletion: {nodeDrainTimeoutSeconds: 90}}}}}}
---
apiVersion: infrastructure.capstan.dev/v1beta2
kind: CapstanMachinePool
metadata: {name: kept, namespace: tenants}
spec: {machineTemplate: {spec: {memory: 768Mi}}}
---
apiVersion: infrastructure.capstan.dev/v1beta2
kind: CapstanMachinePoolTemplate
metadata: {name: kept, namespace: tenants}
spec: {template: {spec: {machineTemplate: {spec: {memory: 768Mi}}}}}
---
apiVersion: ipam.capstan.dev/v1beta2
kind: CapstanIPPool
metadata: {name: kept, namespace: tenants}
spec: {subnets: [{cidr: 10.219.0.0/24, gateway: 10.219.0.1}]}
`

// laterKinds and laterRights are what the managers need and the earlier release does not contain, because the managers are of
// the current build.
const laterKinds = "../../../config/infrastructure/crd/bases/infrastructure.capstan.dev_capstanvolumes.yaml"

const laterRights = `
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: later-rights}
rules:
- {apiGroups: [apiextensions.k8s.io], resources: [customresourcedefinitions], verbs: [get, list, watch]}
- {apiGroups: [infrastructure.capstan.dev], resources: [capstanvolumes], verbs: [get, list, watch]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: later-rights}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: later-rights}
subjects: [{apiGroup: rbac.authorization.k8s.io, kind: Group, name: "system:serviceaccounts"}]
`

// installEarlier adds the earlier release to clusterctl's repository and installs it, with managers of the current build.
func installEarlier(t *testing.T, management *harness.Cluster) {
	t.Helper()
	testdata, err := filepath.Abs("testdata")
	if err != nil {
		t.Fatal(err)
	}
	repository := filepath.Join(dist, "repository")
	for _, command := range [][]string{
		{"tar", "-xzf", filepath.Join(testdata, earlierVersion+".tar.gz"), "-C", repository},
		{"env", "-C", repository, "sha256sum", "--check", "--strict", "--quiet", filepath.Join(testdata, earlierVersion+".sha256")},
	} {
		if _, err := harness.Command(t.Context(), nil, command[0], command[1:]...); err != nil {
			t.Fatal(err)
		}
	}
	loadImages(t, management, earlierVersion)
	mustKubectl(t, management.Kubeconfig, laterRights, "apply", "-f", "-")
	mustKubectl(t, management.Kubeconfig, "", "apply", "-f", laterKinds)
	init := []string{"init", "--kubeconfig", management.Kubeconfig, "--wait-providers", "--core", "cluster-api"}
	for i := 0; i < len(providerFlags); i += 2 {
		init = append(init, providerFlags[i], providerFlags[i+1]+":"+earlierVersion)
	}
	mustClusterctl(t, variables, init...)
}

// object contains the properties that an upgrade must preserve.
type object struct {
	UID  string
	Spec any
}

// objectsOf reads the objects of a kind in a version, by name.
func objectsOf(t *testing.T, kubeconfig, kind, version string) map[string]object {
	t.Helper()
	resource, group, _ := strings.Cut(kind, ".")
	var list unstructured.UnstructuredList
	harness.Eventually(t, kind+" in "+version, time.Minute, func(context.Context) error {
		out, err := kubectl(t, kubeconfig, "", "-n", "tenants", "get", resource+"."+version+"."+group+".capstan.dev", "-o", "json")
		if err != nil {
			return err
		}
		return json.Unmarshal([]byte(out), &list)
	})
	found := map[string]object{}
	for _, o := range list.Items {
		found[o.GetName()] = object{UID: string(o.GetUID()), Spec: o.Object["spec"]}
	}
	return found
}

// allObjects reads the tenant's objects of all kinds in v1beta2. There is at least one of each kind.
func allObjects(t *testing.T, kubeconfig string) map[string]map[string]object {
	t.Helper()
	all := map[string]map[string]object{}
	for _, kind := range slices.Concat(versionedKinds, []string{"capstanippools.ipam"}) {
		if all[kind] = objectsOf(t, kubeconfig, kind, "v1beta2"); len(all[kind]) == 0 {
			t.Errorf("found no object of %s", kind)
		}
	}
	return all
}

// servesOneVersion checks that the earlier release does not serve v1beta1.
func servesOneVersion(t *testing.T, kubeconfig string) {
	t.Helper()
	for _, kind := range versionedKinds {
		if served := mustKubectl(t, kubeconfig, "", "get", "crd", kind+".capstan.dev", "-o", "jsonpath={.spec.versions[?(@.served)].name}"); served != "v1beta2" {
			t.Errorf("%s of %s is served in %s", kind, earlierVersion, served)
		}
	}
}

// wantUnchanged checks the objects from before the upgrade. Each is unchanged in v1beta2, and can be read and written in
// v1beta1.
func wantUnchanged(t *testing.T, kubeconfig string, before map[string]map[string]object) {
	t.Helper()
	after := allObjects(t, kubeconfig)
	for kind, former := range before {
		for name, o := range former {
			if !reflect.DeepEqual(o, after[kind][name]) {
				t.Errorf("%s %s changed from %v to %v", kind, name, o, after[kind][name])
			}
		}
	}
	for _, kind := range versionedKinds {
		in := objectsOf(t, kubeconfig, kind, "v1beta1")
		if !maps.EqualFunc(in, after[kind], func(a, b object) bool { return a.UID == b.UID }) {
			t.Errorf("%s: %v in v1beta1, %v in v1beta2", kind, in, after[kind])
		}
		resource, group, _ := strings.Cut(kind, ".")
		mustKubectl(t, kubeconfig, "", "-n", "tenants", "label", resource+".v1beta1."+group+".capstan.dev", "--all", "upgraded=")
		if stored := mustKubectl(t, kubeconfig, "", "get", "crd", kind+".capstan.dev", "-o", "jsonpath={.status.storedVersions}"); stored != `["v1beta2"]` {
			t.Errorf("%s is stored in %s", kind, stored)
		}
	}
	if labelled := allObjects(t, kubeconfig); !reflect.DeepEqual(after, labelled) {
		t.Errorf("a label in v1beta1 changed the specifications from %v to %v", after, labelled)
	}
	status := mustKubectl(t, kubeconfig, "", "-n", "tenants", "get", "capstancontrolplanes.v1beta1.controlplane.capstan.dev", "-o", "jsonpath={.items[*].status.initialized}")
	if status != "true" {
		t.Errorf("the control plane in v1beta1 is initialized: %q", status)
	}
}

// upgradedByClusterctl upgrades the providers from the earlier release to the current one.
func upgradedByClusterctl(t *testing.T, management, tenant *harness.Cluster) {
	kubeconfig := management.Kubeconfig
	servesOneVersion(t, kubeconfig)
	// On a busy box, a manager can lose its lease and start again. Its webhooks are away then.
	harness.Eventually(t, "the objects of the earlier release", time.Minute, func(context.Context) error {
		_, err := kubectl(t, kubeconfig, earlierObjects, "apply", "-f", "-")
		return err
	})
	before, running := allObjects(t, kubeconfig), processesOf(t, management, tenant)
	loadImages(t, management, version)
	mustKubectl(t, kubeconfig, laterRights, "delete", "-f", "-")

	plan := mustClusterctl(t, nil, "upgrade", "plan", "--kubeconfig", kubeconfig)
	upgrades := 0
	for line := range strings.Lines(plan) {
		if fields := strings.Fields(line); len(fields) == 5 && fields[3] == earlierVersion && fields[4] == version {
			upgrades++
		}
	}
	if upgrades != 4 {
		t.Errorf("the plan does not upgrade Capstan's four providers:\n%s", plan)
	}
	mustClusterctl(t, variables, "upgrade", "apply", "--kubeconfig", kubeconfig, "--contract", "v1beta2", "--wait-providers")
	images := strings.Fields(mustKubectl(t, kubeconfig, "", "get", "deployments", "-A", "-o", "jsonpath={.items[*].spec.template.spec.containers[0].image}"))
	if n := len(slices.DeleteFunc(images, func(image string) bool { return !strings.HasSuffix(image, "/manager:"+version) })); n != 4 {
		t.Errorf("%d Deployments run manager:%s, want 4", n, version)
	}
	wantUnchanged(t, kubeconfig, before)
	mustKubectl(t, kubeconfig, earlierObjects, "delete", "-f", "-")
	// The new managers work: they scale the cluster.
	mustKubectl(t, kubeconfig, "", "-n", tenant.Namespace, "scale", "machinedeployment", tenant.Name+"-md-0", "--replicas=2")
	ready(t, tenant, 3)
	after := processesOf(t, management, tenant)
	for machine, pid := range running {
		if after[machine] != pid {
			t.Errorf("%s was restarted", machine)
		}
	}
}
