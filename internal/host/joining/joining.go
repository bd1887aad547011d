// Package joining contains the data that a joining host and its management cluster exchange: the token, its terms, and the request of the
// host.
//
// A token is a token of a service account that Kubernetes issues (TokenRequest). It is bound to a Secret with the terms, so the
// deletion of the Secret revokes it. The management cluster does not store the token, only its id. With the token, a host
// creates a CertificateSigningRequest for its own key.
//
// Layer: contract. Allowed imports: api, library.
package joining

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/util/cert"
)

// DefaultNamespace is the namespace of the infrastructure provider, with the tokens and credentials of hosts, unless it was installed in
// another one.
const DefaultNamespace = "capstan-infrastructure-system"

const (
	// prefix of the tokens in this format.
	prefix = "capstan1."
	// maxBytes bounds tokens and requests. An encoded token has about 2 KiB.
	maxBytes = 64 << 10
	// MaxName is the longest name of a host that joins. The name of its Secret is longer.
	MaxName = 200
)

// Token admits a host. The administrator gives it to the host.
type Token struct {
	// CA are the authorities that sign the certificate of the management API, in PEM. The host trusts no others. Empty: those
	// of the host's system.
	CA []byte `json:"ca,omitempty"`
	// Bearer is the token of the service account.
	Bearer string `json:"token"`
}

// String returns the token for the command line.
func (t Token) String() string {
	data, err := json.Marshal(t)
	if err != nil {
		panic(err) // It has a string and bytes.
	}
	return prefix + base64.RawURLEncoding.EncodeToString(data)
}

// ParseToken reads the output of String. Its errors never contain a part of the token.
func ParseToken(text string) (Token, error) {
	const expected = "expected the token of `capstan host token create`"
	body, found := strings.CutPrefix(strings.TrimSpace(text), prefix)
	if !found || len(body) > maxBytes {
		return Token{}, fmt.Errorf("%s, which starts with %q, found another text", expected, prefix)
	}
	data, err := base64.RawURLEncoding.DecodeString(body)
	t := Token{}
	if err != nil || json.Unmarshal(data, &t) != nil {
		return Token{}, fmt.Errorf("%s, found a damaged one: copy all of it", expected)
	}
	if _, err := t.Claims(); err != nil {
		return Token{}, err
	}
	if len(t.CA) > 0 {
		if _, err := cert.ParseCertsPEM(t.CA); err != nil {
			return Token{}, fmt.Errorf("%s, found one with a damaged authority: copy all of it", expected)
		}
	}
	return t, nil
}

// Claims are the parts of a token that can be read without its signature.
type Claims struct {
	// ID identifies the token, and is not secret.
	ID string `json:"jti"`
	// Expiry in seconds since 1970.
	Expiry int64 `json:"exp"`
}

// Claims returns the claims of the token. It does not verify the signature, which only the API server can.
func (t Token) Claims() (Claims, error) {
	parts := strings.Split(t.Bearer, ".")
	c := Claims{}
	if len(parts) != 3 {
		return c, errors.New("expected a signed token of a service account, found another text")
	}
	data, err := base64.RawURLEncoding.DecodeString(parts[1])
	if err != nil || json.Unmarshal(data, &c) != nil {
		return c, errors.New("expected a signed token of a service account, found a damaged one")
	}
	if c.ID == "" {
		return c, errors.New("expected a token with an id (claim jti), found one without: the management cluster needs Kubernetes 1.32 or newer")
	}
	return c, nil
}

// Keys of the Secret of a token.
const (
	// KeyTerms contains Terms.
	KeyTerms = "terms"
	// KeyID contains the id of the token.
	KeyID = "id"
	// KeyHosts contains Uses.
	KeyHosts = "hosts"
)

// SecretType of the Secrets of tokens.
const SecretType = "infrastructure.capstan.dev/host-token"

// Bounds of Terms.
const (
	MinTTL     = 10 * time.Second
	DefaultTTL = time.Hour
	MaxTTL     = 24 * time.Hour
	MaxHosts   = 100
	// MinValidity of certificates leaves time for their renewal: see pki.Backdate.
	MinValidity = 3 * time.Minute
	MaxValidity = 5 * 365 * 24 * time.Hour
)

