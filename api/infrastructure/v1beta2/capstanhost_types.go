package v1beta2

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// HostCredentialsLabel marks Secrets with credentials of hosts. The controller sets it when the host becomes the
// owner of the Secret.
const HostCredentialsLabel = "infrastructure.capstan.dev/host-credentials"

// Joining of hosts: `capstan host token` and `capstan host join`.
const (
	// HostSignerName is the signer of the CertificateSigningRequests with which hosts join.
	HostSignerName = "infrastructure.capstan.dev/host"
	// HostJoinServiceAccount is the service account of join tokens, in the namespace of the infrastructure provider. It can
	// create and read CertificateSigningRequests, and nothing else.
	HostJoinServiceAccount = "capstan-infrastructure-host-join"
	// HostTokenLabel marks the Secrets of join tokens. They contain the terms of the tokens, and not the tokens.
	HostTokenLabel = "infrastructure.capstan.dev/host-token"
	// HostRotateAuthorityAnnotation of a CapstanHost that joined requests another authority for its certificates. The
	// controller removes the annotation.
	HostRotateAuthorityAnnotation = "infrastructure.capstan.dev/rotate-authority"
	// HostJoinAnnotation of a CertificateSigningRequest contains the properties of the joining host, as JSON.
	HostJoinAnnotation = "infrastructure.capstan.dev/host-join"
)

// MaxUnknownMachines is the largest number of machines in status.unknownMachines.
const MaxUnknownMachines = 100

