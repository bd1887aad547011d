package provision

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"

	"capstan.dev/capstan/internal/node/machine"
	"capstan.dev/capstan/internal/node/nodeconfig"
	"capstan.dev/capstan/internal/node/provision/manifests"
	"capstan.dev/capstan/internal/node/supervisor"
)

func testNode(role nodeconfig.Role, change func(*nodeconfig.NodeConfiguration)) *node {
	config := &nodeconfig.NodeConfiguration{
		APIVersion: nodeconfig.APIVersion, Kind: nodeconfig.Kind, ClusterName: "c", KubernetesVersion: "v1.36.3",
		Role: role, Endpoint: "10.0.0.1:6443", BootstrapToken: "abcdef.hunter2hunter2aa",
		Network: nodeconfig.Network{
			PodCIDRs: []string{"10.244.0.0/16"}, ServiceCIDRs: []string{"10.96.0.0/16"}, DNSServiceIP: "10.96.0.10",
		},
		Node: nodeconfig.Node{ProviderID: "capstan:///c/m"},
	}
	if role != nodeconfig.RoleWorker {
		config.ControlPlane = &nodeconfig.ControlPlane{Encryption: true, CertSANs: []string{"api.example.org", "192.0.2.7"}}
	}
	if change != nil {
		change(config)
	}
	config.Default()
	return &node{NodeConfiguration: config, machine: machine.Metadata{ID: "id"}, name: "m", hostname: "m", ips: []netip.Addr{netip.MustParseAddr("10.0.0.2")}}
}

func TestUserArgumentsWin(t *testing.T) {
	got := args{arg("a", "1"), arg("b", "2")}.with("/bin/x", []nodeconfig.Arg{arg("b", "3"), arg("c", "4"), arg("c", "5")})
	if diff := cmp.Diff([]string{"/bin/x", "--a=1", "--b=3", "--c=4", "--c=5"}, got); diff != "" {
		t.Error(diff)
	}
}

