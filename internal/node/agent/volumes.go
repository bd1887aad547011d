package agent

import (
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/tools/cache"

	"capstan.dev/capstan/internal/backoff"
	"capstan.dev/capstan/internal/node/initapi"
	"capstan.dev/capstan/internal/node/kube"
	"capstan.dev/capstan/internal/node/localvolume"
	"capstan.dev/capstan/internal/node/nodeconfig"
	"capstan.dev/capstan/internal/projectquota"
	"capstan.dev/capstan/internal/wakeup"
)

// volumeRetry and longestVolumeRetry are the first and the longest pause after which a refused claim or a volume that could not be
// removed is examined again: no event reports free space, or the end of a mount.
const (
	volumeRetry        = time.Second
	longestVolumeRetry = 30 * time.Second
)

// volumes provides the local volumes of one node.
type volumes struct {
	*agent
	client  dynamic.Interface
	folders localvolume.Folders
	// blocks are the folders of block volumes.
	blocks localvolume.Folders
	// init sets the limits of volumes and attaches block volumes: the agent lacks CAP_SYS_ADMIN.
	init *initapi.Client
	// controlPlane machines also remove the volumes of Nodes that are gone.
	controlPlane           bool
	claims, known, members cache.Store
	events                 *events
}

// provideVolumes creates and deletes local volumes of this node from the moment that the cluster has the StorageClass for them.
// Each step can be repeated after a crash: the records are the claims and volumes in the API, and those of the data that is made before
// its PersistentVolume (localvolume.Folders.Begin).
func (a *agent) provideVolumes(ctx context.Context) error {
	client, err := a.client(ctx, nodeconfig.AgentKubeconfig)
	if err != nil {
		return err
	}
	exists := func(*unstructured.Unstructured) (bool, error) { return true, nil }
	if err := kube.WaitFor(ctx, client, kube.StorageClasses, localvolume.Class, exists); err != nil {
		return err
	}
	wake := wakeup.New()
	v := &volumes{
		agent: a, client: client, folders: localvolume.OfMachine, blocks: localvolume.Blocks, init: initapi.NewClient(initapi.Socket),
		events: newEvents(a, client), controlPlane: a.config.Role != nodeconfig.RoleWorker,
	}
	if err := v.folders.Enforced(); err != nil {
		a.log.Info("The sizes of local volumes are not enforced", "reason", err)
	}
	if err := v.follow(ctx, wake.Send); err != nil {
		return err
	}
	// One timer: a refused claim can stay for days, and each change would add another one.
	retry := time.NewTimer(0)
	defer retry.Stop()
	for failures := 0; ; failures++ {
		select {
		case <-ctx.Done():
			return nil
		case <-wake:
			failures = 0
		case <-retry.C:
		}
		if err := v.sync(ctx); err != nil {
			a.log.Error("Local volumes are not up to date; trying again", "error", err)
			retry.Reset(backoff.After(failures, volumeRetry, longestVolumeRetry))
		}
	}
}

func (v *volumes) follow(ctx context.Context, changed func()) (err error) {
	if v.known, err = follow(ctx, v.client, kube.PersistentVolumes, "", typed[corev1.PersistentVolume](nil), changed); err != nil {
		return err
	}
	if v.controlPlane {
		if v.members, err = follow(ctx, v.client, kube.Nodes, "", stripNode, changed); err != nil {
			return err
		}
	}
	v.claims, err = follow(ctx, v.client, kube.PersistentVolumeClaims, "", typed[corev1.PersistentVolumeClaim](nil), changed)
	return err
}

// sync takes the next step of all claims and volumes. An error of one does not hold up others.
func (v *volumes) sync(ctx context.Context) error {
	var errs []error
	known := listed[corev1.PersistentVolume](v.known)
	for _, volume := range known {
		if localvolume.Node(volume) == v.name && localvolume.Released(volume) {
			errs = append(errs, v.remove(ctx, volume))
		}
	}
	promised := localvolume.Promised(known, v.name)
	wanted := map[string]bool{}
	for _, claim := range listed[corev1.PersistentVolumeClaim](v.claims) {
		if !localvolume.Wants(claim, v.name) || v.has(claim) {
			continue
		}
		wanted[localvolume.Name(claim)] = true
		if err := v.provide(ctx, claim, promised); err != nil {
			v.events.report(ctx, reference(claim), "ProvisioningFailed", err.Error())
			errs = append(errs, fmt.Errorf("the claim %s/%s: %w", claim.Namespace, claim.Name, err))
			continue
		}
		promised += localvolume.Size(claim)
	}
	errs = append(errs, v.removeUnfinished(ctx, false, wanted), v.removeUnfinished(ctx, true, wanted))
	if v.controlPlane {
		errs = append(errs, v.removeLost(ctx, known))
	}
	return errors.Join(errs...)
}

// has returns whether the volume of a claim exists, and only Kubernetes has not bound it yet.
func (v *volumes) has(claim *corev1.PersistentVolumeClaim) bool {
	_, found, _ := v.known.GetByKey(localvolume.Name(claim))
	return found
}

// provide creates the folder or the device first: a volume without it would make its pods fail.
func (v *volumes) provide(ctx context.Context, claim *corev1.PersistentVolumeClaim, promised int64) error {
	disk, err := v.folders.Disk()
	if err != nil {
		return err
	}
	if err := localvolume.Check(claim, disk, promised); err != nil {
		return err
	}
	block, create := localvolume.Block(claim.Spec.VolumeMode), v.create
	if block {
		create = v.init.ProvideDevice
	}
	folders := v.foldersOf(block)
	if err := folders.Begin(localvolume.Name(claim)); err != nil {
		return err
	}
	if err := create(ctx, localvolume.Name(claim), localvolume.Size(claim)); err != nil {
		return err
	}
	fields, err := runtime.DefaultUnstructuredConverter.ToUnstructured(localvolume.Volume(claim, v.name))
	if err != nil {
		return err
	}
	_, err = v.client.Resource(kube.PersistentVolumes).Create(ctx, &unstructured.Unstructured{Object: fields}, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return err
	}
	v.log.Info("Local volume created", "volume", localvolume.Name(claim), "namespace", claim.Namespace, "claim", claim.Name)
	return folders.End(localvolume.Name(claim))
}

