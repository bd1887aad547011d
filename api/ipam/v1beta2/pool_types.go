package v1beta2

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// AllocationOrder selects the free address that a claim gets.
// +kubebuilder:validation:Enum=Lowest;RoundRobin;Random
type AllocationOrder string

const (
	// LowestOrder allocates the lowest free address.
	LowestOrder AllocationOrder = "Lowest"
	// RoundRobinOrder allocates the next free address after the previously allocated one, and continues with the
	// lowest after the highest.
	RoundRobinOrder AllocationOrder = "RoundRobin"
	// RandomOrder allocates a random free address.
	RandomOrder AllocationOrder = "Random"
)

// OverlapPolicy selects the reaction to pools with common addresses.
// +kubebuilder:validation:Enum=Report;Refuse
type OverlapPolicy string

const (
	// ReportOverlap reports the overlap in the NotOverlapping condition.
	ReportOverlap OverlapPolicy = "Report"
	// RefuseOverlap makes admission refuse a pool that overlaps this one.
	RefuseOverlap OverlapPolicy = "Refuse"
)

// ReservedAddress is a kind of address that is not allocated by default.
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

// CapstanIPPoolSpec is the desired state of a CapstanIPPool and the common part of both kinds of pool. A pool has
// one address family. Dual stack requires two pools and two claims.
// +kubebuilder:validation:XValidation:rule="self.subnets.all(s, !isCIDR(s.cidr) || !isCIDR(self.subnets[0].cidr) || cidr(s.cidr).ip().family() == cidr(self.subnets[0].cidr).ip().family())",message="subnets must have one address family, but they contain IPv4 and IPv6: create one pool for each family"
// +kubebuilder:validation:XValidation:rule="!has(self.prefixLength) || self.subnets.all(s, !isCIDR(s.cidr) || cidr(s.cidr).prefixLength() <= self.prefixLength)",message="prefixLength must be at least the prefix length of every subnet: an allocated prefix cannot be larger than its subnet"
// +kubebuilder:validation:XValidation:rule="!has(self.prefixLength) || self.subnets.all(s, !isCIDR(s.cidr) || cidr(s.cidr).ip().family() == 6 || self.prefixLength <= 32)",message="prefixLength must be at most 32 in an IPv4 pool"
// +kubebuilder:validation:XValidation:rule="has(self.prefixLength) == has(oldSelf.prefixLength) && (!has(self.prefixLength) || self.prefixLength == oldSelf.prefixLength)",message="prefixLength is immutable: create a new pool for prefixes of another length"
type CapstanIPPoolSpec struct {
	// subnets are the networks of the pool, 1 to 64. Addresses are allocated in the order of the addresses, not of
	// this list. Subnets of one pool must not overlap.
	// +required
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=64
	// +listType=map
	// +listMapKey=cidr
	Subnets []Subnet `json:"subnets,omitempty"`

	// prefixLength makes the pool allocate prefixes of this length (in bits) instead of single addresses. The
	// IPAddress then contains the first address of the prefix and this length. It is immutable.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=128
	PrefixLength *int32 `json:"prefixLength,omitempty"`

	// order selects the free address that a claim gets: Lowest (default), RoundRobin or Random.
	// +optional
	// +kubebuilder:default=Lowest
	Order AllocationOrder `json:"order,omitempty"`

	// restSeconds is the time in seconds before a released address can be allocated to another claim. It does not
	// delay the deletion of the claim. Default: 0. Maximum: 30 days.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=2592000
	RestSeconds *int32 `json:"restSeconds,omitempty"`

	// reservations reserve an address for the claim of a given name. No other claim gets it.
	// +optional
	// +kubebuilder:validation:MaxItems=1024
	// +listType=map
	// +listMapKey=address
	Reservations []Reservation `json:"reservations,omitempty"`

	// overlap selects the reaction to another pool with common addresses. Report (default) shows the overlap in
	// the NotOverlapping condition. Refuse makes admission refuse this pool, and any later pool, if they overlap.
	// +optional
	// +kubebuilder:default=Report
	Overlap OverlapPolicy `json:"overlap,omitempty"`
}

