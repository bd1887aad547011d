package nodeconfig

import (
	"fmt"
	"net/netip"
	"net/url"
	"regexp"
)

// Proxy is the HTTP proxy of the machine's services.
type Proxy struct {
	HTTP  string `json:"http,omitempty"`
	HTTPS string `json:"https,omitempty"`
	// NoProxy has the user's hosts, domains, addresses and networks.
	NoProxy []string `json:"noProxy,omitempty"`
	// ControlPlane is true if the API server uses the proxy.
	ControlPlane bool `json:"controlPlane,omitempty"`
}

// Check returns an error unless the proxy can be used. Errors never quote a URL, because it may contain credentials.
func (p *Proxy) Check() error {
	if p == nil {
		return nil
	}
	for _, f := range []struct{ name, url string }{{"http", p.HTTP}, {"https", p.HTTPS}} {
		if f.url == "" {
			continue
		}
		u, err := url.Parse(f.url)
		switch {
		case err != nil || u.Hostname() == "" || u.Scheme != "http" && u.Scheme != "https" || u.Path != "" && u.Path != "/" || u.RawQuery != "" || u.Fragment != "":
			return fmt.Errorf("%s: expected the URL of a proxy: http:// or https://, a host and a port", f.name)
		case u.User != nil:
			return fmt.Errorf("%s: a proxy URL must not contain credentials, because every program on the machine could read them", f.name)
		}
	}
	for i, entry := range p.NoProxy {
		if err := CheckNoProxy(entry); err != nil {
			return fmt.Errorf("noProxy[%d]: %w", i, err)
		}
	}
	return nil
}

var noProxyName = regexp.MustCompile(`^\.?[a-zA-Z0-9_]([-a-zA-Z0-9_.]*[a-zA-Z0-9_])?(:[0-9]{1,5})?$`)

// CheckNoProxy returns an error unless the entry is a host, a domain, an address or a network, as Go's HTTP client reads it.
func CheckNoProxy(entry string) error {
	_, notAddress := netip.ParseAddr(entry)
	_, notNetwork := netip.ParsePrefix(entry)
	_, notPort := netip.ParseAddrPort(entry)
	if notAddress != nil && notNetwork != nil && notPort != nil && !noProxyName.MatchString(entry) {
		return fmt.Errorf("expected a host, a domain, an address or a network such as registry.example.com, .example.com, 10.0.0.9 or 10.0.0.0/8, found %q", entry)
	}
	return nil
}
