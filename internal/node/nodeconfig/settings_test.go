package nodeconfig

import (
	"encoding/json"
	"strings"
	"testing"
)

func expect(t *testing.T, err error, want string) {
	t.Helper()
	switch {
	case want == "" && err != nil:
		t.Errorf("refused: %v", err)
	case want != "" && (err == nil || !strings.Contains(err.Error(), want)):
		t.Errorf("got %v, want %q", err, want)
	}
}

func TestCheckKubelet(t *testing.T) {
	for name, c := range map[string]struct{ patch, want string }{
		"nothing":                     {`{}`, ""},
		"values":                      {`{"maxPods":60,"evictionHard":{"memory.available":"1Gi"},"featureGates":{"X":true}}`, ""},
		"an unknown field":            {`{"maxPod":60}`, `unknown field "maxPod"`},
		"an unknown inner field":      {`{"memorySwap":{"behaviour":"x"}}`, `unknown field "memorySwap.behaviour"`},
		"another type":                {`{"maxPods":"many"}`, "maxPods"},
		"another case":                {`{"StaticPodPath":"/x"}`, `unknown field "StaticPodPath"`},
		"another case of a user's":    {`{"maxpods":60}`, `unknown field "maxpods"`},
		"authentication":              {`{"authentication":{"anonymous":{"enabled":true}}}`, "authentication: Capstan sets this field"},
		"authorization":               {`{"authorization":{"mode":"AlwaysAllow"}}`, "authorization: Capstan sets this field"},
		"static pods":                 {`{"staticPodPath":"/x","staticPodURL":"http://x"}`, "staticPodURL: Capstan sets this field"},
		"cgroup driver":               {`{"cgroupDriver":"systemd"}`, "cgroupDriver: Capstan sets this field"},
		"certificates":                {`{"rotateCertificates":false}`, "rotateCertificates: Capstan sets this field"},
		"another kind":                {`{"kind":"Pod"}`, "kind: Capstan sets this field"},
		"a field that is reset":       {`{"authorization":null}`, "authorization: Capstan sets this field"},
		"an unknown field with null":  {`{"nonsense":null}`, `unknown field "nonsense"`},
		"more than the allowed bytes": {`{"clusterDNS":["` + strings.Repeat("x", maxPatch) + `"]}`, "expected at most 16384"},
	} {
		t.Run(name, func(t *testing.T) {
			var patch map[string]any
			if err := json.Unmarshal([]byte(c.patch), &patch); err != nil {
				t.Fatal(err)
			}
			expect(t, CheckKubelet(patch), c.want)
		})
	}
}

func TestCheckKubeProxy(t *testing.T) {
	for patch, want := range map[string]string{
		`{"metricsBindAddress":"0.0.0.0:10249"}`:     "",
		`{"clientConnection":{"qps":20}}`:            "",
		`{"clientConnection":{"kubeconfig":"/x"}}`:   "clientConnection.kubeconfig: Capstan sets this field",
		`{"mode":"iptables"}`:                        "mode: Capstan sets this field",
		`{"conntrack":{"min":1}}`:                    "conntrack: Capstan sets this field",
		`{"Mode":"iptables"}`:                        `unknown field "Mode"`,
		`{"nftables":{"syncPeriod":"often"}}`:        "duration",
		`{"clientConnection":{"Kubeconfig":"/tmp"}}`: `unknown field "clientConnection.Kubeconfig"`,
	} {
		t.Run(patch, func(t *testing.T) {
			var object map[string]any
			if err := json.Unmarshal([]byte(patch), &object); err != nil {
				t.Fatal(err)
			}
			expect(t, CheckKubeProxy(object), want)
		})
	}
}

func TestCheckClusterDNS(t *testing.T) {
	patch := map[string]any{"clusterDNS": []any{"169.254.20.10"}}
	expect(t, checkClusterDNS(patch, DNSCoreDNS), "set dns of the control plane to None")
	expect(t, checkClusterDNS(patch, None), "")
	expect(t, checkClusterDNS(nil, DNSCoreDNS), "")
}

