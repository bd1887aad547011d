package nodeconfig

import "strings"

// DefaultRegistry is the host of the registry whose mirrors apply to all registries that are not listed.
const DefaultRegistry = "_default"

// NamedCredentials returns the registries with credentials, except for DefaultRegistry: an image does not name it.
func (c *NodeConfiguration) NamedCredentials() []Registry {
	var out []Registry
	for _, r := range c.Registries {
		if r.Username != "" && r.Host != DefaultRegistry {
			out = append(out, r)
		}
	}
	return out
}

// CredentialsOf returns the registry with the credentials of an image, whose name starts with the host of its registry.
func (c *NodeConfiguration) CredentialsOf(image string) (Registry, bool) {
	host, _, _ := strings.Cut(image, "/")
	for _, r := range c.NamedCredentials() {
		if r.Host == host {
			return r, true
		}
	}
	return Registry{}, false
}
