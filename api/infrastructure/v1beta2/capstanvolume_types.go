package v1beta2

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

const (
	// VolumeFinalizer keeps a CapstanVolume until its host has deleted the data.
	VolumeFinalizer = "infrastructure.capstan.dev/capstanvolume"
)

// VolumeReclaimPolicy is the end of a volume.
// +kubebuilder:validation:Enum=Retain;Delete
type VolumeReclaimPolicy string

const (
	// VolumeRetain keeps a volume until somebody deletes its CapstanVolume.
	VolumeRetain VolumeReclaimPolicy = "Retain"
	// VolumeDelete deletes a volume together with the owner of its machines.
	VolumeDelete VolumeReclaimPolicy = "Delete"
)

// MachineVolume is a volume that outlives its machine: a file system on a host, which is mounted into one machine at a time.
type MachineVolume struct {
	// name identifies the volume among those of the machine. The successor of the machine gets the volume of the same name.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([a-z0-9-]*[a-z0-9])?$`
	Name string `json:"name,omitempty"`

	// path is the folder of the machine where the volume is mounted: below /srv, /mnt, /data, /opt or /var/lib, and not where
	// the machine has its own files (/var/lib/kubelet, /var/lib/containerd, /var/lib/etcd, /var/lib/cni, /var/lib/capstan,
	// /opt/cni, /opt/capstan).
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=128
	// +kubebuilder:validation:XValidation:rule="self.matches('^/(srv|mnt|data|opt|var/lib)(/[A-Za-z0-9_-][A-Za-z0-9._-]*)+$')",message="path must be a clean path below /srv, /mnt, /data, /opt or /var/lib"
	// +kubebuilder:validation:XValidation:rule="!self.matches('^(/opt/(capstan|cni)|/var/lib/(capstan|cni|containerd|etcd|kubelet))(/.*)?$')",message="path must not be where the machine has its own files: /var/lib/kubelet, /var/lib/containerd, /var/lib/etcd, /var/lib/cni, /var/lib/capstan, /opt/cni, /opt/capstan"
	Path string `json:"path,omitempty"`

	// sizeGiB is the size of the volume in GiB. The host reserves it. It cannot be changed: a new name makes a new volume.
	// +required
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=16384
	SizeGiB int32 `json:"sizeGiB,omitempty"`

	// reclaimPolicy decides about the volume when the owner of its machines (MachineDeployment, MachinePool, control plane, or
	// a Machine without an owner) is deleted. Retain (default) keeps it, also after the Cluster is gone. Delete deletes it.
	// +optional
	ReclaimPolicy VolumeReclaimPolicy `json:"reclaimPolicy,omitempty"`
}

// CapstanVolumeSpec describes a volume of a host. The controller writes it.
// +kubebuilder:validation:XValidation:rule="self.id == oldSelf.id && self.hostName == oldSelf.hostName && self.clusterName == oldSelf.clusterName && self.owner == oldSelf.owner && self.volumeName == oldSelf.volumeName && self.sizeGiB == oldSelf.sizeGiB",message="id, hostName, clusterName, owner, volumeName and sizeGiB cannot be changed: a volume cannot move"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.hostID) || (has(self.hostID) && self.hostID == oldSelf.hostID)",message="hostID is written once by the controller and cannot be changed"
type CapstanVolumeSpec struct {
	// id identifies the volume on its host.
	// +required
	// +kubebuilder:validation:MinLength=8
	// +kubebuilder:validation:MaxLength=36
	// +kubebuilder:validation:Pattern=`^[a-z0-9-]+$`
	ID string `json:"id,omitempty"`

	// hostName is the name of the CapstanHost that has the volume.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	HostName string `json:"hostName,omitempty"`

	// hostID is the id of this host, as capstand generated it. The controller writes it after the host has made the volume. From
	// then on a volume that the host does not have is lost, and is not made again.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	HostID string `json:"hostID,omitempty"`

	// clusterName is the name of the Cluster of the machines that can have the volume.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	ClusterName string `json:"clusterName,omitempty"`

	// owner is the kind and the name of the owner of the machines that can have the volume, for example MachineDeployment/db.
	// +required
	// +kubebuilder:validation:MinLength=3
	// +kubebuilder:validation:MaxLength=317
	Owner string `json:"owner,omitempty"`

	// volumeName is the name of the volume in spec.volumes of the machines.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=32
	VolumeName string `json:"volumeName,omitempty"`

	// sizeGiB is the size of the volume in GiB.
	// +required
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=16384
	SizeGiB int32 `json:"sizeGiB,omitempty"`

	// machineName is the name of the CapstanMachine that has the volume. An empty name means that the volume is free.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	MachineName string `json:"machineName,omitempty"`
}

