package v1beta2

// Conditions of both kinds of pool and their reasons.
const (
	// ReadyCondition is True when the pool can serve claims. A full pool without waiting claims is Ready. The condition is False in these
	// cases: the spec is invalid; the pool is being deleted; the pool overlaps with another one, and one of the two has the setting
	// `overlap: Refuse`; a move has not yet brought all of its addresses; claims wait because no address is free.
	// InvalidSpec and Exhausted are also reasons of this condition.
	ReadyCondition = "Ready"
	// ReadyReason: the pool serves claims.
	ReadyReason = "Ready"
	// DeletingReason: the pool is being deleted and waits for the release of its addresses.
	DeletingReason = "Deleting"
	// OverlapRefusedReason: the pool overlaps with another pool and one of them refuses that. The pool allocates
	// no new address. NotOverlapping can have the same reason.
	OverlapRefusedReason = "OverlapRefused"
	// ArrivingFromMoveReason: clusterctl move created the pool, and its addresses are still arriving.
	ArrivingFromMoveReason = "ArrivingFromMove"

	// SpecValidCondition is False when the spec is invalid. Admission refuses such a spec, so this occurs only
	// without the webhook.
	SpecValidCondition = "SpecValid"
	// ValidReason: the spec is valid.
	ValidReason = "Valid"
	// InvalidSpecReason: the spec is invalid. The message contains the cause.
	InvalidSpecReason = "InvalidSpec"

	// AddressesAvailableCondition is False when no address is free.
	AddressesAvailableCondition = "AddressesAvailable"
	// AvailableReason: an address is free.
	AvailableReason = "Available"
	// ExhaustedReason: no address is free. Waiting claims are served when an address is released.
	ExhaustedReason = "Exhausted"

	// AddressesInRangeCondition is False when the spec no longer contains all allocated addresses. These addresses
	// stay with their claims.
	AddressesInRangeCondition = "AddressesInRange"
	// InRangeReason: the spec contains every allocated address.
	InRangeReason = "InRange"
	// OutOfRangeReason: the spec no longer contains some allocated addresses. The message contains their number.
	OutOfRangeReason = "OutOfRange"

	// NotOverlappingCondition is False when another pool contains some of the same addresses.
	NotOverlappingCondition = "NotOverlapping"
	// NotOverlappingReason: no other pool contains addresses of this one.
	NotOverlappingReason = "NotOverlapping"
	// OverlappingReason: another pool contains some of the same addresses. The message contains its name.
	OverlappingReason = "Overlapping"
)

// Reason of the condition Ready of an IPAddressClaim.
const (
	// ClaimAddressReadyReason: a claim got an address.
	ClaimAddressReadyReason = "AddressAllocated"
)
