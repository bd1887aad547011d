//go:build dashboard

package dashboard

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	apimeta "k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"
)

// hostile is a text that a tenant writes into objects.
const hostile = `<script>window.pwned=1</script><img src=x onerror=window.pwned=1>`

// fleet creates the objects of an installation with its problems, without the controllers that would change them.
type fleet struct {
	t      *testing.T
	client client.Client
	now    time.Time
	ip     int
}

// create creates an object with its status.
func (f *fleet) create(text string) {
	f.t.Helper()
	o := &unstructured.Unstructured{}
	if err := yaml.Unmarshal([]byte(text), &o.Object); err != nil {
		f.t.Fatalf("%v\n%s", err, text)
	}
	status := o.Object["status"]
	if err := f.client.Create(f.t.Context(), o); err != nil {
		f.t.Fatalf("%v\n%s", err, text)
	}
	if status == nil {
		return
	}
	o.Object["status"] = status
	if err := f.client.Status().Update(f.t.Context(), o); err != nil {
		f.t.Fatalf("status: %v\n%s", err, text)
	}
}

func (f *fleet) ago(d time.Duration) string { return f.now.Add(-d).UTC().Format(time.RFC3339) }

// condition in the form of YAML.
func (f *fleet) condition(kind, status, reason, message string, since time.Duration) string {
	return fmt.Sprintf("{type: %s, status: %q, reason: %s, message: %q, lastTransitionTime: %s}", kind, status, reason, message, f.ago(since))
}

// good returns conditions that are "True" without a message.
func (f *fleet) good(kinds ...string) string {
	var all []string
	for _, kind := range kinds {
		all = append(all, f.condition(kind, "True", kind, "", 26*time.Hour))
	}
	return strings.Join(all, ", ")
}

func (f *fleet) host(name, domain, address, spec, free, conditions string, machines int) {
	f.create(fmt.Sprintf(`
apiVersion: infrastructure.capstan.dev/v1beta2
kind: CapstanHost
metadata: {name: %s}
spec: {address: %q, failureDomain: %s, credentialsRef: {name: x, namespace: capstan-system}%s}
status:
  capacity: {cpu: "16", memory: 64Gi, ephemeral-storage: 900Gi}
  allocatable: {%s}
  machines: %d
  versions: [v1.35.4, v1.36.3]
  system: {capstandVersion: v0.1.0, kernelVersion: 6.1.0-30-amd64, osImage: Debian 12}
  conditions: [%s]
`, name, address, domain, spec, free, machines, conditions))
}

func (f *fleet) cluster(namespace, name, controlPlane, workers, conditions string) {
	f.create(fmt.Sprintf(`
apiVersion: cluster.x-k8s.io/v1beta2
kind: Cluster
metadata: {namespace: %s, name: %s}
spec:
  controlPlaneEndpoint: {host: 10.60.0.%d, port: 6443}
  infrastructureRef: {apiGroup: infrastructure.capstan.dev, kind: CapstanCluster, name: %[2]s}
  controlPlaneRef: {apiGroup: controlplane.capstan.dev, kind: CapstanControlPlane, name: %[2]s}
status: {phase: Provisioned, controlPlane: {%[4]s}, workers: {%s}, conditions: [%s]}
`, namespace, name, 10+len(name), controlPlane, workers, conditions))
}

func (f *fleet) controlPlane(namespace, name, version string, replicas, ready int) {
	f.create(fmt.Sprintf(`
apiVersion: controlplane.capstan.dev/v1beta2
kind: CapstanControlPlane
metadata: {namespace: %s, name: %s, labels: {cluster.x-k8s.io/cluster-name: %[2]s}}
spec:
  version: %[3]s
  replicas: %[4]d
  machineTemplate: {spec: {infrastructureRef: {apiGroup: infrastructure.capstan.dev, kind: CapstanMachineTemplate, name: x}}}
status: {replicas: %[4]d, readyReplicas: %[5]d, upToDateReplicas: %[5]d, conditions: [%[6]s]}
`, namespace, name, version, replicas, ready, f.good("Available")))
}

