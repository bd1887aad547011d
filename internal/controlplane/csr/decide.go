// Package csr approves the certificates that the machines of a cluster request: the first client certificate
// of a kubelet, its serving certificates, and the client certificates of kube-proxy and of the node agent.
// kube-controller-manager approves one thing itself, the renewal of a kubelet's client certificate: such a request
// cannot name another node, and it must not depend on the management cluster.
//
// Layer: reconciler. Allowed imports: api, library, contract.
package csr

import (
	"crypto/x509"
	"fmt"
	"net"
	"slices"
	"strings"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	"capstan.dev/capstan/internal/node/nodeconfig"
	"capstan.dev/capstan/internal/pki"
)

const (
	bootstrapUserPrefix = "system:bootstrap:"
	bootstrapGroup      = "system:bootstrappers"
)

// Verdict on a request.
type Verdict string

// Verdicts on a request.
const (
	// Untouched: the request is not Capstan's to decide, or cannot be decided yet.
	Untouched Verdict = "Untouched"
	// Approved: the named machine may have the requested certificate.
	Approved Verdict = "Approved"
	// Denied: the request has the identity of a machine, but the machine must not have the requested certificate.
	Denied Verdict = "Denied"
)

// Decision on a request, and why.
type Decision struct {
	Verdict Verdict
	Message string
	// NewNode is the name of a Node that must be new when the request is approved. Empty: no such condition.
	NewNode string
	// MaxAge is the greatest age of this Node at the time of the request. 0: it must not exist.
	MaxAge time.Duration
}

func untouched(format string, args ...any) Decision {
	return Decision{Verdict: Untouched, Message: fmt.Sprintf(format, args...)}
}

func deny(format string, args ...any) Decision {
	return Decision{Verdict: Denied, Message: fmt.Sprintf(format, args...)}
}

func approve(format string, args ...any) Decision {
	return Decision{Verdict: Approved, Message: fmt.Sprintf(format, args...)}
}

// Decide on a request, by its content, its author, and the machines of the cluster. A request that
// may become acceptable when a Machine or its bootstrap data changes is left untouched.
func Decide(csr *certificatesv1.CertificateSigningRequest, cluster Cluster) Decision {
	switch csr.Spec.SignerName {
	case certificatesv1.KubeletServingSignerName:
		return decideServing(csr, cluster.Machines)
	case certificatesv1.KubeAPIServerClientKubeletSignerName:
		return decideKubelet(csr, cluster)
	case certificatesv1.KubeAPIServerClientSignerName:
		return decideClient(csr, cluster)
	}
	return untouched("another signer's")
}

// decideKubelet: a machine requests the first client certificate of its kubelet with its own bootstrap token.
func decideKubelet(csr *certificatesv1.CertificateSigningRequest, cluster Cluster) Decision {
	token := bootstrapToken(csr)
	if token == "" {
		return untouched("not from a bootstrap token")
	}
	request, err := pki.DecodeRequest(csr.Spec.Request)
	if err != nil {
		return deny("%s", err)
	}
	node, ok := strings.CutPrefix(request.Subject.CommonName, nodeconfig.NodeUserPrefix)
	if !ok || node == "" || !slices.Equal(request.Subject.Organization, []string{nodeconfig.NodesGroup}) {
		return deny("the subject must be CN=%s<node>, O=%s", nodeconfig.NodeUserPrefix, nodeconfig.NodesGroup)
	}
	if problem := checkClient(csr, request); problem != "" {
		return deny("%s", problem)
	}
	return cluster.join(token, node)
}

// decideServing accepts a request of a kubelet for its own node, with names and addresses of its Machine.
func decideServing(csr *certificatesv1.CertificateSigningRequest, machines []clusterv1.Machine) Decision {
	node := kubeletNode(csr)
	if node == "" {
		return untouched("not from a node")
	}
	machine := machineOf(node, machines)
	if machine == nil {
		return untouched("no Machine has the node %s yet", node)
	}
	request, err := pki.DecodeRequest(csr.Spec.Request)
	if err != nil {
		return deny("%s", err)
	}
	if request.Subject.CommonName != csr.Spec.Username || !slices.Equal(request.Subject.Organization, []string{nodeconfig.NodesGroup}) {
		return deny("the subject must be CN=%s, O=%s", csr.Spec.Username, nodeconfig.NodesGroup)
	}
	if problem := checkUsages(csr.Spec.Usages, certificatesv1.UsageServerAuth); problem != "" {
		return deny("%s", problem)
	}
	if len(request.EmailAddresses) > 0 || len(request.URIs) > 0 {
		return deny("e-mail addresses and URIs have no place in a kubelet's certificate")
	}
	if len(request.DNSNames)+len(request.IPAddresses) == 0 {
		return deny("the certificate would be for no name and no address")
	}
	if len(machine.Status.Addresses) == 0 {
		return untouched("the addresses of Machine %s are not known yet", machine.Name)
	}
	if foreign := foreignSANs(request, node, machine); len(foreign) > 0 {
		return deny("%s are not names or addresses of Machine %s", strings.Join(foreign, ", "), machine.Name)
	}
	return approve("node %s is Machine %s and requests its own names and addresses", node, machine.Name)
}

