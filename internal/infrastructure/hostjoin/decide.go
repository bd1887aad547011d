package hostjoin

import (
	"cmp"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	"k8s.io/client-go/util/cert"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/joining"
	"capstan.dev/capstan/internal/pki"
)

// claimID is the key of spec.extra in which the API server records the id of the token of a request.
const claimID = "authentication.kubernetes.io/credential-id"

// tokenID returns the id of the token with which a CertificateSigningRequest was created.
func tokenID(csr *certificatesv1.CertificateSigningRequest) string {
	for _, id := range csr.Spec.Extra[claimID] {
		if len(id) > len("JTI=") && id[:len("JTI=")] == "JTI=" {
			return id[len("JTI="):]
		}
	}
	return ""
}

// token is a join token, as its Secret describes it.
type token struct {
	terms joining.Terms
	uses  joining.Uses
}

// joiner is a host that asks to join.
type joiner struct {
	joining.Request
	// host is the part of the address without the port, or the name of a host that dials.
	host string
	// request is that of its key, which has signed it.
	request *x509.CertificateRequest
	// fingerprint identifies the key.
	fingerprint string
}

// read checks the parts of a CertificateSigningRequest that do not depend on other objects.
func read(csr *certificatesv1.CertificateSigningRequest) (joiner, error) {
	properties, err := joining.ParseRequest(csr.Annotations[infrav1.HostJoinAnnotation])
	if err != nil {
		return joiner{}, err
	}
	j := joiner{Request: properties}
	if j.host, err = j.Host(); err != nil {
		return joiner{}, err
	}
	block, rest := pem.Decode(csr.Spec.Request)
	if block == nil || block.Type != cert.CertificateRequestBlockType || len(rest) > 0 {
		return joiner{}, errors.New("expected one certificate request in PEM")
	}
	if j.request, err = pki.ParseRequest(block.Bytes); err != nil {
		return joiner{}, err
	}
	if err := strong(j.request.PublicKey); err != nil {
		return joiner{}, err
	}
	if !names(j.request, j.host) {
		return joiner{}, fmt.Errorf("expected a certificate request for the address %s, or for the name of a host that dials, found one for %v %v", j.host, j.request.DNSNames, j.request.IPAddresses)
	}
	if !slices.Contains(csr.Spec.Usages, certificatesv1.UsageServerAuth) || slices.Contains(csr.Spec.Usages, certificatesv1.UsageClientAuth) {
		return joiner{}, fmt.Errorf("expected the usage %q, and not %q, found %v", certificatesv1.UsageServerAuth, certificatesv1.UsageClientAuth, csr.Spec.Usages)
	}
	sum := sha256.Sum256(j.request.RawSubjectPublicKeyInfo)
	j.fingerprint = hex.EncodeToString(sum[:])
	return j, nil
}

func strong(public any) error {
	switch key := public.(type) {
	case *ecdsa.PublicKey, ed25519.PublicKey:
		return nil
	case *rsa.PublicKey:
		if key.N.BitLen() >= 2048 && key.N.BitLen() <= 8192 {
			return nil
		}
	}
	return errors.New("expected an ECDSA, Ed25519 or RSA key, with 2048 to 8192 bits for RSA")
}

// names reports whether a request is for exactly one name, that of the host.
func names(r *x509.CertificateRequest, host string) bool {
	if len(r.DNSNames)+len(r.IPAddresses)+len(r.EmailAddresses)+len(r.URIs) != 1 {
		return false
	}
	if len(r.IPAddresses) == 1 {
		return r.IPAddresses[0].Equal(net.ParseIP(host))
	}
	return len(r.DNSNames) == 1 && r.DNSNames[0] == host
}

// refusal returns the reason why a host cannot join with a token, or an empty string. A host can ask again with the same token
// and the same key: its join may have been interrupted.
func refusal(j joiner, t token, hosts []infrav1.CapstanHost, now time.Time) string {
	incompatible := hostpb.Incompatible(j.ProtocolVersion, j.MinimumManagerVersion, j.Version)
	switch {
	case incompatible != "":
		return incompatible
	case now.After(t.terms.Expires.Time):
		return fmt.Sprintf("the token expired on %s: create another one with `capstan host token create`", t.terms.Expires.UTC().Format(time.RFC3339))
	case t.terms.HostName != "" && j.Name != t.terms.HostName:
		return fmt.Sprintf("the token is only for the host name %q, found %q: set it with --name", t.terms.HostName, j.Name)
	case t.terms.FailureDomain != "" && j.FailureDomain != "" && j.FailureDomain != t.terms.FailureDomain:
		return fmt.Sprintf("the token is only for the failure domain %q, found %q: omit --failure-domain", t.terms.FailureDomain, j.FailureDomain)
	}
	used, again := t.uses[j.fingerprint]
	switch {
	case again && used == joining.Removed:
		return "the CapstanHost of this host was deleted, so the token is no longer valid for it: create another one with `capstan host token create`"
	case again && used != j.Name:
		return fmt.Sprintf("this host has used the token for the name %q, found %q: set --name %s, or create another token", used, j.Name, used)
	case !again && len(t.uses) >= t.terms.Hosts:
		return "the token was used by another host: create another one with `capstan host token create`. If you did not run that join, delete the CapstanHost that it created, and find out who had the token"
	}
	return conflict(j, again || t.terms.HostName == j.Name, hosts)
}