// CapstanVolumeStatus is the observed state of a CapstanVolume. It can be rebuilt from the spec and the host.
// +kubebuilder:validation:MinProperties=1
type CapstanVolumeStatus struct {
	// conditions describe the current state: Ready, Deleting, Paused.
	// +optional
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=32
	Conditions []metav1.Condition `json:"conditions,omitempty"`

	// observedGeneration is the latest generation of this object that the controller processed.
	// +optional
	// +kubebuilder:validation:Minimum=1
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
}

// +kubebuilder:object:root=true
// +kubebuilder:resource:path=capstanvolumes,shortName=capv,scope=Namespaced,categories=capstan
// +kubebuilder:storageversion
// +kubebuilder:metadata:labels={"cluster.x-k8s.io/v1beta2=v1beta2","clusterctl.cluster.x-k8s.io/move="}
// +kubebuilder:subresource:status
// +kubebuilder:printcolumn:name="Cluster",type="string",JSONPath=".spec.clusterName",description="Cluster"
// +kubebuilder:printcolumn:name="Owner",type="string",JSONPath=".spec.owner",description="Owner of the machines that can have the volume"
// +kubebuilder:printcolumn:name="Host",type="string",JSONPath=".spec.hostName",description="Host that has the volume"
// +kubebuilder:printcolumn:name="GiB",type="integer",JSONPath=".spec.sizeGiB",description="Size in GiB"
// +kubebuilder:printcolumn:name="State",type="string",JSONPath=`.status.conditions[?(@.type=="Ready")].reason`,description="Reason of the condition Ready"
// +kubebuilder:printcolumn:name="Machine",type="string",JSONPath=".spec.machineName",description="CapstanMachine that has the volume"
// +kubebuilder:printcolumn:name="Paused",type="string",JSONPath=`.status.conditions[?(@.type=="Paused")].status`,description="Reconciliation paused",priority=10
// +kubebuilder:printcolumn:name="Age",type="date",JSONPath=".metadata.creationTimestamp",description="Time since creation"

// CapstanVolume is a volume of a host that outlives machines. The controller creates it for spec.volumes of a CapstanMachine. Its
// deletion deletes the data.
type CapstanVolume struct {
	metav1.TypeMeta `json:",inline"`
	// metadata is the standard object's metadata.
	// +optional
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// spec describes the volume.
	// +required
	Spec CapstanVolumeSpec `json:"spec,omitempty,omitzero"`
	// status is the observed state of the volume.
	// +optional
	Status CapstanVolumeStatus `json:"status,omitempty,omitzero"`
}

// GetConditions returns the conditions.
func (v *CapstanVolume) GetConditions() []metav1.Condition { return v.Status.Conditions }

// SetConditions sets the conditions.
func (v *CapstanVolume) SetConditions(conditions []metav1.Condition) {
	v.Status.Conditions = conditions
}

// +kubebuilder:object:root=true

// CapstanVolumeList is a list of CapstanVolumes.
type CapstanVolumeList struct {
	metav1.TypeMeta `json:",inline"`
	// metadata is the standard list's metadata.
	// +optional
	metav1.ListMeta `json:"metadata,omitempty"`
	// items are the CapstanVolumes.
	Items []CapstanVolume `json:"items"`
}

func init() { objectTypes = append(objectTypes, &CapstanVolume{}, &CapstanVolumeList{}) }