// CapstanHostSpec is the desired state of a CapstanHost.
// +kubebuilder:validation:XValidation:rule="!has(self.address) || self.address.startsWith('unix:') || has(self.credentialsRef)",message="credentialsRef is required for an address of the form host:port: capstand serves TCP with mutual TLS only"
// +kubebuilder:validation:XValidation:rule="has(self.connection) && self.connection == 'FromHost' ? !has(self.address) && has(self.credentialsRef) : has(self.address)",message="expected an address, or connection FromHost with credentialsRef and without an address: such a host dials the manager"
type CapstanHostSpec struct {
	// address is the address of the host's capstand: unix:///path for a socket on the same box, or host:port for
	// TCP with mutual TLS. Required unless connection is FromHost.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=512
	// +kubebuilder:validation:XValidation:rule="self.matches('^(unix:///.+|[^/:]+:[0-9]{1,5}|\\\\[[0-9a-fA-F:]+\\\\]:[0-9]{1,5})$')",message="address must be unix:///path/to/socket or host:port"
	Address string `json:"address,omitempty"`

	// connection is the side that opens the connections. FromManager: the manager connects to the address. FromHost: capstand
	// dials the manager (capstand --dial, the manager's --host-listen-address), for a host that the manager does not reach, for
	// example behind NAT. The certificate of such a host is for the name of the CapstanHost. Default: FromManager.
	// +optional
	Connection HostConnection `json:"connection,omitempty"`

	// credentialsRef names the Secret with the keys ca.crt, tls.crt and tls.key for mutual TLS. Required for an
	// address of the form host:port and for connection FromHost. The host becomes an owner of the Secret, so that clusterctl moves both.
	// +optional
	CredentialsRef SecretReference `json:"credentialsRef,omitempty,omitzero"`

	// allowedNamespaces selects the namespaces whose clusters may use the host. If not set, all namespaces may use
	// it. If it selects nothing, no namespace may use it.
	// +optional
	AllowedNamespaces *AllowedNamespaces `json:"allowedNamespaces,omitempty"`

	// failureDomain is the name of the unit that fails together with the host, for example a rack or a power
	// circuit. Default: the name of the host.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=256
	FailureDomain string `json:"failureDomain,omitempty"`

	// controlPlane allows control plane machines on the host. Default: true.
	// +optional
	ControlPlane *bool `json:"controlPlane,omitempty"`

	// tunnelAddress is an IP address of the host that the other hosts reach. Over it the host exchanges the traffic of
	// clusters that span several boxes (VXLAN, UDP port 4789). A new cluster whose load balancer is on a host with a
	// tunnelAddress can have machines on all hosts with one. Hosts of one box have the same tunnelAddress. It cannot change
	// while the host has machines or load balancers of such clusters: see status.tunnelAddress. If empty, the host shares
	// clusters only with hosts of its own box.
	// +optional
	// +kubebuilder:validation:MinLength=2
	// +kubebuilder:validation:MaxLength=39
	// +kubebuilder:validation:XValidation:rule="isIP(self) && ip.isCanonical(self) && ip(self).isGlobalUnicast()",message="tunnelAddress must be a unicast IP address in canonical form, for example 192.0.2.10"
	TunnelAddress string `json:"tunnelAddress,omitempty"`

	// virtualAddresses are networks, or single addresses with /32 or /128, from which control plane endpoints of clusters
	// across hosts, or in a LAN, get an address that moves between their hosts. A cluster with IPv6 only gets an IPv6 address, all
	// others get an IPv4 address. The addresses are in the network of an interface of
	// the host, for all hosts of a cluster in the same one, and nothing else there has them. A new cluster whose load
	// balancer is on this host gets one of them as its endpoint, or the one that its controlPlaneEndpoint names. Clusters
	// can have no virtual address that is not in this list. If empty, endpoints are addresses of one host.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MaxItems=16
	// +kubebuilder:validation:items:MinLength=6
	// +kubebuilder:validation:items:MaxLength=43
	// +kubebuilder:validation:XValidation:rule="self.all(n, isCIDR(n) && cidr(n) == cidr(n).masked() && cidr(n).prefixLength() >= (cidr(n).ip().family() == 4 ? 16 : 112) && cidr(n).ip().isGlobalUnicast())",message="virtualAddresses must be networks of at most 65536 addresses and without host bits, for example 192.0.2.64/28, 192.0.2.10/32 or 2001:db8::40/122"
	VirtualAddresses []string `json:"virtualAddresses,omitempty"`

	// services allows clusters to publish Services of type LoadBalancer at addresses of the host. If not set, no cluster can.
	// +optional
	Services *HostServices `json:"services,omitempty"`

	// allowedMounts are the folders and files of the host that machines can mount, each for some namespaces. If empty, no machine can
	// mount a path of the host. A change applies to new machines. Existing machines keep their mounts.
	// +optional
	// +listType=map
	// +listMapKey=path
	// +kubebuilder:validation:MaxItems=32
	AllowedMounts []AllowedMount `json:"allowedMounts,omitempty"`

	// allowedDevices are the devices of the host that machines can have, each for some namespaces. If empty, no machine can have a device
	// of the host. A change applies to new machines. Existing machines keep their devices.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=32
	AllowedDevices []AllowedDevice `json:"allowedDevices,omitempty"`

	// lanNetworks are networks of the user to which machines can be attached, each for some namespaces and with addresses for them. If
	// empty, machines are in networks of their clusters only. A change applies to new machines. Existing machines keep their network.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=16
	LANNetworks []LANNetwork `json:"lanNetworks,omitempty"`

	// taints keep new machines off the host, unless spec.hostTolerations of the CapstanMachine tolerates them. They steer the
	// placement and are no access control: see allowedNamespaces. Load balancers do not regard them.
	// +optional
	// +listType=map
	// +listMapKey=key
	// +listMapKey=effect
	// +kubebuilder:validation:MaxItems=16
	Taints []HostTaint `json:"taints,omitempty"`

	// unschedulable prevents new machines on the host. Existing machines continue. Default: false.
	// +optional
	Unschedulable *bool `json:"unschedulable,omitempty"`

	// drain replaces the machines of the host on other hosts. Nothing new is placed on the host. Capstan deletes the
	// Machines one after another, of each cluster at most one control plane Machine and one worker at a time, and only
	// while all others of the cluster are Available. Their owners create the replacements. The condition Drained shows the
	// progress. Default: false.
	// +optional
	Drain *bool `json:"drain,omitempty"`

	// rebootRequestedAt requests one reboot of the host. The time identifies the request: set the current time, and a later time
	// for the next reboot. The host is drained as with drain, rebooted through systemd, and accepts machines again when its capstand
	// is connected. The condition Rebooted shows the progress. If you remove the field before the reboot, the request ends.
	// +optional
	// +kubebuilder:validation:XValidation:rule="self >= oldSelf",message="rebootRequestedAt can only be replaced by a later time: set the current time to request another reboot"
	RebootRequestedAt metav1.Time `json:"rebootRequestedAt,omitempty,omitzero"`

	// fencing lets the host stop its machines when it is cut off. If not set, the host never stops them.
	// +optional
	Fencing HostFencing `json:"fencing,omitempty,omitzero"`
}

