package hostjoin

import (
	"crypto/rand"
	"crypto/rsa"
	"net"
	"strings"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/joining"
	"capstan.dev/capstan/internal/pki"
)

var now = time.Now()

// properties of the host in these tests.
var properties = joining.Request{
	Name: "rack-1", Address: "10.0.0.5:7443", BoxID: "box-1", TunnelAddress: "10.0.0.5",
	Version: "v1", ProtocolVersion: hostpb.ProtocolVersion, MinimumManagerVersion: hostpb.MinimumManagerVersion,
}

func TestRefusal(t *testing.T) {
	host := func(name, address, box string) infrav1.CapstanHost {
		return infrav1.CapstanHost{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: infrav1.CapstanHostSpec{Address: address}, Status: infrav1.CapstanHostStatus{BoxID: box}}
	}
	tunnel := func(h infrav1.CapstanHost) infrav1.CapstanHost {
		h.Spec.TunnelAddress = properties.TunnelAddress
		return h
	}
	leaving := host("rack-1", "10.0.0.5:7443", "box-1")
	leaving.DeletionTimestamp = &metav1.Time{Time: now}
	for name, test := range map[string]struct {
		terms joining.Terms
		uses  joining.Uses
		hosts []infrav1.CapstanHost
		want  string // a part of the refusal; empty: admitted
	}{
		"a first host":                        {},
		"beside other hosts":                  {hosts: []infrav1.CapstanHost{host("rack-2", "10.0.0.6:7443", "box-2"), host("local", "unix:///run/x", "")}},
		"expired":                             {terms: joining.Terms{Expires: metav1.NewTime(now.Add(-time.Second))}, want: "expired on"},
		"for another name":                    {terms: joining.Terms{HostName: "rack-2"}, want: `only for the host name "rack-2"`},
		"for another failure domain":          {terms: joining.Terms{FailureDomain: "row-9"}, want: "only for the failure domain"},
		"used by another key":                 {uses: joining.Uses{"other": "rack-2"}, want: "used by another host"},
		"used by another key, several hosts":  {terms: joining.Terms{Hosts: 2}, uses: joining.Uses{"other": "rack-2"}},
		"used up by other keys":               {terms: joining.Terms{Hosts: 2}, uses: joining.Uses{"a": "a", "b": "b"}, want: "used by another host"},
		"interrupted":                         {uses: joining.Uses{"key": "rack-1"}, hosts: []infrav1.CapstanHost{host("rack-1", "10.0.0.5:7443", "")}},
		"interrupted, and another name":       {uses: joining.Uses{"key": "rack-2"}, want: `used the token for the name "rack-2"`},
		"removed":                             {uses: joining.Uses{"key": joining.Removed}, want: "was deleted"},
		"used by a removed host":              {uses: joining.Uses{"other": joining.Removed}, want: "used by another host"},
		"the name exists":                     {hosts: []infrav1.CapstanHost{host("rack-1", "10.0.0.9:7443", "box-9")}, want: "a CapstanHost rack-1 exists"},
		"the name exists, even on this box":   {hosts: []infrav1.CapstanHost{host("rack-1", "10.0.0.5:7443", "box-1")}, want: "a CapstanHost rack-1 exists"},
		"returns":                             {terms: joining.Terms{HostName: "rack-1"}, hosts: []infrav1.CapstanHost{host("rack-1", "10.0.0.4:7443", "box-1")}},
		"returns, but is another box":         {terms: joining.Terms{HostName: "rack-1"}, hosts: []infrav1.CapstanHost{host("rack-1", "10.0.0.5:7443", "box-9")}, want: "is another box"},
		"returns while it is deleted":         {terms: joining.Terms{HostName: "rack-1"}, hosts: []infrav1.CapstanHost{leaving}, want: "is being deleted"},
		"the address exists":                  {hosts: []infrav1.CapstanHost{host("rack-2", "10.0.0.5:7443", "")}, want: "has the address"},
		"the machine-id exists":               {hosts: []infrav1.CapstanHost{host("rack-2", "10.0.0.6:7443", "box-1")}, want: "has the same machine-id"},
		"the tunnel address exists":           {hosts: []infrav1.CapstanHost{tunnel(host("rack-2", "10.0.0.6:7443", "box-2"))}, want: "has the tunnel address 10.0.0.5: set another one with --tunnel-address"},
		"the tunnel address of the same box":  {hosts: []infrav1.CapstanHost{tunnel(host("rack-1b", "10.0.0.5:7444", "box-1"))}},
		"a box that is not connected yet":     {hosts: []infrav1.CapstanHost{tunnel(host("rack-1b", "10.0.0.5:7444", ""))}},
		"a second host of one box":            {hosts: []infrav1.CapstanHost{host("rack-1b", "10.0.0.5:7444", "box-1")}},
		"the box of the plane":                {hosts: []infrav1.CapstanHost{host("local", "unix:///run/x.sock", "box-1")}, want: "set spec.tunnelAddress of local instead of a join"},
		"the box of the plane, its name":      {terms: joining.Terms{HostName: "rack-1"}, hosts: []infrav1.CapstanHost{host("rack-1", "unix:///run/x.sock", "box-1")}, want: "set spec.tunnelAddress of rack-1 instead of a join"},
		"a box without an id beside the same": {hosts: []infrav1.CapstanHost{host("rack-2", "10.0.0.6:7443", "")}},
	} {
		if test.terms.Hosts == 0 {
			test.terms.Hosts = 1
		}
		if test.terms.Expires.IsZero() {
			test.terms.Expires = metav1.NewTime(now.Add(time.Hour))
		}
		j := joiner{Request: properties, host: "10.0.0.5", fingerprint: "key"}
		j.FailureDomain = "row-1"
		got := refusal(j, token{terms: test.terms, uses: test.uses}, test.hosts, now)
		if (got == "") != (test.want == "") || !strings.Contains(got, test.want) {
			t.Errorf("%s: want %q, got %q", name, test.want, got)
		}
	}
}

