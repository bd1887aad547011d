package v1beta2

import clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

// Conditions of a CapstanHost. Ready summarizes them. Its reason is the reason of the first condition that is not
// as expected.
const (
	// HostConnectedCondition is true while the manager is connected to the host's capstand and has its state.
	HostConnectedCondition = "Connected"

	// HostConnectedReason: the manager is connected to capstand.
	HostConnectedReason = "Connected"
	// HostConnectingReason: the first connection attempt is in progress.
	HostConnectingReason = "Connecting"
	// HostUnreachableReason: capstand is not reachable. The message contains the cause. The manager retries.
	HostUnreachableReason = "Unreachable"
	// HostCredentialsInvalidReason: the Secret of credentialsRef is missing or invalid.
	HostCredentialsInvalidReason = "CredentialsInvalid"

	// HostIncompatibleVersionReason: the manager and the host's capstand have versions that do not work together. The message
	// contains both, and which one to upgrade first.
	HostIncompatibleVersionReason = "IncompatibleVersion"

	// HostTunnelReadyCondition exists while status.tunnelAddress is set. It is false while the clusters across hosts are cut off, or lose
	// large packets, on this host. Placement ignores it.
	HostTunnelReadyCondition = "TunnelReady"
	// HostTunnelReadyReason: the host has its tunnel address, and the interface carries the packets of all clusters.
	HostTunnelReadyReason = "TunnelReady"
	// HostTunnelBrokenReason: the host has lost its tunnel address, or the MTU of its interface is too small. The message contains the
	// cause.
	HostTunnelBrokenReason = "TunnelBroken"

	// HostFencingCondition exists while spec.fencing is set. It is true when the host has acknowledged it.
	HostFencingCondition = "Fencing"
	// HostFencingSetReason: the host stops its machines when it is cut off.
	HostFencingSetReason = "FencingSet"
	// HostFencingPendingReason: the host has not acknowledged the setting yet.
	HostFencingPendingReason = "FencingPending"
	// HostFencingUnsupportedReason: the host's capstand is older than fencing, or cannot do it.
	HostFencingUnsupportedReason = "FencingUnsupported"
	// HostFencingConflictReason: another CapstanHost is the same host, and its setting is in effect.
	HostFencingConflictReason = "FencingConflict"

	// HostRebootedCondition exists while spec.rebootRequestedAt is set. It is true when the host has rebooted since and is back.
	HostRebootedCondition = "Rebooted"
	// HostRebootedReason: the host has rebooted.
	HostRebootedReason = "Rebooted"
	// HostRebootDrainingReason: the reboot waits until the host has no machines. The condition Drained contains the causes of delays.
	HostRebootDrainingReason = "RebootDraining"
	// HostRebootingReason: the host was asked to reboot, and has not returned yet.
	HostRebootingReason = "Rebooting"
	// HostRebootWaitingReason: the host cannot be rebooted now. The message contains the cause. The host keeps its machines.
	HostRebootWaitingReason = "RebootWaiting"
	// HostRebootUnsupportedReason: the host's capstand is older than reboots, or is not a service of systemd.
	HostRebootUnsupportedReason = "RebootUnsupported"

	// HostDrainedCondition exists while spec.drain is true, or while the host is drained for a reboot. It is true when the host has no machines of this management
	// cluster any more.
	HostDrainedCondition = "Drained"
	// HostDrainedReason: the host has no machines of this management cluster.
	HostDrainedReason = "Drained"
	// HostDrainingReason: machines are being replaced. The message contains their number and the causes of delays.
	HostDrainingReason = "Draining"
)

// Reason of the condition Deleting of a CapstanHost.
const (
	// HostDeletingInUseReason: the host still has machines, networks, load balancers or volumes.
	HostDeletingInUseReason = "InUse"
)

// Condition of a CapstanHost, a CapstanMachine and a CapstanControlPlane about their certificates, and its reasons.
const (
	// CertificatesExpiringCondition is true if the renewal of a certificate of the object is overdue: two thirds and another hundredth of
	// its lifetime have passed.
	CertificatesExpiringCondition = "CertificatesExpiring"
	// CertificatesExpiringReason: the renewal of certificates is overdue. The message contains their names and expiry.
	CertificatesExpiringReason = "CertificatesExpiring"
	// CertificatesNotExpiringReason: the renewal of no certificate is overdue.
	CertificatesNotExpiringReason = "CertificatesNotExpiring"
)

