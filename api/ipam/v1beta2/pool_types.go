package v1beta2

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// AllocationOrder says which of the free addresses a claim gets.
// +kubebuilder:validation:Enum=Lowest;RoundRobin;Random
type AllocationOrder string

const (
	// LowestOrder hands out the lowest free address.
	LowestOrder AllocationOrder = "Lowest"
	// RoundRobinOrder hands out the next free address after the one that was
	// handed out last, and begins again at the lowest after the highest.
	RoundRobinOrder AllocationOrder = "RoundRobin"
	// RandomOrder hands out any free address.
	RandomOrder AllocationOrder = "Random"
)

// OverlapPolicy says what happens when pools have addresses in common.
// +kubebuilder:validation:Enum=Report;Refuse
type OverlapPolicy string

const (
	// ReportOverlap shows the overlap in the NotOverlapping condition.
	ReportOverlap OverlapPolicy = "Report"
	// RefuseOverlap makes admission refuse a pool that overlaps this one.
	RefuseOverlap OverlapPolicy = "Refuse"
)

// ReservedAddress names a kind of address that is kept back by default.
// +kubebuilder:validation:Enum=Network;Broadcast;Anycast;Gateway
type ReservedAddress string

const (
	// NetworkAddress is the first address of an IPv4 subnet.
	NetworkAddress ReservedAddress = "Network"
	// BroadcastAddress is the last address of an IPv4 subnet.
	BroadcastAddress ReservedAddress = "Broadcast"
	// AnycastAddress is the first address of an IPv6 subnet: the
	// subnet-router anycast address of RFC 4291.
	AnycastAddress ReservedAddress = "Anycast"
	// GatewayAddress is the subnet's gateway.
	GatewayAddress ReservedAddress = "Gateway"
)

// AddressRange is a range "a-b", a CIDR, or a single address.
// +kubebuilder:validation:MinLength=2
// +kubebuilder:validation:MaxLength=80
type AddressRange string

// CapstanIPPoolSpec is the desired state of a CapstanIPPool, and what both kinds
// of pool have in common. A pool has one
// address family; dual stack takes two pools and two claims (row IPAM-08).
// +kubebuilder:validation:XValidation:rule="self.subnets.all(s, !isCIDR(s.cidr) || !isCIDR(self.subnets[0].cidr) || cidr(s.cidr).ip().family() == cidr(self.subnets[0].cidr).ip().family())",message="a pool has one address family, but its subnets mix IPv4 and IPv6: make one pool for each family"
// +kubebuilder:validation:XValidation:rule="!has(self.prefixLength) || self.subnets.all(s, !isCIDR(s.cidr) || cidr(s.cidr).prefixLength() <= self.prefixLength)",message="prefixLength must be at least the prefix length of every subnet: a block cannot be larger than its subnet"
// +kubebuilder:validation:XValidation:rule="!has(self.prefixLength) || self.subnets.all(s, !isCIDR(s.cidr) || cidr(s.cidr).ip().family() == 6 || self.prefixLength <= 32)",message="prefixLength must be at most 32 in an IPv4 pool"
// +kubebuilder:validation:XValidation:rule="has(self.prefixLength) == has(oldSelf.prefixLength) && (!has(self.prefixLength) || self.prefixLength == oldSelf.prefixLength)",message="prefixLength is immutable: make a new pool for blocks of another length"
type CapstanIPPoolSpec struct {
	// subnets are the networks that the pool hands out addresses from, in
	// the order of their addresses and not of this list. Subnets of one pool
	// must not overlap.
	// +required
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=64
	// +listType=map
	// +listMapKey=cidr
	Subnets []Subnet `json:"subnets,omitempty"`

	// prefixLength makes the pool hand out prefixes of this length (in bits)
	// instead of single addresses. The IPAddress then carries the first
	// address of the prefix and this length. It cannot be changed.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=128
	PrefixLength *int32 `json:"prefixLength,omitempty"`

	// order says which of the free addresses a claim gets. The default is
	// Lowest.
	// +optional
	// +kubebuilder:default=Lowest
	Order AllocationOrder `json:"order,omitempty"`

	// restSeconds is how long, in seconds, a released address rests before
	// another claim can get it. It does not hold up the claim's deletion. The
	// default is 0: no rest. The maximum is 30 days.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=2592000
	RestSeconds *int32 `json:"restSeconds,omitempty"`

	// reservations keep an address for the claim of one name. No other claim
	// gets it.
	// +optional
	// +kubebuilder:validation:MaxItems=1024
	// +listType=map
	// +listMapKey=address
	Reservations []Reservation `json:"reservations,omitempty"`

	// overlap says whether another pool may have addresses in common with
	// this one. The default, Report, shows it in the NotOverlapping condition;
	// Refuse makes admission refuse this pool, and any later one, when they
	// overlap.
	// +optional
	// +kubebuilder:default=Report
	Overlap OverlapPolicy `json:"overlap,omitempty"`
}

