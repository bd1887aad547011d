package nodeconfig

import (
	"net/url"
	"slices"
	"strings"
)

// DefaultRegistry is the host of the registry whose mirrors apply to all registries that are not listed.
const DefaultRegistry = "_default"

// Server returns the URL of the registry's API, or "" for DefaultRegistry.
func (r Registry) Server() string {
	if host := r.server(); host != "" {
		return "https://" + host
	}
	return ""
}

func (r Registry) server() string {
	switch r.Host {
	case DefaultRegistry:
		return ""
	case "docker.io":
		return "registry-1.docker.io"
	}
	return r.Host
}

// mirrorHosts returns the hosts of the mirrors.
func (r Registry) mirrorHosts() []string {
	var hosts []string
	for _, mirror := range r.Mirrors {
		if u, err := url.Parse(mirror); err == nil {
			hosts = append(hosts, u.Host)
		}
	}
	return hosts
}

// loginOf returns the registry with the credentials of a mirror of r: the entry of the mirror's host, or r, or another entry with this
// mirror.
func (c *NodeConfiguration) loginOf(r Registry, host string) (Registry, bool) {
	find := func(has func(Registry) bool) (Registry, bool) {
		i := slices.IndexFunc(c.Registries, func(other Registry) bool { return other.Username != "" && has(other) })
		if i < 0 {
			return Registry{}, false
		}
		return c.Registries[i], true
	}
	if own, found := find(func(other Registry) bool { return other.server() == host }); found {
		return own, true
	}
	if r.Username != "" {
		return r, true
	}
	return find(func(other Registry) bool { return slices.Contains(other.mirrorHosts(), host) })
}

// passed returns whether the kubelet passes the credentials of a registry to containerd, which uses them for the registry and for all of
// its mirrors. So it does not if a mirror has others, nor for DefaultRegistry, which no image names.
func (c *NodeConfiguration) passed(r Registry) bool {
	return r.Username != "" && r.Host != DefaultRegistry && !slices.ContainsFunc(r.mirrorHosts(), func(host string) bool {
		login, _ := c.loginOf(r, host)
		return login.Username != r.Username || login.Password != r.Password
	})
}

// FixedLogin returns the registry with the credentials of a URL that the kubelet does not pass. The URL is the server of r or one of its
// mirrors. Credentials never cross the network unencrypted.
func (c *NodeConfiguration) FixedLogin(r Registry, address string) (Registry, bool) {
	u, err := url.Parse(address)
	switch {
	case err != nil || u.Scheme != "https" || c.passed(r):
		return Registry{}, false
	case address == r.Server():
		return r, r.Username != ""
	}
	return c.loginOf(r, u.Host)
}

// PassedCredentials returns the registries whose credentials the kubelet passes to containerd.
func (c *NodeConfiguration) PassedCredentials() []Registry {
	var out []Registry
	for _, r := range c.Registries {
		if c.passed(r) {
			out = append(out, r)
		}
	}
	return out
}

// CredentialsOf returns the registry with the credentials of an image, whose name starts with the host of its registry.
func (c *NodeConfiguration) CredentialsOf(image string) (Registry, bool) {
	host, _, _ := strings.Cut(image, "/")
	for _, r := range c.PassedCredentials() {
		if r.Host == host {
			return r, true
		}
	}
	return Registry{}, false
}
