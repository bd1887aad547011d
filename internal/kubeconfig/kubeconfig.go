// Package kubeconfig reads the kubeconfigs of workload clusters. Users who can write Secrets in a namespace control
// their content, and a kubeconfig can contain programs to run, files to read and proxies to use. Managers therefore load
// kubeconfigs only with this package. It accepts an inline authority and inline credentials, and connections only to the
// cluster's own endpoint.
//
// Layer: library. Allowed imports: api.
package kubeconfig

import (
	"bytes"
	"crypto/x509"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"capstan.dev/capstan/internal/pki"
)

const (
	// MaxSize is the maximum size of a kubeconfig in bytes. A kubeconfig with a client certificate has about 6 KiB.
	MaxSize = 64 << 10
	// maxToken is the maximum size of a token in bytes. It is the limit of a header in an API server, and larger than
	// the tokens of all known issuers.
	maxToken = 16 << 10
)

// RefusedError names the refused field of a kubeconfig and the reason. It contains no value of the kubeconfig.
type RefusedError struct {
	// Field is the name of the field in kubeconfigs, after `cluster`, `user` or `context`, in the current context.
	Field string
	// Problem describes the problem and the expected value.
	Problem string
}

func (e *RefusedError) Error() string {
	return fmt.Sprintf("the kubeconfig is refused: %s: %s", e.Field, e.Problem)
}

func refuse(field, problem string) error { return &RefusedError{Field: field, Problem: problem} }

// Load returns the connection of the current context of a kubeconfig. endpoint is the cluster's own endpoint: a
// kubeconfig for another server is refused. Each refusal is a *RefusedError. Load runs no program, reads no file and
// opens no connection.
func Load(data []byte, endpoint clusterv1.APIEndpoint) (*rest.Config, error) {
	config, server, err := parse(data)
	if err != nil {
		return nil, err
	}
	if !sameServer(server, endpoint) {
		return nil, refuse("cluster.server", "it is not the cluster's endpoint "+endpoint.String())
	}
	return config, nil
}

// Server returns the server of a kubeconfig that meets all rules of Load except the one about the endpoint.
func Server(data []byte) (*url.URL, error) {
	_, server, err := parse(data)
	return server, err
}

// Rewrite returns a kubeconfig that contains only the fields that Load has accepted, for code with its own loader.
func Rewrite(data []byte, endpoint clusterv1.APIEndpoint) ([]byte, error) {
	config, err := Load(data, endpoint)
	if err != nil {
		return nil, err
	}
	const name = "cluster"
	return pki.Kubeconfig{
		ClusterName: name, UserName: name, ContextName: name,
		Cluster: clientcmdapi.Cluster{Server: config.Host, CertificateAuthorityData: config.CAData, TLSServerName: config.ServerName},
		User:    clientcmdapi.AuthInfo{ClientCertificateData: config.CertData, ClientKeyData: config.KeyData, Token: config.BearerToken},
	}.Encode()
}

func parse(data []byte) (*rest.Config, *url.URL, error) {
	cluster, user, err := current(data)
	if err != nil {
		return nil, nil, err
	}
	if err := checkForbidden(cluster, user); err != nil {
		return nil, nil, err
	}
	server, err := parseServer(cluster.Server)
	if err != nil {
		return nil, nil, err
	}
	if err := checkTLS(cluster); err != nil {
		return nil, nil, err
	}
	if err := checkCredentials(user); err != nil {
		return nil, nil, err
	}
	return &rest.Config{
		Host:        "https://" + server.Host,
		BearerToken: user.Token,
		TLSClientConfig: rest.TLSClientConfig{
			CAData: cluster.CertificateAuthorityData, ServerName: cluster.TLSServerName,
			CertData: user.ClientCertificateData, KeyData: user.ClientKeyData,
		},
	}, server, nil
}

// current returns the cluster and the user of the current context. Other entries are not checked, because they are not
// used. Messages of the decoder quote the document, so errors do not contain them.
func current(data []byte) (*clientcmdapi.Cluster, *clientcmdapi.AuthInfo, error) {
	config, err := decode(data)
	if err != nil {
		return nil, nil, err
	}
	context := config.Contexts[config.CurrentContext]
	if context == nil {
		return nil, nil, refuse("current-context", "it names no context of the kubeconfig")
	}
	cluster, user := config.Clusters[context.Cluster], config.AuthInfos[context.AuthInfo]
	switch {
	case cluster == nil:
		return nil, nil, refuse("context.cluster", "it names no cluster of the kubeconfig")
	case user == nil:
		return nil, nil, refuse("context.user", "it names no user of the kubeconfig")
	}
	return cluster, user, nil
}

// decode refuses documents that are too large or need too much memory in the decoder.
func decode(data []byte) (*clientcmdapi.Config, error) {
	if len(data) > MaxSize {
		return nil, refuse("size", fmt.Sprintf("it has %d bytes, at most %d are allowed", len(data), MaxSize))
	}
	// A document of 64 KiB with aliases can need gigabytes in the decoder.
	if bytes.ContainsRune(data, '&') {
		return nil, refuse("&", "the character is not allowed, because it begins a YAML anchor")
	}
	config, err := clientcmd.Load(data)
	if err != nil {
		return nil, refuse("document", "it is no valid kubeconfig: expected YAML or JSON with apiVersion v1 and kind Config, in which each name occurs once")
	}
	return config, nil
}

