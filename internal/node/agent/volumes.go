package agent

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"

	"capstan.dev/capstan/internal/node/initapi"
	"capstan.dev/capstan/internal/node/kube"
	"capstan.dev/capstan/internal/node/localvolume"
	"capstan.dev/capstan/internal/node/nodeconfig"
	"capstan.dev/capstan/internal/node/provision"
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

	// providing is held while a claim gets its volume: all volumes share the space of the disk.
	providing sync.Mutex
	// removing is the volume whose data removeUnfinished removes now; providing guards it.
	removing string
	// made has the claims of the volumes that known can still lack.
	made  map[string]*corev1.PersistentVolumeClaim
	space space
}

// space is the disk, and the part of it that is promised to volumes, at a time. A user can make many claims that are refused: they share it.
type space struct {
	at       time.Time
	disk     localvolume.Disk
	promised int64
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
		events: newEvents(a, client), controlPlane: a.config.Role != nodeconfig.RoleWorker, made: map[string]*corev1.PersistentVolumeClaim{},
	}
	if err := v.folders.Enforced(); err != nil {
		a.log.Info("The sizes of local volumes are not enforced", "reason", err)
	}
	if err := v.follow(ctx, wake.Send); err != nil {
		return err
	}
	return v.run(ctx, wake)
}

