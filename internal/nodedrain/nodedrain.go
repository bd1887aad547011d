// Package nodedrain drains the Node of a machine before an update in place (drainBeforeUpdate), and makes it schedulable again
// after it. The pods are selected and evicted by Cluster API's own drain, so MachineDrainRules and labels have the effect that
// they have before the deletion of a Machine.
//
// Layer: reconciler. Allowed imports: api, library, contract.
package nodedrain

import (
	"context"
	"fmt"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	upstream "sigs.k8s.io/cluster-api/core/reconcilers/machine/drain"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"capstan.dev/capstan/internal/reconciling"
)

// Annotation is on a Node that is drained for an update in place. It has the time of the start.
const Annotation = "controlplane.capstan.dev/drained-for-update"

// wasCordoned follows the time if the Node was not schedulable before: it stays so after the update.
const wasCordoned = " cordoned"

// Uncached are the kinds that a drain lists in a workload cluster. The cache of a workload cluster must not contain them: it
// would contain all pods of the cluster, and it has no index of the pods of a Node.
func Uncached() []client.Object {
	return []client.Object{&corev1.Pod{}, &appsv1.DaemonSet{}, &corev1.PersistentVolume{}, &storagev1.VolumeAttachment{}}
}

// Drain empties the Node of a Machine.
type Drain struct {
	// Management lists the MachineDrainRules of the management cluster. It needs no cache.
	// Workload is a client of the workload cluster.
	Management, Workload client.Client
	Cluster              *clusterv1.Cluster
	Machine              *clusterv1.Machine
	// DrainTimeout and DetachTimeout limit the waits, in seconds since the start. nil and 0 mean no limit.
	DrainTimeout, DetachTimeout *int32
	Now                         time.Time
}

// Run cordons the Node, evicts its pods, and returns the reason of a wait; "" when the Node is drained or the limits have passed. The
// Node carries the time of the start, so that any manager continues.
func (d Drain) Run(ctx context.Context) (waits string, err error) {
	node := &corev1.Node{}
	if err := d.Workload.Get(ctx, client.ObjectKey{Name: d.Machine.Status.NodeRef.Name}, node); err != nil {
		return "", client.IgnoreNotFound(err)
	}
	if err := cordon(ctx, d.Workload, node, d.Now); err != nil {
		return "", fmt.Errorf("cannot cordon the Node %s: %w", node.Name, err)
	}
	helper := upstream.Helper{Client: d.Management, RemoteClient: d.Workload, GracePeriodSeconds: -1}
	pods, err := helper.GetPodsForEviction(ctx, d.Cluster, d.Machine, node.Name)
	if err != nil {
		return "", fmt.Errorf("cannot select the pods of the Node %s: %w", node.Name, err)
	}
	started := startOf(node, d.Now)
	if !over(d.DrainTimeout, d.Now.Sub(started)) && len(pods.Pods()) > 0 {
		if result := helper.EvictPods(ctx, pods); !result.DrainCompleted() {
			why := strings.Join(strings.Fields(result.ConditionMessage(metav1.NewTime(started))), " ")
			return fmt.Sprintf("%d pods have to leave the Node %s before the update of Machine %s: %s", len(pods.Pods()), node.Name, d.Machine.Name, why), nil
		}
	}
	if over(d.DetachTimeout, d.Now.Sub(started)) {
		return "", nil
	}
	n, err := attached(ctx, d.Workload, node.Name, pods.SkippedPods())
	if err == nil && n > 0 {
		return fmt.Sprintf("%d volumes have to be detached from the Node %s before the update of Machine %s", n, node.Name, d.Machine.Name), nil
	}
	return "", err
}

// cordon makes a Node unschedulable and records the start.
func cordon(ctx context.Context, c client.Client, node *corev1.Node, now time.Time) error {
	if _, begun := node.Annotations[Annotation]; begun && node.Spec.Unschedulable {
		return nil
	}
	return reconciling.Change(ctx, c, node, func() {
		record := now.UTC().Format(time.RFC3339)
		if node.Spec.Unschedulable {
			record += wasCordoned
		}
		node.Spec.Unschedulable = true
		metav1.SetMetaDataAnnotation(&node.ObjectMeta, Annotation, record)
	})
}

// Release makes a Node schedulable again if a drain for an update has cordoned it.
func Release(ctx context.Context, c client.Client, name string) error {
	node := &corev1.Node{}
	if err := c.Get(ctx, client.ObjectKey{Name: name}, node); err != nil {
		return client.IgnoreNotFound(err)
	}
	record, ours := node.Annotations[Annotation]
	if !ours {
		return nil
	}
	if err := reconciling.Change(ctx, c, node, func() {
		node.Spec.Unschedulable = strings.HasSuffix(record, wasCordoned)
		delete(node.Annotations, Annotation)
	}); err != nil {
		return fmt.Errorf("cannot uncordon the Node %s: %w", node.Name, err)
	}
	return nil
}

// startOf returns the start of the drain.
func startOf(node *corev1.Node, now time.Time) time.Time {
	at, err := time.Parse(time.RFC3339, strings.TrimSuffix(node.Annotations[Annotation], wasCordoned))
	if err != nil {
		return now
	}
	return at
}

// over reports whether a limit has passed.
func over(limitSeconds *int32, since time.Duration) bool {
	limit := time.Duration(ptr.Deref(limitSeconds, 0)) * time.Second
	return limit > 0 && since > limit
}

// attached counts the volumes that are attached to a Node, without those of pods that stay.
func attached(ctx context.Context, c client.Client, node string, staying []*corev1.Pod) (n int, err error) {
	claims := map[client.ObjectKey]bool{}
	for _, pod := range staying {
		for _, volume := range pod.Spec.Volumes {
			if claim := volume.PersistentVolumeClaim; claim != nil {
				claims[client.ObjectKey{Namespace: pod.Namespace, Name: claim.ClaimName}] = true
			}
		}
	}
	list := &storagev1.VolumeAttachmentList{}
	if err := c.List(ctx, list); err != nil {
		return 0, fmt.Errorf("cannot list the attached volumes: %w", err)
	}
	for _, a := range list.Items {
		name := a.Spec.Source.PersistentVolumeName
		if a.Spec.NodeName != node || !a.Status.Attached || name == nil {
			continue
		}
		volume := &corev1.PersistentVolume{}
		err := c.Get(ctx, client.ObjectKey{Name: *name}, volume)
		if client.IgnoreNotFound(err) != nil {
			return 0, fmt.Errorf("cannot read the volume %s: %w", *name, err)
		}
		if ref := volume.Spec.ClaimRef; ref == nil || !claims[client.ObjectKey{Namespace: ref.Namespace, Name: ref.Name}] {
			n++
		}
	}
	return n, nil
}
