package v1beta2

// Kinds of this API group.
const (
	ClusterKind             = "CapstanCluster"
	ClusterTemplateKind     = "CapstanClusterTemplate"
	HostKind                = "CapstanHost"
	MachineKind             = "CapstanMachine"
	MachineTemplateKind     = "CapstanMachineTemplate"
	MachinePoolKind         = "CapstanMachinePool"
	MachinePoolTemplateKind = "CapstanMachinePoolTemplate"
	VolumeKind              = "CapstanVolume"
)