// The tunnel address of a host that joins again matters only if its user has set it. It changes only without networks at the former one.
func TestRefusalOfTunnel(t *testing.T) {
	host := func(name, tunnel, used string) infrav1.CapstanHost {
		return infrav1.CapstanHost{
			ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: infrav1.CapstanHostSpec{Address: tunnel + ":7443", TunnelAddress: tunnel},
			Status: infrav1.CapstanHostStatus{BoxID: "box of " + name, TunnelAddress: used},
		}
	}
	other := host("rack-2", "10.0.0.9", "")
	for name, test := range map[string]struct {
		own    infrav1.CapstanHost
		tunnel string
		set    bool
		want   string
	}{
		"that of another host, by default": {host("rack-1", "10.0.0.4", ""), "10.0.0.9", false, ""},
		"that of another host":             {host("rack-1", "10.0.0.4", ""), "10.0.0.9", true, "the CapstanHost rack-2 has the tunnel address 10.0.0.9"},
		"another one":                      {host("rack-1", "10.0.0.4", ""), "10.0.0.5", true, ""},
		"the same":                         {host("rack-1", "10.0.0.4", "10.0.0.4"), "10.0.0.4", true, ""},
		"that of the networks":             {host("rack-1", "10.0.0.4", "10.0.0.5"), "10.0.0.5", true, ""},
		"another one with networks":        {host("rack-1", "10.0.0.4", "10.0.0.4"), "10.0.0.5", true, "networks of clusters across hosts at the tunnel address 10.0.0.4"},
		"none with networks":               {host("rack-1", "10.0.0.4", "10.0.0.4"), "", true, "omit --tunnel-address"},
		"by default, with networks":        {host("rack-1", "10.0.0.4", "10.0.0.4"), "10.0.0.5", false, ""},
	} {
		j := joiner{Request: properties, host: "10.0.0.5", fingerprint: "key"}
		j.BoxID, j.TunnelAddress, j.TunnelSet = test.own.Status.BoxID, test.tunnel, test.set
		if got := conflict(j, true, []infrav1.CapstanHost{other, test.own}); (got == "") != (test.want == "") || !strings.Contains(got, test.want) {
			t.Errorf("%s: want %q, got %q", name, test.want, got)
		}
	}
}

