package v1beta2

// LANNetwork is a network of the user to which a host can attach machines of some namespaces.
// +kubebuilder:validation:XValidation:rule="!isCIDR(self.cidr) || (has(self.ipv6CIDR) && !isCIDR(self.ipv6CIDR)) || self.addresses.all(a, isCIDR(a) && (cidr(self.cidr).containsCIDR(a) || (has(self.ipv6CIDR) && cidr(self.ipv6CIDR).containsCIDR(a))))",message="addresses must be parts of cidr or ipv6CIDR, for example 192.0.2.128/26 of 192.0.2.0/24"
// +kubebuilder:validation:XValidation:rule="!has(self.ipv6CIDR) || !isCIDR(self.cidr) || cidr(self.cidr).ip().family() == 4",message="cidr must be IPv4 if ipv6CIDR is set: for a LAN with IPv6 only, set cidr to the IPv6 network and leave ipv6CIDR out"
type LANNetwork struct {
	// name of the network, for spec.network.lan of CapstanClusters. Hosts of one LAN have an entry of the same name, with the same
	// cidr. A LAN can have several entries, for namespaces with addresses of their own.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`
	Name string `json:"name,omitempty"`

	// bridge is an existing bridge of the host with an interface of the LAN as its port: a network card, or a VLAN of one. Capstan
	// attaches the machines to it, and changes nothing else of it. With vlans, the bridge filters VLANs.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=15
	// +kubebuilder:validation:XValidation:rule="self.matches('^[a-zA-Z0-9_.-]+$') && !self.matches('^([.]{1,2}|(cap|cpm|cpx)[0-9a-f]{10}|capwg)$')",message="bridge must be the name of a bridge of the host's own configuration, of letters, digits and ._-, for example br-lab"
	Bridge string `json:"bridge,omitempty"`

	// vlans are the VLANs of the bridge for spec.network.lan.vlan of CapstanClusters, all of them with cidr and addresses. Machines of
	// clusters in other VLANs, or without one, are not attached. If empty, clusters have no VLAN.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:Minimum=1
	// +kubebuilder:validation:items:Maximum=4094
	VLANs []int32 `json:"vlans,omitempty"`

	// cidr is the IPv4 network of the LAN, for example 192.0.2.0/24, or the IPv6 network of a LAN with IPv6 only.
	// +required
	// +kubebuilder:validation:MinLength=5
	// +kubebuilder:validation:MaxLength=43
	// +kubebuilder:validation:XValidation:rule="isCIDR(self) && cidr(self) == cidr(self).masked() && (cidr(self).ip().family() == 4 ? cidr(self).prefixLength() >= 8 && cidr(self).prefixLength() <= 29 : cidr(self).prefixLength() >= 16 && cidr(self).prefixLength() <= 125)",message="cidr must be an IPv4 network from /8 to /29, or an IPv6 network from /16 to /125, without host bits, for example 192.0.2.0/24"
	CIDR string `json:"cidr,omitempty"`

	// ipv6CIDR is the IPv6 network of a LAN that also has the IPv4 network of cidr, for example 2001:db8:7::/64. The machines of a
	// cluster whose spec.network.machineIPv6CIDR is this network have an address of each family, and those of a cluster whose
	// machineCIDR is this network have IPv6 only.
	// +optional
	// +kubebuilder:validation:MinLength=5
	// +kubebuilder:validation:MaxLength=43
	// +kubebuilder:validation:XValidation:rule="isCIDR(self) && cidr(self) == cidr(self).masked() && cidr(self).ip().family() == 6 && cidr(self).prefixLength() >= 16 && cidr(self).prefixLength() <= 125",message="ipv6CIDR must be an IPv6 network from /16 to /125 without host bits, for example 2001:db8:7::/64"
	IPv6CIDR string `json:"ipv6CIDR,omitempty"`

	// addresses are networks, or single addresses with /32 or /128, that machines of the namespaces can have in the LAN. No other station
	// has them, and no DHCP server gives them away.
	// +required
	// +listType=set
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=16
	// +kubebuilder:validation:items:MinLength=5
	// +kubebuilder:validation:items:MaxLength=43
	Addresses []string `json:"addresses,omitempty"`

	// allowedNamespaces selects the namespaces whose machines can be attached to the LAN. It has to be set: a host that admits the
	// machines of a namespace does not thereby open the LAN for it.
	// +required
	AllowedNamespaces AllowedNamespaces `json:"allowedNamespaces,omitempty,omitzero"`
}

// ClusterLAN attaches the machines of a cluster to a network of the user.
// +kubebuilder:validation:XValidation:rule="self.name == oldSelf.name && (has(self.vlan) ? self.vlan : 0) == (has(oldSelf.vlan) ? oldSelf.vlan : 0)",message="network.lan cannot be changed: the machines have addresses of this network; create another cluster"
type ClusterLAN struct {
	// name is an entry of spec.lanNetworks of CapstanHosts. The machines are placed on hosts that offer it to their namespace.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`
	Name string `json:"name,omitempty"`

	// vlan is the VLAN of the LAN that the machines are in, one of vlans of the entry. Machines of other VLANs do not reach them. Their
	// frames have no tag, and they cannot send frames with one. It is required if the entry has vlans.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=4094
	VLAN int32 `json:"vlan,omitempty"`
}