func (v *volumes) follow(ctx context.Context, changed func()) (err error) {
	gone := func(object any) {
		v.recordGone(object)
		changed()
	}
	if v.known, err = followGone(ctx, v.client, kube.PersistentVolumes, "", typed[corev1.PersistentVolume](nil), changed, gone); err != nil {
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

// run takes the next steps of all namespaces until ctx ends. Each namespace has its own goroutine and its own pauses: a removal can last a
// minute, and a user can make many claims that are refused.
func (v *volumes) run(ctx context.Context, changed <-chan struct{}) error {
	var steps sync.WaitGroup
	defer steps.Wait()
	queue := workqueue.NewTypedRateLimitingQueue(workqueue.NewTypedItemExponentialFailureRateLimiter[string](volumeRetry, longestVolumeRetry))
	defer queue.ShutDown()
	steps.Go(func() {
		for namespace, stopped := queue.Get(); !stopped; namespace, stopped = queue.Get() {
			steps.Go(func() { v.step(ctx, queue, namespace) })
		}
	})
	for {
		for namespace := range v.namespaces() {
			queue.Forget(namespace)
			queue.Add(namespace)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		}
	}
}

// step takes the next step of a namespace. The queue gives the namespace to no other goroutine meanwhile.
func (v *volumes) step(ctx context.Context, queue workqueue.TypedRateLimitingInterface[string], namespace string) {
	defer queue.Done(namespace)
	if err := v.sync(ctx, namespace); err != nil {
		v.log.Error("Local volumes are not up to date; trying again", "namespace", namespace, "error", err)
		queue.AddRateLimited(namespace)
		return
	}
	queue.Forget(namespace)
}

// noNamespace stands for the data of volumes without a claim.
const noNamespace = ""

// namespaces returns the namespaces with a step.
func (v *volumes) namespaces() map[string]bool {
	found := map[string]bool{noNamespace: true}
	for _, claim := range v.wanted() {
		found[claim.Namespace] = true
	}
	known := listed[corev1.PersistentVolume](v.known)
	for _, volume := range known {
		if localvolume.Node(volume) == v.name && localvolume.Released(volume) {
			found[namespaceOf(volume)] = true
		}
	}
	if v.controlPlane {
		for _, volume := range localvolume.Lost(known, v.members.ListKeys()) {
			found[namespaceOf(volume)] = true
		}
	}
	return found
}

// namespaceOf returns the namespace of the claim of a volume.
func namespaceOf(volume *corev1.PersistentVolume) string {
	if claim := volume.Spec.ClaimRef; claim != nil {
		return claim.Namespace
	}
	return noNamespace
}

// sync takes the next step of the claims and volumes of a namespace. An error of one does not hold up others.
func (v *volumes) sync(ctx context.Context, namespace string) error {
	var errs []error
	known := slices.DeleteFunc(listed[corev1.PersistentVolume](v.known), func(volume *corev1.PersistentVolume) bool { return namespaceOf(volume) != namespace })
	for _, volume := range known {
		if localvolume.Node(volume) == v.name && localvolume.Released(volume) {
			errs = append(errs, v.remove(ctx, volume))
		}
	}
	for _, claim := range v.wanted() {
		if claim.Namespace != namespace {
			continue
		}
		if err := v.provide(ctx, claim); err != nil {
			v.events.report(ctx, reference(claim), "ProvisioningFailed", err.Error())
			errs = append(errs, fmt.Errorf("the claim %s/%s: %w", claim.Namespace, claim.Name, err))
		}
	}
	if namespace == noNamespace {
		errs = append(errs, v.removeUnfinished(ctx, false), v.removeUnfinished(ctx, true))
	}
	if v.controlPlane {
		errs = append(errs, v.removeLost(ctx, known))
	}
	return errors.Join(errs...)
}

// wanted returns the claims without a volume, by the name of the volume.
func (v *volumes) wanted() map[string]*corev1.PersistentVolumeClaim {
	wanted := map[string]*corev1.PersistentVolumeClaim{}
	for _, claim := range listed[corev1.PersistentVolumeClaim](v.claims) {
		if v.wants(claim) {
			wanted[localvolume.Name(claim)] = claim
		}
	}
	return wanted
}

// wants returns whether a claim has no volume. A claim whose volume only Kubernetes has not bound yet has one.
func (v *volumes) wants(claim *corev1.PersistentVolumeClaim) bool {
	_, has, _ := v.known.GetByKey(localvolume.Name(claim))
	return !has && localvolume.Wants(claim, v.name)
}

// stillWants is wants for the current state of a claim.
func (v *volumes) stillWants(claim *corev1.PersistentVolumeClaim) bool {
	object, found, _ := v.claims.Get(claim)
	if !found {
		return false
	}
	current := object.(*corev1.PersistentVolumeClaim)
	return current.UID == claim.UID && v.wants(current)
}

// check returns an error unless the disk has space for the volume of a claim; providing is held. The space that an earlier attempt has
// taken for the volume counts as free.
func (v *volumes) check(claim *corev1.PersistentVolumeClaim) error {
	if time.Since(v.space.at) >= volumeRetry {
		if err := v.measure(); err != nil {
			return err
		}
	}
	name, block := localvolume.Name(claim), localvolume.Block(claim.Spec.VolumeMode)
	taken, err := v.foldersOf(block).Taken(name, block)
	if err != nil {
		return err
	}
	disk, promised := v.space.disk, v.space.promised
	disk.Unwritten -= taken
	if v.made[name] != nil {
		promised -= localvolume.Size(claim)
	}
	return localvolume.Check(claim, disk, promised)
}

// measure sets space; providing is held.
func (v *volumes) measure() error {
	maps.DeleteFunc(v.made, func(_ string, claim *corev1.PersistentVolumeClaim) bool { return !v.stillWants(claim) })
	promised := localvolume.Promised(listed[corev1.PersistentVolume](v.known), v.name)
	for _, claim := range v.made {
		promised += localvolume.Size(claim)
	}
	disk, err := v.folders.Disk()
	if err != nil {
		return err
	}
	// Read it each time: an update in place changes the file and does not restart the agent.
	if disk.Eviction, err = provision.EvictionSpace(disk.Total); err != nil {
		return err
	}
	for _, block := range []bool{false, true} {
		unwritten, err := v.foldersOf(block).Unwritten(block)
		if err != nil {
			return err
		}
		disk.Unwritten += unwritten
	}
	v.space = space{at: time.Now(), disk: disk, promised: promised}
	return nil
}

// provide creates the folder or the device first: a volume without it would make its pods fail. It does nothing for a claim that was
// deleted meanwhile, because removeUnfinished may have removed its data.
func (v *volumes) provide(ctx context.Context, claim *corev1.PersistentVolumeClaim) error {
	v.providing.Lock()
	defer v.providing.Unlock()
	if !v.stillWants(claim) {
		return nil
	}
	if v.removing == localvolume.Name(claim) {
		return errors.New("expected no data of an earlier attempt, found data that is being removed; the node tries again")
	}
	if err := v.check(claim); err != nil {
		return err
	}
	v.space = space{} // The volume changes it.
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
	if err := v.createVolume(ctx, claim); err != nil {
		return err
	}
	v.made[localvolume.Name(claim)] = claim
	v.log.Info("Local volume created", "volume", localvolume.Name(claim), "namespace", claim.Namespace, "claim", claim.Name)
	return folders.End(localvolume.Name(claim))
}

// createVolume creates the PersistentVolume of a claim, unless an earlier attempt has. Another node can have created it, because the claim had
// selected that node as well. The record of this node then stays, so that removeUnfinished removes its data.
func (v *volumes) createVolume(ctx context.Context, claim *corev1.PersistentVolumeClaim) error {
	fields, err := runtime.DefaultUnstructuredConverter.ToUnstructured(localvolume.Volume(claim, v.name))
	if err != nil {
		return err
	}
	_, err = v.client.Resource(kube.PersistentVolumes).Create(ctx, &unstructured.Unstructured{Object: fields}, metav1.CreateOptions{})
	if !apierrors.IsAlreadyExists(err) {
		return err
	}
	volume, err := v.fetch(ctx, localvolume.Name(claim))
	if err != nil {
		return err
	}
	if volume == nil {
		return fmt.Errorf("the PersistentVolume %s was deleted while the node provided it; the node tries again", localvolume.Name(claim))
	}
	switch node := localvolume.Node(volume); node {
	case v.name:
		return nil
	case "":
		return fmt.Errorf("expected no PersistentVolume %s, found one that no node has provided: delete it if nothing needs it", volume.Name)
	default:
		return fmt.Errorf("expected no PersistentVolume %s, found one of node %s: the claim had selected that node as well", volume.Name, node)
	}
}

// fetch reads a PersistentVolume from the API server, not from the cache. It returns nil if the volume does not exist.
func (v *volumes) fetch(ctx context.Context, name string) (*corev1.PersistentVolume, error) {
	found, err := v.client.Resource(kube.PersistentVolumes).List(ctx, metav1.ListOptions{FieldSelector: "metadata.name=" + name})
	if err != nil || len(found.Items) == 0 {
		return nil, err
	}
	volume := &corev1.PersistentVolume{}
	return volume, runtime.DefaultUnstructuredConverter.FromUnstructured(found.Items[0].Object, volume)
}

// removeUnfinished removes the data of volumes that no claim wants any more before they had a PersistentVolume, or for which another node
// has provided the PersistentVolume. It asks the API server: the answer to a creation can have been lost, also by the death of an earlier
// agent.
func (v *volumes) removeUnfinished(ctx context.Context, block bool) error {
	folders := v.foldersOf(block)
	names, err := folders.Unfinished()
	errs := []error{err}
	defer v.reserve("")
	for _, name := range names {
		if !v.reserve(name) {
			continue
		}
		volume, err := v.fetch(ctx, name)
		if err == nil && (volume == nil || !slices.Contains([]string{"", v.name}, localvolume.Node(volume))) {
			err = v.removeData(ctx, name, block)
		}
		if err == nil {
			err = folders.End(name)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("removing the data of %s, which has no PersistentVolume of this node: %w", name, err))
		}
	}
	return errors.Join(errs...)
}

// reserve keeps a volume from its claim until the next call, because a removal can last longer than providing may be held. It returns false
// if a claim wants the volume.
func (v *volumes) reserve(name string) bool {
	v.providing.Lock()
	defer v.providing.Unlock()
	v.removing = ""
	if v.wanted()[name] != nil {
		return false
	}
	v.removing = name
	return true
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

// recordGone records that the data of a volume goes, whose claim is gone. Somebody else can have deleted the PersistentVolume: agents of
// control plane machines do so while this machine has no Node.
func (v *volumes) recordGone(object any) {
	// A PersistentVolume that the watch has missed (cache.DeletedFinalStateUnknown) may have got another reclaim policy.
	volume, ok := object.(*corev1.PersistentVolume)
	if !ok || localvolume.Node(volume) != v.name || !localvolume.Released(volume) {
		return
	}
	if err := v.foldersOf(localvolume.Block(volume.Spec.VolumeMode)).Begin(volume.Name); err != nil {
		v.log.Error("The data of a local volume remains; remove its folder", "volume", volume.Name, "error", err)
	}
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
