package provision

import (
	"encoding/json"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	"capstan.dev/capstan/internal/machineapi"
	"capstan.dev/capstan/internal/node/initapi"
	"capstan.dev/capstan/internal/node/machine"
	"capstan.dev/capstan/internal/node/nodeconfig"
)

// capstand waits for the longest step, including the stop of the services, so that a machine can still go back after it.
func TestStepsEndInTime(t *testing.T) {
	const stops = time.Minute
	if longest := readyTimeout + nodeTimeout + stops; longest >= machineapi.UpdateStalled {
		t.Errorf("the longest step takes %s, and capstand gives up the update after %s", longest, machineapi.UpdateStalled)
	}
}

// A service counts as broken when it has ended maxCrashes times since the wait began, and is not ready.
func TestCrashing(t *testing.T) {
	status := func(state initapi.State, restarts int32) initapi.Status {
		return initapi.Status{Services: []initapi.Service{{Name: "kubelet", State: state, Restarts: restarts}, {Name: "other", State: initapi.StateBackoff, Restarts: 99}}}
	}
	for name, test := range map[string]struct {
		seen   []initapi.Status
		broken bool
	}{
		"ends again and again":     {[]initapi.Status{status(initapi.StateStarting, 0), status(initapi.StateBackoff, maxCrashes)}, true},
		"ended a few times":        {[]initapi.Status{status(initapi.StateStarting, 0), status(initapi.StateBackoff, maxCrashes-1)}, false},
		"ended earlier":            {[]initapi.Status{status(initapi.StateBackoff, 50), status(initapi.StateBackoff, 51)}, false},
		"is ready in the end":      {[]initapi.Status{status(initapi.StateStarting, 0), status(initapi.StateReady, maxCrashes)}, false},
		"was replaced by a reload": {[]initapi.Status{status(initapi.StateReady, 50), status(initapi.StateStarting, 0), status(initapi.StateBackoff, maxCrashes)}, true},
	} {
		first := map[string]int32{}
		var err error
		for _, s := range test.seen {
			err = crashing(s, []string{"kubelet"}, first)
		}
		if (err != nil) != test.broken {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// kube-apiserver stops when etcd of its machine restarts, so both get their new files at once. An external etcd does not restart.
func TestRestartedTogether(t *testing.T) {
	for name, test := range map[string]struct {
		role     nodeconfig.Role
		external *nodeconfig.ExternalEtcd
		service  string
		want     []string
	}{
		"etcd":                 {nodeconfig.RoleInit, nil, "etcd", []string{"etcd", "kube-apiserver"}},
		"API server":           {nodeconfig.RoleInit, nil, "kube-apiserver", []string{"kube-apiserver"}},
		"kubelet":              {nodeconfig.RoleInit, nil, "kubelet", []string{"kubelet"}},
		"external etcd":        {nodeconfig.RoleInit, &nodeconfig.ExternalEtcd{}, "etcd", nil},
		"beside external etcd": {nodeconfig.RoleInit, &nodeconfig.ExternalEtcd{}, "kube-apiserver", []string{"kube-apiserver"}},
		"worker":               {nodeconfig.RoleWorker, nil, "etcd", nil},
	} {
		t.Run(name, func(t *testing.T) {
			n := &node{NodeConfiguration: &nodeconfig.NodeConfiguration{Role: test.role, ControlPlane: &nodeconfig.ControlPlane{ExternalEtcd: test.external}}}
			n.Default()
			n.ips, _ = machine.Metadata{Addresses: []machine.Address{{Address: "10.0.0.2"}}}.IPs()
			var got []string
			for _, service := range restartedTogether((&Update{n}).services(), test.service) {
				got = append(got, service.Name)
			}
			if !slices.Equal(got, test.want) {
				t.Errorf("got %v, want %v", got, test.want)
			}
		})
	}
}

// The order of restarts contains each service of every kind of machine once, and respects what the services wait for.
func TestRestartOrder(t *testing.T) {
	for _, role := range []nodeconfig.Role{nodeconfig.RoleInit, nodeconfig.RoleControlPlane, nodeconfig.RoleWorker} {
		n := &node{NodeConfiguration: &nodeconfig.NodeConfiguration{Role: role, ControlPlane: &nodeconfig.ControlPlane{}}}
		n.Default()
		n.ips, _ = machine.Metadata{Addresses: []machine.Address{{Address: "10.0.0.2"}}}.IPs()
		u := &Update{n}
		for _, service := range u.services() {
			at := slices.Index(restartOrder, service.Name)
			if at < 0 {
				t.Errorf("%s: updates do not restart %s", role, service.Name)
			}
			for _, before := range slices.Concat(service.After, service.Requires) {
				if slices.Index(restartOrder, before) > at {
					t.Errorf("%s: %s is restarted before %s", role, service.Name, before)
				}
			}
		}
	}
}

// An update restarts the node agent for settings that the agent reads, and not for the arguments of other services or the version of
// a worker.
func TestAgentRevision(t *testing.T) {
	base := nodeconfig.NodeConfiguration{KubernetesVersion: "v1.36.3", Endpoint: "10.0.0.1:6443", ControlPlane: &nodeconfig.ControlPlane{
		ExternalEtcd: &nodeconfig.ExternalEtcd{Endpoints: []string{"a"}},
	}}
	revisionOf := func(change func(*nodeconfig.NodeConfiguration)) string {
		data, err := json.Marshal(base)
		if err != nil {
			t.Fatal(err)
		}
		c := &nodeconfig.NodeConfiguration{}
		if err := json.Unmarshal(data, c); err != nil {
			t.Fatal(err)
		}
		change(c)
		return (&node{NodeConfiguration: c}).agentRevision()
	}
	arg := []nodeconfig.Arg{{Name: "v", Value: "4"}}
	for name, test := range map[string]struct {
		change  func(*nodeconfig.NodeConfiguration)
		restart bool
	}{
		"nothing":           {func(*nodeconfig.NodeConfiguration) {}, false},
		"version":           {func(c *nodeconfig.NodeConfiguration) { c.KubernetesVersion = "v1.37.0" }, true},
		"token":             {func(c *nodeconfig.NodeConfiguration) { c.BootstrapToken = "a.b" }, false},
		"API server":        {func(c *nodeconfig.NodeConfiguration) { c.ControlPlane.APIServer.ExtraArgs = arg }, false},
		"kubelet":           {func(c *nodeconfig.NodeConfiguration) { c.Kubelet.ExtraArgs = arg }, false},
		"names of the cert": {func(c *nodeconfig.NodeConfiguration) { c.ControlPlane.CertSANs = []string{"a"} }, true},
		"etcd":              {func(c *nodeconfig.NodeConfiguration) { c.ControlPlane.Etcd.ExtraArgs = arg }, false},
		"external etcd":     {func(c *nodeconfig.NodeConfiguration) { c.ControlPlane.ExternalEtcd.Endpoints = []string{"b"} }, false},
		"encryption":        {func(c *nodeconfig.NodeConfiguration) { c.ControlPlane.Encryption = true }, false},
		"audit":             {func(c *nodeconfig.NodeConfiguration) { c.ControlPlane.AuditPolicy = true }, false},
		"authentication":    {func(c *nodeconfig.NodeConfiguration) { c.ControlPlane.Authentication = true }, false},
		"local volumes":     {func(c *nodeconfig.NodeConfiguration) { c.ControlPlane.LocalVolumes = "StorageClass" }, false},
		"validity":          {func(c *nodeconfig.NodeConfiguration) { c.ControlPlane.CertificateValidityDays = 30 }, true},
		"metrics":           {func(c *nodeconfig.NodeConfiguration) { c.ControlPlane.MetricsServer = true }, true},
		"endpoint":          {func(c *nodeconfig.NodeConfiguration) { c.Endpoint = "10.0.0.2:6443" }, true},
	} {
		if restart := revisionOf(test.change) != revisionOf(func(*nodeconfig.NodeConfiguration) {}); restart != test.restart {
			t.Errorf("%s: restart %v", name, restart)
		}
	}
	worker := func(version string) string {
		return (&node{NodeConfiguration: &nodeconfig.NodeConfiguration{Role: nodeconfig.RoleWorker, KubernetesVersion: version}}).agentRevision()
	}
	if worker("v1.36.3") != worker("v1.37.0") {
		t.Error("another version restarts the agent of a worker")
	}
}

// A kubelet reads the size of its machine at its start, so another size restarts it.
func TestKubeletSize(t *testing.T) {
	n := &node{NodeConfiguration: &nodeconfig.NodeConfiguration{Role: nodeconfig.RoleWorker}}
	if n.size() != "" {
		t.Errorf("an older capstand: %q", n.size())
	}
	n.machine = machine.Metadata{CPUs: 2, MemoryBytes: 1 << 30}
	small := n.size()
	n.machine.MemoryBytes++
	shared := n.size()
	if shared == small {
		t.Error("the memory does not change the revision")
	}
	n.machine.DiskBytes = 20 << 30
	if own := n.size(); own == shared {
		t.Error("the disk does not change the revision")
	}
}

// The API server reads these files at its start, or too late after an update.
func TestAPIServerFiles(t *testing.T) {
	n := testNode(nodeconfig.RoleInit, nil)
	if diff := cmp.Diff([]string{authenticationFile, auditPolicyFile, nodeconfig.EncryptionConfigPath}, n.apiServerFiles()); diff != "" {
		t.Error(diff)
	}
	n.ControlPlane.Encryption, n.ControlPlane.AuditPolicy = false, true
	if diff := cmp.Diff([]string{authenticationFile, nodeconfig.AuditPolicyPath}, n.apiServerFiles()); diff != "" {
		t.Error(diff)
	}
}

func TestSameRole(t *testing.T) {
	have := &nodeconfig.NodeConfiguration{ClusterName: "a", Role: nodeconfig.RoleWorker, Network: nodeconfig.Network{KubeProxy: nodeconfig.None}}
	same := *have
	same.KubernetesVersion = "v1.37.0"
	if err := SameRole(have, &same); err != nil {
		t.Error(err)
	}
	for _, change := range []func(*nodeconfig.NodeConfiguration){
		func(c *nodeconfig.NodeConfiguration) { c.ClusterName = "b" },
		func(c *nodeconfig.NodeConfiguration) { c.Role = nodeconfig.RoleInit },
		func(c *nodeconfig.NodeConfiguration) { c.Node.Name = "other" },
		func(c *nodeconfig.NodeConfiguration) { c.Network.KubeProxy = nodeconfig.KubeProxyNFTables },
	} {
		other := *have
		change(&other)
		if err := SameRole(have, &other); err == nil || !strings.Contains(err.Error(), "cannot change") {
			t.Errorf("%v", err)
		}
	}
}

// The authorities that a machine trusts change independently of updates, so a rollback must not restore them.
func TestUpdatedPaths(t *testing.T) {
	for _, path := range UpdatedPaths() {
		if path == caFile || strings.HasPrefix(caFile, path+"/") || strings.HasPrefix(machineTrust.challengeFile, path+"/") || strings.HasSuffix(path, ".key") {
			t.Errorf("%s is restored", path)
		}
	}
}

// An update changes its own labels and taints and keeps those of others.
func TestNodeChanges(t *testing.T) {
	labels := labelChanges(nodeconfig.Node{Labels: map[string]string{"same": "1", "gone": "1", "other": "1", "node-role.kubernetes.io/x": ""}},
		nodeconfig.Node{Labels: map[string]string{"same": "1", "other": "2", "new": "1"}})
	if want := map[string]any{"gone": nil, "other": "2", "new": "1"}; !reflect.DeepEqual(labels, want) {
		t.Errorf("labels %v, want %v", labels, want)
	}
	removed, added, err := taintChanges([]string{"same:NoSchedule", "gone:NoExecute", "changed=1:NoSchedule"}, []string{"same:NoSchedule", "changed=2:NoSchedule"})
	if err != nil {
		t.Fatal(err)
	}
	have := []corev1.Taint{{Key: "same", Effect: "NoSchedule"}, {Key: "gone", Effect: "NoExecute"}, {Key: "gone", Effect: "NoSchedule"}, {Key: "changed", Value: "1", Effect: "NoSchedule"}}
	want := []corev1.Taint{{Key: "same", Effect: "NoSchedule"}, {Key: "gone", Effect: "NoSchedule"}, {Key: "changed", Value: "2", Effect: "NoSchedule"}}
	if got := changedTaints(have, removed, added); !reflect.DeepEqual(got, want) {
		t.Errorf("taints %v, want %v", got, want)
	}
}

// A kubelet must not change the taints of its Node.
func TestCheckNode(t *testing.T) {
	for role, ok := range map[nodeconfig.Role]bool{nodeconfig.RoleInit: true, nodeconfig.RoleWorker: false} {
		have, want := &nodeconfig.NodeConfiguration{Role: role}, &nodeconfig.NodeConfiguration{Role: role}
		want.Node.Taints = []string{"a:NoSchedule"}
		if err := CheckNode(have, want); (err == nil) != ok {
			t.Errorf("%s: %v", role, err)
		}
		if err := CheckNode(have, have); err != nil {
			t.Error(err)
		}
	}
}

// etcd does not start without its data: neither data-dir nor wal-dir changes in place.
func TestCheckFoldersOfEtcd(t *testing.T) {
	with := func(args ...nodeconfig.Arg) *nodeconfig.NodeConfiguration {
		return &nodeconfig.NodeConfiguration{Role: nodeconfig.RoleInit, ControlPlane: &nodeconfig.ControlPlane{Etcd: nodeconfig.Component{ExtraArgs: args}}}
	}
	for name, test := range map[string]struct {
		have, want *nodeconfig.NodeConfiguration
		ok         bool
	}{
		"other folder": {with(), with(arg("data-dir", "/data")), false},
		"no folder":    {with(arg("wal-dir", "/wal")), with(), false},
		"same folder":  {with(arg("data-dir", "/data")), with(arg("v", "1"), arg("data-dir", "/data")), true},
	} {
		if err := CheckNode(test.have, test.want); (err == nil) != test.ok || err != nil && !strings.Contains(err.Error(), "without its data") {
			t.Errorf("%s: %v", name, err)
		}
	}
}