// Harmless refuses a kubeconfig that makes other loaders run programs or read files, in any of its contexts. Kubeconfigs
// of other providers may contain proxies, passwords and other servers. Load checks these. Each refusal is a
// *RefusedError.
func Harmless(data []byte) error {
	config, err := decode(data)
	if err != nil {
		return err
	}
	for _, cluster := range config.Clusters {
		if err := first(harmful(cluster, &clientcmdapi.AuthInfo{})); err != nil {
			return err
		}
	}
	for _, user := range config.AuthInfos {
		if err := first(harmful(&clientcmdapi.Cluster{}, user)); err != nil {
			return err
		}
	}
	return nil
}

// forbidden is a field that must not be set.
type forbidden struct {
	field   string
	set     bool
	problem string
}

func first(fields []forbidden) error {
	for _, f := range fields {
		if f.set {
			return refuse(f.field, f.problem)
		}
	}
	return nil
}

// harmful contains the fields that make the loader of a kubeconfig run programs or read files.
func harmful(cluster *clientcmdapi.Cluster, user *clientcmdapi.AuthInfo) []forbidden {
	const inline = "files are not read: give the content inline"
	return []forbidden{
		{"user.exec", user.Exec != nil, "programs are not run: give a client certificate and key, or a token"},
		{"user.auth-provider", user.AuthProvider != nil, "plugins are not run: give a client certificate and key, or a token"},
		{"user.tokenFile", user.TokenFile != "", inline + " in token"},
		{"user.client-certificate", user.ClientCertificate != "", inline + " in client-certificate-data"},
		{"user.client-key", user.ClientKey != "", inline + " in client-key-data"},
		{"cluster.certificate-authority", cluster.CertificateAuthority != "", inline + " in certificate-authority-data"},
	}
}

// checkForbidden refuses the fields that make the loader of a kubeconfig do more than connect to a server.
func checkForbidden(cluster *clientcmdapi.Cluster, user *clientcmdapi.AuthInfo) error {
	return first(append(harmful(cluster, user), []forbidden{
		{"user.username", user.Username != "", "passwords are not used: give a client certificate and key, or a token"},
		{"user.password", user.Password != "", "passwords are not used: give a client certificate and key, or a token"},
		{"user.as", user.Impersonate != "", "impersonation is not allowed"},
		{"user.as-uid", user.ImpersonateUID != "", "impersonation is not allowed"},
		{"user.as-groups", len(user.ImpersonateGroups) > 0, "impersonation is not allowed"},
		{"user.as-user-extra", len(user.ImpersonateUserExtra) > 0, "impersonation is not allowed"},
		{"cluster.proxy-url", cluster.ProxyURL != "", "proxies are not used: the endpoint must be reachable directly"},
		{"cluster.insecure-skip-tls-verify", cluster.InsecureSkipTLSVerify, "the server's certificate is always verified: give the authority in certificate-authority-data"},
	}...))
}

func parseServer(server string) (*url.URL, error) {
	u, err := url.Parse(server)
	switch {
	case err != nil:
		return nil, refuse("cluster.server", "it is no URL: expected https://HOST:PORT")
	case u.Scheme != "https", u.Hostname() == "", u.User != nil, strings.TrimSuffix(u.Path, "/") != "", u.RawQuery != "", u.ForceQuery, u.Fragment != "":
		return nil, refuse("cluster.server", "expected https://HOST:PORT and nothing else")
	}
	return u, nil
}

// checkTLS accepts tls-server-name. It changes neither the address nor the authority, and some endpoints have addresses
// that are not in their certificate.
func checkTLS(cluster *clientcmdapi.Cluster) error {
	if !x509.NewCertPool().AppendCertsFromPEM(cluster.CertificateAuthorityData) {
		return refuse("cluster.certificate-authority-data", "it contains no certificate: expected PEM")
	}
	if err := pki.CheckAuthorities(cluster.CertificateAuthorityData); err != nil {
		return refuse("cluster.certificate-authority-data", err.Error())
	}
	if name := cluster.TLSServerName; name != "" && net.ParseIP(name) == nil && len(validation.IsDNS1123Subdomain(name)) > 0 {
		return refuse("cluster.tls-server-name", "expected a DNS name or an IP address")
	}
	return nil
}

func checkCredentials(user *clientcmdapi.AuthInfo) error {
	cert, key := user.ClientCertificateData, user.ClientKeyData
	if user.Token == "" {
		if _, err := pki.KeyPair(cert, key); err != nil {
			return refuse("user.client-certificate-data", "expected a certificate in PEM, and its key of at most 8 KiB in client-key-data; or a token")
		}
		return nil
	}
	switch {
	case len(cert) > 0 || len(key) > 0:
		return refuse("user.token", "expected either a token, or a client certificate and key")
	case len(user.Token) > maxToken:
		return refuse("user.token", fmt.Sprintf("it is longer than %d bytes", maxToken))
	case strings.ContainsFunc(user.Token, func(r rune) bool { return r <= ' ' || r > '~' }):
		return refuse("user.token", "it contains characters that no token has")
	}
	return nil
}

// sameServer compares host names and addresses by meaning: https without a port is port 443.
func sameServer(server *url.URL, endpoint clusterv1.APIEndpoint) bool {
	port := server.Port()
	if port == "" {
		port = "443"
	}
	return port == strconv.Itoa(int(endpoint.Port)) && canonical(server.Hostname()) == canonical(endpoint.Host)
}

func canonical(host string) string {
	host = strings.TrimSuffix(strings.TrimPrefix(host, "["), "]")
	if ip, err := netip.ParseAddr(host); err == nil {
		return ip.Unmap().String()
	}
	return strings.ToLower(host)
}
