package v1beta2

const (
	// CapstanIPPoolKind is the kind of the namespaced pool in the poolRef of a claim.
	CapstanIPPoolKind = "CapstanIPPool"

	// GlobalCapstanIPPoolKind is the kind of the cluster-scoped pool.
	GlobalCapstanIPPoolKind = "GlobalCapstanIPPool"

	// PoolFinalizer keeps a pool until no IPAddress refers to it.
	PoolFinalizer = "ipam.capstan.dev/pool"

	// ClaimFinalizer keeps an IPAddressClaim until its address is released.
	ClaimFinalizer = "ipam.capstan.dev/release-address"

	// AddressFinalizer protects an IPAddress from accidental deletion.
	AddressFinalizer = "ipam.cluster.x-k8s.io/protect-address"

	// AddressAnnotation on an IPAddressClaim requests a specific address, for example "10.0.0.7", or "10.0.1.0/28"
	// in a pool of prefixes.
	AddressAnnotation = "ipam.capstan.dev/address"

	// OriginUIDAnnotation contains the UID under which the provider first observed a claim or a pool. clusterctl
	// move copies annotations and creates new UIDs. A difference therefore means that the object came from another
	// management cluster, and that related objects may still arrive.
	OriginUIDAnnotation = "ipam.capstan.dev/origin-uid"

	// RestingAnnotation on a pool is a copy of status.allocator.resting in JSON. clusterctl move keeps annotations and no
	// status, so that released addresses keep their rest. Capstan brings it up to date within a sixteenth of the
	// resting period, and at once when a Cluster of the namespace is paused. Of more than 200 kB, the addresses that
	// rest longest stay. Do not edit it.
	RestingAnnotation = "ipam.capstan.dev/resting"

	// RestingBlocksMove is the value of the annotation clusterctl.cluster.x-k8s.io/block-move while RestingAnnotation is
	// behind status. Capstan removes this value and no other.
	RestingBlocksMove = "ipam.capstan.dev/resting"
)
