package inplace

import (
	"fmt"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
)

// whole contains the fields that have one decision for all of their content: types of other projects, and the backup, which is
// never compared.
var whole = []string{
	"hostSelector.matchLabels", "hostSelector.matchExpressions", "restore.store", "restore.keys", "kubelet.configuration", "kubeProxy.configuration",
}

// leaves returns the JSON paths of all fields of a type. The fields of list items follow the path of the list.
func leaves(t reflect.Type, prefix string) []string {
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	switch {
	case t == reflect.TypeFor[resource.Quantity](), t == reflect.TypeFor[metav1.Time](), slices.Contains(whole, prefix):
		return []string{prefix}
	case t.Kind() == reflect.Slice && ofStructs(t):
		return append([]string{prefix}, leaves(t.Elem(), prefix)...)
	case t.Kind() != reflect.Struct:
		return []string{prefix}
	}
	var out []string
	for i := range t.NumField() {
		name, _, _ := strings.Cut(t.Field(i).Tag.Get("json"), ",")
		out = append(out, leaves(t.Field(i).Type, strings.TrimPrefix(prefix+"."+name, "."))...)
	}
	return out
}

func ofStructs(t reflect.Type) bool {
	e := t.Elem()
	for e.Kind() == reflect.Pointer {
		e = e.Elem()
	}
	return e.Kind() == reflect.Struct
}

// decided returns the paths of the fields and list items with a decision.
func decided(fields []field) []string {
	var out []string
	for _, f := range fields {
		out = append(out, f.path)
		for _, item := range f.items {
			out = append(out, f.path+"."+item)
		}
	}
	return out
}

// TestEveryFieldHasADecision (CP-21) fails for a new field of a spec until its decision is in the table.
func TestEveryFieldHasADecision(t *testing.T) {
	for name, test := range map[string]struct {
		spec   reflect.Type
		fields []field
	}{
		"CapstanMachineSpec": {reflect.TypeFor[infrav1.CapstanMachineSpec](), machineFields},
		"CapstanConfigSpec":  {reflect.TypeFor[bootstrapv1.CapstanConfigSpec](), configFields},
	} {
		has, want := decided(test.fields), leaves(test.spec, "")
		if len(want) < 10 {
			t.Fatalf("%s has only the fields %v", name, want)
		}
		for _, path := range want {
			if !slices.Contains(has, path) {
				t.Errorf("the field %s of %s has no decision: add it to fields.go", path, name)
			}
		}
		for _, path := range has {
			if !slices.ContainsFunc(want, func(leaf string) bool { return leaf == path || strings.HasPrefix(leaf, path+".") }) {
				t.Errorf("%s has no field %s: remove its decision from fields.go", name, path)
			}
		}
	}
}

func TestReflectionFindsNewFields(t *testing.T) {
	type item struct {
		New string `json:"new,omitempty"`
	}
	type spec struct {
		List []item `json:"list,omitempty"`
		Deep *struct {
			Leaf map[string]string `json:"leaf"`
		} `json:"deep"`
	}
	if has, want := leaves(reflect.TypeFor[spec](), ""), []string{"list", "list.new", "deep.leaf"}; !slices.Equal(has, want) {
		t.Errorf("found the fields %v, expected %v", has, want)
	}
}

func size(text string) *resource.Quantity { return ptr.To(resource.MustParse(text)) }

// describe returns the changes as "path verdict services".
func describe(changes []Change) string {
	var out []string
	for _, c := range changes {
		out = append(out, strings.TrimSpace(fmt.Sprintf("%s %s %s", c.Path, c.Verdict, strings.Join(c.Services, ","))))
	}
	return strings.Join(out, "; ")
}

