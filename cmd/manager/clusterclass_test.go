package main

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"

	"capstan.dev/capstan/internal/testenv"
	"capstan.dev/capstan/internal/testenv/ports"
	shipped "capstan.dev/capstan/templates"
)

// classRow is a variable of the class capstan with a value, and the fields that it sets. A field starts with the name of an
// object: see objectsOfTopology.
type classRow struct {
	variable, value string
	fields          map[string]string
}

// cluster is the name of the Cluster with the variable. An endpoint cannot have addresses inside and outside of the cluster's network.
func (r classRow) cluster() string {
	if r.variable == "endpointAddress" {
		return "outside"
	}
	return "inside"
}

// everywhere returns the fields of the configuration of all machines.
func everywhere(field, value string) map[string]string {
	return map[string]string{"controlPlane.config." + field: value, "workerConfig." + field: value, "poolConfig." + field: value}
}

const (
	registries = `[{host: docker.io, mirrors: ["https://mirror.example.com:5000/docker/v2"], overridePath: true, credentials: {name: pull}, ca: {contentFrom: {configMap: {name: ca, key: ca.crt}}}}]`
	egress     = `{http: "http://proxy.example.com:3128", noProxy: [.example.com], controlPlane: true}`
	backups    = `{schedule: "@daily", retention: 3, beforeUpgrade: false, store: {s3: {endpoint: "https://s3.example.org", bucket: etcd, credentialsSecretRef: {name: s3}}}}`
	addOns     = `[{name: cni, contentFrom: {configMap: {name: cni, key: cni.yaml}}}]`
	oidc       = `{contentFrom: {secret: {name: oidc, key: authentication.yaml}}}`
	audit      = `{content: "apiVersion: audit.k8s.io/v1\nkind: Policy\nrules: [{level: Metadata}]\n"}`
	labelled   = `{labels: {tier: front, example.com/gpu: ""}, taints: [{key: example.com/only, value: gpu, effect: NoSchedule}]}`
	volumes    = `[{name: data, path: /srv/data, sizeGiB: 20, reclaimPolicy: Delete}]`
	ownPool    = `{kind: GlobalCapstanIPPool, name: machines}`
	sameInAPI  = `{apiGroup: ipam.capstan.dev, kind: GlobalCapstanIPPool, name: machines}`
)

var classRows = []classRow{
	{"controlPlaneMachine", `{cpus: 3, memory: 3Gi, disk: 5Gi}`, map[string]string{"controlPlaneMachine": `{cpus: 3, memory: 3Gi, disk: {size: 5Gi}, network: {addressesFromPools: [` + sameInAPI + `]}}`}},
	{"workerMachine", `{cpus: 4, memory: 1Gi, disk: 6Gi}`, map[string]string{
		"worker.cpus": "4", "worker.memory": "1Gi", "worker.disk.size": "6Gi", "pool.cpus": "4", "pool.memory": "1Gi", "pool.disk.size": "6Gi",
	}},
	{"workerVolumes", volumes, map[string]string{"worker.volumes": volumes, "pool.volumes": volumes}},
	{"podNetwork", "None", map[string]string{"controlPlane.config.cluster.podNetwork": "None"}},
	{"kubeProxy", "None", map[string]string{"controlPlane.config.cluster.kubeProxy": "None"}},
	{"dns", "None", map[string]string{"controlPlane.config.cluster.dns": "None"}},
	{"localVolumes", "StorageClass", map[string]string{"controlPlane.config.cluster.localVolumes": "StorageClass"}},
	{"resourceMetrics", "MetricsServer", map[string]string{"controlPlane.config.cluster.resourceMetrics": "MetricsServer"}},
	{"manifests", addOns, map[string]string{"controlPlane.manifests": addOns}},
	{"machineCIDR", "10.231.0.0/24", map[string]string{"cluster.network.machineCIDR": "10.231.0.0/24"}},
	{"machineIPv6CIDR", `"fd00:10:231::/64"`, map[string]string{"cluster.network.machineIPv6CIDR": "fd00:10:231::/64"}},
	{"endpointAddress", "192.0.2.7", map[string]string{"cluster.loadBalancer.bindAddress": "192.0.2.7"}},
	{"endpointPool", "{name: endpoints}", map[string]string{"cluster.loadBalancer.addressFromPool": "{apiGroup: ipam.capstan.dev, kind: CapstanIPPool, name: endpoints}"}},
	{"addressPool", ownPool, map[string]string{
		"controlPlaneMachine.network.addressesFromPools": "[" + sameInAPI + "]", "worker.network.addressesFromPools": "[" + sameInAPI + "]", "pool.network.addressesFromPools": "[" + sameInAPI + "]",
	}},
	{"registries", registries, everywhere("registries", registries)},
	{"proxy", egress, everywhere("proxy", egress)},
	{"backup", backups, map[string]string{"controlPlane.backup": backups}},
	{"certSANs", "[api.example.com, 192.0.2.7]", map[string]string{"controlPlane.config.cluster.apiServer.certSANs": "[api.example.com, 192.0.2.7]"}},
	{"authentication", oidc, map[string]string{"controlPlane.config.cluster.apiServer.authentication": oidc}},
	{"auditPolicy", audit, map[string]string{"controlPlane.config.cluster.apiServer.auditPolicy": audit}},
	{"controlPlaneNode", "{taints: []}", map[string]string{"controlPlane.config.node": "{taints: []}"}},
	{"workerNode", labelled, map[string]string{"workerConfig.node": labelled, "poolConfig.node": labelled}},
}