// Subnet is one network of a pool.
// +kubebuilder:validation:XValidation:rule="!isCIDR(self.cidr) || cidr(self.cidr) == cidr(self.cidr).masked()",message="cidr has host bits set: write the network address, for example 10.0.0.0/24 and not 10.0.0.1/24"
// +kubebuilder:validation:XValidation:rule="!isCIDR(self.cidr) || cidr(self.cidr).prefixLength() > 0",message="cidr must not be /0: use the network of the machines"
// +kubebuilder:validation:XValidation:rule="!has(self.gateway) || !isIP(self.gateway) || !isCIDR(self.cidr) || cidr(self.cidr).containsIP(self.gateway)",message="gateway must be an address inside cidr"
type Subnet struct {
	// cidr is the network, for example 10.0.0.0/24. Its length is the prefix of the IPAddresses.
	// +required
	// +kubebuilder:validation:MinLength=4
	// +kubebuilder:validation:MaxLength=43
	// +kubebuilder:validation:XValidation:rule="isCIDR(self)",message="must be a CIDR, for example 10.0.0.0/24 or fd00:1::/64"
	CIDR string `json:"cidr,omitempty"`

	// gateway is the network's router. It is copied to the IPAddresses. It is not allocated unless
	// allocateReserved contains Gateway.
	// +optional
	// +kubebuilder:validation:MinLength=2
	// +kubebuilder:validation:MaxLength=39
	// +kubebuilder:validation:XValidation:rule="isIP(self)",message="must be an IP address, for example 10.0.0.1"
	Gateway string `json:"gateway,omitempty"`

	// ranges are the addresses that can be allocated: each "a-b", a CIDR, or a single address. They must be inside
	// cidr and must not overlap. At most 256. Default: the whole network.
	// +optional
	// +kubebuilder:validation:MaxItems=256
	// +listType=atomic
	Ranges []AddressRange `json:"ranges,omitempty"`

	// exclude lists addresses that are never allocated: each "a-b", a CIDR, or a single address, inside cidr.
	// +optional
	// +kubebuilder:validation:MaxItems=256
	// +listType=atomic
	Exclude []AddressRange `json:"exclude,omitempty"`

	// allocateReserved allows the allocation of reserved addresses. The following addresses are reserved by
	// default: the network and broadcast addresses of an IPv4 subnet (not of a /31 or /32), the subnet-router
	// anycast address of an IPv6 subnet (not of a /127 or /128), and the gateway. In a pool of prefixes only the
	// gateway is reserved.
	// +optional
	// +kubebuilder:validation:MaxItems=4
	// +listType=set
	AllocateReserved []ReservedAddress `json:"allocateReserved,omitempty"`

	// drain stops new allocations from this subnet. Allocated addresses stay with their claims. Default: false.
	// +optional
	Drain *bool `json:"drain,omitempty"`
}

// Reservation reserves an address for a claim.
type Reservation struct {
	// address is the reserved address, or the first address of the prefix in a pool of prefixes.
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

	// namespace is the namespace of the claim. It must be empty in a CapstanIPPool, which serves only its own
	// namespace. If it is empty in a GlobalCapstanIPPool, the reservation holds for a claim of this name in any
	// namespace.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	Namespace string `json:"namespace,omitempty"`
}

// GlobalCapstanIPPoolSpec is the desired state of a GlobalCapstanIPPool.
type GlobalCapstanIPPoolSpec struct {
	CapstanIPPoolSpec `json:",inline"`

	// allowedNamespaces selects the namespaces whose claims get addresses. If not set, all namespaces get
	// addresses. If it selects nothing, no namespace gets any. Allocated addresses stay with their claims.
	// +optional
	AllowedNamespaces *AllowedNamespaces `json:"allowedNamespaces,omitempty"`
}

// AllowedNamespaces selects namespaces by name or by label. A namespace is allowed if either selects it.
// +kubebuilder:validation:MinProperties=1
type AllowedNamespaces struct {
	// names lists allowed namespaces. To admit no namespace, use a selector that matches none.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=1000
	// +kubebuilder:validation:items:MinLength=1
	// +kubebuilder:validation:items:MaxLength=63
	Names []string `json:"names,omitempty"`

	// selector selects allowed namespaces by label.
	// +optional
	Selector *metav1.LabelSelector `json:"selector,omitempty"`
}