func (f *fleet) workers(namespace, cluster, name, version string, replicas, ready int) {
	f.create(fmt.Sprintf(`
apiVersion: cluster.x-k8s.io/v1beta2
kind: MachineDeployment
metadata: {namespace: %s, name: %s, labels: {cluster.x-k8s.io/cluster-name: %[3]s}}
spec:
  clusterName: %[3]s
  replicas: %[5]d
  selector: {matchLabels: {group: x}}
  template:
    metadata: {labels: {group: x}}
    spec:
      clusterName: %[3]s
      version: %[4]s
      bootstrap: {dataSecretName: x}
      infrastructureRef: {apiGroup: infrastructure.capstan.dev, kind: CapstanMachineTemplate, name: x}
status: {replicas: %[5]d, readyReplicas: %[6]d, upToDateReplicas: %[6]d, conditions: [%[7]s]}
`, namespace, name, cluster, version, replicas, ready, f.good("Available")))
}

// machineState describes a Machine and its CapstanMachine.
type machineState struct {
	namespace, cluster, name string
	group                    string // empty for the control plane
	host                     string // empty without one
	version, phase           string
	// The conditions of the Machine, and those of the CapstanMachine with further fields of its status.
	conditions, infraConditions, infraStatus string
}

// machine creates a Machine and its CapstanMachine.
func (f *fleet) machine(m machineState) {
	label := "cluster.x-k8s.io/control-plane: ''"
	if m.group != "" {
		label = "cluster.x-k8s.io/deployment-name: " + m.group
	}
	f.ip++
	address := fmt.Sprintf("10.64.%d.%d", len(m.cluster), 10+f.ip)
	hostName, status := "", ""
	if m.host != "" {
		hostName = ", hostName: " + m.host
		status = "addresses: [{type: InternalIP, address: " + address + "}], "
	}
	labels := fmt.Sprintf("{cluster.x-k8s.io/cluster-name: %s, %s}", m.cluster, label)
	f.create(fmt.Sprintf(`
apiVersion: infrastructure.capstan.dev/v1beta2
kind: CapstanMachine
metadata:
  namespace: %s
  name: %s
  labels: %s
  annotations: {in-place-updates.internal.cluster.x-k8s.io/update-in-progress: ""}
spec: {cpus: 2, memory: 4Gi%s}
status: {%s%sconditions: [%s]}
`, m.namespace, m.name, labels, hostName, status, m.infraStatus, m.infraConditions))
	f.create(fmt.Sprintf(`
apiVersion: cluster.x-k8s.io/v1beta2
kind: Machine
metadata: {namespace: %s, name: %s, labels: %s}
spec:
  clusterName: %s
  version: %q
  bootstrap: {dataSecretName: x}
  infrastructureRef: {apiGroup: infrastructure.capstan.dev, kind: CapstanMachine, name: %[2]s}
status: {phase: %[6]s, conditions: [%[7]s]}
`, m.namespace, m.name, labels, m.cluster, m.version, m.phase, m.conditions))
}

func (f *fleet) running(namespace, cluster, group, name, host, version string) {
	f.machine(machineState{
		namespace: namespace, cluster: cluster, group: group, name: name, host: host, version: version, phase: "Running",
		conditions: f.good("Available", "Ready"), infraConditions: f.good("HostAssigned", "MachineRunning", "Ready"),
	})
}

func (f *fleet) pool(namespace, name, cidr string, total, free string, used, waiting int, conditions string) {
	kind, meta := "GlobalCapstanIPPool", "name: "+name
	if namespace != "" {
		kind, meta = "CapstanIPPool", meta+", namespace: "+namespace
	}
	f.create(fmt.Sprintf(`
apiVersion: ipam.capstan.dev/v1beta2
kind: %s
metadata: {%s}
spec: {subnets: [{cidr: %q}]}
status: {addresses: {total: %q, free: %q, used: %d, outOfRange: 0, resting: 0, waiting: %d}, conditions: [%s]}
`, kind, meta, cidr, total, free, used, waiting, conditions))
}

func (f *fleet) event(namespace, kind, group, name, warning, reason, message string, since time.Duration) {
	own := namespace
	if own == "" {
		own = "default"
	}
	f.create(fmt.Sprintf(`
apiVersion: v1
kind: Event
metadata: {namespace: %s, generateName: x-}
involvedObject: {apiVersion: %s/v1beta2, kind: %s, namespace: %q, name: %q}
type: %s
reason: %q
message: %q
count: 1
lastTimestamp: %s
`, own, group, kind, namespace, name, warning, reason, message, f.ago(since)))
}

const (
	infra = "infrastructure.capstan.dev"
	core  = "cluster.x-k8s.io"
)