// Subnet is one network of a pool.
// +kubebuilder:validation:XValidation:rule="!isCIDR(self.cidr) || cidr(self.cidr) == cidr(self.cidr).masked()",message="cidr has host bits set: write the network address, for example 10.0.0.0/24 and not 10.0.0.1/24"
// +kubebuilder:validation:XValidation:rule="!isCIDR(self.cidr) || cidr(self.cidr).prefixLength() > 0",message="cidr must not be /0: name the network that the machines are in"
// +kubebuilder:validation:XValidation:rule="!has(self.gateway) || !isIP(self.gateway) || !isCIDR(self.cidr) || cidr(self.cidr).containsIP(self.gateway)",message="gateway must be an address inside cidr"
type Subnet struct {
	// cidr is the network, for example 10.0.0.0/24. Its length becomes the
	// prefix of the IPAddresses.
	// +required
	// +kubebuilder:validation:MinLength=4
	// +kubebuilder:validation:MaxLength=43
	// +kubebuilder:validation:XValidation:rule="isCIDR(self)",message="must be a CIDR, for example 10.0.0.0/24 or fd00:1::/64"
	CIDR string `json:"cidr,omitempty"`

	// gateway is the network's router. It is written into the IPAddresses and
	// is not handed out unless allocateReserved says so.
	// +optional
	// +kubebuilder:validation:MinLength=2
	// +kubebuilder:validation:MaxLength=39
	// +kubebuilder:validation:XValidation:rule="isIP(self)",message="must be an IP address, for example 10.0.0.1"
	Gateway string `json:"gateway,omitempty"`

	// ranges are what may be handed out, each "a-b", a CIDR, or a single
	// address, all inside cidr and none overlapping another. Without ranges
	// it is the whole network.
	// +optional
	// +kubebuilder:validation:MaxItems=256
	// +listType=atomic
	Ranges []AddressRange `json:"ranges,omitempty"`

	// exclude is what is never handed out, each "a-b", a CIDR, or a single
	// address, inside cidr.
	// +optional
	// +kubebuilder:validation:MaxItems=256
	// +listType=atomic
	Exclude []AddressRange `json:"exclude,omitempty"`

	// allocateReserved names the kept-back addresses that may be handed out
	// all the same. By default the network and broadcast addresses of an IPv4
	// subnet (not of a /31 or /32), the subnet-router anycast address of an
	// IPv6 subnet (not of a /127 or /128) and the gateway are kept back. In a
	// pool of prefixes only the gateway matters.
	// +optional
	// +kubebuilder:validation:MaxItems=4
	// +listType=set
	AllocateReserved []ReservedAddress `json:"allocateReserved,omitempty"`

	// drain stops new addresses from this subnet. What is handed out stays
	// with its claims. The default is false.
	// +optional
	Drain *bool `json:"drain,omitempty"`
}

// Reservation keeps an address for a claim.
type Reservation struct {
	// address is the address, or in a pool of prefixes the first address of
	// the prefix.
	// +required
	// +kubebuilder:validation:MinLength=2
	// +kubebuilder:validation:MaxLength=39
	// +kubebuilder:validation:XValidation:rule="isIP(self)",message="must be an IP address, for example 10.0.0.7"
	Address string `json:"address,omitempty"`

	// claim is the name of the IPAddressClaim that gets the address.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Claim string `json:"claim,omitempty"`

	// namespace of the claim. A CapstanIPPool serves its own namespace only,
	// so it is left out there; in a GlobalCapstanIPPool leaving it out means
	// a claim of this name in any namespace.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	Namespace string `json:"namespace,omitempty"`
}

// GlobalCapstanIPPoolSpec is the desired state of a GlobalCapstanIPPool.
type GlobalCapstanIPPoolSpec struct {
	CapstanIPPoolSpec `json:",inline"`

	// allowedNamespaces selects the namespaces whose claims get addresses. All
	// of them when not set; none when it selects none (row ALL-18). Addresses
	// that are out stay with their claims.
	// +optional
	AllowedNamespaces *AllowedNamespaces `json:"allowedNamespaces,omitempty"`
}