// CapstanIPPoolStatus is the observed state of both kinds of pool.
type CapstanIPPoolStatus struct {
	// observedGeneration is the generation of the spec that this status describes.
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`

	// conditions describe the current state: Ready, SpecValid, AddressesAvailable, AddressesInRange,
	// NotOverlapping, Paused.
	// +optional
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=32
	Conditions []metav1.Condition `json:"conditions,omitempty"`

	// addresses contains the numbers of the pool's addresses, or of its prefixes in a pool of prefixes.
	// +optional
	Addresses *AddressCounts `json:"addresses,omitempty"`

	// allocator is the record that prevents managers from allocating an address twice. Managers write it with
	// compare-and-swap, once per batch of claims. Do not edit it.
	// +optional
	Allocator *AllocatorStatus `json:"allocator,omitempty"`
}

// AddressCounts contains numbers of addresses. The first two are decimal strings, because the size of an IPv6
// subnet does not fit into an integer. The others are written also when they are zero, for the columns of kubectl.
type AddressCounts struct {
	// total is the number of addresses in the spec, without exclusions and reserved kinds of address, but with
	// reservations and drained subnets.
	// +optional
	Total string `json:"total,omitempty"`

	// free is the number of addresses that a claim without a reservation can get now.
	// +optional
	Free string `json:"free,omitempty"`

	// used is the number of allocated addresses in the spec.
	// +optional
	Used int64 `json:"used"`

	// outOfRange is the number of allocated addresses that the spec does not contain.
	// +optional
	OutOfRange int64 `json:"outOfRange"`

	// resting is the number of released addresses that cannot be allocated yet.
	// +optional
	Resting int64 `json:"resting"`

	// waiting is the number of claims that wait for an address.
	// +optional
	Waiting int64 `json:"waiting"`
}

// AllocatorStatus is the compare-and-swap record of a pool.
type AllocatorStatus struct {
	// holder is the process that wrote the record last. Another process must take the record over and read all
	// addresses again before it can allocate.
	// +optional
	Holder string `json:"holder,omitempty"`

	// write identifies the last write, so that the holder can find out whether a write without an answer
	// succeeded.
	// +optional
	Write string `json:"write,omitempty"`

	// cursor is the address that was allocated last. RoundRobin continues after it.
	// +optional
	Cursor string `json:"cursor,omitempty"`

	// pending lists addresses that are chosen but whose IPAddress may not exist yet.
	// +optional
	// +listType=atomic
	Pending []PendingAllocation `json:"pending,omitempty"`

	// resting lists released addresses that cannot be allocated yet, by the time when they become free.
	// +optional
	// +listType=atomic
	Resting []RestingAddresses `json:"resting,omitempty"`
}

// PendingAllocation is an address that is chosen for a claim.
type PendingAllocation struct {
	// address is the chosen address.
	// +required
	Address string `json:"address"`
	// namespace is the namespace of the claim.
	// +required
	Namespace string `json:"namespace"`
	// name is the name of the claim.
	// +required
	Name string `json:"name"`
	// uid is the UID of the claim.
	// +required
	UID string `json:"uid"`
	// until is the latest time of a request that creates the IPAddress. The address stays allocated until then,
	// even if the claim is deleted.
	// +required
	Until metav1.Time `json:"until"`
}

// RestingAddresses are addresses that become free at the same time.
type RestingAddresses struct {
	// until is the time when the addresses become free.
	// +required
	Until metav1.Time `json:"until"`
	// offsets encodes the addresses compactly as base64 of varints: the first number is the address, each
	// following number the distance to the previous address.
	// +required
	Offsets string `json:"offsets"`
}

// +kubebuilder:object:root=true
// +kubebuilder:resource:path=capstanippools,scope=Namespaced,categories=cluster-api;capstan,shortName=cipp
// +kubebuilder:subresource:status
// +kubebuilder:storageversion
// +kubebuilder:metadata:labels={"cluster.x-k8s.io/v1beta2=v1beta2","cluster.x-k8s.io/provider=ipam-capstan","clusterctl.cluster.x-k8s.io/move-hierarchy="}
// +kubebuilder:printcolumn:name="Ready",type="string",JSONPath=".status.conditions[?(@.type=='Ready')].status",description="The pool can serve claims"
// +kubebuilder:printcolumn:name="Total",type="string",JSONPath=".status.addresses.total",description="Addresses in the pool"
// +kubebuilder:printcolumn:name="Used",type="integer",JSONPath=".status.addresses.used",description="Allocated addresses"
// +kubebuilder:printcolumn:name="Free",type="string",JSONPath=".status.addresses.free",description="Free addresses"
// +kubebuilder:printcolumn:name="Waiting",type="integer",JSONPath=".status.addresses.waiting",description="Claims without an address",priority=10
// +kubebuilder:printcolumn:name="Out Of Range",type="integer",JSONPath=".status.addresses.outOfRange",description="Allocated addresses outside the spec",priority=10
// +kubebuilder:printcolumn:name="Reason",type="string",JSONPath=".status.conditions[?(@.type=='Ready')].reason",description="Reason of the Ready condition",priority=10
// +kubebuilder:printcolumn:name="Paused",type="string",JSONPath=`.status.conditions[?(@.type=="Paused")].status`,description="Reconciliation paused",priority=10
// +kubebuilder:printcolumn:name="Age",type="date",JSONPath=".metadata.creationTimestamp",description="Time since creation"

// CapstanIPPool provides IP addresses for the IPAddressClaims of its namespace.
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
// +kubebuilder:printcolumn:name="Ready",type="string",JSONPath=".status.conditions[?(@.type=='Ready')].status",description="The pool can serve claims"
// +kubebuilder:printcolumn:name="Total",type="string",JSONPath=".status.addresses.total",description="Addresses in the pool"
// +kubebuilder:printcolumn:name="Used",type="integer",JSONPath=".status.addresses.used",description="Allocated addresses"
// +kubebuilder:printcolumn:name="Free",type="string",JSONPath=".status.addresses.free",description="Free addresses"
// +kubebuilder:printcolumn:name="Waiting",type="integer",JSONPath=".status.addresses.waiting",description="Claims without an address",priority=10
// +kubebuilder:printcolumn:name="Out Of Range",type="integer",JSONPath=".status.addresses.outOfRange",description="Allocated addresses outside the spec",priority=10
// +kubebuilder:printcolumn:name="Reason",type="string",JSONPath=".status.conditions[?(@.type=='Ready')].reason",description="Reason of the Ready condition",priority=10
// +kubebuilder:printcolumn:name="Paused",type="string",JSONPath=`.status.conditions[?(@.type=="Paused")].status`,description="Reconciliation paused",priority=10
// +kubebuilder:printcolumn:name="Age",type="date",JSONPath=".metadata.creationTimestamp",description="Time since creation"

// GlobalCapstanIPPool provides IP addresses for the IPAddressClaims of all namespaces that it allows.
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