// Arguments contain no secrets, because all users of the machine can read them (CP-23). Anonymous access is limited to
// health checks.
func TestServices(t *testing.T) {
	for _, role := range []nodeconfig.Role{nodeconfig.RoleInit, nodeconfig.RoleWorker} {
		n := testNode(role, nil)
		services := n.nodeServices()
		if role == nodeconfig.RoleInit {
			services = append(n.controlPlaneServices(), services...)
		}
		all := map[string]supervisor.Service{}
		for _, s := range services {
			if err := s.Validate(); err != nil {
				t.Errorf("%s: %v", s.Name, err)
			}
			if strings.Contains(strings.Join(s.Command, " "), "hunter2") {
				t.Errorf("%s: a secret is an argument", s.Name)
			}
			all[s.Name] = s
		}
		for _, s := range services {
			for _, name := range s.After {
				if _, known := all[name]; !known {
					t.Errorf("%s comes after %s, which %s does not have", s.Name, name, role)
				}
			}
		}
		want := []string{"containerd", "kubelet", "node-agent", "kube-proxy"}
		if role == nodeconfig.RoleInit {
			want = append([]string{"etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "coredns"}, want...)
		}
		var names []string
		for _, s := range services {
			names = append(names, s.Name)
		}
		if diff := cmp.Diff(want, names); diff != "" {
			t.Errorf("%s: %s", role, diff)
		}
	}
}

// CP-24: disabled services are absent, and external etcd replaces the machine's etcd.
func TestOptionalServices(t *testing.T) {
	n := testNode(nodeconfig.RoleInit, func(c *nodeconfig.NodeConfiguration) {
		c.Network.KubeProxy, c.Network.DNS = nodeconfig.None, nodeconfig.None
		c.ControlPlane.ExternalEtcd = &nodeconfig.ExternalEtcd{Endpoints: []string{"https://a:2379", "https://b:2379"}}
	})
	for _, s := range append(n.controlPlaneServices(), n.nodeServices()...) {
		if slices.Contains([]string{"etcd", "coredns", "kube-proxy"}, s.Name) {
			t.Errorf("%s is not absent", s.Name)
		}
	}
	if command := n.apiServerArgs().with("x", nil); !slices.Contains(command, "--etcd-servers=https://a:2379,https://b:2379") {
		t.Errorf("%v", command)
	}
	for _, leaf := range n.leaves() {
		if strings.Contains(leaf.Name, "etcd") {
			t.Errorf("%s would be created with external etcd", leaf.Name)
		}
	}
	objects, err := n.manifests()
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range objects {
		if strings.Contains(o.GetName(), "dns") || strings.Contains(o.GetName(), "proxy") {
			t.Errorf("%s %s is applied", o.GetKind(), o.GetName())
		}
	}
}

// TestLocalVolumes: only a cluster with the setting gets the StorageClass and the rights of node agents.
func TestLocalVolumes(t *testing.T) {
	for setting, isDefault := range map[string]string{"": "", nodeconfig.None: "", manifests.StorageClass: "false", manifests.DefaultStorageClass: "true"} {
		n := testNode(nodeconfig.RoleInit, nil)
		n.ControlPlane.LocalVolumes = setting
		objects, err := n.manifests()
		if err != nil {
			t.Fatal(err)
		}
		found := ""
		for _, o := range objects {
			if o.GetKind() == "StorageClass" {
				found = o.GetAnnotations()["storageclass.kubernetes.io/is-default-class"]
			}
		}
		if found != isDefault {
			t.Errorf("%q: the StorageClass is the default: %q, want %q", setting, found, isDefault)
		}
	}
}

func TestManifests(t *testing.T) {
	objects, err := testNode(nodeconfig.RoleInit, nil).manifests()
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, o := range objects {
		names = append(names, o.GetKind()+" "+o.GetName())
		if o.GetName() == "capstan:node-bootstrappers" && !strings.Contains(fmt.Sprint(o.Object["subjects"]), "system:kube-proxy") {
			t.Error("kube-proxy of workers of earlier builds cannot request certificates, and repeats it without a pause")
		}
		if o.GetName() == "kube-dns" {
			if ip := o.Object["spec"].(map[string]any)["clusterIP"]; ip != "10.96.0.10" {
				t.Errorf("DNS Service: %v", ip)
			}
		}
	}
	want := []string{
		"CustomResourceDefinition etcdmembers.etcd.capstan.dev",
		"CustomResourceDefinition etcdbackups.etcd.capstan.dev",
		"CustomResourceDefinition etcdbackupchecks.etcd.capstan.dev",
		"ClusterRole capstan:etcd-care", "ClusterRoleBinding capstan:etcd-care", "Role capstan:etcd-care", "RoleBinding capstan:etcd-care",
		"ClusterRoleBinding capstan:node-bootstrappers",
		"ClusterRoleBinding capstan:approve-kubelet-client-renewals", "ClusterRoleBinding capstan:kubelet-api-admin",
		"ClusterRole capstan:metrics-reader",
		"Role capstan:endpoint", "RoleBinding capstan:endpoint",
		"ClusterRole capstan:node-agent", "ClusterRoleBinding capstan:node-agent",
		"ClusterRole capstan:metrics-server", "ClusterRoleBinding capstan:metrics-server",
		"ClusterRoleBinding capstan:metrics-server-auth-delegator", "RoleBinding capstan:metrics-server-auth-reader",
		"Role capstan:metrics-server-endpoints", "RoleBinding capstan:metrics-server-endpoints",
		"ClusterRoleBinding capstan:kube-proxy",
		"Service kube-dns", "ClusterRole capstan:coredns", "ClusterRoleBinding capstan:coredns",
		"Role capstan:dns-endpoints", "RoleBinding capstan:dns-endpoints",
	}
	if diff := cmp.Diff(want, names); diff != "" {
		t.Error(diff)
	}
}

func TestAPIServerCertificate(t *testing.T) {
	n := testNode(nodeconfig.RoleInit, nil)
	if diff := cmp.Diff([]string{"localhost", "m", "kubernetes", "kubernetes.default", "kubernetes.default.svc",
		"kubernetes.default.svc.cluster.local", "api.example.org"}, n.apiServerNames()); diff != "" {
		t.Error(diff)
	}
	var ips []string
	for _, ip := range n.apiServerIPs() {
		ips = append(ips, ip.String())
	}
	if diff := cmp.Diff([]string{"127.0.0.1", "::1", "10.0.0.2", "10.96.0.1", "10.0.0.1", "192.0.2.7"}, ips); diff != "" {
		t.Error(diff)
	}
	if n.validity() != 365*24*time.Hour {
		t.Errorf("validity %s", n.validity())
	}
}

func TestRefusedArguments(t *testing.T) {
	for want, change := range map[string]func(*nodeconfig.NodeConfiguration){
		"oidc-issuer-url": func(c *nodeconfig.NodeConfiguration) {
			c.ControlPlane.APIServer.ExtraArgs = []nodeconfig.Arg{arg("oidc-issuer-url", "https://a")}
		},
		"anonymous-auth": func(c *nodeconfig.NodeConfiguration) {
			c.ControlPlane.APIServer.ExtraArgs = []nodeconfig.Arg{arg("anonymous-auth", "true")}
		},
		"node-role.kubernetes.io/x": func(c *nodeconfig.NodeConfiguration) {
			c.Node.Labels = map[string]string{"node-role.kubernetes.io/x": ""}
		},
		"a=b:Sometimes": func(c *nodeconfig.NodeConfiguration) { c.Node.Taints = []string{"a=b:Sometimes"} },
	} {
		if err := testNode(nodeconfig.RoleInit, change).checkArguments(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("want %q in: %v", want, err)
		}
	}
	if err := testNode(nodeconfig.RoleInit, nil).checkArguments(); err != nil {
		t.Error(err)
	}
}

// TestCloudArguments_CP24: kubelets can leave Nodes to an external cloud controller manager. Their provider id is that of the machine;
// without one, the cloud controller manager sets it.
func TestCloudArguments_CP24(t *testing.T) {
	type args = []nodeconfig.Arg
	for name, test := range map[string]struct {
		machine string
		args    args
		want    string
	}{
		"external":                         {"capstan:///c/m", args{arg("cloud-provider", "external")}, ""},
		"none":                             {"capstan:///c/m", args{arg("cloud-provider", "")}, ""},
		"a removed in-tree cloud provider": {"capstan:///c/m", args{arg("cloud-provider", "aws")}, `expected external or no value, found "aws"`},
		"the provider id of the machine":   {"capstan:///c/m", args{arg("provider-id", "capstan:///c/m")}, ""},
		"another provider id":              {"capstan:///c/m", args{arg("provider-id", "other://m")}, "expected capstan:///c/m"},
		"a machine without a provider id":  {"", args{arg("cloud-provider", "external"), arg("provider-id", "other://m")}, ""},
	} {
		n := testNode(nodeconfig.RoleInit, func(c *nodeconfig.NodeConfiguration) {
			c.Kubelet.ExtraArgs, c.Node.ProviderID = test.args, test.machine
		})
		if err := n.checkArguments(); (err != nil) != (test.want != "") || err != nil && !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: want %q, got %v", name, test.want, err)
		}
		for _, a := range test.args {
			if want := "--" + a.Name + "=" + a.Value; !slices.Contains(servicesByName(n)["kubelet"].Command, want) {
				t.Errorf("%s: the kubelet has no argument %s", name, want)
			}
		}
		if config, err := n.kubeletConfig(); err != nil || config.ProviderID != test.machine {
			t.Errorf("%s: the configuration of the kubelet has the provider id %q, %v", name, config.ProviderID, err)
		}
	}
}

func TestAuthentication(t *testing.T) {
	var users map[string]any
	if err := yaml.Unmarshal([]byte("apiVersion: v1\njwt: [{issuer: {url: 'https://a'}}]\n"), &users); err != nil {
		t.Fatal(err)
	}
	merged, err := withHealthChecks(users)
	if err != nil {
		t.Fatal(err)
	}
	data, _ := yaml.Marshal(merged)
	want := `anonymous:
  conditions:
  - path: /livez
  - path: /readyz
  - path: /healthz
  enabled: true
apiVersion: v1
jwt:
- issuer:
    url: https://a
`
	if diff := cmp.Diff(want, string(data)); diff != "" {
		t.Error(diff)
	}
	if _, err := withHealthChecks(map[string]any{"anonymous": map[string]any{"enabled": true}}); err == nil {
		t.Error("the user's anonymous access was accepted")
	}
}

func TestKubeletConfig(t *testing.T) {
	n := testNode(nodeconfig.RoleWorker, func(c *nodeconfig.NodeConfiguration) {
		c.Node.Taints = []string{"node.cluster.x-k8s.io/uninitialized:NoSchedule", "a=b:NoExecute"} // BC-06
	})
	c, err := n.kubeletConfig()
	if err != nil {
		t.Fatal(err)
	}
	if *c.Authentication.Anonymous.Enabled || !*c.Authentication.Webhook.Enabled || c.Authorization.Mode != "Webhook" || !c.ServerTLSBootstrap ||
		!c.RotateCertificates || c.FailCgroupV1 != nil || c.CgroupDriver != "cgroupfs" {
		t.Errorf("%+v", c)
	}
	n.cgroupV1 = true
	if c, err := n.kubeletConfig(); err != nil || c.FailCgroupV1 == nil || *c.FailCgroupV1 {
		t.Errorf("on cgroup v1, failCgroupV1 is %v, %v", c.FailCgroupV1, err)
	}
	for machine, pod := range map[int64]int64{0: 4096, 1024: 256, 16384: 4096} {
		n.machine.PidsLimit = machine
		if c, err := n.kubeletConfig(); err != nil || *c.PodPidsLimit != pod {
			t.Errorf("a pod of a machine with %d processes can have %d, %v; want %d", machine, *c.PodPidsLimit, err, pod)
		}
	}
	if c.ProviderID != "capstan:///c/m" { // IM-01
		t.Errorf("providerID %q", c.ProviderID)
	}
	if len(c.RegisterWithTaints) != 2 || c.RegisterWithTaints[0].Key != "node.cluster.x-k8s.io/uninitialized" || c.RegisterWithTaints[1].Value != "b" {
		t.Errorf("taints %+v", c.RegisterWithTaints)
	}
}

func TestCorefile(t *testing.T) {
	n := testNode(nodeconfig.RoleInit, nil)
	for _, forward := range []bool{true, false} {
		text := string(n.corefile(forward))
		if strings.Contains(text, "forward . /etc/resolv.conf") != forward || !strings.Contains(text, "bind 10.0.0.2\n") ||
			!strings.Contains(text, "kubernetes cluster.local in-addr.arpa ip6.arpa {") {
			t.Errorf("forward %v:\n%s", forward, text)
		}
	}
}

// The user's upstreams replace the resolvers of the machine. A stub domain has a block of its own.
func TestCorefileOptions(t *testing.T) {
	n := testNode(nodeconfig.RoleInit, func(c *nodeconfig.NodeConfiguration) {
		c.ControlPlane.CoreDNS = &nodeconfig.CoreDNS{
			Upstreams:   []string{"10.0.0.53", "[fd00::53]:5353"},
			StubDomains: []nodeconfig.StubDomain{{Domain: "corp.example.com", Servers: []string{"10.0.0.54", "10.0.0.55:5353"}}},
		}
	})
	for _, resolver := range []bool{true, false} {
		text := string(n.corefile(resolver))
		for _, want := range []string{
			"    forward . 10.0.0.53 [fd00::53]:5353 {\n",
			"\n}\ncorp.example.com:53 {\n    bind 10.0.0.2\n", "    forward . 10.0.0.54 10.0.0.55:5353 {\n",
		} {
			if !strings.Contains(text, want) {
				t.Errorf("want %q in:\n%s", want, text)
			}
		}
		if strings.Contains(text, "resolv.conf") || strings.Count(text, "{") != strings.Count(text, "}") {
			t.Errorf("resolver %v:\n%s", resolver, text)
		}
	}
}

// A patch changes single fields and keeps the others.
func TestComponentPatches(t *testing.T) {
	n := testNode(nodeconfig.RoleInit, func(c *nodeconfig.NodeConfiguration) {
		c.Kubelet.Configuration = map[string]any{"maxPods": 60.0, "evictionHard": map[string]any{"nodefs.available": "2Gi", "imagefs.available": nil}, "memorySwap": map[string]any{"swapBehavior": "LimitedSwap"}}
		c.KubeProxy = &nodeconfig.KubeProxy{Configuration: map[string]any{"nftables": map[string]any{"minSyncPeriod": "1s"}, "clientConnection": map[string]any{"qps": 7.0}}}
	})
	kubelet, err := n.kubeletConfig()
	if err != nil {
		t.Fatal(err)
	}
	if _, set := kubelet.EvictionHard["imagefs.available"]; kubelet.MaxPods != 60 || kubelet.EvictionHard["nodefs.available"] != "2Gi" || set ||
		kubelet.EvictionHard["memory.available"] != "100Mi" || !kubelet.RotateCertificates || kubelet.Authorization.Mode != "Webhook" ||
		kubelet.MemorySwap.SwapBehavior != "LimitedSwap" || *kubelet.FailSwapOn {
		t.Errorf("%+v", kubelet)
	}
	proxy, err := n.kubeProxyConfig()
	if err != nil {
		t.Fatal(err)
	}
	if proxy.NFTables.MinSyncPeriod.Duration != time.Second || proxy.ClientConnection.QPS != 7 || proxy.ClientConnection.Kubeconfig == "" || proxy.Mode != "nftables" {
		t.Errorf("%+v", proxy)
	}
	n.Kubelet.Configuration = map[string]any{"Authorization": map[string]any{"mode": "AlwaysAllow"}}
	if _, err := n.kubeletConfig(); err == nil {
		t.Error("a patch changed the authorization")
	}
}

// The services that call out have the proxy, and reach the cluster itself without it.
func TestProxy(t *testing.T) {
	n := testNode(nodeconfig.RoleInit, func(c *nodeconfig.NodeConfiguration) {
		c.Proxy = &nodeconfig.Proxy{HTTP: "http://proxy:3128", HTTPS: "http://proxy:3129", NoProxy: []string{".example.com", "10.0.0.1"}}
		c.ControlPlane.ExternalEtcd = &nodeconfig.ExternalEtcd{Endpoints: []string{"https://etcd-1.example.org:2379"}}
	})
	n.machine.Addresses = []machine.Address{{Address: "10.0.0.2", Prefix: 24}, {Address: "fd00::2", Prefix: 64}}
	noProxy := "localhost,127.0.0.0/8,::1,10.0.0.2,10.0.0.0/24,fd00::2,fd00::/64,10.244.0.0/16,10.96.0.0/16,.svc,.cluster.local,10.0.0.1,etcd-1.example.org,.example.com"
	want := []string{
		"HTTP_PROXY=http://proxy:3128", "http_proxy=http://proxy:3128", "HTTPS_PROXY=http://proxy:3129", "https_proxy=http://proxy:3129",
		"NO_PROXY=" + noProxy, "no_proxy=" + noProxy,
	}
	for _, controlPlane := range []bool{false, true} {
		n.Proxy.ControlPlane = controlPlane
		for name, s := range servicesByName(n) {
			uses := name == "containerd" || name == "kubelet" || name == "kube-apiserver" && controlPlane
			if uses != slices.Equal(s.Env, want) || !uses && len(s.Env) > 0 {
				t.Errorf("control plane %v: %s has the environment %q", controlPlane, name, s.Env)
			}
		}
	}
	n.Proxy = nil
	for name, s := range servicesByName(n) {
		if len(s.Env) > 0 {
			t.Errorf("without a proxy, %s has the environment %q", name, s.Env)
		}
	}
}

// Each service has its own variables, after those of the proxy: the last of one name applies.
func TestEnvironment(t *testing.T) {
	variable := func(value string) []nodeconfig.Arg { return []nodeconfig.Arg{{Name: "NO_PROXY", Value: value}} }
	n := testNode(nodeconfig.RoleInit, func(c *nodeconfig.NodeConfiguration) {
		c.Proxy = &nodeconfig.Proxy{HTTP: "http://proxy:3128", ControlPlane: true}
		c.ControlPlane.APIServer.Env, c.ControlPlane.ControllerManager.Env = variable("kube-apiserver"), variable("kube-controller-manager")
		c.ControlPlane.Scheduler.Env, c.ControlPlane.Etcd.Env = variable("kube-scheduler"), variable("etcd")
		c.Kubelet.Env, c.KubeProxy = variable("kubelet"), &nodeconfig.KubeProxy{Env: variable("kube-proxy")}
	})
	for name, s := range servicesByName(n) {
		var want []string
		if name == "containerd" || name == "kubelet" || name == "kube-apiserver" {
			want = n.proxyEnvironment()
		}
		if name != "containerd" && name != "coredns" && name != "node-agent" {
			want = append(want, "NO_PROXY="+name)
		}
		if !slices.Equal(s.Env, want) {
			t.Errorf("%s has the environment %q, want %q", name, s.Env, want)
		}
	}
}

// The node agent does not restart for settings of other services.
func TestAgentRevisionOfSettings(t *testing.T) {
	n := testNode(nodeconfig.RoleInit, nil)
	before := n.agentRevision()
	n.Proxy, n.KubeProxy = &nodeconfig.Proxy{HTTP: "http://proxy:1"}, &nodeconfig.KubeProxy{}
	n.ControlPlane.CoreDNS = &nodeconfig.CoreDNS{Upstreams: []string{"10.0.0.53"}}
	n.Kubelet.Configuration = map[string]any{"maxPods": 60.0}
	if n.agentRevision() != before {
		t.Error("a setting of another service restarts the agent")
	}
}

func TestTOMLString(t *testing.T) {
	for text, want := range map[string]string{
		`pa"ss\`: `"pa\"ss\\"`, "a\x00\x1f\x7f": `"a\u0000\u001f\u007f"`, "line\nline": `"line\nline"`, "<ü>": `"\u003cü\u003e"`,
	} {
		if got := tomlString(text); got != want {
			t.Errorf("%q: got %s, want %s", text, got, want)
		}
	}
}

func TestRegistries(t *testing.T) {
	n := testNode(nodeconfig.RoleWorker, func(c *nodeconfig.NodeConfiguration) {
		c.Registries = []nodeconfig.Registry{
			{Host: "docker.io", Mirrors: []string{"https://mirror.example.org:5000"}, CAFile: "/etc/ca.crt", Username: "ann", Password: `pa"ss`},
			{Host: "_default", Mirrors: []string{"http://10.0.0.9"}},
			{Host: "quay.io", Mirrors: []string{"https://mirror.example.org/quay/v2"}, OverridePath: true},
			{Host: "ghcr.io", Mirrors: []string{"https://mirror.example.org:5000", "http://mirror.example.org:5000", "https://10.0.0.8"}},
			{Host: "_default", Mirrors: []string{"https://10.0.0.8"}, Username: "bob", Password: "other"},
			{Host: "hub.test", Mirrors: []string{"https://own.test:5000", "https://10.0.0.8"}, CAFile: "/etc/hub.crt", Username: "carl", Password: "c"},
			{Host: "own.test:5000", Username: "owner", Password: "o"},
			{Host: "same.test", Mirrors: []string{"https://own.test:5000"}, Username: "owner", Password: "o"},
		}
	})
	if config := string(n.containerdConfig()); strings.Contains(config, "ann") || strings.Contains(config, "bob") {
		t.Errorf("containerd's configuration has credentials:\n%s", config)
	}
	for i, want := range []string{`server = "https://registry-1.docker.io"
ca = "/etc/ca.crt"

[host."https://mirror.example.org:5000"]
  capabilities = ["pull", "resolve"]
  ca = "/etc/ca.crt"
`, `
[host."http://10.0.0.9"]
  capabilities = ["pull", "resolve"]
`, `server = "https://quay.io"

[host."https://mirror.example.org/quay/v2"]
  capabilities = ["pull", "resolve"]
  override_path = true
`, // Credentials of another registry are for its mirror only, and never cross the network unencrypted.
		`server = "https://ghcr.io"

[host."https://mirror.example.org:5000"]
  capabilities = ["pull", "resolve"]
  [host."https://mirror.example.org:5000".header]
    Authorization = "Basic YW5uOnBhInNz"

[host."http://mirror.example.org:5000"]
  capabilities = ["pull", "resolve"]

[host."https://10.0.0.8"]
  capabilities = ["pull", "resolve"]
  [host."https://10.0.0.8".header]
    Authorization = "Basic Ym9iOm90aGVy"
`, `
[host."https://10.0.0.8"]
  capabilities = ["pull", "resolve"]
  [host."https://10.0.0.8".header]
    Authorization = "Basic Ym9iOm90aGVy"
`, // A mirror with an entry has its credentials, and never those of the registry. So the kubelet cannot pass either.
		`server = "https://hub.test"
ca = "/etc/hub.crt"
[header]
  Authorization = "Basic Y2FybDpj"

[host."https://own.test:5000"]
  capabilities = ["pull", "resolve"]
  ca = "/etc/hub.crt"
  [host."https://own.test:5000".header]
    Authorization = "Basic b3duZXI6bw=="

[host."https://10.0.0.8"]
  capabilities = ["pull", "resolve"]
  ca = "/etc/hub.crt"
  [host."https://10.0.0.8".header]
    Authorization = "Basic Y2FybDpj"
`, `server = "https://own.test:5000"
`, `server = "https://same.test"

[host."https://own.test:5000"]
  capabilities = ["pull", "resolve"]
`} {
		if diff := cmp.Diff(registryHeader+want, string(n.hostsTOML(n.Registries[i]))); diff != "" {
			t.Error(diff)
		}
	}
}

