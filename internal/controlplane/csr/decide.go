// Package csr approves the certificates that the machines of a cluster ask for: serving certificates
// of kubelets, and the client certificates of kube-proxy and of the node agent. kube-controller-manager
// itself approves the kubelets' client certificates, and nothing else.
package csr

import (
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"net"
	"slices"
	"strings"

	certificatesv1 "k8s.io/api/certificates/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
)

const (
	nodeUserPrefix = "system:node:"
	nodesGroup     = "system:nodes"

	bootstrapUserPrefix = "system:bootstrap:"
	bootstrapGroup      = "system:bootstrappers"

	kubeProxyUser = "system:kube-proxy"

	// NodeAgentUserPrefix and NodeAgentGroup are the identity of a machine's node agent.
	NodeAgentUserPrefix = "capstan:node-agent:"
	NodeAgentGroup      = "capstan:node-agents"
)

// Verdict on a request.
type Verdict string

const (
	// Untouched: not ours to decide, or not yet.
	Untouched Verdict = "Untouched"
	// Approved.
	Approved Verdict = "Approved"
	// Denied: it claims to be ours but is not what our machines ask for.
	Denied Verdict = "Denied"
)

// Decision on a request, and why.
type Decision struct {
	Verdict Verdict
	Message string
}

func untouched(message string) Decision { return Decision{Untouched, message} }
func deny(format string, args ...any) Decision {
	return Decision{Denied, fmt.Sprintf(format, args...)}
}
func approve(format string, args ...any) Decision {
	return Decision{Approved, fmt.Sprintf(format, args...)}
}

// Decide on a request, by what it asks for, who asks, and the Machines of the cluster. A request that
// may become acceptable when a Machine changes is left untouched.
func Decide(csr *certificatesv1.CertificateSigningRequest, machines []clusterv1.Machine) Decision {
	switch csr.Spec.SignerName {
	case certificatesv1.KubeletServingSignerName:
		return decideServing(csr, machines)
	case certificatesv1.KubeAPIServerClientSignerName:
		return decideClient(csr, machines)
	}
	return untouched("another signer's")
}

// decideServing: a kubelet asks for its own node, for names and addresses that its Machine has.
func decideServing(csr *certificatesv1.CertificateSigningRequest, machines []clusterv1.Machine) Decision {
	node, ok := strings.CutPrefix(csr.Spec.Username, nodeUserPrefix)
	if !ok || !slices.Contains(csr.Spec.Groups, nodesGroup) {
		return untouched("not from a node")
	}
	machine := machineOf(node, machines)
	if machine == nil {
		return untouched(fmt.Sprintf("no Machine has the node %s yet", node))
	}
	request, err := parse(csr)
	if err != nil {
		return deny("%s", err)
	}
	if request.Subject.CommonName != csr.Spec.Username || !slices.Equal(request.Subject.Organization, []string{nodesGroup}) {
		return deny("the subject must be CN=%s, O=%s", csr.Spec.Username, nodesGroup)
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
		return untouched(fmt.Sprintf("the addresses of Machine %s are not known yet", machine.Name))
	}
	if foreign := foreignSANs(request, node, machine); len(foreign) > 0 {
		return deny("%s are not names or addresses of Machine %s", strings.Join(foreign, ", "), machine.Name)
	}
	return approve("node %s is Machine %s, and it asks for its own names and addresses", node, machine.Name)
}

// decideClient: a machine that holds a bootstrap token asks for kube-proxy's or its node agent's
// certificate, or either of them for its next one.
func decideClient(csr *certificatesv1.CertificateSigningRequest, machines []clusterv1.Machine) Decision {
	request, err := parse(csr)
	if err != nil {
		return untouched("not a request that can be read")
	}
	user := request.Subject.CommonName
	node, agent := strings.CutPrefix(user, NodeAgentUserPrefix)
	if !agent && user != kubeProxyUser {
		return untouched("another client's")
	}
	if !fromBootstrapToken(csr) && csr.Spec.Username != user {
		return untouched("neither from a bootstrap token nor a renewal")
	}
	var groups []string
	if agent {
		groups = []string{NodeAgentGroup}
	}
	if !slices.Equal(request.Subject.Organization, groups) {
		return deny("the subject CN=%s needs the organizations %v, it has %v", user, groups, request.Subject.Organization)
	}
	if len(request.DNSNames)+len(request.IPAddresses)+len(request.EmailAddresses)+len(request.URIs) > 0 {
		return deny("a client's certificate has no alternative names")
	}
	if problem := checkUsages(csr.Spec.Usages, certificatesv1.UsageClientAuth); problem != "" {
		return deny("%s", problem)
	}
	if agent && machineOf(node, machines) == nil {
		return untouched(fmt.Sprintf("no Machine has the node %s yet", node))
	}
	return approve("%s on a machine of this cluster", user)
}

func fromBootstrapToken(csr *certificatesv1.CertificateSigningRequest) bool {
	return strings.HasPrefix(csr.Spec.Username, bootstrapUserPrefix) && slices.Contains(csr.Spec.Groups, bootstrapGroup)
}

// machineOf is the Machine whose node has the name. Before Cluster API has linked the two, the node's
// name is that of the Machine, of its infrastructure machine, or the machine's host name.
func machineOf(node string, machines []clusterv1.Machine) *clusterv1.Machine {
	if node == "" {
		return nil
	}
	for i := range machines {
		m := &machines[i]
		if m.Status.NodeRef.IsDefined() {
			if m.Status.NodeRef.Name == node {
				return m
			}
			continue
		}
		if m.Name == node || m.Spec.InfrastructureRef.Name == node || hasAddress(m, node, isName) {
			return m
		}
	}
	return nil
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

// checkUsages: purpose is needed, and of the others only what TLS takes for it.
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

func parse(csr *certificatesv1.CertificateSigningRequest) (*x509.CertificateRequest, error) {
	block, _ := pem.Decode(csr.Spec.Request)
	if block == nil || block.Type != "CERTIFICATE REQUEST" {
		return nil, fmt.Errorf("the request is not a PEM certificate request")
	}
	request, err := x509.ParseCertificateRequest(block.Bytes)
	if err != nil {
		return nil, fmt.Errorf("the request cannot be read: %w", err)
	}
	if err := request.CheckSignature(); err != nil {
		return nil, fmt.Errorf("the request is not signed by its own key: %w", err)
	}
	return request, nil
}
