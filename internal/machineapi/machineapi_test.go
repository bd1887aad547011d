package machineapi

import "testing"

// The first address can be IPv6: the variables name the address of each family.
func TestTemplateVariables(t *testing.T) {
	four, six := Address{Address: "10.1.0.2"}, Address{Address: "fd00:1::2"}
	for name, test := range map[string]struct {
		addresses    []Address
		ipv4, ipv6   string
		has4, hasSix bool
	}{
		"none":       {nil, "", "", false, false},
		"IPv4":       {[]Address{four}, four.Address, "", true, false},
		"dual stack": {[]Address{four, six}, four.Address, six.Address, true, true},
		"IPv6 only":  {[]Address{six}, "", six.Address, false, true},
	} {
		vars := Metadata{Addresses: test.addresses}.TemplateVariables()
		ipv4, has4 := vars["local_ipv4"]
		ipv6, hasSix := vars["local_ipv6"]
		if ipv4 != test.ipv4 || ipv6 != test.ipv6 || has4 != test.has4 || hasSix != test.hasSix {
			t.Errorf("%s: %v", name, vars)
		}
	}
}