// HostConnection is the side that opens the connections between a manager and a host.
// +kubebuilder:validation:Enum=FromManager;FromHost
type HostConnection string

const (
	// HostConnectionFromManager is the default: the manager connects to spec.address.
	HostConnectionFromManager HostConnection = "FromManager"
	// HostConnectionFromHost is for hosts that dial the manager.
	HostConnectionFromHost HostConnection = "FromHost"
)

// HostFencing is the condition under which a host stops its machines.
// +kubebuilder:validation:MinProperties=1
type HostFencing struct {
	// stopAfterSeconds is the time after which the host stops a machine, if it reaches neither a manager of this management
	// cluster nor any other host of the machine's cluster. A stopped machine starts again when a manager confirms it. The
	// machines of a cluster that is on one host only are never stopped. Do not set it on hosts that run the management cluster
	// itself.
	// +required
	// +kubebuilder:validation:Minimum=30
	// +kubebuilder:validation:Maximum=3600
	StopAfterSeconds *int32 `json:"stopAfterSeconds,omitempty"`
}

// HostServices allows clusters to publish Services at addresses that the host gets for them, or at ports of its own addresses.
// +kubebuilder:validation:MinProperties=1
// +kubebuilder:validation:XValidation:rule="has(self.addresses) == has(self.allowedNamespaces)",message="addresses and allowedNamespaces must be set together: the namespaces may publish the addresses"
// +kubebuilder:validation:XValidation:rule="has(self.hostAddresses) == has(self.hostPorts)",message="hostAddresses and hostPorts must be set together: the ports are published at these addresses of the host"
type HostServices struct {
	// addresses are networks, or single addresses with /32 or /128, from which Services can have addresses. They are in the
	// network of an interface of the host, and nothing else there has them. Clients of this network reach the Services. If empty, the
	// host gets no address for a Service.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=16
	// +kubebuilder:validation:items:MinLength=9
	// +kubebuilder:validation:items:MaxLength=43
	// +kubebuilder:validation:XValidation:rule="self.all(n, isCIDR(n) && cidr(n) == cidr(n).masked() && cidr(n).prefixLength() >= (cidr(n).ip().family() == 4 ? 16 : 64) && cidr(n).ip().isGlobalUnicast())",message="addresses must be networks without host bits, of at most 65536 IPv4 addresses or a /64 of IPv6, for example 192.0.2.64/28, 192.0.2.10/32 or 2001:db8::100/120"
	Addresses []string `json:"addresses,omitempty"`

	// allowedNamespaces selects the namespaces whose clusters may publish Services at addresses. It has to be set with addresses: a
	// host that admits the machines of a namespace does not thereby open ports for it. It does not authorise hostPorts.
	// +optional
	AllowedNamespaces AllowedNamespaces `json:"allowedNamespaces,omitempty,omitzero"`

	// hostAddresses are addresses that the host itself has: at most one of each family. Clients reach Services of the class
	// capstan.dev/host-ports at hostPorts of these addresses.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=2
	// +kubebuilder:validation:items:MinLength=2
	// +kubebuilder:validation:items:MaxLength=39
	// +kubebuilder:validation:XValidation:rule="self.all(a, isIP(a) && ip.isCanonical(a) && ip(a).isGlobalUnicast()) && (self.size() < 2 || ip(self[0]).family() != ip(self[1]).family())",message="hostAddresses must be one IPv4 or one IPv6 address of the host, or one of each, in canonical form, for example 192.0.2.10 and 2001:db8::10"
	HostAddresses []string `json:"hostAddresses,omitempty"`

	// hostPorts authorise ports of hostAddresses, each for some namespaces. Nothing else is authorised. If you remove a port, its
	// publication ends.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=64
	HostPorts []HostPorts `json:"hostPorts,omitempty"`
}

