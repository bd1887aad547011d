package dashboard

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"

	"capstan.dev/capstan/internal/cli/diagnosis"
)

var noon = time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)

// snapshotOf sorts objects into their kinds, as the reader does.
func snapshotOf(t *testing.T, texts ...string) snapshot {
	t.Helper()
	s := snapshot{objects: map[*kind][]*unstructured.Unstructured{}}
	for _, text := range texts {
		o := &unstructured.Unstructured{}
		if err := yaml.Unmarshal([]byte(text), &o.Object); err != nil {
			t.Fatalf("%v\n%s", err, text)
		}
		at := slices.IndexFunc(kinds, func(k *kind) bool { return k.Kind == o.GetKind() && k.Group == o.GroupVersionKind().Group })
		if at < 0 {
			t.Fatalf("%s is not a kind of the page", o.GroupVersionKind())
		}
		s.objects[kinds[at]] = append(s.objects[kinds[at]], trim(o, kinds[at]))
	}
	return s
}

func object(group, kind, namespace, name, rest string) string {
	return fmt.Sprintf("apiVersion: %s/v1beta2\nkind: %s\nmetadata: {namespace: %q, name: %s, uid: %[4]s%s\n", group, kind, namespace, name, cmp.Or(rest, "}"))
}

func waits(reason, since string) string {
	return "conditions: [{type: Up, status: 'False', reason: " + reason + ", lastTransitionTime: '2026-01-01T" + since + ":00Z'}]"
}

func clusterMachine(name, labels, host, conditions string) []string {
	all := fmt.Sprintf(", labels: {cluster.x-k8s.io/cluster-name: shop, %s}}", labels)
	return []string{
		object(coreGroup, "Machine", "team", name, all+"\nspec: {clusterName: shop, infrastructureRef: {kind: CapstanMachine, name: i-"+name+"}}\nstatus: {phase: Running}"),
		object(infraGroup, "CapstanMachine", "team", "i-"+name, all+"\nspec: {hostName: "+host+", cpus: 2, memory: 4Gi}\nstatus: {addresses: [{type: InternalIP, address: 10.0.0.1}], "+cmp.Or(conditions, "conditions: []")+"}"),
	}
}

const (
	controlPlaneLabel = "cluster.x-k8s.io/control-plane: ''"
	workersLabel      = "cluster.x-k8s.io/deployment-name: shop-md"
)

