package csr

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"net"
	"net/url"
	"reflect"
	"strings"
	"testing"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	"capstan.dev/capstan/internal/node/nodeconfig"
)

// asked contains the fields of a request.
type asked struct {
	signer, user string
	groups       []string
	cn           string
	o            []string
	dns, ips     []string
	emails       []string
	uris         []string
	usages       []certificatesv1.KeyUsage
	pem          []byte
}

var (
	serverUsages  = []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageServerAuth}
	clientUsages  = []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageKeyEncipherment, certificatesv1.UsageClientAuth}
	authenticated = "system:authenticated"
)

func serving() asked {
	return asked{
		signer: certificatesv1.KubeletServingSignerName, user: "system:node:w1", groups: []string{nodeconfig.NodesGroup, authenticated},
		cn: "system:node:w1", o: []string{nodeconfig.NodesGroup}, dns: []string{"w1"}, ips: []string{"10.200.0.3"}, usages: serverUsages,
	}
}

func agent() asked {
	return asked{
		signer: certificatesv1.KubeAPIServerClientSignerName, user: "system:bootstrap:aaaaaa", groups: []string{bootstrapGroup, authenticated},
		cn: "capstan:node-agent:w1", o: []string{nodeconfig.AgentGroup}, usages: clientUsages,
	}
}

func proxy() asked {
	a := agent()
	a.cn, a.o = nodeconfig.KubeProxyUser, nil
	return a
}

// fromKubelet sets the kubelet of the node as the requester.
func fromKubelet(node string) func(*asked) {
	return func(a *asked) { a.user, a.groups = "system:node:"+node, []string{nodeconfig.NodesGroup, authenticated} }
}

// data is bootstrap data of Capstan's provider.
func data(name, ids string) corev1.Secret {
	return corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{bootstrapv1.TokenIDsAnnotation: ids}},
		Type:       clusterv1.ClusterSecretType,
	}
}

func with(a asked, change func(*asked)) asked {
	change(&a)
	return a
}

func request(t *testing.T, a asked) *certificatesv1.CertificateSigningRequest {
	t.Helper()
	if a.pem == nil {
		a.pem = requestPEM(t, a)
	}
	return &certificatesv1.CertificateSigningRequest{Spec: certificatesv1.CertificateSigningRequestSpec{
		SignerName: a.signer, Username: a.user, Groups: a.groups, Usages: a.usages, Request: a.pem,
	}}
}

func requestPEM(t *testing.T, a asked) []byte {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.CertificateRequest{
		Subject: pkix.Name{CommonName: a.cn, Organization: a.o}, DNSNames: a.dns, EmailAddresses: a.emails,
	}
	for _, ip := range a.ips {
		template.IPAddresses = append(template.IPAddresses, net.ParseIP(ip))
	}
	for _, u := range a.uris {
		parsed, err := url.Parse(u)
		if err != nil {
			t.Fatal(err)
		}
		template.URIs = append(template.URIs, parsed)
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, template, key)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der})
}

func machine(name string, change func(*clusterv1.Machine)) clusterv1.Machine {
	m := clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{Name: name}}
	m.Spec.InfrastructureRef.Name = name
	m.Spec.Bootstrap.DataSecretName = &name
	m.Status.Addresses = clusterv1.MachineAddresses{
		{Type: clusterv1.MachineHostName, Address: name},
		{Type: clusterv1.MachineInternalIP, Address: "10.200.0.3"},
	}
	if change != nil {
		change(&m)
	}
	return m
}