// HostPorts authorises ports of a host for clusters of some namespaces.
// +kubebuilder:validation:XValidation:rule="!has(self.endPort) || self.endPort >= self.port",message="endPort must be port or a higher one"
type HostPorts struct {
	// protocol is TCP or UDP.
	// +required
	Protocol HostPortProtocol `json:"protocol,omitempty"`

	// port is the only port, or the first one of a range.
	// +required
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=65535
	Port int32 `json:"port,omitempty"`

	// endPort is the last port of a range. Default: port.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=65535
	EndPort int32 `json:"endPort,omitempty"`

	// allowedNamespaces selects the namespaces whose clusters may publish Services at the ports. An empty selector selects all.
	// +required
	AllowedNamespaces AllowedNamespaces `json:"allowedNamespaces,omitempty,omitzero"`
}

// HostPortProtocol is the protocol of a published port.
// +kubebuilder:validation:Enum=TCP;UDP
type HostPortProtocol string

const (
	// HostPortTCP is TCP.
	HostPortTCP HostPortProtocol = "TCP"
	// HostPortUDP is UDP.
	HostPortUDP HostPortProtocol = "UDP"
)

// HostTaintEffect is the effect of a taint on machines that do not tolerate it.
// +kubebuilder:validation:Enum=NoSchedule;PreferNoSchedule
type HostTaintEffect string

const (
	// HostTaintNoSchedule keeps new machines off the host. Existing machines continue.
	HostTaintNoSchedule HostTaintEffect = "NoSchedule"
	// HostTaintPreferNoSchedule places new machines on other hosts, if one of them accepts the machine.
	HostTaintPreferNoSchedule HostTaintEffect = "PreferNoSchedule"
)

// HostTaint keeps machines off a host that do not tolerate it.
type HostTaint struct {
	// key is the name of the taint, in the form of a label's key.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=317
	// +kubebuilder:validation:Pattern=`^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$`
	Key string `json:"key,omitempty"`

	// value belongs to the key, in the form of a label's value. Default: the empty value.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$`
	Value string `json:"value,omitempty"`

	// effect is NoSchedule or PreferNoSchedule. To remove the machines of a host, set its drain.
	// +required
	Effect HostTaintEffect `json:"effect,omitempty"`
}

// Dials returns whether capstand of the host dials the manager.
func (h *CapstanHost) Dials() bool { return h.Spec.Connection == HostConnectionFromHost }

// SecretReference names a Secret.
type SecretReference struct {
	// name is the name of the Secret.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name,omitempty"`

	// namespace is the namespace of the Secret.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	Namespace string `json:"namespace,omitempty"`
}

// AllowedNamespaces selects namespaces by name or by label. A namespace is allowed if either selects it.
// +kubebuilder:validation:MinProperties=1
type AllowedNamespaces struct {
	// names lists allowed namespaces. To admit no namespace, use a selector that matches none.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=1000
	// +kubebuilder:validation:items:MinLength=1
	// +kubebuilder:validation:items:MaxLength=63
	Names []string `json:"names,omitempty"`

	// selector selects allowed namespaces by label.
	// +optional
	Selector *metav1.LabelSelector `json:"selector,omitempty"`
}