// removeUnfinished removes the data of volumes that no claim wants any more before they had a PersistentVolume. It asks the API server:
// the answer to a creation can have been lost, also by the death of an earlier agent.
func (v *volumes) removeUnfinished(ctx context.Context, block bool, wanted map[string]bool) error {
	folders := v.foldersOf(block)
	names, err := folders.Unfinished()
	errs := []error{err}
	for _, name := range names {
		if wanted[name] {
			continue
		}
		found, err := v.client.Resource(kube.PersistentVolumes).List(ctx, metav1.ListOptions{FieldSelector: "metadata.name=" + name})
		if err == nil && len(found.Items) == 0 {
			err = v.removeData(ctx, name, block)
		}
		if err == nil {
			err = folders.End(name)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("removing the data of %s, which has no PersistentVolume: %w", name, err))
		}
	}
	return errors.Join(errs...)
}

// limited reports whether this machine enforces the sizes of its volumes. Without an answer, a volume waits: it would have no limits, or
// its limits would remain.
func (v *volumes) limited() (bool, error) {
	err := v.folders.Enforced()
	if errors.Is(err, projectquota.ErrNone) {
		return false, nil
	}
	return err == nil, err
}

// create creates the folder of a volume with its limits.
func (v *volumes) create(ctx context.Context, name string, size int64) error {
	if err := v.folders.Create(name); err != nil {
		return err
	}
	if limited, err := v.limited(); err != nil || !limited {
		return err
	}
	return v.init.LimitVolume(ctx, name, size)
}

// removeFolder removes the folder of a volume last, because it is the record of the limits.
func (v *volumes) removeFolder(ctx context.Context, name string) error {
	limited, err := v.limited()
	if err != nil {
		return err
	}
	if limited {
		if err := v.folders.Empty(name); err != nil {
			return err
		}
		if err := v.init.UnlimitVolume(ctx, name); err != nil {
			return err
		}
	}
	return v.folders.Remove(name)
}

// removeBlock removes the data of a block volume after its device.
func (v *volumes) removeBlock(ctx context.Context, name string) error {
	if err := v.init.WithdrawDevice(ctx, name); err != nil {
		return err
	}
	return v.blocks.Remove(name)
}

func (v *volumes) removeData(ctx context.Context, name string, block bool) error {
	if block {
		return v.removeBlock(ctx, name)
	}
	return v.removeFolder(ctx, name)
}

func (v *volumes) foldersOf(block bool) localvolume.Folders {
	if block {
		return v.blocks
	}
	return v.folders
}

// remove removes the folder first: the volume is the record that the folder remains.
func (v *volumes) remove(ctx context.Context, volume *corev1.PersistentVolume) error {
	if err := v.removeData(ctx, volume.Name, localvolume.Block(volume.Spec.VolumeMode)); err != nil {
		err = fmt.Errorf("removing the data of %s: %w", volume.Name, err)
		v.events.report(ctx, corev1.ObjectReference{APIVersion: "v1", Kind: "PersistentVolume", Name: volume.Name, UID: volume.UID}, "DeletionFailed", err.Error())
		return err
	}
	if err := v.deleteVolume(ctx, volume); err != nil {
		return err
	}
	v.log.Info("Local volume removed", "volume", volume.Name)
	return nil
}

func (v *volumes) deleteVolume(ctx context.Context, volume *corev1.PersistentVolume) error {
	err := v.client.Resource(kube.PersistentVolumes).Delete(ctx, volume.Name, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &volume.UID}})
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// removeLost deletes the volumes of Nodes that are gone after their claims. It informs the users of the other claims.
func (v *volumes) removeLost(ctx context.Context, known []*corev1.PersistentVolume) error {
	var errs []error
	for _, volume := range localvolume.Lost(known, v.members.ListKeys()) {
		node := localvolume.Node(volume)
		// The store of Nodes can be older than that of volumes.
		if _, err := v.client.Resource(kube.Nodes).Get(ctx, node, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
			errs = append(errs, err)
			continue
		}
		if localvolume.Released(volume) {
			errs = append(errs, v.deleteVolume(ctx, volume))
			continue
		}
		if claim := volume.Spec.ClaimRef; claim != nil && volume.Status.Phase == corev1.VolumeBound {
			errs = append(errs, errors.New(v.reportLost(ctx, *claim, node)))
		}
	}
	return errors.Join(errs...)
}

func (v *volumes) reportLost(ctx context.Context, claim corev1.ObjectReference, node string) string {
	message := fmt.Sprintf("expected the node %s with the data of this claim, found no such Node: the data is lost with the machine; "+
		"delete the claim and its pod to start with an empty volume", node)
	v.events.report(ctx, claim, "VolumeLost", message)
	return fmt.Sprintf("the claim %s/%s: %s", claim.Namespace, claim.Name, message)
}

func reference(claim *corev1.PersistentVolumeClaim) corev1.ObjectReference {
	return corev1.ObjectReference{APIVersion: "v1", Kind: "PersistentVolumeClaim", Namespace: claim.Namespace, Name: claim.Name, UID: claim.UID}
}
