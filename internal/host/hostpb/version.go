package hostpb

// Versions of the interface between managers and capstand. Version 1 has no version in HostInfo. Version 2 added it, and fencing.
const (
	// ProtocolVersion is the version that this program implements.
	ProtocolVersion = 2
	// MinimumManagerVersion is the smallest version of managers that this capstand accepts.
	MinimumManagerVersion = 1
	// MinimumHostVersion is the smallest version of hosts that this manager accepts.
	MinimumHostVersion = 1
	// MaximumHostVersion is the largest one.
	MaximumHostVersion = 3
)