// CapstanHostStatus is the observed state of a CapstanHost.
// +kubebuilder:validation:MinProperties=1
type CapstanHostStatus struct {
	// conditions describe the current state: Ready, Connected, Drained, Rebooted, Fencing,
	// TunnelReady, CertificatesExpiring, Deleting, Paused.
	// +optional
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=32
	Conditions []metav1.Condition `json:"conditions,omitempty"`

	// capacity is the cpu and memory of the host that machines can use, as ephemeral-storage the size of the file system
	// that has their disks, and the number of its CDI devices by kind.
	// +optional
	Capacity corev1.ResourceList `json:"capacity,omitempty"`

	// allocatable is the part of the capacity that is not used. The ephemeral-storage is the capacity less the sizes of
	// all disks. It is 0 if they exceed the capacity: disks occupy only their written part, so the host still accepts
	// machines. Of CDI devices it has those that no machine has.
	// +optional
	Allocatable corev1.ResourceList `json:"allocatable,omitempty"`

	// diskBackend is the method by which the host limits the disks of machines. Image: each disk is an ext4 file system in a sparse file, on a
	// loop device. None: the host cannot limit disks, and each machine can fill the disk of the host; `capstan doctor` on the
	// host has the cause.
	// +optional
	DiskBackend DiskBackend `json:"diskBackend,omitempty"`

	// localVolumeSizes shows whether nodes on new machines of the host enforce the sizes of local volumes. Enforced: the disks of machines
	// get project quotas. NotEnforced: a pod can write more to its local volume than its claim requested, because the kernel
	// of the host has no project quotas for ext4 or diskBackend is None; `capstan doctor` on the host has the cause.
	// +optional
	LocalVolumeSizes LocalVolumeSizes `json:"localVolumeSizes,omitempty"`

	// machines is the number of machines on the host, including machines of other management clusters.
	// +optional
	// +kubebuilder:validation:Minimum=0
	Machines *int32 `json:"machines,omitempty"`

	// versions lists the Kubernetes versions that the host can run.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=100
	// +kubebuilder:validation:items:MinLength=1
	// +kubebuilder:validation:items:MaxLength=64
	Versions []string `json:"versions,omitempty"`

	// images lists the images of the host, without the image `host`, which every host has.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=64
	Images []HostImage `json:"images,omitempty"`

	// containerImages lists the archives with the container images that each new machine of the host imports.
	// +optional
	// +listType=map
	// +listMapKey=archive
	// +kubebuilder:validation:MaxItems=64
	ContainerImages []HostContainerImages `json:"containerImages,omitempty"`

	// nodeInfo contains the architecture and operating system of the host.
	// +optional
	NodeInfo NodeInfo `json:"nodeInfo,omitempty,omitzero"`

	// system contains the software of the host.
	// +optional
	System HostSystem `json:"system,omitempty,omitzero"`

	// boxID identifies the Linux box of the host. All hosts on one box have the same boxID. The machines of a
	// cluster are placed on hosts of one box, unless the cluster has network.overlay or is in a LAN. A host without
	// a boxID is treated as a host of any box.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=64
	BoxID string `json:"boxID,omitempty"`

	// overlayPublicKey is the WireGuard key with which the host encrypts the traffic of clusters to other hosts. It is empty if
	// the host does not encrypt it. All hosts of a cluster encrypt it, or none does.
	// +optional
	// +kubebuilder:validation:Pattern=`^[A-Za-z0-9+/]{43}=$`
	OverlayPublicKey string `json:"overlayPublicKey,omitempty"`

	// tunnelAddress is the tunnel address of the networks on the host that span several boxes. As long as it is set,
	// spec.tunnelAddress cannot change to another one. It is empty if the host has no such network, or if its capstand does not
	// report it.
	// +optional
	// +kubebuilder:validation:MinLength=2
	// +kubebuilder:validation:MaxLength=39
	TunnelAddress string `json:"tunnelAddress,omitempty"`

	// fencing is the fencing that the host has acknowledged. It is empty while a change is not acknowledged.
	// +optional
	Fencing HostFencing `json:"fencing,omitempty,omitzero"`

	// reboot is the request of spec.rebootRequestedAt that the controller has begun or completed.
	// +optional
	Reboot HostReboot `json:"reboot,omitempty,omitzero"`

	// unknownMachines are machines on the host that belong to this management cluster and have no
	// CapstanMachine, as after the restore of an old etcd; the first 100 by id. They run on, and their addresses are not
	// given to others. Capstan does not remove them: see the annotation infrastructure.capstan.dev/prune.
	// +optional
	// +listType=map
	// +listMapKey=id
	// +kubebuilder:validation:MaxItems=100
	UnknownMachines []UnknownMachine `json:"unknownMachines,omitempty"`

	// observedGeneration is the latest generation of this object that the controller processed.
	// +optional
	// +kubebuilder:validation:Minimum=1
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
}