// build creates everything.
func (f *fleet) build() {
	for _, namespace := range []string{"team-a", "team-b"} {
		f.create("apiVersion: v1\nkind: Namespace\nmetadata: {name: " + namespace + "}")
	}
	connected := f.good("Connected", "Ready")
	f.host("rack-a-1", "rack-a", "10.0.1.11:8443", "", `cpu: "6", memory: 24Gi, ephemeral-storage: 610Gi`, connected, 6)
	f.host("rack-a-2", "rack-a", "10.0.1.12:8443", ", drain: true", `cpu: "12", memory: 51Gi, ephemeral-storage: 770Gi`, connected+", "+f.condition("Drained", "False", "Draining", "2 machines are left: team-a/shop-md-0-x7k2p, team-a/search-cp-2", 4*time.Minute), 2)
	f.host("rack-b-1", "rack-b", "10.0.2.11:8443", "", `cpu: "1", memory: 3Gi, ephemeral-storage: 40Gi`, connected, 7)
	f.host("rack-b-2", "rack-b", "10.0.2.12:8443", "", `cpu: "14", memory: 60Gi, ephemeral-storage: 880Gi`, f.condition("Connected", "False", "Unreachable", "expected an answer of capstand at 10.0.2.12:8443, found a timeout after 10s", 7*time.Minute), 1)
	f.host("rack-c-1", "rack-c", "10.0.3.11:8443", ", taints: [{key: gpu, value: a40, effect: NoSchedule}]", `cpu: "16", memory: 64Gi, ephemeral-storage: 900Gi`, connected, 0)
	f.shop()
	f.search()
	f.ledger()
	f.pool("", "rack-lan", "10.60.0.0/24", "254", "212", 42, 0, f.good("Ready"))
	f.pool("team-b", "ledger-net", "10.64.6.0/28", "13", "0", 13, 2, f.condition("Ready", "False", "Exhausted", "13 of 13 addresses are used, 2 claims wait", 6*time.Minute))
	f.pool("team-a", "dual-v6", "fd00:10:64::/64", "18446744073709551615", "18446744073709551601", 14, 0, f.good("Ready"))
	for i := range 5 {
		f.create(fmt.Sprintf(`
apiVersion: ipam.cluster.x-k8s.io/v1beta2
kind: IPAddress
metadata: {namespace: team-b, name: ledger-%d}
spec: {address: 10.64.6.%d, prefix: 28, claimRef: {name: ledger-%[1]d}, poolRef: {apiGroup: ipam.capstan.dev, kind: CapstanIPPool, name: ledger-net}}
`, i, i+2))
	}
	f.event("team-a", "CapstanMachine", infra, "search-cp-1", "Normal", "UpdateStarted", "The update to v1.36.3 begins", 2*time.Minute)
	f.event("", "CapstanHost", infra, "rack-b-2", "Warning", "Unreachable", "expected an answer of capstand at 10.0.2.12:8443, found a timeout after 10s", 7*time.Minute)
	f.event("team-b", "CapstanMachine", infra, "ledger-md-0-9qf4z", "Warning", "NoHost", "no host of 5 has 16Gi of free memory and admits the namespace team-b", 11*time.Minute)
	f.event("team-a", "MachineDeployment", core, "shop-md-0", "Normal", "SuccessfulCreate", "Created machine shop-md-0-t5w8c", 42*time.Minute)
	f.event("team-b", "Cluster", core, hostile, "Warning", "<b>Bold</b>", hostile+" "+strings.Repeat("long", 60), 50*time.Minute)
}

func (f *fleet) shop() {
	f.cluster("team-a", "shop", "desiredReplicas: 3, readyReplicas: 3, upToDateReplicas: 3", "desiredReplicas: 4, readyReplicas: 4", f.good("Available", "InfrastructureReady", "ControlPlaneAvailable", "WorkersAvailable", "RemoteConnectionProbe"))
	f.controlPlane("team-a", "shop", "v1.36.3", 3, 3)
	f.workers("team-a", "shop", "shop-md-0", "v1.36.3", 4, 4)
	for i, host := range []string{"rack-a-1", "rack-b-1", "rack-a-1"} {
		f.running("team-a", "shop", "", fmt.Sprintf("shop-cp-%d", i+1), host, "v1.36.3")
	}
	for name, host := range map[string]string{"t5w8c": "rack-a-1", "x7k2p": "rack-a-2", "m2d9s": "rack-b-1", "b8r3n": "rack-b-1"} {
		f.running("team-a", "shop", "shop-md-0", "shop-md-0-"+name, host, "v1.36.3")
	}
}