func TestMachine(t *testing.T) {
	type spec = infrav1.CapstanMachineSpec
	pools := []infrav1.IPPoolReference{{APIGroup: "ipam.capstan.dev", Kind: "CapstanIPPool", Name: "a"}}
	addresses := func(a string) infrav1.MachineNetworkSpec {
		return infrav1.MachineNetworkSpec{Addresses: []infrav1.InterfaceAddress{{Address: a, Prefix: 24, Gateway: "10.0.0.1"}}}
	}
	for name, test := range map[string]struct {
		current, desired spec
		want             string
	}{
		"equal":            {spec{CPUs: 2, Memory: size("2Gi")}, spec{CPUs: 2, Memory: size("2Gi")}, ""},
		"id lost":          {spec{ID: "abcdefgh"}, spec{}, ""},
		"id":               {spec{ID: "abcdefgh"}, spec{ID: "bbcdefgh"}, "id Replace"},
		"providerID lost":  {spec{ProviderID: "capstan://a"}, spec{}, ""},
		"providerID":       {spec{ProviderID: "capstan://a"}, spec{ProviderID: "capstan://b"}, "providerID Replace"},
		"hostName lost":    {spec{HostName: "a"}, spec{}, ""},
		"hostName":         {spec{HostName: "a"}, spec{HostName: "b"}, "hostName Replace"},
		"hostID lost":      {spec{HostID: "a"}, spec{}, ""},
		"hostID":           {spec{HostID: "a"}, spec{HostID: "b"}, "hostID Replace"},
		"hostSelector":     {spec{}, spec{HostSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"a": "b"}}}, "hostSelector Replace"},
		"hostTolerations":  {spec{}, spec{HostTolerations: []infrav1.HostToleration{{Key: "a"}}}, "hostTolerations Replace"},
		"image":            {spec{Image: "a"}, spec{Image: "b"}, "image Replace"},
		"image lost":       {spec{Image: "a"}, spec{}, "image Replace"},
		"cpus":             {spec{CPUs: 2}, spec{CPUs: 4}, "cpus Restart kubelet"},
		"cpus of the host": {spec{CPUs: 2}, spec{}, "cpus Restart kubelet"},
		"more memory":      {spec{Memory: size("2Gi")}, spec{Memory: size("4Gi")}, "memory Restart kubelet"},
		"less memory":      {spec{Memory: size("4Gi")}, spec{Memory: size("2Gi")}, "memory Restart kubelet"},
		"pids":             {spec{PidsLimit: 1024}, spec{PidsLimit: 2048}, "pidsLimit Restart kubelet"},
		"disk grows":       {spec{Disk: infrav1.MachineDiskSpec{Size: size("20Gi")}}, spec{Disk: infrav1.MachineDiskSpec{Size: size("30Gi")}}, "disk.size Restart kubelet"},
		"disk shrinks":     {spec{Disk: infrav1.MachineDiskSpec{Size: size("20Gi")}}, spec{Disk: infrav1.MachineDiskSpec{Size: size("10Gi")}}, "disk.size Replace"},
		"disk, same size":  {spec{Disk: infrav1.MachineDiskSpec{Size: size("2Gi")}}, spec{Disk: infrav1.MachineDiskSpec{Size: size("2048Mi")}}, ""},
		"disk of no size":  {spec{}, spec{Disk: infrav1.MachineDiskSpec{Size: size("30Gi")}}, "disk.size Replace"},
		"disk loses size":  {spec{Disk: infrav1.MachineDiskSpec{Size: size("30Gi")}}, spec{}, "disk.size Replace"},
		"pools":            {spec{}, spec{Network: infrav1.MachineNetworkSpec{AddressesFromPools: pools}}, "network.addressesFromPools Replace"},
		"addresses":        {spec{Network: addresses("10.0.0.2")}, spec{Network: addresses("10.0.0.3")}, "network.addresses Replace"},
		"addresses lost":   {spec{Network: addresses("10.0.0.2")}, spec{}, ""},
		"several":          {spec{CPUs: 1, Image: "a"}, spec{CPUs: 2, Image: "b"}, "image Replace; cpus Restart kubelet"},
	} {
		if has := describe(Machine(test.current, test.desired)); has != test.want {
			t.Errorf("%s: %q, expected %q", name, has, test.want)
		}
	}
}