// HostReboot is a reboot that was requested.
type HostReboot struct {
	// requestedAt is the time that identifies the request.
	// +required
	RequestedAt metav1.Time `json:"requestedAt,omitempty,omitzero"`

	// bootID is the host's boot before the reboot. The reboot is complete when the host has another one.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=64
	BootID string `json:"bootID,omitempty"`

	// completedAt is the time at which the controller saw that the host had returned.
	// +optional
	CompletedAt metav1.Time `json:"completedAt,omitempty,omitzero"`
}

// RebootPending returns whether a reboot of the host is requested and not complete.
func (h *CapstanHost) RebootPending() bool {
	done := h.RebootBegun() && !h.Status.Reboot.CompletedAt.IsZero()
	return !h.Spec.RebootRequestedAt.IsZero() && !done
}

// RebootBegun returns whether the status records the present request.
func (h *CapstanHost) RebootBegun() bool {
	return h.Status.Reboot.RequestedAt.Equal(&h.Spec.RebootRequestedAt)
}

// HostContainerImages are the container images of an archive.
type HostContainerImages struct {
	// archive is the name of the file.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=255
	Archive string `json:"archive,omitempty"`

	// names of the images: the first 16 of the archive, and at most 64 of all archives.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=16
	// +kubebuilder:validation:items:MinLength=1
	// +kubebuilder:validation:items:MaxLength=256
	Names []string `json:"names,omitempty"`

	// problem is the reason why machines do not get the images.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=256
	Problem string `json:"problem,omitempty"`
}

// HostImage is a root file system for machines.
type HostImage struct {
	// name of the image, for spec.image of CapstanMachines.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	Name string `json:"name,omitempty"`

	// digest of the content. It is empty if machines cannot have the image.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=71
	Digest string `json:"digest,omitempty"`

	// problem is the reason why machines cannot have the image.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=256
	Problem string `json:"problem,omitempty"`
}

// HostSystem is the software of a host.
// +kubebuilder:validation:MinProperties=1
type HostSystem struct {
	// capstandVersion is the version of the running capstand, for example v0.1.0.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=256
	CapstandVersion string `json:"capstandVersion,omitempty"`

	// kernelVersion is the release of the kernel, as `uname -r` prints it.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=256
	KernelVersion string `json:"kernelVersion,omitempty"`

	// osImage is the name of the distribution: PRETTY_NAME of os-release(5).
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=256
	OSImage string `json:"osImage,omitempty"`

	// cgroupVersion is 1 or 2.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=2
	CgroupVersion *int32 `json:"cgroupVersion,omitempty"`
}

// DiskBackend is the method by which a host limits the disks of machines.
// +kubebuilder:validation:Enum=Image;None
type DiskBackend string

// Backends of a host for the disks of its machines.
const (
	// DiskBackendImage: each disk is an ext4 file system in a sparse file, on a loop device.
	DiskBackendImage DiskBackend = "Image"
	// DiskBackendNone: the disks of machines have no limit.
	DiskBackendNone DiskBackend = "None"
)

// LocalVolumeSizes shows whether nodes on a host enforce the sizes of local volumes.
// +kubebuilder:validation:Enum=Enforced;NotEnforced
type LocalVolumeSizes string

// Values of LocalVolumeSizes.
const (
	// LocalVolumeSizesEnforced: the disks of new machines have project quotas.
	LocalVolumeSizesEnforced LocalVolumeSizes = "Enforced"
	// LocalVolumeSizesNotEnforced: a pod can write more to its volume than its claim requested.
	LocalVolumeSizesNotEnforced LocalVolumeSizes = "NotEnforced"
)

// UnknownMachine is a machine without a CapstanMachine.
type UnknownMachine struct {
	// id of the machine on its host.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	ID string `json:"id,omitempty"`

	// namespace of the CapstanMachine that it was made for.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	Namespace string `json:"namespace,omitempty"`

	// name of the CapstanMachine that it was made for.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name,omitempty"`

	// cluster is the name of its Cluster.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Cluster string `json:"cluster,omitempty"`

	// addresses of the machine.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=32
	// +kubebuilder:validation:items:MinLength=1
	// +kubebuilder:validation:items:MaxLength=39
	Addresses []string `json:"addresses,omitempty"`

	// since is the time at which the controller first saw that the machine has no CapstanMachine.
	// +required
	Since metav1.Time `json:"since,omitempty,omitzero"`
}