// decideClient: a machine requests the certificate of kube-proxy or of its node agent: the first one with its bootstrap
// token, the next ones with its kubelet's certificate. The node agents of older machines use their own certificate. The Node may exist,
// because a machine requests these certificates while its kubelet starts. With the token of a pool, the Node must not be older than the
// token: each machine of the pool could obtain the certificate of the others otherwise.
func decideClient(csr *certificatesv1.CertificateSigningRequest, cluster Cluster) Decision {
	request, err := pki.DecodeRequest(csr.Spec.Request)
	if err != nil {
		return untouched("not a request that can be read")
	}
	user := request.Subject.CommonName
	node, agent := strings.CutPrefix(user, nodeconfig.AgentUserPrefix)
	if !agent && user != nodeconfig.KubeProxyUser {
		return untouched("another client's")
	}
	token, kubelet := bootstrapToken(csr), kubeletNode(csr)
	ownAgent := agent && csr.Spec.Username == user
	if token == "" && kubelet == "" && !ownAgent {
		return untouched("neither from a bootstrap token nor from a kubelet")
	}
	var groups []string
	if agent {
		groups = []string{nodeconfig.AgentGroup}
	}
	if !slices.Equal(request.Subject.Organization, groups) {
		return deny("the subject CN=%s needs the organizations %v, it has %v", user, groups, request.Subject.Organization)
	}
	if problem := checkClient(csr, request); problem != "" {
		return deny("%s", problem)
	}
	if !agent {
		return decideProxy(cluster, token, kubelet)
	}
	if kubelet != "" && kubelet != node {
		return untouched("the node %s requests the certificate of the node %s", kubelet, node)
	}
	machine := cluster.machineFor(node, token)
	if machine == nil {
		return untouched("%s", cluster.stranger(node, token))
	}
	d := approve("%s is on Machine %s", user, machine.Name)
	if token != "" && sharesToken(machine) {
		d.NewNode, d.MaxAge = node, bootstrapv1.PoolTokenTTL
	}
	return d
}

// decideProxy: kube-proxy is the same user on all machines, so its certificate names none of them. It therefore does not renew
// itself: a stolen one would do so without end.
func decideProxy(cluster Cluster, token, kubelet string) Decision {
	switch {
	case token != "" && !cluster.hasToken(token):
		return untouched("no bootstrap data of the cluster has the token %s", token)
	case kubelet != "" && machineOf(kubelet, cluster.Machines) == nil:
		return untouched("no Machine has the node %s yet", kubelet)
	}
	return approve("%s on a machine of this cluster", nodeconfig.KubeProxyUser)
}

// bootstrapToken is the id of the bootstrap token that made the request; empty if another credential did.
func bootstrapToken(csr *certificatesv1.CertificateSigningRequest) string {
	id, ok := strings.CutPrefix(csr.Spec.Username, bootstrapUserPrefix)
	if !ok || !slices.Contains(csr.Spec.Groups, bootstrapGroup) {
		return ""
	}
	return id
}

// kubeletNode is the node whose kubelet made the request; empty if another credential did.
func kubeletNode(csr *certificatesv1.CertificateSigningRequest) string {
	node, ok := strings.CutPrefix(csr.Spec.Username, nodeconfig.NodeUserPrefix)
	if !ok || !slices.Contains(csr.Spec.Groups, nodeconfig.NodesGroup) {
		return ""
	}
	return node
}

func foreignSANs(request *x509.CertificateRequest, node string, machine *clusterv1.Machine) []string {
	var out []string
	for _, name := range request.DNSNames {
		if name != node && !hasAddress(machine, name, isName) {
			out = append(out, name)
		}
	}
	for _, ip := range request.IPAddresses {
		if !hasIP(machine, ip) {
			out = append(out, ip.String())
		}
	}
	return out
}

func isName(t clusterv1.MachineAddressType) bool {
	return t == clusterv1.MachineHostName || t == clusterv1.MachineInternalDNS || t == clusterv1.MachineExternalDNS
}

func hasAddress(m *clusterv1.Machine, address string, of func(clusterv1.MachineAddressType) bool) bool {
	return slices.ContainsFunc(m.Status.Addresses, func(a clusterv1.MachineAddress) bool {
		return of(a.Type) && a.Address == address
	})
}

func hasIP(m *clusterv1.Machine, ip net.IP) bool {
	return slices.ContainsFunc(m.Status.Addresses, func(a clusterv1.MachineAddress) bool {
		return !isName(a.Type) && ip.Equal(net.ParseIP(a.Address))
	})
}

// checkClient: the certificate of a client has one usage and no alternative names.
func checkClient(csr *certificatesv1.CertificateSigningRequest, request *x509.CertificateRequest) string {
	if len(request.DNSNames)+len(request.IPAddresses)+len(request.EmailAddresses)+len(request.URIs) > 0 {
		return "a client's certificate has no alternative names"
	}
	return checkUsages(csr.Spec.Usages, certificatesv1.UsageClientAuth)
}

// checkUsages requires the purpose, and allows in addition only the usages that TLS needs.
func checkUsages(usages []certificatesv1.KeyUsage, purpose certificatesv1.KeyUsage) string {
	allowed := []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageKeyEncipherment, purpose}
	for _, u := range usages {
		if !slices.Contains(allowed, u) {
			return fmt.Sprintf("the usage %q is not allowed here", u)
		}
	}
	if !slices.Contains(usages, purpose) {
		return fmt.Sprintf("the usage %q is missing", purpose)
	}
	return ""
}