// TestCredentialProvider: the kubelet asks for the credentials of named registries only, unless a mirror has others, and its configuration
// has none of them.
func TestCredentialProvider(t *testing.T) {
	with := func(registries ...nodeconfig.Registry) *node {
		return testNode(nodeconfig.RoleWorker, func(c *nodeconfig.NodeConfiguration) { c.Registries = registries })
	}
	n := with(nodeconfig.Registry{Host: "a.test:5000", Username: "ann", Password: "secret"}, nodeconfig.Registry{Host: "b.test"},
		nodeconfig.Registry{Host: nodeconfig.DefaultRegistry, Username: "bob", Password: "secret"},
		nodeconfig.Registry{Host: "hub.test", Mirrors: []string{"https://a.test:5000"}, Username: "carl", Password: "secret"})
	config, err := yaml.Marshal(n.credentialProviders())
	if err != nil {
		t.Fatal(err)
	}
	want := `apiVersion: kubelet.config.k8s.io/v1
kind: CredentialProviderConfig
providers:
- apiVersion: credentialprovider.kubelet.k8s.io/v1
  args:
  - images
  - credentials
  defaultCacheDuration: 0s
  matchImages:
  - a.test:5000
  name: capstan-init
`
	if diff := cmp.Diff(want, string(config)); diff != "" {
		t.Error(diff)
	}
	command := n.kubeletArgs().with("kubelet", nil)
	if valueOf(command, "image-credential-provider-config") != credentialProvidersFile || valueOf(command, "image-credential-provider-bin-dir") != "/opt/capstan" {
		t.Errorf("the kubelet runs with %v", command)
	}
	command = with(nodeconfig.Registry{Host: nodeconfig.DefaultRegistry, Username: "bob", Password: "secret"}).kubeletArgs().with("kubelet", nil)
	if valueOf(command, "image-credential-provider-config") != "" {
		t.Errorf("without named credentials, the kubelet runs with %v", command)
	}
}