func TestTopology(t *testing.T) {
	texts := slices.Concat(
		[]string{
			object(coreGroup, "Cluster", "team", "shop", "}\nspec: {controlPlaneRef: {kind: CapstanControlPlane, name: shop}, controlPlaneEndpoint: {host: 'fd00::1', port: 6443}}\nstatus: {phase: Provisioned, conditions: [{type: A, status: 'True'}, {type: B, status: 'False', reason: MachineStarting}]}"),
			object(coreGroup, "Cluster", "other", "shop", "}"),
			object(controlGroup, "CapstanControlPlane", "team", "shop", "}\nspec: {version: v1.36.3, replicas: 3}\nstatus: {readyReplicas: 1}"),
			object(coreGroup, "MachineDeployment", "team", "shop-md", "}\nspec: {clusterName: shop, replicas: 2}\nstatus: {readyReplicas: 1}"),
		},
		clusterMachine("cp-1", controlPlaneLabel, "h1", ""), clusterMachine("w-1", workersLabel, "h2", waits("NoHost", "11:00")), clusterMachine("alone", "a: b", "h1", ""),
	)
	m := Build(snapshotOf(t, texts...), noon)
	var got []string
	for _, c := range m.Clusters {
		got = append(got, fmt.Sprintf("%s/%s %s %s", c.Namespace, c.Name, c.Endpoint, c.Health))
		for _, g := range c.Groups {
			line := fmt.Sprintf("  %s %s %s %s/%s:", g.Kind, g.Name, g.Version, g.Ready, g.Desired)
			for _, x := range g.Machines {
				line += fmt.Sprintf(" %s on %s %s %s %s", x.Name, x.Host, x.Address, x.Size, x.Health)
			}
			got = append(got, line)
		}
	}
	want := []string{
		"team/shop [fd00::1]:6443 attention",
		"  CapstanControlPlane shop v1.36.3 1/3: cp-1 on h1 10.0.0.1 2 CPU · 4 GiB ok",
		"  MachineDeployment shop-md  1/2: w-1 on h2 10.0.0.1 2 CPU · 4 GiB attention",
		"  Machines without a group   /: alone on h1 10.0.0.1 2 CPU · 4 GiB ok",
		"other/shop  ok",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	if c := m.Clusters[0].Conditions; len(c) != 2 || c[0].Type != "B" || c[0].Good || !c[1].Good {
		t.Errorf("conditions: %+v, want the one that waits first", c)
	}
	// The hosts cannot be read: they are derived from the machines.
	if h := m.Hosts; len(h) != 2 || h[0].Name != "h1" || !h[0].Derived || len(h[0].Machines) != 2 || h[0].Health != Unknown || h[1].Machines[0].Name != "w-1" {
		t.Errorf("hosts: %+v", h)
	}
	if s := m.Summary; s.Clusters != (Count{2, 1, Attention}) || s.Machines != (Count{3, 2, Attention}) || s.Waiting != 1 || s.Attention != 1 {
		t.Errorf("summary: %+v", s)
	}
}

func TestHosts(t *testing.T) {
	host := object(infraGroup, "CapstanHost", "", "h1", "}\nspec: {address: 'a:1', failureDomain: r, drain: true, taints: [{key: gpu, effect: NoSchedule}, {key: k, value: v, effect: NoSchedule}]}\nstatus: {machines: 3, versions: [v1.36.3], capacity: {cpu: 8, memory: 16Gi}, allocatable: {cpu: 7500m, memory: 4Gi}, system: {osImage: Debian 12}, unknownMachines: [{id: x}], "+waits("NoHost", "11:59")+"}")
	m := Build(snapshotOf(t, append(clusterMachine("cp-1", controlPlaneLabel, "h1", ""), host)...), noon)
	h := m.Hosts[0]
	if len(m.Hosts) != 1 || h.Derived || h.Foreign != 2 || h.Health != Attention || h.System != "Debian 12" || len(h.Machines) != 1 {
		t.Errorf("%+v", m.Hosts)
	}
	if want := []string{"draining", "taint gpu:NoSchedule", "taint k=v:NoSchedule", "1 machines without an object"}; !slices.Equal(h.Notes, want) {
		t.Errorf("notes %q, want %q", h.Notes, want)
	}
	if want := []Resource{{"CPU", "7.5", "8", 0.0625}, {"Memory", "4 GiB", "16 GiB", 0.75}}; !slices.Equal(h.Resources, want) {
		t.Errorf("resources %+v, want %+v", h.Resources, want)
	}
}

func TestPools(t *testing.T) {
	pool := func(kind, namespace, addresses string) string {
		return object(ipamGroup, kind, namespace, "p", "}\nspec: {subnets: [{cidr: 10.0.0.0/24}]}\nstatus: {addresses: "+addresses+"}")
	}
	address := func(namespace, kind, ip string) string {
		return object(addressGroup, "IPAddress", namespace, "c"+strings.ReplaceAll(ip, ".", "-"), "}\nspec: {address: "+ip+", poolRef: {kind: "+kind+", name: p}, claimRef: {name: c}}")
	}
	m := Build(snapshotOf(t, pool("CapstanIPPool", "team", "{total: '4', free: '1', used: 3}"), pool("GlobalCapstanIPPool", "", "{total: '18446744073709551616', free: '9223372036854775808', used: 0}"),
		address("team", "CapstanIPPool", "10.0.0.10"), address("team", "CapstanIPPool", "10.0.0.9"), address("other", "CapstanIPPool", "10.0.0.8"), address("other", "GlobalCapstanIPPool", "10.0.0.7")), noon)
	if len(m.Pools) != 2 || !m.Pools[0].Global || m.Pools[0].Share != 0.5 || len(m.Pools[0].Addresses) != 1 || m.Pools[0].Addresses[0].Namespace != "other" {
		t.Errorf("global pool: %+v", m.Pools)
	}
	if p := m.Pools[1]; p.Share != 0.75 || p.Used != "3" || len(p.Addresses) != 2 || p.Addresses[0].Address != "10.0.0.9" || !slices.Equal(p.Subnets, []string{"10.0.0.0/24"}) {
		t.Errorf("pool: %+v", p)
	}
	for _, test := range []struct {
		free, total string
		want        float64
	}{{"", "", 0}, {"0", "0", 0}, {"x", "4", 0}, {"5", "4", 0}, {"0", "4", 1}} {
		if got := share(test.free, test.total); got != test.want {
			t.Errorf("share(%q, %q) = %v, want %v", test.free, test.total, got, test.want)
		}
	}
}

func TestHealth(t *testing.T) {
	minutes := func(n int) time.Time { return noon.Add(-time.Duration(n) * time.Minute) }
	for name, test := range map[string]struct {
		waiting diagnosis.Waiting
		want    Health
	}{
		"ends by itself, however long":      {diagnosis.Waiting{Condition: "Up=False", Do: "nothing", ByItself: true, Since: minutes(99)}, Working},
		"advice":                            {diagnosis.Waiting{Condition: "Up=False", Do: "add a host", Since: noon}, Attention},
		"an operation":                      {diagnosis.Waiting{Condition: "RollingOut=True", Since: minutes(99)}, Working},
		"an operation with advice":          {diagnosis.Waiting{Condition: "Deleting=True", Do: "look at what it waits for", Since: minutes(99)}, Working},
		"a certificate that is not renewed": {diagnosis.Waiting{Condition: "CertificatesExpiring=True", Reason: "CertificatesExpiring", Do: "look", Since: minutes(1)}, Attention},
		"no advice, short":                  {diagnosis.Waiting{Condition: "Up=Unknown", Since: minutes(9)}, Working},
		"no advice, long":                   {diagnosis.Waiting{Condition: "Up=Unknown", Since: minutes(10)}, Attention},
		"no advice, no time":                {diagnosis.Waiting{Condition: "Up=Unknown"}, Working},
		"paused":                            {diagnosis.Waiting{Condition: "Paused=True", Do: "unpause", Since: minutes(99)}, Paused},
	} {
		if got := healthOfWait(&test.waiting, noon); got != test.want {
			t.Errorf("%s: %s, want %s", name, got, test.want)
		}
	}
}

func TestOperations(t *testing.T) {
	cluster := func(name, conditions string) string {
		return object(coreGroup, "Cluster", "team", name, "}\nstatus: {"+conditions+"}")
	}
	m := Build(snapshotOf(t, cluster("well", "conditions: []"), cluster("new", waits("MachineStarting", "11:59")), cluster("short", waits("NoHost", "11:50")), cluster("long", waits("NoHost", "11:40")),
		object(infraGroup, "CapstanMachine", "team", "m", ", labels: {cluster.x-k8s.io/cluster-name: new}}\nstatus: {"+waits("NoHost", "11:45")+"}")), noon)
	var got []string
	for _, o := range m.Operations.Items {
		line := o.Kind + " " + o.Name + " " + string(o.Health) + " " + o.Since.Format("15:04")
		for _, w := range o.Waits {
			line += " " + w.Object
		}
		got = append(got, line)
	}
	if want := []string{"cluster long attention 11:40 Cluster long", "cluster new attention 11:45 CapstanMachine m Cluster new", "cluster short attention 11:50 Cluster short"}; !slices.Equal(got, want) {
		t.Errorf("got  %q\nwant %q", got, want)
	}
}

// TestLimits: tenants create many objects with large fields.
func TestLimits(t *testing.T) {
	var texts []string
	for i := range maxOperations + 3 {
		texts = append(texts, object(coreGroup, "Cluster", "team", fmt.Sprintf("c%d", i), "}\nstatus: {"+waits("NoHost", "11:00")+"}"))
	}
	for i := range maxWaits + 2 {
		texts = append(texts, object(infraGroup, "CapstanMachine", "team", fmt.Sprintf("m%d", i), ", labels: {cluster.x-k8s.io/cluster-name: c0}}\nstatus: {"+waits("NoHost", "10:00")+"}"))
	}
	for i := range maxAddresses + 4 {
		texts = append(texts, object(addressGroup, "IPAddress", "team", fmt.Sprintf("a%d", i), "}\nspec: {address: 10.0.0.1, poolRef: {kind: CapstanIPPool, name: p}}"))
	}
	m := Build(snapshotOf(t, append(texts, object(ipamGroup, "CapstanIPPool", "team", "p", "}"))...), noon)
	if o := m.Operations; len(o.Items) != maxOperations || o.Cut != 3 || len(o.Items[0].Waits) != maxWaits || o.Items[0].Cut != 3 || m.Summary.Waiting != maxOperations+3 {
		t.Errorf("%d operations, %d cut, %d waits, %d cut, summary %+v", len(o.Items), o.Cut, len(o.Items[0].Waits), o.Items[0].Cut, m.Summary)
	}
	if p := m.Pools[0]; len(p.Addresses) != maxAddresses || p.Cut != 4 {
		t.Errorf("%d addresses, %d cut", len(p.Addresses), p.Cut)
	}
}

func TestTrim(t *testing.T) {
	deep := map[string]any{"x": "y"}
	for range 20 {
		deep = map[string]any{"x": deep}
	}
	many := make([]any, 500)
	for i := range many {
		many[i] = strings.Repeat("é", 5000)
	}
	o := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": infraGroup + "/v1beta2", "kind": "CapstanHost",
		"metadata": map[string]any{"name": "h", "managedFields": many, "annotations": map[string]any{"a": "b", keptAnnotations[0]: ""}, "labels": map[string]any{"l": "m", keptLabels[0]: "c"}},
		"spec":     map[string]any{"address": strings.Repeat("é", 5000), "taints": many, "credentialsRef": map[string]any{"name": "secret"}},
		"status":   map[string]any{"capacity": deep, "conditions": many},
	}}
	got := trim(o, hosts)
	data, err := json.Marshal(got.Object)
	if err != nil || len(data) > 3*maxItems*(maxText+10) {
		t.Errorf("%d bytes are left: %v", len(data), err)
	}
	for _, removed := range []string{"managedFields", "credentialsRef", `"l"`, `"a"`} {
		if strings.Contains(string(data), removed) {
			t.Errorf("%s is kept", removed)
		}
	}
	if got.GetLabels()[keptLabels[0]] != "c" || len(got.GetAnnotations()) != 1 || len(o.Object["metadata"].(map[string]any)["managedFields"].([]any)) != 500 {
		t.Errorf("labels %v, annotations %v", got.GetLabels(), got.GetAnnotations())
	}
	if address := text(got, "spec.address"); !strings.HasSuffix(address, "é…") || len(address) > maxText+3 {
		t.Errorf("the address ends with %q, length %d", address[len(address)-6:], len(address))
	}
}

func TestSizes(t *testing.T) {
	for n, want := range map[float64]string{0: "0 B", 1023: "1023 B", 1536: "1.5 KiB", 4 << 30: "4 GiB", 900 << 30: "900 GiB", 1 << 50: "1 PiB", 1 << 62: "4096 PiB"} {
		if got := size(n); got != want {
			t.Errorf("%v: %q, want %q", n, got, want)
		}
	}
}