// Conditions of a CapstanCluster. Ready summarizes them.
const (
	// HostsAvailableCondition is true when a host that the cluster may use is connected.
	HostsAvailableCondition = "HostsAvailable"
	// HostsAvailableReason: at least one host is connected.
	HostsAvailableReason = "HostsAvailable"
	// NoHostsReason: no CapstanHost admits the namespace and matches spec.hostSelector.
	NoHostsReason = "NoHosts"
	// NoHostConnectedReason: hosts match, but none of them is connected.
	NoHostConnectedReason = "NoHostConnected"

	// NetworkReadyCondition is true when the cluster's network exists on the load balancer's host. Other hosts
	// create it with the first machine. If the network spans several hosts, the message names those that are not
	// up to date, for example because they are not connected.
	NetworkReadyCondition = "NetworkReady"
	// NetworkReadyReason: the network exists.
	NetworkReadyReason = "NetworkReady"
	// NetworkInvalidReason: the machine, pod and Service networks conflict or are invalid, or network.overlay is
	// not usable: its vni belongs to another cluster, or the load balancer's host has no tunnelAddress.
	NetworkInvalidReason = "NetworkInvalid"
	// NoFreeNetworkReason: the pool of machine networks is exhausted.
	NoFreeNetworkReason = "NoFreeNetwork"
	// LANNotOfferedReason: no CapstanHost offers the network of spec.network.lan to the namespace.
	LANNotOfferedReason = "LANNotOffered"
	// NetworkRefusedReason: the host refused the network. The message contains the cause.
	NetworkRefusedReason = "NetworkRefused"

	// LoadBalancerReadyCondition is true when the control plane endpoint is known and, with mode Managed, its load
	// balancer listens.
	LoadBalancerReadyCondition = "LoadBalancerReady"
	// LoadBalancerReadyReason: the load balancer listens.
	LoadBalancerReadyReason = "LoadBalancerReady"
	// LoadBalancerExternalReason: the endpoint is external and known.
	LoadBalancerExternalReason = "EndpointExternal"
	// WaitingForEndpointReason: the endpoint is external and not known yet.
	WaitingForEndpointReason = "WaitingForEndpoint"
	// LoadBalancerNotServingReason: the load balancer exists but does not listen. The message contains the cause.
	LoadBalancerNotServingReason = "LoadBalancerNotServing"
	// LoadBalancerRefusedReason: the host refused the load balancer. The message contains the cause.
	LoadBalancerRefusedReason = "LoadBalancerRefused"
	// LoadBalancerNoHostReason: no host accepts the load balancer. The message contains the cause.
	LoadBalancerNoHostReason = NoHostReason
	// LoadBalancerHostMismatchReason: the CapstanHost of spec.loadBalancer is not the host that has the load
	// balancer. The message contains the remedy.
	LoadBalancerHostMismatchReason = HostMismatchReason

	// BootAllowedCondition is true when machines may boot. By default this is earlier than initialization.provisioned, which waits
	// until the first API server of a CapstanControlPlane answers, for at most a minute. Ready does not depend on the condition.
	BootAllowedCondition = "BootAllowed"
	// BootAllowedReason: machines may boot.
	BootAllowedReason = "BootAllowed"
	// PreparingFirstMachineReason: the kubeconfig, or the bootstrap data of the first control plane machine, does not exist yet.
	// The machines wait for at most ten seconds.
	PreparingFirstMachineReason = "PreparingFirstMachine"
	// WaitingForOtherClustersReason: other clusters boot on the load balancer's host. A host boots one cluster for each two
	// processors at the same time.
	WaitingForOtherClustersReason = "WaitingForOtherClusters"

	// ServicesPublishedCondition exists while spec.services.loadBalancer is set, and until the publication has ended. It is
	// true when hosts publish all Services of type LoadBalancer. Ready does not depend on it: users of the workload cluster
	// create Services.
	ServicesPublishedCondition = "ServicesPublished"
	// ServicesPublishedReason: all Services are published.
	ServicesPublishedReason = "ServicesPublished"
	// ServicesNotPublishedReason: Services wait or are refused. The message contains the cause for each Service.
	ServicesNotPublishedReason = "ServicesNotPublished"
	// WorkloadNotConnectedReason: the manager is not connected to the API server of the cluster. Published Services continue.
	WorkloadNotConnectedReason = "WorkloadNotConnected"
	// ServicesEndingReason: the publication ends, but a host or the cluster cannot be reached. The message contains the cause.
	ServicesEndingReason = "ServicesEnding"
)