func TestConfig(t *testing.T) {
	type spec = bootstrapv1.CapstanConfigSpec
	cluster := func(c bootstrapv1.ClusterConfiguration) spec { return spec{Cluster: c} }
	api := func(a bootstrapv1.APIServerSpec) spec { return cluster(bootstrapv1.ClusterConfiguration{APIServer: a}) }
	args := []bootstrapv1.Arg{{Name: "v", Value: "4"}}
	env := []bootstrapv1.EnvVar{{Name: "GOGC", Value: "50"}}
	from := bootstrapv1.ContentSource{Secret: bootstrapv1.SecretKeyReference{Name: "n", Key: "k"}}
	external := func(url string) spec {
		return cluster(bootstrapv1.ClusterConfiguration{Etcd: bootstrapv1.EtcdSpec{External: bootstrapv1.ExternalEtcdSpec{Endpoints: []string{url}}}})
	}
	etcdArgs := func(pairs ...string) spec {
		var args []bootstrapv1.Arg
		for pair := range slices.Chunk(pairs, 2) {
			args = append(args, bootstrapv1.Arg{Name: pair[0], Value: pair[1]})
		}
		return cluster(bootstrapv1.ClusterConfiguration{Etcd: bootstrapv1.EtcdSpec{ExtraArgs: args}})
	}
	encryption := func(e bootstrapv1.EncryptionSpec) spec {
		return cluster(bootstrapv1.ClusterConfiguration{Encryption: e})
	}
	for name, test := range map[string]struct {
		current, desired spec
		want             string
	}{
		"equal":           {spec{Role: bootstrapv1.RoleWorker}, spec{Role: bootstrapv1.RoleWorker}, ""},
		"default role":    {spec{}, spec{Role: bootstrapv1.RoleWorker}, ""},
		"first machine":   {spec{Role: bootstrapv1.RoleInit}, spec{Role: bootstrapv1.RoleControlPlane}, ""},
		"no role desired": {spec{Role: bootstrapv1.RoleInit}, spec{}, "role Replace"},
		"role":            {spec{Role: bootstrapv1.RoleWorker}, spec{Role: bootstrapv1.RoleControlPlane}, "role Replace"},
		"restore":         {spec{Restore: bootstrapv1.RestoreSource{Name: "a"}}, spec{}, ""},
		"API server":      {spec{}, api(bootstrapv1.APIServerSpec{ExtraArgs: args}), "cluster.apiServer.extraArgs Restart kube-apiserver"},
		"SANs":            {spec{}, api(bootstrapv1.APIServerSpec{CertSANs: []string{"a"}}), "cluster.apiServer.certSANs Restart node-agent"},
		"audit":           {spec{}, api(bootstrapv1.APIServerSpec{AuditPolicy: bootstrapv1.Document{Content: "a"}}), "cluster.apiServer.auditPolicy.content Restart kube-apiserver"},
		"authentication":  {spec{}, api(bootstrapv1.APIServerSpec{Authentication: bootstrapv1.Document{Content: "a"}}), "cluster.apiServer.authentication.content Restart kube-apiserver"},
		"audit of a Secret": {spec{}, api(bootstrapv1.APIServerSpec{AuditPolicy: bootstrapv1.Document{ContentFrom: from}}),
			"cluster.apiServer.auditPolicy.contentFrom.secret.name Restart kube-apiserver; cluster.apiServer.auditPolicy.contentFrom.secret.key Restart kube-apiserver"},
		"authentication of a Secret": {spec{}, api(bootstrapv1.APIServerSpec{Authentication: bootstrapv1.Document{ContentFrom: from}}),
			"cluster.apiServer.authentication.contentFrom.secret.name Restart kube-apiserver; cluster.apiServer.authentication.contentFrom.secret.key Restart kube-apiserver"},
		"controller manager": {spec{}, cluster(bootstrapv1.ClusterConfiguration{ControllerManager: bootstrapv1.ComponentSpec{ExtraArgs: args}}), "cluster.controllerManager.extraArgs Restart kube-controller-manager"},
		"scheduler":          {spec{}, cluster(bootstrapv1.ClusterConfiguration{Scheduler: bootstrapv1.ComponentSpec{ExtraArgs: args}}), "cluster.scheduler.extraArgs Restart kube-scheduler"},
		"etcd":               {spec{}, cluster(bootstrapv1.ClusterConfiguration{Etcd: bootstrapv1.EtcdSpec{ExtraArgs: args}}), "cluster.etcd.extraArgs Restart etcd,kube-apiserver"},
		"etcd's folder":      {spec{}, etcdArgs("data-dir", "/data/etcd"), "cluster.etcd.extraArgs Replace"},
		"etcd's log":         {etcdArgs("wal-dir", "/a"), etcdArgs("wal-dir", "/b"), "cluster.etcd.extraArgs Replace"},
		"no folder of etcd":  {etcdArgs("data-dir", "/data/etcd"), spec{}, "cluster.etcd.extraArgs Replace"},
		"etcd's quota":       {etcdArgs("data-dir", "/a"), etcdArgs("quota-backend-bytes", "1", "data-dir", "/a"), "cluster.etcd.extraArgs Restart etcd,kube-apiserver"},
		"external etcd":      {external("https://a"), external("https://b"), "cluster.etcd.external.endpoints Restart kube-apiserver"},
		"to external etcd":   {spec{}, external("https://b"), "cluster.etcd.external.endpoints Replace"},
		"from external etcd": {external("https://a"), spec{}, "cluster.etcd.external.endpoints Replace"},
		"encryption mode":    {spec{}, encryption(bootstrapv1.EncryptionSpec{Mode: bootstrapv1.EncryptionAESGCM}), "cluster.encryption.mode Restart kube-apiserver"},
		"encrypted":          {spec{}, encryption(bootstrapv1.EncryptionSpec{Resources: []string{"configmaps"}}), "cluster.encryption.resources Restart kube-apiserver"},
		"encryption": {spec{}, encryption(bootstrapv1.EncryptionSpec{Configuration: bootstrapv1.EncryptionConfigurationSource{Secret: from.Secret}}),
			"cluster.encryption.configuration.secret.name Restart kube-apiserver; cluster.encryption.configuration.secret.key Restart kube-apiserver"},
		"pod network":                    {spec{}, cluster(bootstrapv1.ClusterConfiguration{PodNetwork: bootstrapv1.PodNetworkNone}), "cluster.podNetwork Replace"},
		"proxy":                          {spec{}, cluster(bootstrapv1.ClusterConfiguration{KubeProxy: bootstrapv1.KubeProxyNone}), "cluster.kubeProxy Replace"},
		"DNS":                            {spec{}, cluster(bootstrapv1.ClusterConfiguration{DNS: bootstrapv1.DNSNone}), "cluster.dns Replace"},
		"validity":                       {spec{}, cluster(bootstrapv1.ClusterConfiguration{CertificateValidityDays: 30}), "cluster.certificateValidityDays Restart node-agent"},
		"authority's validity":           {spec{}, cluster(bootstrapv1.ClusterConfiguration{CACertificateValidityDays: 400}), "cluster.caCertificateValidityDays InPlace"},
		"key algorithm":                  {spec{}, cluster(bootstrapv1.ClusterConfiguration{EncryptionAlgorithm: "RSA-2048"}), "cluster.encryptionAlgorithm Replace"},
		"API server's variables":         {spec{}, api(bootstrapv1.APIServerSpec{Env: env}), "cluster.apiServer.env Restart kube-apiserver"},
		"controller manager's variables": {spec{}, cluster(bootstrapv1.ClusterConfiguration{ControllerManager: bootstrapv1.ComponentSpec{Env: env}}), "cluster.controllerManager.env Restart kube-controller-manager"},
		"scheduler's variables":          {spec{}, cluster(bootstrapv1.ClusterConfiguration{Scheduler: bootstrapv1.ComponentSpec{Env: env}}), "cluster.scheduler.env Restart kube-scheduler"},
		"etcd's variables":               {spec{}, cluster(bootstrapv1.ClusterConfiguration{Etcd: bootstrapv1.EtcdSpec{Env: env}}), "cluster.etcd.env Restart etcd,kube-apiserver"},
		"kubelet's variables":            {spec{}, spec{Kubelet: bootstrapv1.KubeletSpec{Env: env}}, "kubelet.env Restart kubelet"},
		"kube-proxy's variables":         {spec{}, spec{KubeProxy: bootstrapv1.KubeProxySpec{Env: env}}, "kubeProxy.env Restart kube-proxy"},
		"kubelet":                        {spec{}, spec{Kubelet: bootstrapv1.KubeletSpec{ExtraArgs: args}}, "kubelet.extraArgs Restart kubelet"},
		"kubelet's configuration": {spec{}, spec{Kubelet: bootstrapv1.KubeletSpec{Configuration: runtime.RawExtension{Raw: []byte(`{"maxPods":60}`)}}},
			"kubelet.configuration Restart kubelet"},
		"equal configuration": {
			spec{Kubelet: bootstrapv1.KubeletSpec{Configuration: runtime.RawExtension{Raw: []byte(`{"a":1,"b":2}`)}}},
			spec{Kubelet: bootstrapv1.KubeletSpec{Configuration: runtime.RawExtension{Raw: []byte(`{ "b": 2, "a": 1 }`)}}}, ""},
		"kube-proxy's configuration": {spec{}, spec{KubeProxy: bootstrapv1.KubeProxySpec{Configuration: runtime.RawExtension{Raw: []byte(`{"metricsBindAddress":"0.0.0.0:10249"}`)}}},
			"kubeProxy.configuration Restart kube-proxy"},
		"upstreams": {spec{}, cluster(bootstrapv1.ClusterConfiguration{CoreDNS: bootstrapv1.CoreDNSSpec{Upstreams: []string{"10.0.0.1"}}}), "cluster.coreDNS.upstreams Restart coredns"},
		"stub domains": {spec{}, cluster(bootstrapv1.ClusterConfiguration{CoreDNS: bootstrapv1.CoreDNSSpec{StubDomains: []bootstrapv1.StubDomain{{Domain: "a", Servers: []string{"10.0.0.1"}}}}}),
			"cluster.coreDNS.stubDomains Restart coredns"},
		"metrics-server":             {spec{}, cluster(bootstrapv1.ClusterConfiguration{ResourceMetrics: bootstrapv1.ResourceMetricsServer}), "cluster.resourceMetrics Restart metrics-server,node-agent"},
		"without metrics-server":     {cluster(bootstrapv1.ClusterConfiguration{ResourceMetrics: bootstrapv1.ResourceMetricsServer}), spec{}, "cluster.resourceMetrics Replace"},
		"no metrics-server, written": {spec{}, cluster(bootstrapv1.ClusterConfiguration{ResourceMetrics: bootstrapv1.ResourceMetricsNone}), ""},
		"HTTP proxy": {spec{}, spec{Proxy: bootstrapv1.ProxySpec{HTTP: "http://a:1", NoProxy: []string{"b"}}},
			"proxy.http Restart kube-apiserver,containerd,kubelet; proxy.noProxy Restart kube-apiserver,containerd,kubelet"},
		"HTTP proxy of the control plane": {spec{}, spec{Proxy: bootstrapv1.ProxySpec{ControlPlane: ptr.To(true)}}, "proxy.controlPlane Restart kube-apiserver"},
		"node name":                       {spec{}, spec{Node: bootstrapv1.NodeSpec{Name: "a"}}, "node.name Replace"},
		"labels":                          {spec{Node: bootstrapv1.NodeSpec{Labels: map[string]string{"a": "b"}}}, spec{}, "node.labels Restart kubelet"},
		"taints":                          {spec{Role: bootstrapv1.RoleControlPlane}, spec{Role: bootstrapv1.RoleControlPlane, Node: bootstrapv1.NodeSpec{Taints: &[]bootstrapv1.Taint{{Key: "a", Effect: corev1.TaintEffectNoSchedule}}}}, "node.taints Restart kubelet"},
		"no taints":                       {spec{Role: bootstrapv1.RoleInit}, spec{Role: bootstrapv1.RoleControlPlane, Node: bootstrapv1.NodeSpec{Taints: &[]bootstrapv1.Taint{}}}, "node.taints Restart kubelet"},
		"taints of a worker":              {spec{}, spec{Node: bootstrapv1.NodeSpec{Taints: &[]bootstrapv1.Taint{}}}, "node.taints Replace"},
		"pre":                             {spec{PreCommands: []string{"a"}}, spec{PreCommands: []string{"b"}}, "preCommands Replace"},
		"post":                            {spec{PostCommands: []string{"a"}}, spec{}, "postCommands Replace"},
		"users":                           {spec{}, spec{Users: []bootstrapv1.User{{Name: "ann"}}}, "users Replace"},
		"images":                          {spec{}, spec{Images: []string{"a.test/a:v1"}}, "images Replace"},
		"update":                          {spec{}, spec{UpdateCommands: []string{"a"}}, "updateCommands InPlace"},
		"registries":                      {spec{}, spec{Registries: []bootstrapv1.Registry{{Host: "a", Mirrors: []string{"https://b"}}}}, "registries Restart kubelet"},
	} {
		if has := describe(Config(test.current, test.desired)); has != test.want {
			t.Errorf("%s: %q, expected %q", name, has, test.want)
		}
	}
}

