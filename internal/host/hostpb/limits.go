package hostpb

// Limits of the Services of a cluster that a host publishes.
const (
	MaxServices        = 64
	MaxServicePorts    = 256
	MaxServiceMachines = 256
	MaxSourceRanges    = 64
	MaxServiceName     = 255 // with its namespace, in bytes; Kubernetes allows fewer
)