// invalidValues are values that the schemas of the class refuse, with a part of the message.
var invalidValues = []struct{ variable, value, want string }{
	{"registries", `[{host: docker.io, mirrors: ["ftp://mirror.example.com"]}]`, "registries].value.[0].mirrors[0]"},
	{"registries", `[{host: "docker.io/library", mirrors: ["https://mirror.example.com"]}]`, "registries].value.[0].host"},
	{"proxy", `{http: "http://user:secret@proxy.example.com"}`, "proxy].value.http"},
	{"backup", `{schedule: hourly, store: {directory: {path: /var/lib/capstan/backups}}}`, "backup].value.schedule"},
	{"backup", `{store: {directory: {path: backups}}}`, "backup].value.store.directory.path"},
	{"authentication", `{content: x, contentFrom: {secret: {name: a, key: b}}}`, "authentication].value"},
	{"certSANs", "[]", "certSANs].value"},
	{"workerNode", "{taints: [{key: a, effect: Never}]}", "workerNode].value.taints[0].effect"},
	{"controlPlaneNode", `{labels: {tier: "a b"}}`, "controlPlaneNode].value.labels.tier"},
	{"manifests", "[{name: cni}]", "manifests].value.[0]"},
	{"dns", "BIND", "dns].value"},
	{"workerVolumes", "[{name: data, path: /etc, sizeGiB: 1}]", "workerVolumes].value.[0].path"},
}

// ownSettings are settings in a user's copy of the class for which the class has no variable.
var ownSettings = strings.NewReplacer(
	"      config:\n        cluster: #", "      config:\n        preCommands: [sysctl -n vm.swappiness]\n        cluster:\n          certificateValidityDays: 90 #",
	"        mode: Managed\n", "        mode: Managed\n        port: 7443\n",
)

// settingsKept are the fields of ownSettings.
var settingsKept = map[string]string{"controlPlane.config.cluster.certificateValidityDays": "90", "controlPlane.config.preCommands": "[sysctl -n vm.swappiness]", "cluster.loadBalancer.port": "7443"}