func TestFiles(t *testing.T) {
	file := func(content string, repeatable *bool) bootstrapv1.File {
		return bootstrapv1.File{Path: "/etc/a", Content: content, Repeatable: repeatable}
	}
	yes, no := ptr.To(true), ptr.To(false)
	for name, test := range map[string]struct {
		current, desired []bootstrapv1.File
		want             string
	}{
		"added":                  {nil, []bootstrapv1.File{file("a", nil)}, "files[/etc/a] Replace"},
		"added, repeatable":      {nil, []bootstrapv1.File{file("a", yes)}, "files[/etc/a] InPlace"},
		"removed":                {[]bootstrapv1.File{file("a", yes)}, nil, "files[/etc/a] Replace"},
		"changed":                {[]bootstrapv1.File{file("a", nil)}, []bootstrapv1.File{file("b", nil)}, "files[/etc/a] Replace"},
		"changed, repeatable":    {[]bootstrapv1.File{file("a", yes)}, []bootstrapv1.File{file("b", yes)}, "files[/etc/a] InPlace"},
		"changed and declared":   {[]bootstrapv1.File{file("a", no)}, []bootstrapv1.File{file("b", yes)}, "files[/etc/a] InPlace"},
		"changed and undeclared": {[]bootstrapv1.File{file("a", yes)}, []bootstrapv1.File{file("b", no)}, "files[/etc/a] Replace"},
		"declared":               {[]bootstrapv1.File{file("a", nil)}, []bootstrapv1.File{file("a", yes)}, "files[/etc/a] InPlace"},
		"undeclared":             {[]bootstrapv1.File{file("a", yes)}, []bootstrapv1.File{file("a", nil)}, "files[/etc/a] InPlace"},
		"same":                   {[]bootstrapv1.File{file("a", nil)}, []bootstrapv1.File{file("a", nil)}, ""},
		"permissions":            {[]bootstrapv1.File{{Path: "/a", Permissions: "0600"}}, []bootstrapv1.File{{Path: "/a", Permissions: "0644"}}, "files[/a] Replace"},
		"two": {
			[]bootstrapv1.File{{Path: "/b", Content: "a"}, {Path: "/a", Content: "a", Repeatable: yes}},
			[]bootstrapv1.File{{Path: "/b", Content: "b"}, {Path: "/a", Content: "b", Repeatable: yes}},
			"files[/a] InPlace; files[/b] Replace",
		},
		"other order": {
			[]bootstrapv1.File{{Path: "/b"}, {Path: "/a"}}, []bootstrapv1.File{{Path: "/a"}, {Path: "/b"}}, "",
		},
	} {
		has := describe(Config(bootstrapv1.CapstanConfigSpec{Files: test.current}, bootstrapv1.CapstanConfigSpec{Files: test.desired}))
		if has != test.want {
			t.Errorf("%s: %q, expected %q", name, has, test.want)
		}
	}
}