func TestCoreDNS(t *testing.T) {
	network := Network{ServiceDomain: "cluster.local", DNSServiceIP: "10.96.0.10"}
	for name, c := range map[string]struct {
		upstreams []string
		domain    string
		servers   []string
		want      string
	}{
		"servers":                  {[]string{"10.0.0.53", "10.0.0.53:5353", "fd00::53", "[fd00::53]:53"}, "corp.example.com", []string{"10.1.1.1"}, ""},
		"a name":                   {[]string{"dns.example.com"}, "", nil, `upstreams[0]: expected the address of a DNS server`},
		"an injection":             {[]string{"10.0.0.1 {\n}\n"}, "", nil, "expected the address"},
		"a port that is none":      {[]string{"10.0.0.1:0"}, "", nil, "expected the address"},
		"a zone":                   {[]string{"fe80::1%eth0"}, "", nil, "expected the address"},
		"no host":                  {[]string{"0.0.0.0"}, "", nil, "expected the address"},
		"itself":                   {[]string{"10.96.0.10:53"}, "", nil, "this DNS server itself"},
		"the cluster's domain":     {nil, "cluster.local", []string{"10.1.1.1"}, "names of the cluster"},
		"a part of it":             {nil, "svc.cluster.local", []string{"10.1.1.1"}, "names of the cluster"},
		"a parent":                 {nil, "local", []string{"10.1.1.1"}, "names of the cluster"},
		"another one with its end": {nil, "mycluster.local", []string{"10.1.1.1"}, ""},
		"all addresses":            {nil, "in-addr.arpa", []string{"10.1.1.1"}, "names of the cluster"},
		"some addresses":           {nil, "168.192.in-addr.arpa", []string{"10.1.1.1"}, ""},
		"a domain with a block":    {nil, "x {}", []string{"10.1.1.1"}, "expected a domain"},
		"no server":                {nil, "corp", nil, "at least one server"},
		"itself as stub server":    {nil, "corp", []string{"10.96.0.10"}, "stubDomains[0].servers[0]"},
	} {
		t.Run(name, func(t *testing.T) {
			options := &CoreDNS{Upstreams: c.upstreams}
			if c.domain != "" {
				options.StubDomains = []StubDomain{{Domain: c.domain, Servers: c.servers}}
			}
			expect(t, options.Check(network), c.want)
		})
	}
	expect(t, (*CoreDNS)(nil).Check(network), "")
}

func TestCheckProxy(t *testing.T) {
	for name, c := range map[string]struct {
		proxy *Proxy
		want  string
	}{
		"none":              {nil, ""},
		"both":              {&Proxy{HTTP: "http://proxy.example.com:3128", HTTPS: "https://[fd00::1]:3128/"}, ""},
		"a host":            {&Proxy{HTTP: "proxy.example.com:3128"}, "http: expected the URL of a proxy"},
		"another scheme":    {&Proxy{HTTPS: "socks5://proxy:1"}, "https: expected the URL of a proxy"},
		"a path":            {&Proxy{HTTP: "http://proxy:1/path"}, "expected the URL"},
		"a query":           {&Proxy{HTTP: "http://proxy:1?a=b"}, "expected the URL"},
		"credentials":       {&Proxy{HTTP: "http://me:hunter2@proxy:1"}, "must not contain credentials"},
		"entries":           {&Proxy{NoProxy: []string{"a.example.com", ".example.com", "10.0.0.9", "10.0.0.0/8", "fd00::/8", "host:8080", "*"}}, "noProxy[6]"},
		"an entry as a URL": {&Proxy{NoProxy: []string{"http://x"}}, "noProxy[0]: expected a host"},
		"two entries":       {&Proxy{NoProxy: []string{"a,b"}}, "noProxy[0]"},
	} {
		t.Run(name, func(t *testing.T) {
			err := c.proxy.Check()
			expect(t, err, c.want)
			if err != nil && strings.Contains(err.Error(), "hunter2") {
				t.Error("the error quotes the credentials")
			}
		})
	}
}

// A component becomes the owner of the folders that it writes to, so these must have no files of others.
func TestCheckFoldersOfComponents(t *testing.T) {
	for _, path := range []string{"/audit.log", "/var/log/audit.log", "/var/log/../log/audit.log", "/etc/kubernetes/audit.log", "/var/lib/kubelet/pki/audit.log", "/opt/capstan/x/audit.log"} {
		if err := CheckAPIServerArg(Arg{Name: "audit-log-path", Value: path}); err == nil || !strings.Contains(err.Error(), "audit-log-path: expected a folder for this component alone") {
			t.Errorf("%s: %v", path, err)
		}
	}
	for _, path := range []string{"-", "", "audit.log", "/var/log/kubernetes/audit.log", "/var/log/kube-audit/audit.log", "/data/audit.log", "/var/lib/kubelet-audit/audit.log"} {
		if err := CheckAPIServerArg(Arg{Name: "audit-log-path", Value: path}); err != nil {
			t.Error(err)
		}
	}
	for path, refused := range map[string]bool{"/": true, "/srv/": true, "/var/lib": true, "/var/lib/kubelet": true, "/var/lib/etcd": false, "/srv/etcd": false, "/data": false} {
		for _, name := range EtcdFolders {
			if err := CheckEtcdArg(Arg{Name: name, Value: path}); refused != (err != nil) {
				t.Errorf("%s %s: %v", name, path, err)
			}
		}
	}
}