// Terms limit the use of a token.
type Terms struct {
	// Expires is the end of the token.
	Expires metav1.Time `json:"expires"`
	// Hosts is the number of hosts that can join with the token.
	Hosts int `json:"hosts"`
	// HostName is the only name of a host. Empty: any name that no host has.
	HostName string `json:"hostName,omitempty"`
	// FailureDomain of the hosts. Empty: the host chooses.
	FailureDomain string `json:"failureDomain,omitempty"`
	// Labels of the CapstanHosts. A host cannot choose labels, because they can be selectors.
	Labels map[string]string `json:"labels,omitempty"`
	// AllowedNamespaces of the CapstanHosts. Empty: all.
	AllowedNamespaces []string `json:"allowedNamespaces,omitempty"`
	// Validity of the certificates of the host and of its managers.
	Validity metav1.Duration `json:"validity"`
}

// Check returns the first mistake, in the words of the flags of `capstan host token create`.
func (t Terms) Check(now time.Time) error {
	ttl := t.Expires.Sub(now)
	switch {
	case ttl < MinTTL || ttl > MaxTTL+time.Minute:
		return fmt.Errorf("expected --ttl from %s to %s, found %s", MinTTL, MaxTTL, ttl.Round(time.Second))
	case t.Hosts < 1 || t.Hosts > MaxHosts:
		return fmt.Errorf("expected --hosts from 1 to %d, found %d", MaxHosts, t.Hosts)
	case t.HostName != "" && t.Hosts != 1:
		return fmt.Errorf("expected --hosts 1 with --name, found %d", t.Hosts)
	case t.Validity.Duration < MinValidity || t.Validity.Duration > MaxValidity:
		return fmt.Errorf("expected --valid-for from %s to %s, found %s", MinValidity, MaxValidity, t.Validity.Duration)
	case len(t.FailureDomain) > 256:
		return fmt.Errorf("expected a --failure-domain of at most 256 characters, found %d", len(t.FailureDomain))
	}
	if t.HostName != "" {
		if err := checkName(t.HostName); err != nil {
			return err
		}
	}
	for key, value := range t.Labels {
		problems := append(validation.IsQualifiedName(key), validation.IsValidLabelValue(value)...)
		if len(problems) > 0 {
			return fmt.Errorf("expected --label key=value with a label of Kubernetes, found %s=%s: %s", key, value, problems[0])
		}
	}
	for _, name := range t.AllowedNamespaces {
		if problems := validation.IsDNS1123Label(name); len(problems) > 0 {
			return fmt.Errorf("expected names of namespaces for --allow-namespace, found %q: %s", name, problems[0])
		}
	}
	return nil
}

// Uses are the hosts that joined with a token: their names by the fingerprints of their keys. The name of a host whose CapstanHost
// was deleted is Removed.
type Uses map[string]string

// Removed is not the name of a host.
const Removed = ""

// Remove returns the uses after the deletion of a CapstanHost, and whether the host had used the token. Its key does not join with
// the token again, and no other key takes its place.
func (u Uses) Remove(host string) (out Uses, used bool) {
	out = maps.Clone(u)
	for fingerprint, name := range out {
		if name == host {
			out[fingerprint], used = Removed, true
		}
	}
	return out, used
}

// Request is the description of a host by itself, in the annotation of its CertificateSigningRequest. The signer believes none of
// it without a check.
type Request struct {
	// Name of the CapstanHost.
	Name string `json:"name"`
	// Address of capstand for the managers, host:port. Empty if the host dials.
	Address string `json:"address"`
	// Dials: the host dials the managers, which do not reach it.
	Dials bool `json:"dials,omitempty"`
	// FailureDomain that the host chose, or empty.
	FailureDomain string `json:"failureDomain,omitempty"`
	// BoxID identifies the box of the host, as in HostInfo.
	BoxID string `json:"boxID,omitempty"`
	// TunnelAddress is that of a CapstanHost, or empty.
	TunnelAddress string `json:"tunnelAddress,omitempty"`
	// TunnelSet: the user has set the tunnel address, so it replaces that of an existing CapstanHost.
	TunnelSet bool `json:"tunnelSet,omitempty"`
	// Returns: the host has joined at another URL under this name, so only the management cluster that has its CapstanHost admits it.
	Returns bool `json:"returns,omitempty"`
	// Version of capstand.
	Version string `json:"version,omitempty"`
	// ProtocolVersion and MinimumManagerVersion are as in HostInfo.
	ProtocolVersion       int32 `json:"protocolVersion,omitempty"`
	MinimumManagerVersion int32 `json:"minimumManagerVersion,omitempty"`
}

