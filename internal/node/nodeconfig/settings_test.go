package nodeconfig

import (
	"encoding/json"
	"errors"
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
func TestCheckFolders(t *testing.T) {
	for _, test := range []struct{ audit, data, wal, refused string }{
		{},
		{audit: "-"}, {audit: "audit.log"}, {audit: "/var/log/kube-audit/audit.log"}, {audit: "/data/audit.log"}, {audit: "/var/lib/kubelet-audit/audit.log"},
		{data: "/data"}, {data: "/srv/etcd"}, {data: "/var/lib/etcd", wal: "/var/lib/etcd/wal"}, {wal: "/srv/wal/etcd"},
		{audit: "/audit.log", refused: "audit-log-path"}, {audit: "/var/log/audit.log", refused: "audit-log-path"}, {audit: "/var/log/x/../audit.log", refused: "audit-log-path"},
		{audit: "/etc/kubernetes/audit.log", refused: "audit-log-path"}, {audit: "/var/lib/kubelet/pki/audit.log", refused: "audit-log-path"},
		{audit: "/var/run/containerd/audit.log", refused: "audit-log-path"}, {audit: "/var/lib/etcd/audit.log", refused: "audit-log-path"},
		{audit: "/data/etcd/audit/a.log", data: "/data/etcd", refused: "audit-log-path"}, {audit: "/data/a.log", data: "/data/etcd", refused: "audit-log-path"},
		{data: "/var/log/kubernetes", refused: "audit-log-path"}, {audit: "/srv/wal/etcd/a.log", wal: "/srv/wal/etcd", refused: "audit-log-path"},
		{data: "/", refused: "data-dir"}, {data: "/srv/", refused: "data-dir"}, {data: "/var/lib/kubelet", refused: "data-dir"},
		{wal: "/srv/wal", refused: "wal-dir"}, {wal: "/wal", refused: "wal-dir"},
	} {
		c := NodeConfiguration{ControlPlane: &ControlPlane{}}
		for name, value := range map[string]string{"data-dir": test.data, "wal-dir": test.wal} {
			if value != "" {
				c.ControlPlane.Etcd.ExtraArgs = append(c.ControlPlane.Etcd.ExtraArgs, Arg{Name: name, Value: value})
			}
		}
		if test.audit != "" {
			c.ControlPlane.APIServer.ExtraArgs = []Arg{{Name: "audit-log-path", Value: test.audit}}
		}
		err := errors.Join(c.CheckFolders()...)
		if (err != nil) != (test.refused != "") || err != nil && !strings.Contains(err.Error(), test.refused+": expected files in a folder for this component alone") {
			t.Errorf("%+v: %v", test, err)
		}
	}
}