// +kubebuilder:object:root=true
// +kubebuilder:resource:path=capstanhosts,shortName=caph,scope=Cluster,categories=cluster-api;capstan
// +kubebuilder:storageversion
// +kubebuilder:metadata:labels="cluster.x-k8s.io/v1beta2=v1beta2"
// +kubebuilder:subresource:status
// +kubebuilder:metadata:labels="clusterctl.cluster.x-k8s.io/move-hierarchy="
// +kubebuilder:printcolumn:name="Ready",type="string",JSONPath=`.status.conditions[?(@.type=="Ready")].status`,description="The host is connected and accepts machines"
// +kubebuilder:printcolumn:name="Reason",type="string",JSONPath=`.status.conditions[?(@.type=="Ready")].reason`,description="Reason"
// +kubebuilder:printcolumn:name="Domain",type="string",JSONPath=".spec.failureDomain",description="Failure domain"
// +kubebuilder:printcolumn:name="Machines",type="integer",JSONPath=".status.machines",description="Machines on the host"
// +kubebuilder:printcolumn:name="Memory",type="string",JSONPath=".status.capacity.memory",description="Memory for machines"
// +kubebuilder:printcolumn:name="Free",type="string",JSONPath=".status.allocatable.memory",description="Free memory"
// +kubebuilder:printcolumn:name="Disk",type="string",JSONPath=".status.capacity.ephemeral-storage",description="Size of the file system for machines' disks",priority=10
// +kubebuilder:printcolumn:name="Versions",type="string",JSONPath=".status.versions",description="Kubernetes versions",priority=10
// +kubebuilder:printcolumn:name="Capstand",type="string",JSONPath=".status.system.capstandVersion",description="Version of capstand",priority=10
// +kubebuilder:printcolumn:name="Kernel",type="string",JSONPath=".status.system.kernelVersion",description="Release of the kernel",priority=10
// +kubebuilder:printcolumn:name="Address",type="string",JSONPath=".spec.address",description="capstand's address",priority=10
// +kubebuilder:printcolumn:name="Paused",type="string",JSONPath=`.status.conditions[?(@.type=="Paused")].status`,description="Reconciliation paused",priority=10
// +kubebuilder:printcolumn:name="Age",type="date",JSONPath=".metadata.creationTimestamp",description="Time since creation"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.status) || !has(oldSelf.status.tunnelAddress) || !has(self.spec.tunnelAddress) && !has(oldSelf.spec.tunnelAddress) || has(self.spec.tunnelAddress) && (self.spec.tunnelAddress == oldSelf.status.tunnelAddress || has(oldSelf.spec.tunnelAddress) && self.spec.tunnelAddress == oldSelf.spec.tunnelAddress)",message="spec.tunnelAddress cannot change while the host has networks of clusters across hosts, whose address is in status.tunnelAddress: drain the host and move load balancers to other hosts first"

// CapstanHost is a Linux host whose capstand runs machines. It is cluster-scoped, because namespaces share hosts.
type CapstanHost struct {
	metav1.TypeMeta `json:",inline"`
	// metadata is the standard object's metadata.
	// +optional
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// spec is the desired state of the host.
	// +required
	Spec CapstanHostSpec `json:"spec,omitempty,omitzero"`
	// status is the observed state of the host.
	// +optional
	Status CapstanHostStatus `json:"status,omitempty,omitzero"`
}

// GetConditions returns the conditions.
func (h *CapstanHost) GetConditions() []metav1.Condition { return h.Status.Conditions }

// SetConditions sets the conditions.
func (h *CapstanHost) SetConditions(conditions []metav1.Condition) { h.Status.Conditions = conditions }

// +kubebuilder:object:root=true

// CapstanHostList is a list of CapstanHosts.
type CapstanHostList struct {
	metav1.TypeMeta `json:",inline"`
	// metadata is the standard list's metadata.
	// +optional
	metav1.ListMeta `json:"metadata,omitempty"`
	// items are the CapstanHosts.
	Items []CapstanHost `json:"items"`
}

func init() { objectTypes = append(objectTypes, &CapstanHost{}, &CapstanHostList{}) }
