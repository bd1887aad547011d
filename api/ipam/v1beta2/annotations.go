package v1beta2

const (
	// CapstanIPPoolKind is the kind of the namespaced pool, as it is written
	// in the poolRef of a claim.
	CapstanIPPoolKind = "CapstanIPPool"

	// GlobalCapstanIPPoolKind is the kind of the cluster-scoped pool.
	GlobalCapstanIPPoolKind = "GlobalCapstanIPPool"

	// PoolFinalizer keeps a pool until no IPAddress refers to it.
	PoolFinalizer = "ipam.capstan.dev/pool"

	// ClaimFinalizer keeps an IPAddressClaim until its address is given back
	// (rows IPAM-04c and IPAM-05d).
	ClaimFinalizer = "ipam.capstan.dev/release-address"

	// AddressFinalizer protects an IPAddress from deletion by accident (row
	// IPAM-04e).
	AddressFinalizer = "ipam.cluster.x-k8s.io/protect-address"

	// AddressAnnotation on an IPAddressClaim asks for this one address, for
	// example "10.0.0.7", or in a pool of prefixes "10.0.1.0/28".
	AddressAnnotation = "ipam.capstan.dev/address"

	// OriginUIDAnnotation holds the UID under which the provider first saw a
	// claim or a pool. clusterctl move copies annotations but gives new UIDs,
	// so a difference means: this object came from another management
	// cluster, and what belongs to it may still be on its way (row IPAM-06).
	OriginUIDAnnotation = "ipam.capstan.dev/origin-uid"
)
