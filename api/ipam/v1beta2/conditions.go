package v1beta2

// Conditions of both kinds of pool (row IPAM-02).
const (
	// ReadyCondition says whether the pool can serve claims. It is False
	// while any of these holds: the spec is invalid, the pool is being
	// deleted, it overlaps where that is refused, its addresses are still
	// arriving from a move, or claims wait because nothing is free. A pool
	// that is full while nobody waits is Ready.
	ReadyCondition = "Ready"

	// SpecValidCondition is False when the spec cannot be used. Admission
	// refuses such a spec, so this is seen only where the webhook is off.
	SpecValidCondition = "SpecValid"

	// AddressesAvailableCondition is False when no address is free.
	AddressesAvailableCondition = "AddressesAvailable"

	// AddressesInRangeCondition is False when addresses are handed out that
	// the spec no longer contains. They stay with their claims.
	AddressesInRangeCondition = "AddressesInRange"

	// NotOverlappingCondition is False when another pool hands out some of
	// the same addresses.
	NotOverlappingCondition = "NotOverlapping"
)

// Reasons of the pool's conditions.
const (
	// ReadyReason: the pool serves claims.
	ReadyReason = "Ready"
	// ValidReason: the spec can be used.
	ValidReason = "Valid"
	// InvalidSpecReason: the spec cannot be used; the message says what was wanted.
	InvalidSpecReason = "InvalidSpec"
	// AvailableReason: an address is free.
	AvailableReason = "Available"
	// ExhaustedReason: no address is free; claims are served as soon as one is.
	ExhaustedReason = "Exhausted"
	// InRangeReason: the spec contains every address that is out.
	InRangeReason = "InRange"
	// OutOfRangeReason: the message counts the addresses that the spec no longer contains.
	OutOfRangeReason = "OutOfRange"
	// NotOverlappingReason: no other pool has addresses of this one.
	NotOverlappingReason = "NotOverlapping"
	// OverlappingReason: another pool, which the message names, has some of the same addresses.
	OverlappingReason = "Overlapping"
	// OverlapRefusedReason: it overlaps, and a pool concerned refuses that: nothing new is handed out.
	OverlapRefusedReason = "OverlapRefused"
	// DeletingReason: the pool is being deleted and waits for its addresses to come back.
	DeletingReason = "Deleting"
	// ArrivingFromMoveReason: clusterctl move has brought the pool, and its addresses are still to come.
	ArrivingFromMoveReason = "ArrivingFromMove"
	// ClaimAddressReadyReason: a claim got an address.
	ClaimAddressReadyReason = "AddressAllocated"
	// ClaimAddressAdoptedCause: a claim got its own address back, after a move or a crash.
	ClaimAddressAdoptedCause = "AddressAdopted"
)