// ParseRequest reads and checks the annotation.
func ParseRequest(text string) (Request, error) {
	r := Request{}
	if len(text) > maxBytes {
		return r, fmt.Errorf("expected properties of the host with at most %d bytes, found %d", maxBytes, len(text))
	}
	if err := json.NewDecoder(bytes.NewReader([]byte(text))).Decode(&r); err != nil {
		return r, fmt.Errorf("expected the properties of the host as JSON: %w", err)
	}
	return r, r.Check()
}

// Encode returns the content of the annotation.
func (r Request) Encode() string {
	data, err := json.Marshal(r)
	if err != nil {
		panic(err) // It has strings only.
	}
	return string(data)
}

// Check returns the first mistake.
func (r Request) Check() error {
	if err := checkName(r.Name); err != nil {
		return err
	}
	if _, err := r.Host(); err != nil {
		return err
	}
	if len(r.FailureDomain) > 256 || len(r.BoxID) > 64 || len(r.Version) > 256 {
		return errors.New("expected a failure domain and a version of at most 256 characters and a box id of at most 64, found more")
	}
	if ip, err := netip.ParseAddr(r.TunnelAddress); r.TunnelAddress != "" && (err != nil || !reachable(ip) || ip.String() != r.TunnelAddress) {
		return fmt.Errorf("expected --tunnel-address with an IP address of this host that other hosts reach, found %q", r.TunnelAddress)
	}
	return nil
}

// reachable reports whether other boxes can reach an address: it means the same box to each client.
func reachable(ip netip.Addr) bool { return ip.IsGlobalUnicast() && ip.Zone() == "" && !ip.Is4In6() }

// NoTunnel is the value of --tunnel-address for a host without clusters across hosts.
const NoTunnel = "none"

// Tunnel returns the tunnel address of a host: the value of --tunnel-address, or its own address towards the management cluster if
// other boxes can reach that.
func Tunnel(set string, own netip.Addr) string {
	switch {
	case set == NoTunnel || set == "" && !reachable(own):
		return ""
	case set == "":
		return own.String()
	}
	return set
}

// checkName returns an error if a host cannot have the name.
func checkName(name string) error {
	if problems := validation.IsDNS1123Subdomain(name); len(problems) > 0 {
		return fmt.Errorf("expected a name of the host of lower case letters, digits, dots and dashes, found %q: set another one with --name", name)
	}
	if len(name) > MaxName {
		return fmt.Errorf("expected a name of the host of at most %d characters, found %d: set another one with --name", MaxName, len(name))
	}
	return nil
}

// Host returns the name in the certificate of the host. It is the part of the address without the port, an IP address or a DNS name,
// or the name of a host that dials. Host refuses addresses that mean another box to each client.
func (r Request) Host() (string, error) {
	if r.Dials {
		if r.Address != "" {
			return "", fmt.Errorf("expected no --address of a host that dials, found %q", r.Address)
		}
		return r.Name, nil
	}
	host, port, err := net.SplitHostPort(r.Address)
	number, bad := strconv.ParseUint(port, 10, 16)
	if err != nil || bad != nil || number == 0 {
		return "", fmt.Errorf("expected --address host:port, found %q", r.Address)
	}
	if ip, err := netip.ParseAddr(host); err == nil {
		if !reachable(ip) {
			return "", fmt.Errorf("expected an --address that the management plane reaches, found %s: set a unicast address of this host that is neither loopback nor link-local", r.Address)
		}
		return host, nil
	}
	if problems := validation.IsDNS1123Subdomain(host); len(problems) > 0 || host == "localhost" {
		return "", fmt.Errorf("expected an IP address or a DNS name of this host in --address, found %q", host)
	}
	return host, nil
}