func TestVersion(t *testing.T) {
	for _, test := range []struct {
		from, to string
		want     Verdict
		why      string
	}{
		{"v1.36.3", "v1.36.3", InPlace, ""},
		{"v1.36.3", "v1.36.4", Restart, ""},
		{"v1.35.9", "v1.36.0", Restart, ""},
		{"v1.34.9", "v1.36.0", Replace, "one minor version at a time"},
		{"v1.36.3", "v1.36.2", Replace, "cannot go back"},
		{"v1.36.3", "v1.35.9", Replace, "cannot go back"},
		{"v1.36.3", "v2.0.0", Replace, "one minor version at a time"},
		{"", "v1.36.3", Replace, "not a version"},
		{"v1.36.3", "latest", Replace, "not a version"},
	} {
		c := Version(test.from, test.to)
		if c.Verdict != test.want || !strings.Contains(c.Why, test.why) {
			t.Errorf("from %q to %q: %+v, expected %s because %q", test.from, test.to, c, test.want, test.why)
		}
	}
}

func TestBlocking(t *testing.T) {
	live, restart, other := Change{Path: "a", Verdict: InPlace}, Change{Path: "b", Verdict: Restart}, Change{Path: "c", Verdict: Replace}
	for _, test := range []struct {
		changes []Change
		blocked int
	}{
		{nil, 0},
		{[]Change{live}, 0},
		{[]Change{live, restart, live}, 0},
		{[]Change{other, restart, live}, 1},
		{[]Change{restart, other}, 1},
	} {
		if has := len(Blocking(test.changes)); has != test.blocked {
			t.Errorf("%s: %d need another machine, expected %d", describe(test.changes), has, test.blocked)
		}
	}
}

