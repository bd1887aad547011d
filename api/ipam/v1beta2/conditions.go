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
	ReadyReason              = "Ready"
	ValidReason              = "Valid"
	InvalidSpecReason        = "InvalidSpec"
	AvailableReason          = "Available"
	ExhaustedReason          = "Exhausted"
	InRangeReason            = "InRange"
	OutOfRangeReason         = "OutOfRange"
	NotOverlappingReason     = "NotOverlapping"
	OverlappingReason        = "Overlapping"
	OverlapRefusedReason     = "OverlapRefused"
	DeletingReason           = "Deleting"
	ArrivingFromMoveReason   = "ArrivingFromMove"
	PausedReason             = "Paused"
	ClaimAddressReadyReason  = "AddressAllocated"
	ClaimAddressAdoptedCause = "AddressAdopted"
)
