package hostpb

import "strings"

// IsNode reports whether the device is a device node of the host, and not a kind of CDI devices.
func (x *MachineDevice) IsNode() bool { return strings.HasPrefix(x.GetName(), "/") }
