package v1beta2

import clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

// Conditions of a CapstanHost. Ready sums them up; its reason is that of the first one that is not as
// it should be, so that every reason here can also be seen there.
const (
	// HostConnectedCondition is true while the host's capstand is reached and its state is known.
	HostConnectedCondition = "Connected"

	// HostConnectedReason: capstand is reached.
	HostConnectedReason = "Connected"
	// HostConnectingReason: the first connection is being made.
	HostConnectingReason = "Connecting"
	// HostUnreachableReason: capstand is not reached; the message says why. It is tried again on its own.
	HostUnreachableReason = "Unreachable"
	// HostCredentialsInvalidReason: the Secret that credentialsRef names is missing or unusable.
	HostCredentialsInvalidReason = "CredentialsInvalid"

	// HostDeletingInUseReason: machines, networks or load balancers are still on the host.
	HostDeletingInUseReason = "InUse"
)

// Conditions of a CapstanCluster. Ready sums them up.
const (
	// HostsAvailableCondition is true when a host that the cluster may use is connected.
	HostsAvailableCondition = "HostsAvailable"
	// HostsAvailableReason: there is at least one.
	HostsAvailableReason = "HostsAvailable"
	// NoHostsReason: no CapstanHost admits the namespace and matches spec.hostSelector.
	NoHostsReason = "NoHosts"
	// NoHostConnectedReason: there are hosts, but none of them is connected.
	NoHostConnectedReason = "NoHostConnected"

	// LoadBalancerHostMismatchReason: the CapstanHost that spec.loadBalancer names is another host than the one that
	// has the load balancer; the message says what to do.
	LoadBalancerHostMismatchReason = HostMismatchReason

	// NetworkReadyCondition is true when the cluster's network is on the load balancer's host; other
	// hosts make it together with the first machine.
	NetworkReadyCondition = "NetworkReady"
	// NetworkReadyReason: it is there.
	NetworkReadyReason = "NetworkReady"
	// NetworkInvalidReason: the machine, pod and Service networks cannot be used as they are.
	NetworkInvalidReason = "NetworkInvalid"
	// NoFreeNetworkReason: the pool of machine networks is used up.
	NoFreeNetworkReason = "NoFreeNetwork"
	// NetworkRefusedReason: the host refused the network; the message says why.
	NetworkRefusedReason = "NetworkRefused"

	// LoadBalancerReadyCondition is true when the control plane endpoint is known and, if Capstan
	// provides it, its load balancer listens.
	LoadBalancerReadyCondition = "LoadBalancerReady"
	// LoadBalancerReadyReason: it listens.
	LoadBalancerReadyReason = "LoadBalancerReady"
	// LoadBalancerExternalReason: the endpoint is provided by others and known.
	LoadBalancerExternalReason = "EndpointExternal"
	// WaitingForEndpointReason: the endpoint is provided by others and not known yet (IC-14).
	WaitingForEndpointReason = "WaitingForEndpoint"
	// LoadBalancerNotServingReason: the load balancer was made and does not listen; the message says why.
	LoadBalancerNotServingReason = "LoadBalancerNotServing"
	// LoadBalancerRefusedReason: the host refused the load balancer; the message says why.
	LoadBalancerRefusedReason = "LoadBalancerRefused"
)