// A host that has joined at another URL belongs to the management cluster with its CapstanHost, for example after a move. No other one
// takes it over, and a CapstanHost of its name needs a token for this name.
func TestRefusalOfAnotherPlane(t *testing.T) {
	own := infrav1.CapstanHost{ObjectMeta: metav1.ObjectMeta{Name: "rack-1"}, Spec: infrav1.CapstanHostSpec{Address: properties.Address}}
	for name, test := range map[string]struct {
		token string
		hosts []infrav1.CapstanHost
		want  string
	}{
		"of this management cluster":    {"rack-1", []infrav1.CapstanHost{own}, ""},
		"without a token for its name":  {"", []infrav1.CapstanHost{own}, "a CapstanHost rack-1 exists"},
		"of another management cluster": {"rack-1", nil, "found none: set PLANE and the token of its management cluster"},
	} {
		j := joiner{Request: properties, host: "10.0.0.5", fingerprint: "key"}
		j.Returns = true
		terms := joining.Terms{Expires: metav1.NewTime(now.Add(time.Hour)), Hosts: 1, HostName: test.token}
		if got := refusal(j, token{terms: terms}, test.hosts, now); (got == "") != (test.want == "") || !strings.Contains(got, test.want) {
			t.Errorf("%s: want %q, got %q", name, test.want, got)
		}
	}
}

// Hosts that dial have no addresses to compare: a shared machine-id is that of a copied disk.
func TestRefusalOfDialling(t *testing.T) {
	host := func(address, box string) infrav1.CapstanHost {
		h := infrav1.CapstanHost{ObjectMeta: metav1.ObjectMeta{Name: "rack-2"}, Spec: infrav1.CapstanHostSpec{Address: address}, Status: infrav1.CapstanHostStatus{BoxID: box}}
		if address == "" {
			h.Spec.Connection = infrav1.HostConnectionFromHost
		}
		return h
	}
	for name, test := range map[string]struct {
		dials bool
		other infrav1.CapstanHost
		want  string
	}{
		"both dial":                            {true, host("", "box-2"), ""},
		"the other dials":                      {false, host("", "box-2"), ""},
		"the other listens":                    {true, host("10.0.0.5:7443", "box-2"), ""},
		"both dial, the same machine-id":       {true, host("", "box-1"), "rack-2 (which dials) has the same machine-id"},
		"the other dials, the same machine-id": {false, host("", "box-1"), "has the same machine-id"},
		"the other listens, the same box":      {true, host("10.0.0.5:7443", "box-1"), "rack-2 (10.0.0.5:7443) has the same machine-id"},
	} {
		j := joiner{Request: properties, host: "10.0.0.5", fingerprint: "key"}
		j.TunnelAddress = ""
		if test.dials {
			j.Address, j.Dials, j.host = "", true, j.Name
		}
		got := conflict(j, false, []infrav1.CapstanHost{test.other})
		if (got == "") != (test.want == "") || !strings.Contains(got, test.want) {
			t.Errorf("%s: want %q, got %q", name, test.want, got)
		}
		if made := desiredHost(j, joining.Terms{}, infrav1.SecretReference{}); made.Dials() != test.dials || (made.Spec.Address == "") != test.dials {
			t.Errorf("%s: %+v", name, made.Spec)
		}
	}
}

// A host whose version does not work with this manager is refused before it uses the token.
func TestRefusalOfVersion(t *testing.T) {
	terms := joining.Terms{Expires: metav1.NewTime(now.Add(time.Hour)), Hosts: 1}
	for name, test := range map[string]struct {
		version, minimum int32
		want             string
	}{
		"the same":           {hostpb.ProtocolVersion, hostpb.MinimumManagerVersion, ""},
		"without a version":  {0, 0, ""},
		"the next one":       {hostpb.MaximumHostVersion, hostpb.ProtocolVersion, ""},
		"too new":            {hostpb.MaximumHostVersion + 1, 1, "expected a protocol version of capstand from 1 to 3, found 4 (capstand v1): upgrade the manager first"},
		"for newer managers": {hostpb.ProtocolVersion, hostpb.ProtocolVersion + 1, "capstand v1 expects managers with protocol version 3 at least, found 2: upgrade the manager first"},
	} {
		j := joiner{Request: properties, host: "10.0.0.5", fingerprint: "key"}
		j.ProtocolVersion, j.MinimumManagerVersion = test.version, test.minimum
		if got := refusal(j, token{terms: terms}, nil, now); got != test.want {
			t.Errorf("%s: got %q, want %q", name, got, test.want)
		}
	}
}