func TestDecide(t *testing.T) {
	w1 := []clusterv1.Machine{machine("w1", nil)}
	two := []clusterv1.Machine{machine("w1", nil), machine("w2", nil)}
	linked := []clusterv1.Machine{machine("machine-of-w1", func(m *clusterv1.Machine) { m.Status.NodeRef.Name = "w1" })}
	for name, c := range map[string]struct {
		asked    asked
		machines []clusterv1.Machine
		want     Verdict
		why      string
	}{
		"serving: its own name and address":  {serving(), w1, Approved, ""},
		"serving: linked by nodeRef":         {serving(), linked, Approved, ""},
		"serving: by infrastructure machine": {serving(), []clusterv1.Machine{machine("m", func(m *clusterv1.Machine) { m.Spec.InfrastructureRef.Name = "w1" })}, Approved, ""},
		"serving: by host name": {serving(), []clusterv1.Machine{machine("m", func(m *clusterv1.Machine) {
			m.Spec.InfrastructureRef.Name = "other"
			m.Status.Addresses[0].Address = "w1"
		})}, Approved, ""},
		"serving: only an address":                        {with(serving(), func(a *asked) { a.dns = nil }), w1, Approved, ""},
		"serving: another's address":                      {with(serving(), func(a *asked) { a.ips = append(a.ips, "10.200.0.4") }), w1, Denied, "10.200.0.4"},
		"serving: another's name":                         {with(serving(), func(a *asked) { a.dns = append(a.dns, "kubernetes.default") }), w1, Denied, "kubernetes.default"},
		"serving: an address as a name":                   {with(serving(), func(a *asked) { a.dns = []string{"10.200.0.3"} }), w1, Denied, "10.200.0.3"},
		"serving: a Machine linked to another node":       {serving(), []clusterv1.Machine{machine("w1", func(m *clusterv1.Machine) { m.Status.NodeRef.Name = "w2" })}, Untouched, "no Machine"},
		"serving: no Machine yet":                         {serving(), nil, Untouched, "no Machine"},
		"serving: addresses not known yet":                {serving(), []clusterv1.Machine{machine("w1", func(m *clusterv1.Machine) { m.Status.Addresses = nil })}, Untouched, "not known yet"},
		"serving: for another node":                       {with(serving(), func(a *asked) { a.cn = "system:node:w2" }), w1, Denied, "subject"},
		"serving: another organization":                   {with(serving(), func(a *asked) { a.o = []string{"system:masters"} }), w1, Denied, "subject"},
		"serving: two organizations":                      {with(serving(), func(a *asked) { a.o = append(a.o, "system:masters") }), w1, Denied, "subject"},
		"serving: as a client too":                        {with(serving(), func(a *asked) { a.usages = append(a.usages, certificatesv1.UsageClientAuth) }), w1, Denied, "client auth"},
		"serving: without server auth":                    {with(serving(), func(a *asked) { a.usages = a.usages[:1] }), w1, Denied, "missing"},
		"serving: an e-mail address":                      {with(serving(), func(a *asked) { a.emails = []string{"a@example.com"} }), w1, Denied, "e-mail"},
		"serving: a URI":                                  {with(serving(), func(a *asked) { a.uris = []string{"spiffe://x"} }), w1, Denied, "URI"},
		"serving: for nothing":                            {with(serving(), func(a *asked) { a.dns, a.ips = nil, nil }), w1, Denied, "no name"},
		"serving: garbage":                                {with(serving(), func(a *asked) { a.pem = []byte("garbage") }), w1, Denied, "PEM"},
		"serving: from a user":                            {with(serving(), func(a *asked) { a.user = "alice" }), w1, Untouched, ""},
		"serving: a name like a node's, not in the group": {with(serving(), func(a *asked) { a.groups = nil }), w1, Untouched, ""},

		"agent: with a token":                {agent(), w1, Approved, ""},
		"agent: renewal":                     {with(agent(), func(a *asked) { a.user, a.groups = a.cn, []string{nodeconfig.AgentGroup} }), w1, Approved, ""},
		"agent: renewal of another's":        {with(agent(), func(a *asked) { a.user = "capstan:node-agent:w2" }), w1, Untouched, ""},
		"agent: with another's token":        {with(agent(), func(a *asked) { a.user = "system:bootstrap:bbbbbb" }), two, Untouched, "token"},
		"agent: from its kubelet":            {with(agent(), fromKubelet("w1")), w1, Approved, ""},
		"agent: from another's kubelet":      {with(agent(), fromKubelet("w2")), two, Untouched, "w2"},
		"agent: its kubelet, more groups":    {with(agent(), func(a *asked) { fromKubelet("w1")(a); a.o = append(a.o, "system:masters") }), w1, Denied, "organizations"},
		"agent: no Machine yet":              {agent(), nil, Untouched, "no Machine"},
		"agent: without a node":              {with(agent(), func(a *asked) { a.cn = "capstan:node-agent:" }), w1, Untouched, "no Machine"},
		"agent: more groups":                 {with(agent(), func(a *asked) { a.o = append(a.o, "system:masters") }), w1, Denied, "organizations"},
		"agent: no group":                    {with(agent(), func(a *asked) { a.o = nil }), w1, Denied, "organizations"},
		"agent: with names":                  {with(agent(), func(a *asked) { a.dns = []string{"w1"} }), w1, Denied, "alternative names"},
		"agent: as a server":                 {with(agent(), func(a *asked) { a.usages = append(a.usages, certificatesv1.UsageServerAuth) }), w1, Denied, "server auth"},
		"agent: from an administrator":       {with(agent(), func(a *asked) { a.user, a.groups = "kubernetes-admin", []string{"system:masters"} }), w1, Untouched, ""},
		"agent: token's name, not its group": {with(agent(), func(a *asked) { a.groups = []string{authenticated} }), w1, Untouched, ""},

		"proxy: with a token":                              {proxy(), w1, Approved, ""},
		"proxy: with its own certificate":                  {with(proxy(), func(a *asked) { a.user, a.groups = nodeconfig.KubeProxyUser, nil }), w1, Untouched, "from a kubelet"},
		"proxy: with a group":                              {with(proxy(), func(a *asked) { a.o = []string{"system:masters"} }), w1, Denied, "organizations"},
		"proxy: with an unknown token":                     {with(proxy(), func(a *asked) { a.user = "system:bootstrap:zzzzzz" }), w1, Untouched, "token"},
		"proxy: from its kubelet":                          {with(proxy(), fromKubelet("w1")), w1, Approved, ""},
		"proxy: from a strange kubelet":                    {with(proxy(), fromKubelet("w2")), w1, Untouched, "no Machine"},
		"proxy: a name like a kubelet's, not in the group": {with(proxy(), func(a *asked) { a.user, a.groups = "system:node:w1", nil }), w1, Untouched, ""},
		"client: somebody else":                            {with(proxy(), func(a *asked) { a.cn = "alice" }), w1, Untouched, ""},
		"client: an administrator":                         {with(proxy(), func(a *asked) { a.cn, a.o = "kubernetes-admin", []string{"system:masters"} }), w1, Untouched, ""},
		"client: garbage":                                  {with(proxy(), func(a *asked) { a.pem = []byte("garbage") }), w1, Untouched, ""},
		"another signer's":                                 {with(agent(), func(a *asked) { a.signer = "example.com/signer" }), w1, Untouched, "signer"},
	} {
		t.Run(name, func(t *testing.T) {
			csr := request(t, c.asked)
			tokens := tokensOf([]corev1.Secret{data("w1", "aaaaaa"), data("w2", "bbbbbb")}, askedTokens([]certificatesv1.CertificateSigningRequest{*csr}))
			got := Decide(csr, Cluster{Machines: c.machines, Tokens: tokens})
			if got.Verdict != c.want || !strings.Contains(got.Message, c.why) {
				t.Errorf("got %v, want %s with %q", got, c.want, c.why)
			}
			if got.Message == "" {
				t.Error("no reason is given")
			}
		})
	}
}

