// Package localvolume provides volumes on the disk of a machine: folders below one folder, one for each
// PersistentVolume. Its decisions are pure functions.
//
// Layer: node. Allowed imports: api, library, contract.
package localvolume

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"regexp"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"capstan.dev/capstan/internal/node/machine"
)

const (
	// Class is the name of the StorageClass.
	Class = "capstan-local"
	// Provisioner of the StorageClass.
	Provisioner = "capstan.dev/local-volumes"
	// Root is the folder of all volumes of a machine. The admission policy in the workload cluster has the same path.
	Root = "/var/lib/capstan/volumes"
	// Devices is the folder with the device nodes of all block volumes. The admission policy has this path too.
	Devices = "/run/block-volumes"

	// SelectedNode is the annotation in which the scheduler names the node of a claim.
	SelectedNode = "volume.kubernetes.io/selected-node"
	// StorageProvisioner is the annotation in which Kubernetes names the provisioner of a claim.
	StorageProvisioner = "volume.kubernetes.io/storage-provisioner"
	// ProvisionedBy is the annotation in which a volume names its provisioner.
	ProvisionedBy = "pv.kubernetes.io/provisioned-by"
)

// names of volumes contain only the UID of their claim, so that nothing that a user writes is part of a path.
var names = regexp.MustCompile(`^pvc-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)

func checkName(name string) error {
	if !names.MatchString(name) {
		return fmt.Errorf("expected a volume with the name pvc-UID, found %q", name)
	}
	return nil
}

// Name returns the name of the volume of a claim.
func Name(claim *corev1.PersistentVolumeClaim) string { return "pvc-" + string(claim.UID) }

// Wants returns whether a claim waits for a volume on the node.
func Wants(claim *corev1.PersistentVolumeClaim, node string) bool {
	class := claim.Spec.StorageClassName
	return claim.DeletionTimestamp == nil && claim.Spec.VolumeName == "" && class != nil && *class == Class &&
		claim.Annotations[StorageProvisioner] == Provisioner && claim.Annotations[SelectedNode] == node
}

// Disk is the file system that contains the volumes of a machine, in bytes. Unwritten is the part of Free that volumes can still fill.
// Eviction is the free space below which the kubelet evicts pods, or 0 for the default.
type Disk struct{ Total, Free, Unwritten, Eviction int64 }

// reserve is the space that volumes leave for etcd, images and the logs of services. The kubelet evicts pods at a part of it: volumes alone
// must not lead to that.
func (d Disk) reserve() int64 {
	space := machine.EvictionSpace(d.Total)
	return cmp.Or(d.Eviction, space) + space
}

// Check returns an error unless the node can provide the volume of a claim. Promised is the sum of the sizes of the volumes that
// the node has.
func Check(claim *corev1.PersistentVolumeClaim, disk Disk, promised int64) error {
	spec := claim.Spec
	if err := checkName(Name(claim)); err != nil {
		return err
	}
	for _, mode := range spec.AccessModes {
		if mode != corev1.ReadWriteOnce && mode != corev1.ReadWriteOncePod {
			return fmt.Errorf("expected access mode ReadWriteOnce or ReadWriteOncePod, found %s: a local volume is on one node; use another StorageClass", mode)
		}
	}
	if spec.Selector != nil {
		return errors.New("expected no selector, because the volume is created for this claim; remove spec.selector")
	}
	if spec.DataSource != nil || spec.DataSourceRef != nil {
		return errors.New("expected no data source, because local volumes are created empty; remove spec.dataSource and spec.dataSourceRef")
	}
	return checkSize(size(spec.Resources.Requests), disk, promised)
}

func checkSize(request int64, disk Disk, promised int64) error {
	if request <= 0 {
		return fmt.Errorf("expected a size larger than 0, found %d; set spec.resources.requests.storage", request)
	}
	if available := max(0, min(disk.Free-disk.Unwritten, disk.Total-promised)-disk.reserve()); request > available {
		return fmt.Errorf("expected at most %s, found a request for %s: the disk of the machine has %s, of which %s are free, %s are promised to other volumes "+
			"(%s not written yet), and %s are reserved for the services of the machine; "+
			"delete the pod and the claim, and request less or free space on the machine",
			bytes(available), bytes(request), bytes(disk.Total), bytes(disk.Free), bytes(promised), bytes(max(0, disk.Unwritten)), bytes(disk.reserve()))
	}
	return nil
}

// Size returns the size of the volume of a claim, in bytes.
func Size(claim *corev1.PersistentVolumeClaim) int64 { return size(claim.Spec.Resources.Requests) }

func size(list corev1.ResourceList) int64 {
	quantity := list[corev1.ResourceStorage]
	if quantity.CmpInt64(math.MaxInt64) > 0 {
		return math.MaxInt64
	}
	return quantity.Value()
}

func bytes(n int64) string {
	const mebi = 1 << 20
	if n >= mebi {
		n -= n % mebi
	}
	return resource.NewQuantity(n, resource.BinarySI).String()
}

// Block returns whether a volume, or the volume of a claim, is a block volume.
func Block(mode *corev1.PersistentVolumeMode) bool {
	return mode != nil && *mode == corev1.PersistentVolumeBlock
}

// path returns the path of a volume in the machine.
func path(name string, mode *corev1.PersistentVolumeMode) string {
	if Block(mode) {
		return Devices + "/" + name
	}
	return Root + "/" + name
}

// Volume returns the PersistentVolume of a claim on a node. The admission policy of the workload cluster requires this form.
func Volume(claim *corev1.PersistentVolumeClaim, node string) *corev1.PersistentVolume {
	mode := corev1.PersistentVolumeFilesystem
	if Block(claim.Spec.VolumeMode) {
		mode = corev1.PersistentVolumeBlock
	}
	return &corev1.PersistentVolume{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "PersistentVolume"},
		ObjectMeta: metav1.ObjectMeta{Name: Name(claim), Annotations: map[string]string{ProvisionedBy: Provisioner}},
		Spec: corev1.PersistentVolumeSpec{
			AccessModes:                   claim.Spec.AccessModes,
			Capacity:                      corev1.ResourceList{corev1.ResourceStorage: claim.Spec.Resources.Requests[corev1.ResourceStorage]},
			PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimDelete,
			StorageClassName:              Class,
			VolumeMode:                    &mode,
			PersistentVolumeSource:        corev1.PersistentVolumeSource{Local: &corev1.LocalVolumeSource{Path: path(Name(claim), &mode)}},
			ClaimRef: &corev1.ObjectReference{
				APIVersion: "v1", Kind: "PersistentVolumeClaim", Namespace: claim.Namespace, Name: claim.Name, UID: claim.UID,
			},
			NodeAffinity: &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
				MatchExpressions: []corev1.NodeSelectorRequirement{{
					Key: corev1.LabelHostname, Operator: corev1.NodeSelectorOpIn, Values: []string{node},
				}},
			}}}},
		},
	}
}

// Node returns the node of a volume that an agent has created. It returns "" for every other volume, including one that has
// another form or path.
func Node(volume *corev1.PersistentVolume) string {
	spec := volume.Spec
	if volume.Annotations[ProvisionedBy] != Provisioner || spec.StorageClassName != Class || checkName(volume.Name) != nil ||
		spec.Local == nil || spec.Local.Path != path(volume.Name, spec.VolumeMode) || spec.NodeAffinity == nil || spec.NodeAffinity.Required == nil {
		return ""
	}
	terms := spec.NodeAffinity.Required.NodeSelectorTerms
	if len(terms) != 1 || len(terms[0].MatchExpressions) != 1 || len(terms[0].MatchFields) != 0 {
		return ""
	}
	e := terms[0].MatchExpressions[0]
	if e.Key != corev1.LabelHostname || e.Operator != corev1.NodeSelectorOpIn || len(e.Values) != 1 {
		return ""
	}
	return e.Values[0]
}

// Promised returns the sum of the sizes of a node's volumes.
func Promised(volumes []*corev1.PersistentVolume, node string) int64 {
	var sum int64
	for _, volume := range volumes {
		if Node(volume) == node {
			sum += size(volume.Spec.Capacity)
		}
	}
	return sum
}

// Released returns whether the claim of a volume is gone, and the volume should go too.
func Released(volume *corev1.PersistentVolume) bool {
	return volume.Status.Phase == corev1.VolumeReleased && volume.Spec.PersistentVolumeReclaimPolicy == corev1.PersistentVolumeReclaimDelete
}

// Lost returns the volumes whose node is gone. Their data went with the machine.
func Lost(volumes []*corev1.PersistentVolume, nodes []string) []*corev1.PersistentVolume {
	var lost []*corev1.PersistentVolume
	for _, volume := range volumes {
		if node := Node(volume); node != "" && !slices.Contains(nodes, node) {
			lost = append(lost, volume)
		}
	}
	return lost
}