const (
	// ServiceLoadBalancerClass is the class of the Services that Capstan publishes, besides those without a class.
	ServiceLoadBalancerClass = "capstan.dev/host"
	// ServiceHostPortsClass is the class of the Services that Capstan publishes at ports of the hosts' own addresses.
	ServiceHostPortsClass = "capstan.dev/host-ports"
	// HostPortHostsAnnotation of a CapstanCluster contains the names of the hosts that may publish ports of their own addresses for the
	// cluster, separated by commas.
	HostPortHostsAnnotation = "infrastructure.capstan.dev/host-port-hosts"
	// ServiceHostsAnnotation of an IPAddressClaim contains the names of the hosts that may have the address, separated by
	// commas. The first one publishes the Service.
	ServiceHostsAnnotation = "infrastructure.capstan.dev/service-hosts"
	// ServiceAddressFinalizer keeps the IPAddress of a Service, and so keeps its pool from giving the address to another claim, until no
	// host has the address.
	ServiceAddressFinalizer = "infrastructure.capstan.dev/service-address"
	// ServiceAnnotation of an IPAddressClaim contains the namespace and name of the Service that has the address.
	ServiceAnnotation = "infrastructure.capstan.dev/service"
	// ServiceClaimAnnotation of a Service in a workload cluster contains the name of the IPAddressClaim for its address.
	ServiceClaimAnnotation = "infrastructure.capstan.dev/address-claim"
)