// conflict returns the reason why a host cannot join beside the existing ones, or an empty string. returns: the host may take
// the place of an existing one of its name.
func conflict(j joiner, returns bool, hosts []infrav1.CapstanHost) string {
	exists := slices.ContainsFunc(hosts, func(h infrav1.CapstanHost) bool { return h.Name == j.Name })
	if exists && !j.TunnelSet {
		j.TunnelAddress = "" // The CapstanHost keeps its own.
	}
	if j.Returns && !exists {
		return fmt.Sprintf("expected the CapstanHost %s of this box, which has joined already, found none: set PLANE and the token of its management cluster, or leave that with `capstan host leave`", j.Name)
	}
	for i := range hosts {
		h := &hosts[i]
		same := h.Status.BoxID != "" && h.Status.BoxID == j.BoxID
		var why string
		switch {
		case same && strings.HasPrefix(h.Spec.Address, "unix:"):
			why = fmt.Sprintf("expected another box than that of the management plane, found the machine-id of its CapstanHost %s: on the box of the plane, set spec.tunnelAddress of %s instead of a join. If this is another box from the same disk image, run %s on it, and reboot", h.Name, h.Name, newMachineID)
		case h.Name == j.Name:
			why = taken(j, returns, same, h)
		default:
			why = beside(j, same, h)
		}
		if why != "" {
			return why
		}
	}
	return ""
}

// newMachineID is the command that gives a box another machine-id.
const newMachineID = "`rm /etc/machine-id && systemd-machine-id-setup`"

// taken returns the reason why a host cannot take the place of the existing one of its name. same: both are on the same box.
func taken(j joiner, returns, same bool, h *infrav1.CapstanHost) string {
	switch {
	case !h.DeletionTimestamp.IsZero():
		return fmt.Sprintf("the CapstanHost %s is being deleted: wait until it has gone", j.Name)
	case !returns:
		return fmt.Sprintf("a CapstanHost %s exists: set another name with --name, or, if this is the same host, create a token for it with `capstan host token create --name %s`", j.Name, j.Name)
	case h.Status.BoxID != "" && !same:
		return fmt.Sprintf("the CapstanHost %s is another box (another machine-id): set another name with --name, or delete the CapstanHost first", j.Name)
	case j.TunnelSet && h.Status.TunnelAddress != "" && j.TunnelAddress != h.Status.TunnelAddress && j.TunnelAddress != h.Spec.TunnelAddress:
		return fmt.Sprintf("the CapstanHost %s has networks of clusters across hosts at the tunnel address %s, which cannot change: omit --tunnel-address, or first drain the host and move its load balancers", j.Name, h.Status.TunnelAddress)
	}
	return ""
}

// beside returns the reason why a host cannot join beside one with another name. same: both are on the same box.
func beside(j joiner, same bool, h *infrav1.CapstanHost) string {
	dials := j.Dials || h.Dials()
	if !dials && h.Spec.Address == j.Address {
		return fmt.Sprintf("the CapstanHost %s has the address %s: set another one with --address", h.Name, j.Address)
	}
	other, _, err := net.SplitHostPort(h.Spec.Address)
	if j.TunnelAddress != "" && h.Spec.TunnelAddress == j.TunnelAddress && !same && other != j.host {
		return fmt.Sprintf("the CapstanHost %s has the tunnel address %s: set another one with --tunnel-address", h.Name, j.TunnelAddress)
	}
	// The addresses of hosts that dial do not show whether they are on one box.
	if same && (dials || err == nil && other != j.host) {
		return fmt.Sprintf("the CapstanHost %s (%s) has the same machine-id: boxes from one disk image need their own. On this box, run %s, and reboot. Two hosts of one box have the same host in --address", h.Name, cmp.Or(h.Spec.Address, "which dials"), newMachineID)
	}
	return ""
}
