package hostpb

import "fmt"

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

// Incompatible returns why managers of this version cannot work with a capstand, and the remedy, or an empty string. minimum is
// the smallest version of managers that the capstand accepts. A capstand without a version in its report has version 1.
func Incompatible(version, minimum int32, capstand string) string {
	version = max(version, 1)
	side := "capstand"
	switch {
	case minimum > ProtocolVersion:
		return fmt.Sprintf("capstand %s expects managers with protocol version %d at least, found %d: upgrade the manager first", capstand, minimum, ProtocolVersion)
	case version > MaximumHostVersion:
		side = "the manager"
	case version >= MinimumHostVersion:
		return ""
	}
	return fmt.Sprintf("expected a protocol version of capstand from %d to %d, found %d (capstand %s): upgrade %s first",
		MinimumHostVersion, MaximumHostVersion, version, capstand, side)
}