// CTL-10: each variable of the class sets its fields and no other ones, and its schema refuses invalid values. Cluster API core applies the
// patches, and the webhooks of Capstan accept the objects. No machine starts, as there is no host.
func TestVariablesOfClass_CTL10(t *testing.T) {
	w := sharedEnvironment(t, allWebhooks...)
	w.run(w.env.WebhookFlags()...)
	w.core()
	namespace := w.env.Namespace(t)
	class, err := shipped.FS.ReadFile("clusterclass-capstan.yaml")
	w.Expect(err).NotTo(HaveOccurred())
	objects, err := parse([]byte(ownSettings.Replace(string(class))))
	w.Expect(err).NotTo(HaveOccurred())
	for _, o := range objects {
		o.SetNamespace(namespace)
		w.Eventually(func() error { return w.env.Client.Create(t.Context(), o.DeepCopy()) }).Should(Succeed(), "%s: the webhooks start", o.GetKind())
	}

	clusters, have := map[string]map[string]string{"inside": {}, "outside": {}}, map[string]bool{}
	for _, row := range classRows {
		clusters[row.cluster()][row.variable], have[row.variable] = row.value, true
	}
	w.haveRows(objects[0], have)
	for name, variables := range clusters {
		w.topology(namespace, name, variables)
	}
	for i, bad := range invalidValues {
		w.topology(namespace, fmt.Sprint("bad-", i), map[string]string{bad.variable: bad.value})
	}
	found := map[string]map[string]map[string]any{}
	for name := range clusters {
		w.Eventually(func() (err error) {
			if found[name], err = w.objectsOfTopology(namespace, name); err != nil {
				err = fmt.Errorf("%w: %s", err, w.reconciledTopology(namespace, name))
			}
			return err
		}).Should(Succeed())
	}
	for _, row := range append(classRows, classRow{"the template's own settings", "", settingsKept}) {
		for path, want := range row.fields {
			if got := fieldOf(found[row.cluster()], path); got != asJSON(t, want) {
				t.Errorf("%s: %s is %s, want %s", row.variable, path, got, asJSON(t, want))
			}
		}
	}
	for i, bad := range invalidValues {
		w.Eventually(w.reconciledTopology).WithArguments(namespace, fmt.Sprint("bad-", i)).Should(ContainSubstring(bad.want), "%s: %s", bad.variable, bad.value)
	}
}

// core starts Cluster API core as `make build-capi` built it, with the feature gate of topologies and without its webhooks.
func (w *environment) core() {
	w.t.Helper()
	port, err := ports.Take()
	w.Expect(err).NotTo(HaveOccurred())
	kubeconfig := filepath.Join(w.t.TempDir(), "kubeconfig")
	w.Expect(os.WriteFile(kubeconfig, w.env.Kubeconfig, 0o600)).To(Succeed())
	cmd := exec.Command(filepath.Join(testenv.Root(), "bin", "capi", "capi-core-manager"), "--kubeconfig="+kubeconfig, "--leader-elect=false",
		"--diagnostics-address=0", "--health-addr=0", fmt.Sprint("--webhook-port=", port), "--webhook-cert-dir="+w.env.Webhooks.LocalServingCertDir,
		"--feature-gates=ClusterTopology=true,ReconcilerRateLimiting=false")
	w.Expect(cmd.Start()).To(Succeed(), "run `make build-capi` first")
	w.t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
}

// haveRows requires a row for each variable of the class.
func (w *environment) haveRows(class *unstructured.Unstructured, rows map[string]bool) {
	w.t.Helper()
	variables, _, err := unstructured.NestedSlice(class.Object, "spec", "variables")
	w.Expect(err).NotTo(HaveOccurred())
	for _, v := range variables {
		w.Expect(rows).To(HaveKey(v.(map[string]any)["name"]))
	}
	w.Expect(rows).To(HaveLen(len(variables)))
}