// signingRequest is the CertificateSigningRequest of the host in these tests.
func signingRequest(t *testing.T, leaf pki.Leaf) *certificatesv1.CertificateSigningRequest {
	t.Helper()
	key, err := pki.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	der, err := pki.NewRequest(leaf, key)
	if err != nil {
		t.Fatal(err)
	}
	return &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{infrav1.HostJoinAnnotation: properties.Encode()}},
		Spec: certificatesv1.CertificateSigningRequestSpec{
			Request: pki.EncodeRequest(der), Usages: []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageServerAuth},
		},
	}
}

func TestRead(t *testing.T) {
	own := pki.Leaf{CommonName: "rack-1", IPs: []net.IP{net.ParseIP("10.0.0.5")}}
	if j, err := read(signingRequest(t, own)); err != nil || j.host != "10.0.0.5" || len(j.fingerprint) != 64 {
		t.Fatalf("%+v, %v", j, err)
	}
	weak, err := rsa.GenerateKey(rand.Reader, 1024)
	if err != nil {
		t.Fatal(err)
	}
	der, err := pki.NewRequest(own, weak)
	if err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		leaf   pki.Leaf
		change func(*certificatesv1.CertificateSigningRequest)
		want   string
	}{
		"no annotation": {own, func(c *certificatesv1.CertificateSigningRequest) { c.Annotations = nil }, "properties of the host"},
		"no request":    {own, func(c *certificatesv1.CertificateSigningRequest) { c.Spec.Request = []byte("x") }, "in PEM"},
		"two requests": {own, func(c *certificatesv1.CertificateSigningRequest) {
			c.Spec.Request = append(c.Spec.Request, c.Spec.Request...)
		}, "one certificate request"},
		"another address": {pki.Leaf{IPs: []net.IP{net.ParseIP("10.0.0.6")}}, nil, "expected a certificate request for the address"},
		"two addresses":   {pki.Leaf{IPs: []net.IP{net.ParseIP("10.0.0.5"), net.ParseIP("10.0.0.6")}}, nil, "expected a certificate request for the address"},
		"a further name":  {pki.Leaf{IPs: own.IPs, DNSNames: []string{"capstan-manager"}}, nil, "expected a certificate request for the address"},
		"a client": {own, func(c *certificatesv1.CertificateSigningRequest) {
			c.Spec.Usages = append(c.Spec.Usages, certificatesv1.UsageClientAuth)
		}, "expected the usage"},
		"no server":  {own, func(c *certificatesv1.CertificateSigningRequest) { c.Spec.Usages = nil }, "expected the usage"},
		"a weak key": {own, func(c *certificatesv1.CertificateSigningRequest) { c.Spec.Request = pki.EncodeRequest(der) }, "2048"},
		"another key's request": {own, func(c *certificatesv1.CertificateSigningRequest) {
			forged := append([]byte{}, der...)
			forged[len(forged)-1] ^= 1
			c.Spec.Request = pki.EncodeRequest(forged)
		}, "not signed by its own key"},
	} {
		csr := signingRequest(t, test.leaf)
		if test.change != nil {
			test.change(csr)
		}
		if _, err := read(csr); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: want %q, got %v", name, test.want, err)
		}
	}
}

func TestTokenID(t *testing.T) {
	csr := &certificatesv1.CertificateSigningRequest{}
	if id := tokenID(csr); id != "" {
		t.Error(id)
	}
	csr.Spec.Extra = map[string]certificatesv1.ExtraValue{claimID: {"X509SHA256=abc", "JTI=id-1"}}
	if id := tokenID(csr); id != "id-1" {
		t.Error(id)
	}
}