func TestClientRequests(t *testing.T) {
	n := testNode(nodeconfig.RoleWorker, nil)
	var users []string
	for _, r := range clientRequests(n.NodeConfiguration, "m") {
		users = append(users, r.CommonName+" "+strings.Join(r.Organization, ","))
	}
	want := []string{"capstan:node-agent:m capstan:node-agents", "system:kube-proxy "}
	if diff := cmp.Diff(want, users); diff != "" {
		t.Error(diff)
	}
	n.Network.PodNetwork, n.Network.KubeProxy = nodeconfig.None, nodeconfig.None
	if got := clientRequests(n.NodeConfiguration, "m"); len(got) != 0 {
		t.Errorf("%+v", got)
	}
}

// metrics-server is absent unless it is chosen. It verifies kubelets, has certificates of its own, and no capabilities.
func TestMetricsServer(t *testing.T) {
	chosen := func(c *nodeconfig.NodeConfiguration) { c.ControlPlane.MetricsServer = true }
	if _, has := servicesByName(testNode(nodeconfig.RoleInit, nil))["metrics-server"]; has {
		t.Error("a control plane machine has it without a choice")
	}
	n := testNode(nodeconfig.RoleInit, chosen)
	s := servicesByName(n)["metrics-server"]
	if s.User != "metrics-server" || len(s.Capabilities) > 0 || s.Ready == nil || s.Ready.CAFile != caFile {
		t.Errorf("%+v", s)
	}
	for _, want := range []string{"--kubelet-certificate-authority=" + caFile, "--bind-address=10.0.0.2", "--secure-port=4443"} {
		if !slices.Contains(s.Command, want) {
			t.Errorf("no %s in %v", want, s.Command)
		}
	}
	if slices.ContainsFunc(s.Command, func(a string) bool { return strings.Contains(a, "insecure") }) {
		t.Errorf("insecure: %v", s.Command)
	}
	if slices.Index(restartOrder, "metrics-server") < slices.Index(restartOrder, "kube-apiserver") {
		t.Error("an update does not start it after the API server")
	}
	var names []string
	for _, leaf := range n.leaves() {
		if leaf.Name == "metrics-server" {
			names = leaf.DNSNames
		}
	}
	if diff := cmp.Diff([]string{"metrics-server.kube-system.svc"}, names); diff != "" {
		t.Error(diff)
	}
	if n.agentRevision() == testNode(nodeconfig.RoleInit, nil).agentRevision() {
		t.Error("the agent of a running machine does not learn that it must publish the endpoint")
	}
}