// topology creates a Cluster of the class capstan with variables.
func (w *environment) topology(namespace, name string, variables map[string]string) {
	w.t.Helper()
	var values strings.Builder
	for variable, value := range variables {
		fmt.Fprintf(&values, "    - {name: %s, value: %s}\n", variable, value)
	}
	objects, err := parse(fmt.Appendf(nil, `
apiVersion: cluster.x-k8s.io/v1beta2
kind: Cluster
metadata: {name: %s, namespace: %s}
spec:
  clusterNetwork: {pods: {cidrBlocks: [10.244.0.0/16]}, services: {cidrBlocks: [10.96.0.0/16]}}
  topology:
    classRef: {name: capstan}
    version: v1.36.3
    controlPlane: {replicas: 1}
    workers:
      machineDeployments: [{class: worker, name: md-0, replicas: 0}]
      machinePools: [{class: worker, name: mp-0, replicas: 0}]
    variables:
%s`, name, namespace, &values))
	w.Expect(err).NotTo(HaveOccurred())
	w.create(objects[0])
}

// reconciledTopology returns the message of the condition TopologyReconciled.
func (w *environment) reconciledTopology(namespace, name string) string {
	cluster := &clusterv1.Cluster{}
	w.Expect(w.env.Client.Get(w.t.Context(), client.ObjectKey{Namespace: namespace, Name: name}, cluster)).To(Succeed())
	return conditions.GetMessage(cluster, clusterv1.ClusterTopologyReconciledCondition)
}

// objectsOfTopology returns the specs of the objects that core made for a Cluster: cluster, controlPlane and controlPlaneMachine; worker
// and workerConfig of the machine deployment; pool and poolConfig of the machine pool.
func (w *environment) objectsOfTopology(namespace, name string) (map[string]map[string]any, error) {
	out := map[string]map[string]any{}
	for _, one := range []struct{ name, kind, spec, labelled string }{
		{"cluster", "infrastructure.capstan.dev/v1beta2 CapstanCluster", "spec", ""},
		{"controlPlane", "controlplane.capstan.dev/v1beta2 CapstanControlPlane", "spec", ""},
		{"controlPlaneMachine", "infrastructure.capstan.dev/v1beta2 CapstanMachineTemplate", "spec.template.spec", "!" + clusterv1.ClusterTopologyMachineDeploymentNameLabel},
		{"worker", "infrastructure.capstan.dev/v1beta2 CapstanMachineTemplate", "spec.template.spec", clusterv1.ClusterTopologyMachineDeploymentNameLabel},
		{"workerConfig", "bootstrap.capstan.dev/v1beta2 CapstanConfigTemplate", "spec.template.spec", clusterv1.ClusterTopologyMachineDeploymentNameLabel},
		{"pool", "infrastructure.capstan.dev/v1beta2 CapstanMachinePool", "spec.machineTemplate.spec", ""},
		{"poolConfig", "bootstrap.capstan.dev/v1beta2 CapstanConfig", "spec", clusterv1.ClusterTopologyMachinePoolNameLabel},
	} {
		list := &unstructured.UnstructuredList{}
		version, kind, _ := strings.Cut(one.kind, " ")
		list.SetAPIVersion(version)
		list.SetKind(kind + "List")
		labels := clusterv1.ClusterNameLabel + "=" + name + "," + clusterv1.ClusterTopologyOwnedLabel + "," + one.labelled
		if err := w.env.Client.List(w.t.Context(), list, client.InNamespace(namespace), &client.ListOptions{Raw: &metav1.ListOptions{LabelSelector: strings.TrimSuffix(labels, ",")}}); err != nil {
			return nil, err
		}
		if len(list.Items) != 1 {
			return nil, fmt.Errorf("found %d objects for %s, want one", len(list.Items), one.name)
		}
		out[one.name], _, _ = unstructured.NestedMap(list.Items[0].Object, strings.Split(one.spec, ".")...)
	}
	return out, nil
}

// fieldOf returns the field at a path of names, as JSON.
func fieldOf(objects map[string]map[string]any, path string) string {
	names := strings.Split(path, ".")
	value, _, err := unstructured.NestedFieldNoCopy(objects[names[0]], names[1:]...)
	text, _ := json.Marshal(value)
	if err != nil {
		return err.Error()
	}
	return string(text)
}

// asJSON returns YAML as JSON with sorted keys.
func asJSON(t *testing.T, text string) string {
	t.Helper()
	out, err := yaml.YAMLToJSON([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}
