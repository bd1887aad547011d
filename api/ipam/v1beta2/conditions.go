package v1beta2

// Conditions of both kinds of pool.
const (
	// ReadyCondition is True when the pool can serve claims. A full pool without waiting claims is Ready. The condition is False in these
	// cases: the spec is invalid; the pool is being deleted; the pool overlaps with another one, and one of the two has the setting
	// `overlap: Refuse`; a move has not yet brought all of its addresses; claims wait because no address is free.
	ReadyCondition = "Ready"

	// SpecValidCondition is False when the spec is invalid. Admission refuses such a spec, so this occurs only
	// without the webhook.
	SpecValidCondition = "SpecValid"

	// AddressesAvailableCondition is False when no address is free.
	AddressesAvailableCondition = "AddressesAvailable"

	// AddressesInRangeCondition is False when the spec no longer contains all allocated addresses. These addresses
	// stay with their claims.
	AddressesInRangeCondition = "AddressesInRange"

	// NotOverlappingCondition is False when another pool contains some of the same addresses.
	NotOverlappingCondition = "NotOverlapping"
)

// Reasons of the pool's conditions.
const (
	// ReadyReason: the pool serves claims.
	ReadyReason = "Ready"
	// ValidReason: the spec is valid.
	ValidReason = "Valid"
	// InvalidSpecReason: the spec is invalid. The message contains the cause.
	InvalidSpecReason = "InvalidSpec"
	// AvailableReason: an address is free.
	AvailableReason = "Available"
	// ExhaustedReason: no address is free. Waiting claims are served when an address is released.
	ExhaustedReason = "Exhausted"
	// InRangeReason: the spec contains every allocated address.
	InRangeReason = "InRange"
	// OutOfRangeReason: the spec no longer contains some allocated addresses. The message contains their number.
	OutOfRangeReason = "OutOfRange"
	// NotOverlappingReason: no other pool contains addresses of this one.
	NotOverlappingReason = "NotOverlapping"
	// OverlappingReason: another pool contains some of the same addresses. The message contains its name.
	OverlappingReason = "Overlapping"
	// OverlapRefusedReason: the pool overlaps with another pool and one of them refuses that. The pool allocates
	// no new address.
	OverlapRefusedReason = "OverlapRefused"
	// DeletingReason: the pool is being deleted and waits for the release of its addresses.
	DeletingReason = "Deleting"
	// ArrivingFromMoveReason: clusterctl move created the pool, and its addresses are still arriving.
	ArrivingFromMoveReason = "ArrivingFromMove"
	// ClaimAddressReadyReason: a claim got an address.
	ClaimAddressReadyReason = "AddressAllocated"
)