// documented renders the table of docs/updates-in-place.md.
func documented() string {
	var out strings.Builder
	out.WriteString("| object | field | change |\n| --- | --- | --- |\n| Machine | `version` | patch versions and the next minor version: in place, all Kubernetes services restart |\n")
	for _, of := range []struct {
		kind   string
		fields []field
	}{{"CapstanMachine", machineFields}, {"CapstanConfig", configFields}} {
		for _, f := range of.fields {
			fmt.Fprintf(&out, "| %s | `%s` | %s |\n", of.kind, f.path, effect(f))
		}
	}
	return out.String()
}

func effect(f field) string {
	switch f.path {
	case "disk.size":
		return "growth: in place, restarts kubelet; otherwise another machine"
	case "files":
		return "in place for files with `repeatable: true`; otherwise, and for removed files, another machine"
	case "cluster.etcd.extraArgs":
		return "`data-dir` and `wal-dir`: another machine; others: in place, restarts etcd, kube-apiserver"
	case "cluster.etcd.external.endpoints":
		return "other endpoints: in place, restarts kube-apiserver; into or out of the machines: never"
	case "cluster.resourceMetrics":
		return "`MetricsServer`: in place, restarts metrics-server, node-agent; `None`: another machine"
	case taints:
		return "control plane machines: in place, restarts kubelet; workers: another machine"
	case "restore", "role":
		return "matters only for the first start; a worker never becomes a control plane machine"
	}
	c := f.decide(f, nil, nil)[0]
	switch c.Verdict {
	case InPlace:
		return "in place"
	case Restart:
		return "in place, restarts " + strings.Join(c.Services, ", ")
	}
	return "another machine: " + c.Why
}

// TestDocumented compares the table in the documentation with the decisions.
func TestDocumented(t *testing.T) {
	data, err := os.ReadFile("../../docs/updates-in-place.md")
	if err != nil {
		t.Fatal(err)
	}
	if want := documented(); !strings.Contains(string(data), want) {
		t.Errorf("docs/updates-in-place.md does not contain this table:\n%s", want)
	}
}