// AllowedNamespaces selects namespaces by name or by label; a namespace that
// either selects is allowed.
// +kubebuilder:validation:MinProperties=1
type AllowedNamespaces struct {
	// names of namespaces.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MaxItems=1000
	// +kubebuilder:validation:items:MinLength=1
	// +kubebuilder:validation:items:MaxLength=63
	Names []string `json:"names,omitempty"`

	// selector of namespaces by label.
	// +optional
	Selector *metav1.LabelSelector `json:"selector,omitempty"`
}

// CapstanIPPoolStatus is the observed state of both kinds of pool.
type CapstanIPPoolStatus struct {
	// observedGeneration is the generation of the spec that this status is
	// about.
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`

	// conditions of the pool: Ready, SpecValid, AddressesAvailable,
	// AddressesInRange, NotOverlapping.
	// +optional
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=32
	Conditions []metav1.Condition `json:"conditions,omitempty"`

	// addresses counts the pool's addresses, or in a pool of prefixes its
	// prefixes.
	// +optional
	Addresses *AddressCounts `json:"addresses,omitempty"`

	// allocator is the record by which managers make sure that no address is
	// handed out twice. It is written with compare-and-swap, once per batch of
	// claims, and is not meant to be edited.
	// +optional
	Allocator *AllocatorStatus `json:"allocator,omitempty"`
}

// AddressCounts counts addresses. The first two are decimal strings because
// the count of an IPv6 subnet does not fit an integer.
type AddressCounts struct {
	// total is how many addresses the spec contains, without exclusions and
	// kept-back addresses, with reservations and drained subnets.
	// +optional
	Total string `json:"total,omitempty"`

	// free is how many of them a claim without a reservation can get now.
	// +optional
	Free string `json:"free,omitempty"`

	// used is how many of them are handed out.
	// +optional
	Used int64 `json:"used"`

	// outOfRange is how many addresses are handed out that the spec does not
	// contain (any more).
	// +optional
	OutOfRange int64 `json:"outOfRange"`

	// resting is how many released addresses still rest.
	// +optional
	Resting int64 `json:"resting"`

	// waiting is how many claims wait for an address.
	// +optional
	Waiting int64 `json:"waiting"`
}

// AllocatorStatus is the compare-and-swap record of a pool.
type AllocatorStatus struct {
	// holder is the process that wrote the record last. Another process must
	// take it over, and read all addresses afresh, before it may allocate.
	// +optional
	Holder string `json:"holder,omitempty"`

	// write names the last write, so that the holder can tell whether a write
	// whose answer was lost took place.
	// +optional
	Write string `json:"write,omitempty"`

	// cursor is the address that was handed out last; RoundRobin goes on
	// after it.
	// +optional
	Cursor string `json:"cursor,omitempty"`

	// pending are the addresses that are chosen and whose IPAddress may not
	// exist yet.
	// +optional
	// +listType=atomic
	Pending []PendingAllocation `json:"pending,omitempty"`

	// resting are the released addresses that are not yet free again, by the
	// time when they will be.
	// +optional
	// +listType=atomic
	Resting []RestingAddresses `json:"resting,omitempty"`
}

// PendingAllocation is an address that is chosen for a claim.
type PendingAllocation struct {
	// address that is chosen.
	Address string `json:"address"`
	// namespace of the claim.
	Namespace string `json:"namespace"`
	// name of the claim.
	Name string `json:"name"`
	// uid of the claim.
	UID string `json:"uid"`
	// until is how long a request to create the IPAddress may be under way.
	// The address stays taken until then, whatever becomes of the claim.
	Until metav1.Time `json:"until"`
}

// RestingAddresses are addresses that rest until the same time.
type RestingAddresses struct {
	// until is when they are free again.
	Until metav1.Time `json:"until"`
	// offsets encodes the addresses compactly: base64 of varints, the first
	// of them the address and each further one the distance to the previous.
	Offsets string `json:"offsets"`
}

// +kubebuilder:object:root=true
// +kubebuilder:resource:path=capstanippools,scope=Namespaced,categories=cluster-api;capstan,shortName=cipp
// +kubebuilder:subresource:status
// +kubebuilder:storageversion
// +kubebuilder:metadata:labels={"cluster.x-k8s.io/v1beta2=v1beta2","cluster.x-k8s.io/provider=ipam-capstan","clusterctl.cluster.x-k8s.io/move-hierarchy="}
// +kubebuilder:printcolumn:name="Ready",type="string",JSONPath=".status.conditions[?(@.type=='Ready')].status",description="Whether the pool can serve claims"
// +kubebuilder:printcolumn:name="Total",type="string",JSONPath=".status.addresses.total",description="Addresses in the pool"
// +kubebuilder:printcolumn:name="Used",type="integer",JSONPath=".status.addresses.used",description="Addresses that are handed out"
// +kubebuilder:printcolumn:name="Free",type="string",JSONPath=".status.addresses.free",description="Addresses that are free"
// +kubebuilder:printcolumn:name="Waiting",type="integer",JSONPath=".status.addresses.waiting",description="Claims that wait for an address",priority=1
// +kubebuilder:printcolumn:name="Out Of Range",type="integer",JSONPath=".status.addresses.outOfRange",description="Addresses that are handed out and no longer in the spec",priority=1
// +kubebuilder:printcolumn:name="Reason",type="string",JSONPath=".status.conditions[?(@.type=='Ready')].reason",description="Why the pool is ready or not",priority=1
// +kubebuilder:printcolumn:name="Age",type="date",JSONPath=".metadata.creationTimestamp",description="Time since the pool was made"

// CapstanIPPool hands out IP addresses to the IPAddressClaims of its namespace
// (rows IPAM-01 and IPAM-03).
// +kubebuilder:validation:XValidation:rule="!has(self.spec.reservations) || self.spec.reservations.all(r, !has(r.__namespace__))",message="a CapstanIPPool serves claims of its own namespace only: leave namespace out of reservations, or use a GlobalCapstanIPPool"
type CapstanIPPool struct {
	metav1.TypeMeta `json:",inline"`
	// +optional
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// spec is the desired state.
	// +required
	Spec CapstanIPPoolSpec `json:"spec,omitempty,omitzero"`
	// status is the observed state.
	// +optional
	Status CapstanIPPoolStatus `json:"status,omitempty,omitzero"`
}

// +kubebuilder:object:root=true

// CapstanIPPoolList is a list of CapstanIPPools.
type CapstanIPPoolList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []CapstanIPPool `json:"items"`
}

// +kubebuilder:object:root=true
// +kubebuilder:resource:path=globalcapstanippools,scope=Cluster,categories=cluster-api;capstan,shortName=gcipp
// +kubebuilder:subresource:status
// +kubebuilder:storageversion
// +kubebuilder:metadata:labels={"cluster.x-k8s.io/v1beta2=v1beta2","cluster.x-k8s.io/provider=ipam-capstan","clusterctl.cluster.x-k8s.io/move="}
// +kubebuilder:printcolumn:name="Ready",type="string",JSONPath=".status.conditions[?(@.type=='Ready')].status",description="Whether the pool can serve claims"
// +kubebuilder:printcolumn:name="Total",type="string",JSONPath=".status.addresses.total",description="Addresses in the pool"
// +kubebuilder:printcolumn:name="Used",type="integer",JSONPath=".status.addresses.used",description="Addresses that are handed out"
// +kubebuilder:printcolumn:name="Free",type="string",JSONPath=".status.addresses.free",description="Addresses that are free"
// +kubebuilder:printcolumn:name="Waiting",type="integer",JSONPath=".status.addresses.waiting",description="Claims that wait for an address",priority=1
// +kubebuilder:printcolumn:name="Out Of Range",type="integer",JSONPath=".status.addresses.outOfRange",description="Addresses that are handed out and no longer in the spec",priority=1
// +kubebuilder:printcolumn:name="Reason",type="string",JSONPath=".status.conditions[?(@.type=='Ready')].reason",description="Why the pool is ready or not",priority=1
// +kubebuilder:printcolumn:name="Age",type="date",JSONPath=".metadata.creationTimestamp",description="Time since the pool was made"

// GlobalCapstanIPPool hands out IP addresses to the IPAddressClaims of every
// namespace that it allows (rows IPAM-01 and IPAM-03).
type GlobalCapstanIPPool struct {
	metav1.TypeMeta `json:",inline"`
	// +optional
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// spec is the desired state.
	// +required
	Spec GlobalCapstanIPPoolSpec `json:"spec,omitempty,omitzero"`
	// status is the observed state.
	// +optional
	Status CapstanIPPoolStatus `json:"status,omitempty,omitzero"`
}

// +kubebuilder:object:root=true

// GlobalCapstanIPPoolList is a list of GlobalCapstanIPPools.
type GlobalCapstanIPPoolList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []GlobalCapstanIPPool `json:"items"`
}