func (f *fleet) search() {
	f.cluster("team-a", "search", "desiredReplicas: 3, readyReplicas: 3, upToDateReplicas: 1", "desiredReplicas: 2, readyReplicas: 2", f.good("Available", "InfrastructureReady")+", "+
		f.condition("RollingOut", "True", "RollingOut", "* CapstanControlPlane search: 2 of 3 machines are not up to date", 3*time.Minute))
	f.controlPlane("team-a", "search", "v1.36.3", 3, 1)
	f.workers("team-a", "search", "search-md-0", "v1.35.4", 2, 2)
	f.machine(machineState{
		namespace: "team-a", cluster: "search", name: "search-cp-1", host: "rack-a-1", version: "v1.35.4", phase: "Updating",
		conditions:      f.good("Available") + ", " + f.condition("UpToDate", "False", "NotUpToDate", "version v1.35.4, expected v1.36.3", 3*time.Minute),
		infraConditions: f.good("HostAssigned", "MachineRunning") + ", " + f.condition("Updating", "True", "UpdateRunning", "kubelet: waits until the node is ready", 2*time.Minute),
		infraStatus:     "update: {id: u1, phase: Running, step: kubelet, kubernetesVersion: v1.36.3, startTime: " + f.ago(2*time.Minute) + "}, ",
	})
	f.running("team-a", "search", "", "search-cp-2", "rack-a-2", "v1.35.4")
	f.running("team-a", "search", "", "search-cp-3", "rack-b-1", "v1.36.3")
	f.running("team-a", "search", "search-md-0", "search-md-0-k4v7j", "rack-b-1", "v1.35.4")
	f.running("team-a", "search", "search-md-0", "search-md-0-p9c2h", "rack-a-1", "v1.35.4")
}

func (f *fleet) ledger() {
	f.cluster("team-b", "ledger", "desiredReplicas: 1, readyReplicas: 1, upToDateReplicas: 1", "desiredReplicas: 3, readyReplicas: 1", f.good("InfrastructureReady")+", "+f.condition("WorkersAvailable", "False", "NotAvailable", "* MachineDeployment ledger-md-0: 1 of 3 machines is available", 11*time.Minute))
	f.controlPlane("team-b", "ledger", "v1.36.3", 1, 1)
	f.workers("team-b", "ledger", "ledger-md-0", "v1.36.3", 3, 1)
	f.running("team-b", "ledger", "", "ledger-cp-1", "rack-b-1", "v1.36.3")
	f.machine(machineState{
		namespace: "team-b", cluster: "ledger", name: "ledger-md-0-9qf4z", group: "ledger-md-0", version: "v1.36.3", phase: "Provisioning",
		conditions:      f.condition("InfrastructureReady", "False", "NotReady", "* HostAssigned: no host", 11*time.Minute),
		infraConditions: f.condition("HostAssigned", "False", "NoHost", "no host of 5 has 16Gi of free memory and admits the namespace team-b", 11*time.Minute),
	})
	f.machine(machineState{
		namespace: "team-b", cluster: "ledger", name: "ledger-md-0-w6g8d", group: "ledger-md-0", host: "rack-b-2", version: hostile, phase: "Running",
		conditions:      f.condition("NodeHealthy", "Unknown", "NodeUnreachable", hostile, 7*time.Minute),
		infraConditions: f.condition("MachineRunning", "Unknown", "HostUnreachable", "host rack-b-2 cannot be reached", 7*time.Minute),
	})
	f.running("team-b", "ledger", "ledger-md-0", "ledger-md-0-h3n5t", "rack-b-1", "v1.36.3")
}

// setCondition changes the status of an object, as a controller does.
func setCondition(ctx context.Context, c client.Client, o *unstructured.Unstructured, condition map[string]any) error {
	if err := c.Get(ctx, client.ObjectKeyFromObject(o), o); err != nil {
		return err
	}
	if err := unstructured.SetNestedSlice(o.Object, []any{condition}, "status", "conditions"); err != nil {
		return err
	}
	err := c.Status().Update(ctx, o)
	if apimeta.IsNoMatchError(err) {
		return fmt.Errorf("the CRD is missing: %w", err)
	}
	return err
}