// Conditions of a CapstanMachine. Ready summarizes them.
const (
	// HostAssignedCondition is true when the machine has a host.
	HostAssignedCondition = "HostAssigned"
	// HostAssignedReason: spec.hostName is the host.
	HostAssignedReason = "HostAssigned"
	// NoHostReason: no host accepts the machine. The message contains the cause for each host.
	NoHostReason = "NoHost"
	// HostNotFoundReason: spec.hostName names a CapstanHost that does not exist.
	HostNotFoundReason = "HostNotFound"
	// HostNotAllowedReason: spec.hostName names a CapstanHost that does not admit the namespace.
	HostNotAllowedReason = "HostNotAllowed"
	// WaitingForVolumeReason: a volume of the machine cannot be mounted now. The message names the volume, its host and the remedy.
	// MachineRunning can have the same reason.
	WaitingForVolumeReason = "WaitingForVolume"

	// AddressesAssignedCondition is true when the machine's addresses are in spec.
	AddressesAssignedCondition = "AddressesAssigned"
	// AddressesAssignedReason: spec contains the addresses.
	AddressesAssignedReason = "AddressesAssigned"
	// NoFreeAddressReason: the cluster's network is exhausted.
	NoFreeAddressReason = "NoFreeAddress"
	// WaitingForIPAddressReason: an IPAddressClaim has no address yet.
	WaitingForIPAddressReason = "WaitingForIPAddress"
	// AddressInvalidReason: an address from a pool is not usable. The message contains the cause.
	AddressInvalidReason = "AddressInvalid"

	// MachineRunningCondition is true while PID 1 of the machine runs.
	MachineRunningCondition = "MachineRunning"
	// MachineRunningReason: PID 1 runs.
	MachineRunningReason = "MachineRunning"
	// MachineStartingReason: the host is creating the machine.
	MachineStartingReason = "MachineStarting"
	// MachineRestartingReason: PID 1 ended and will be started again.
	MachineRestartingReason = "MachineRestarting"
	// MachineFailedReason: the machine cannot be started, or its restarts are exhausted. The message contains the cause.
	// Capstan does not replace the machine: delete its Machine, or use a MachineHealthCheck.
	MachineFailedReason = "MachineFailed"
	// MachineLostReason is terminal: the host no longer has the machine or its disk. See MachineFailedReason.
	MachineLostReason = "MachineLost"
	// MachineRefusedReason: the host refused the machine. The message contains the cause.
	MachineRefusedReason = "MachineRefused"
	// WaitingForTurnReason: calls to the host for other machines occupy all workers that one host can have, for ten seconds or longer. A
	// host that hangs causes it. Deleting of a machine can have the same reason.
	WaitingForTurnReason = "WaitingForTurn"
	// MachineFencedReason: the host stopped the machine, because it was cut off. The machine starts when a manager confirms it.
	MachineFencedReason = "MachineFenced"
	// MachineHostMismatchReason: the CapstanHost of spec.hostName is not the host that has the machine. The state
	// of the machine is unknown, and Capstan leaves it unchanged. The message contains the remedy.
	MachineHostMismatchReason = HostMismatchReason
	// MachineHostUnreachableReason: the state of the machine is unknown while its host is not connected.
	MachineHostUnreachableReason = "HostUnreachable"

	// BootstrapSucceededCondition is true when the bootstrap data was applied and its sentinel file exists.
	BootstrapSucceededCondition = "BootstrapSucceeded"
	// BootstrapSucceededReason: the bootstrap completed.
	BootstrapSucceededReason = "BootstrapSucceeded"
	// BootstrapRunningReason: the machine is applying the bootstrap data.
	BootstrapRunningReason = "BootstrapRunning"
	// BootstrapStalledReason: no service of the machine has made progress for ten minutes. The machine continues to try. The message
	// contains the cause.
	BootstrapStalledReason = "BootstrapStalled"
	// BootstrapFailedReason is terminal: the bootstrap failed. The message contains the failed step.
	BootstrapFailedReason = "BootstrapFailed"

	// ServicesHealthyCondition is true when every service of the machine runs.
	ServicesHealthyCondition = "ServicesHealthy"
	// ServicesHealthyReason: all services run.
	ServicesHealthyReason = "ServicesHealthy"
	// ServicesStartingReason: the bootstrap has not ended, or some services have not started yet.
	ServicesStartingReason = "ServicesStarting"
	// ServicesUnhealthyReason: some services are stopped or in back-off. The message contains their names.
	ServicesUnhealthyReason = "ServicesUnhealthy"

	// UpdatingCondition is true while an update of the machine in place is wanted and has not succeeded. It is False with the
	// reason UpdateFailed after a failure.
	UpdatingCondition = clusterv1.MachineUpdatingCondition
	// NotUpdatingReason: no update in place is wanted.
	NotUpdatingReason = "NotUpdating"
	// UpdateSucceededReason: the machine has the desired state of the last update.
	UpdateSucceededReason = "UpdateSucceeded"
	// WaitingForUpdateReason: the update has not begun. The message names the missing object.
	WaitingForUpdateReason = "WaitingForUpdate"
	// UpdateHeldReason: the update has not begun, because the control plane holds it: etcd would lose its quorum. No call to the host is on the
	// way.
	UpdateHeldReason = "UpdateHeld"
	// NoCapacityReason: the host has no room for the memory or the disk that the update asks for. The machine keeps its
	// resources. The update begins when other machines have freed enough memory.
	NoCapacityReason = "NoCapacity"
	// UpdateRefusedReason: the update asks for a change that needs another machine, or the host refused it. The message
	// contains the field.
	UpdateRefusedReason = "UpdateRefused"
	// CannotUpdateInPlaceReason: the MachineDeployment has the policy Only, and a change needs another machine. The message
	// contains the field.
	CannotUpdateInPlaceReason = "CannotUpdateInPlace"
	// UpdateRunningReason: the machine carries out the update. The message contains the step.
	UpdateRunningReason = "UpdateRunning"
	// UpdateFailedReason: the update ended without success, and the machine is back in its previous state as far as possible.
	// The message contains the cause.
	UpdateFailedReason = "UpdateFailed"
)

// Reason of an event of a CapstanMachine.
const (
	// HostFencedReason: the machine is removed without an answer of its host, which has stopped it.
	HostFencedReason = "HostFenced"
)

// Reasons of the condition Ready of a CapstanVolume.
const (
	// VolumeInUseReason: the machine in spec.machineName has the volume.
	VolumeInUseReason = "InUse"
	// VolumeFreeReason: no machine has the volume.
	VolumeFreeReason = "Free"
	// VolumePendingReason: the host has not made the volume yet.
	VolumePendingReason = "Pending"
)