func kubelet(node, token string) asked {
	return asked{
		signer: certificatesv1.KubeAPIServerClientKubeletSignerName, user: "system:bootstrap:" + token, groups: []string{bootstrapGroup, authenticated},
		cn: "system:node:" + node, o: []string{nodeconfig.NodesGroup}, usages: clientUsages,
	}
}

// foreign is bootstrap data of another provider.
func foreign(name, content string) corev1.Secret {
	s := data(name, "")
	s.Annotations, s.Data = nil, map[string][]byte{"value": []byte(content)}
	return s
}

func pool(name, infrastructure, data string) clusterv1.MachinePool {
	p := clusterv1.MachinePool{ObjectMeta: metav1.ObjectMeta{Name: name}}
	p.Spec.Template.Spec.InfrastructureRef.Kind = infrastructure
	p.Spec.Template.Spec.Bootstrap.DataSecretName = &data
	return p
}

// ofPool changes a Machine into one that core has created for a machine of a pool.
func ofPool(name string) func(*clusterv1.Machine) {
	return func(m *clusterv1.Machine) {
		m.Spec.Bootstrap.DataSecretName = ptr.To("")
		m.OwnerReferences = []metav1.OwnerReference{{Kind: "MachinePool", Name: name}}
	}
}

// TestDecideKubelet: a token gets a certificate with the name of its own machine and of no other.
func TestDecideKubelet(t *testing.T) {
	own := pool("own", "CloudMachinePool", "own-1")
	own.Spec.Template.Spec.Bootstrap.ConfigRef = clusterv1.ContractVersionedObjectReference{APIGroup: bootstrapv1.GroupVersion.Group, Kind: "CapstanConfig", Name: "own"}
	cluster := Cluster{
		Machines: []clusterv1.Machine{
			machine("w1", nil), machine("w2", nil), machine("kubeadm", nil), machine("cp", nil),
			machine("going", func(m *clusterv1.Machine) { m.DeletionTimestamp = ptr.To(metav1.Now()) }),
			machine("linked", func(m *clusterv1.Machine) { m.Status.NodeRef.Name = "n1" }),
			machine("n1", nil), // A Machine with the name of another one's node.
			machine("p1", ofPool("pool")), machine("q1", ofPool("quay")),
		},
		Pools: []clusterv1.MachinePool{
			pool("pool", "CapstanMachinePool", "pool-1"), pool("quay", "CapstanMachinePool", "quay-1"),
			pool("cloud", "CloudMachinePool", "cloud-1"), pool("empty", "CapstanMachinePool", "empty-1"), own,
		},
	}
	secrets := []corev1.Secret{
		data("w1", "aaaaaa"), data("w2", "bbbbbb"), data("going", "gggggg"), data("linked", "llllll"), data("n1", "nnnnnn"),
		data("pool-1", "pppppp,oooooo"), data("quay-1", "qqqqqq"), data("cloud-1", "cccccc"), data("empty-1", "eeeeee"),
		data("own-1", "ffffff"),
		foreign("kubeadm", "token: kkkkkk.0123456789abcdef"), foreign("cp", "no token: xaaaaaa.0123456789abcdef aaaaaa.0123"),
		{ObjectMeta: metav1.ObjectMeta{Name: "w1"}, Data: map[string][]byte{"value": []byte("zzzzzz.0123456789abcdef")}},
	}
	for name, c := range map[string]struct {
		asked   asked
		want    Verdict
		newNode string
		why     string
	}{
		"its own":                        {kubelet("w1", "aaaaaa"), Approved, "", ""},
		"another Machine's":              {kubelet("w2", "aaaaaa"), Untouched, "", "w2"},
		"a control plane machine's":      {kubelet("cp", "aaaaaa"), Untouched, "", "cp"},
		"no Machine's":                   {kubelet("w9", "aaaaaa"), Untouched, "", "no Machine"},
		"an unknown token":               {kubelet("w1", "uuuuuu"), Untouched, "", "uuuuuu"},
		"a Secret of another type":       {kubelet("w1", "zzzzzz"), Untouched, "", "zzzzzz"},
		"data of another provider":       {kubelet("kubeadm", "kkkkkk"), Approved, "", ""},
		"the same machine again":         {kubelet("n1", "llllll"), Approved, "", ""},
		"a node that is another's":       {kubelet("n1", "nnnnnn"), Untouched, "", "linked"},
		"a Machine that goes":            {kubelet("going", "gggggg"), Untouched, "", "going"},
		"a pool's machine":               {kubelet("p1", "pppppp"), Approved, "p1", ""},
		"with the pool's former token":   {kubelet("p1", "oooooo"), Approved, "p1", ""},
		"a pool's node agent":            {with(agent(), func(a *asked) { a.user, a.cn = "system:bootstrap:pppppp", "capstan:node-agent:p1" }), Approved, "p1", ""},
		"another pool's machine":         {kubelet("q1", "pppppp"), Untouched, "", "q1"},
		"a Machine, with a pool's token": {kubelet("w1", "pppppp"), Untouched, "", "w1"},
		"a pool without Machines yet":    {kubelet("e1", "eeeeee"), Untouched, "", "no Machine"},
		"a pool of a cloud":              {kubelet("i-123", "cccccc"), Approved, "i-123", ""},
		"a cloud's, a CapstanConfig":     {kubelet("i-123", "ffffff"), Untouched, "", "MachinePool own has a CapstanConfig and no Machine of the node i-123"},
		"a cloud's, a Machine's name":    {kubelet("w1", "cccccc"), Untouched, "", "w1"},
		"renewal":                        {with(kubelet("w1", ""), fromKubelet("w1")), Untouched, "", "token"},
		"from a kubelet, another name":   {with(kubelet("w1", ""), fromKubelet("w2")), Untouched, "", "token"},
		"token's name, not its group":    {with(kubelet("w1", "aaaaaa"), func(a *asked) { a.groups = nil }), Untouched, "", "token"},
		"another organization":           {with(kubelet("w1", "aaaaaa"), func(a *asked) { a.o = []string{"system:masters"} }), Denied, "", "subject"},
		"no name":                        {kubelet("", "aaaaaa"), Denied, "", "subject"},
		"another subject":                {with(kubelet("w1", "aaaaaa"), func(a *asked) { a.cn = "kubernetes-admin" }), Denied, "", "subject"},
		"as a server":                    {with(kubelet("w1", "aaaaaa"), func(a *asked) { a.usages = serverUsages }), Denied, "", "server auth"},
		"with names":                     {with(kubelet("w1", "aaaaaa"), func(a *asked) { a.dns = []string{"w1"} }), Denied, "", "alternative names"},
		"garbage":                        {with(kubelet("w1", "aaaaaa"), func(a *asked) { a.pem = []byte("garbage") }), Denied, "", "PEM"},
	} {
		t.Run(name, func(t *testing.T) {
			csr, known := request(t, c.asked), cluster
			known.Tokens = tokensOf(secrets, askedTokens([]certificatesv1.CertificateSigningRequest{*csr}))
			got := Decide(csr, known)
			if got.Verdict != c.want || got.NewNode != c.newNode || !strings.Contains(got.Message, c.why) {
				t.Errorf("got %v, want %s %q with %q", got, c.want, c.newNode, c.why)
			}
		})
	}
}

// TestTokensOf: a Secret full of tokens takes no memory beyond those of the requests.
func TestTokensOf(t *testing.T) {
	many := foreign("many", strings.Repeat("xxxxxx.0123456789abcdef ", 100)+"aaaaaa.0123456789abcdef")
	got := tokensOf([]corev1.Secret{data("own", "bbbbbb,cccccc"), many, data("none", "")}, map[string]bool{"aaaaaa": true, "cccccc": true})
	if want := map[string][]string{"own": {"cccccc"}, "many": {"aaaaaa"}, "none": nil}; !reflect.DeepEqual(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}