// Conditions of a CapstanMachine. Ready sums them up.
const (
	// HostAssignedCondition is true when the machine was placed.
	HostAssignedCondition = "HostAssigned"
	// HostAssignedReason: spec.hostName says where.
	HostAssignedReason = "HostAssigned"
	// NoHostReason: no host takes the machine now; the message says why for each.
	NoHostReason = "NoHost"
	// HostNotFoundReason: spec.hostName names a CapstanHost that does not exist.
	HostNotFoundReason = "HostNotFound"
	// HostNotAllowedReason: spec.hostName names a CapstanHost that does not admit the namespace (ALL-18).
	HostNotAllowedReason = "HostNotAllowed"

	// AddressesAssignedCondition is true when the machine's addresses are in spec.
	AddressesAssignedCondition = "AddressesAssigned"
	// AddressesAssignedReason: they are.
	AddressesAssignedReason = "AddressesAssigned"
	// NoFreeAddressReason: the cluster's network is used up.
	NoFreeAddressReason = "NoFreeAddress"
	// WaitingForIPAddressReason: an IPAM claim has no address yet.
	WaitingForIPAddressReason = "WaitingForIPAddress"
	// AddressInvalidReason: an IPAM address cannot be used; the message says why.
	AddressInvalidReason = "AddressInvalid"

	// MachineRunningCondition is true while PID 1 of the machine runs.
	MachineRunningCondition = "MachineRunning"
	// MachineRunningReason: it runs.
	MachineRunningReason = "MachineRunning"
	// MachineStartingReason: the host is making the machine.
	MachineStartingReason = "MachineStarting"
	// MachineRestartingReason: PID 1 ended and is started again.
	MachineRestartingReason = "MachineRestarting"
	// MachineFailedReason: the machine's disk is lost, or PID 1 ended too often. In the second case the host starts the
	// machine again after a quarter of an hour, or when the CapstanMachine gets MachineStartAnnotation. Capstan does
	// not replace the machine: a MachineHealthCheck or an operator deletes its Machine.
	MachineFailedReason = "MachineFailed"
	// MachineLostReason is terminal: the host no longer has a machine that it had. A MachineHealthCheck or an operator
	// deletes its Machine.
	MachineLostReason = "MachineLost"
	// MachineRefusedReason: the host refused the machine; the message says why.
	MachineRefusedReason = "MachineRefused"
	// MachineHostMismatchReason: the CapstanHost that spec.hostName names is another host than the one that has the
	// machine. Nothing is known of the machine, and nothing is done to it; the message says what to do.
	MachineHostMismatchReason = HostMismatchReason
	// MachineHostUnreachableReason: nothing is known of the machine while its host is not reached.
	MachineHostUnreachableReason = "HostUnreachable"

	// BootstrapSucceededCondition is true when the bootstrap data was applied and its sentinel seen (IM-08).
	BootstrapSucceededCondition = "BootstrapSucceeded"
	// BootstrapSucceededReason: it was.
	BootstrapSucceededReason = "BootstrapSucceeded"
	// BootstrapRunningReason: the bootstrap data is being applied.
	BootstrapRunningReason = "BootstrapRunning"
	// BootstrapFailedReason is terminal: the bootstrap failed; the message names the step.
	BootstrapFailedReason = "BootstrapFailed"

	// ServicesHealthyCondition is true when every service of the machine runs.
	ServicesHealthyCondition = "ServicesHealthy"
	// ServicesHealthyReason: they do.
	ServicesHealthyReason = "ServicesHealthy"
	// ServicesStartingReason: some have not started yet.
	ServicesStartingReason = "ServicesStarting"
	// ServicesUnhealthyReason: some are stopped or in back-off; the message names them.
	ServicesUnhealthyReason = "ServicesUnhealthy"
)

// Reasons that conditions of several kinds share.
const (
	// WaitingForClusterInfrastructureReason: the cluster's network and endpoint are not there yet.
	WaitingForClusterInfrastructureReason = clusterv1.WaitingForClusterInfrastructureReadyReason
	// WaitingForBootstrapDataReason: the bootstrap provider has not made the data yet.
	WaitingForBootstrapDataReason = clusterv1.WaitingForBootstrapDataReason
	// HostMismatchReason: a CapstanHost is another host than the one that was chosen, under the same name.
	HostMismatchReason = "HostMismatch"
	// DeletionBlockedReason: deletion waits for something; the message says for what and what to do.
	DeletionBlockedReason = "DeletionBlocked"
)

const (
	// HostFinalizer keeps a CapstanHost while machines, networks or load balancers are on it.
	HostFinalizer = "infrastructure.capstan.dev/capstanhost"

	// HostAbandonedAnnotation on a CapstanHost says that the host is gone for good. What was on it counts as
	// gone as well: deletion of its machines, networks and load balancers does not wait for
	// it, and nothing new is placed on it. Set it only when the host will not come back: what
	// still runs there would be orphaned.
	HostAbandonedAnnotation = "infrastructure.capstan.dev/abandoned"

	// MachineStartAnnotation on a CapstanMachine starts a failed machine again now, with all of its restarts. The
	// controller removes the annotation when the host has answered.
	MachineStartAnnotation = "infrastructure.capstan.dev/start"

	// MachineCIDRFromPoolAnnotation on a CapstanCluster says that the controller chose
	// spec.network.machineCIDR, so that it may choose another one as long as no host has taken it.
	MachineCIDRFromPoolAnnotation = "infrastructure.capstan.dev/machine-cidr-from-pool"
)

const (
	// DefaultLoadBalancerPort is the port of the control plane endpoint.
	DefaultLoadBalancerPort = 6443

	// DefaultAPIServerPort is where a control plane machine's API server listens, unless the Cluster's
	// spec.clusterNetwork.apiServerPort says otherwise.
	DefaultAPIServerPort = 6443

	// DefaultMachineMemory is a machine's memory limit when spec.memory is not set.
	DefaultMachineMemory = "2Gi"
)