// Reasons that conditions of several kinds share.
const (
	// WaitingForClusterInfrastructureReason: the cluster's network and endpoint do not exist yet, or its machines may not boot yet. The
	// condition BootAllowed of the CapstanCluster contains the cause.
	WaitingForClusterInfrastructureReason = clusterv1.WaitingForClusterInfrastructureReadyReason
	// WaitingForBootstrapDataReason: the bootstrap provider has not created the data yet.
	WaitingForBootstrapDataReason = clusterv1.WaitingForBootstrapDataReason
	// HostMismatchReason: a CapstanHost is not the host that was chosen under its name.
	HostMismatchReason = "HostMismatch"
	// DeletionBlockedReason: the deletion waits. The message contains the cause and the remedy.
	DeletionBlockedReason = "DeletionBlocked"
)

const (
	// HostFinalizer keeps a CapstanHost while machines, networks, load balancers or volumes are on it.
	HostFinalizer = "infrastructure.capstan.dev/capstanhost"

	// VolumeDeleteDataAnnotation on a CapstanVolume with the policy Retain permits the deletion of its data together with its namespace.
	VolumeDeleteDataAnnotation = "infrastructure.capstan.dev/delete-data"
	// HostAbandonedAnnotation on a CapstanHost states that the host is permanently lost. Its machines, networks,
	// load balancers and volumes count as removed: their deletion does not wait for the host, and nothing new is placed on
	// it. Set it only if the host will not return. Processes that still run there become orphans.
	HostAbandonedAnnotation = "infrastructure.capstan.dev/abandoned"

	// HostPruneAnnotation on a CapstanHost holds ids of status.unknownMachines, with commas between them: the controller
	// removes these machines from the host for good, and then the annotation. A machine that has a CapstanMachine stays.
	HostPruneAnnotation = "infrastructure.capstan.dev/prune"

	// HostPruneNetworksAnnotation on a CapstanHost holds the networks of the machines that HostPruneAnnotation removes and that
	// have no CapstanCluster: namespace/name/id, with commas between them. The controller writes it before it removes the first
	// machine, and removes it together with HostPruneAnnotation, when the networks are removed. Do not set it.
	HostPruneNetworksAnnotation = "infrastructure.capstan.dev/prune-networks"

	// MachineStartAnnotation on a CapstanMachine starts a failed machine again now, with all of its restarts. The
	// controller removes the annotation when the host has answered.
	MachineStartAnnotation = "infrastructure.capstan.dev/start"

	// MachineUpdateAttemptAnnotation on a CapstanMachine tries a failed update in place again, each time with another value.
	MachineUpdateAttemptAnnotation = "infrastructure.capstan.dev/update-attempt"

	// InPlaceAnnotation on a MachineDeployment is its policy of updates: Never (default) replaces outdated machines; Prefer
	// updates a machine in place if every change can be made in place, and replaces it otherwise; Only never replaces an
	// outdated machine: a change that needs another machine stops the rollout. Cluster API copies the annotation to MachineSets.
	InPlaceAnnotation = "infrastructure.capstan.dev/in-place"

	// MachineCIDRFromPoolAnnotation on a CapstanCluster states that the controller chose spec.network.machineCIDR.
	// The controller may choose another network until a host has accepted it.
	MachineCIDRFromPoolAnnotation = "infrastructure.capstan.dev/machine-cidr-from-pool"

	// PortFromRangeAnnotation on a CapstanCluster states that the controller chose spec.loadBalancer.port. The
	// controller may choose another port until the endpoint is set.
	PortFromRangeAnnotation = "infrastructure.capstan.dev/port-from-range"
)

const (
	// DefaultLoadBalancerPort is the port of the control plane endpoint.
	DefaultLoadBalancerPort = 6443

	// DefaultAPIServerPort is the port of a control plane machine's API server, unless the Cluster's
	// spec.clusterNetwork.apiServerPort is set.
	DefaultAPIServerPort = 6443

	// DefaultMachineMemory is a machine's memory limit if spec.memory is not set.
	DefaultMachineMemory = "2Gi"

	// DefaultMachineDiskSize is the size of a machine's disk if spec.disk.size is not set.
	DefaultMachineDiskSize = "20Gi"

	// DefaultMachinePidsLimit is a machine's limit of processes and threads when spec.pidsLimit is not set.
	DefaultMachinePidsLimit = 16384
)
