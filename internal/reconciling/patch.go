package reconciling

import (
	"context"
	"encoding/json"
	"errors"
	"reflect"
	"slices"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/retry"
	"sigs.k8s.io/cluster-api/util/conditions"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"capstan.dev/capstan/internal/shorten"
)

// Patch writes the changes of an object since the Patch was created, in at most two requests: first metadata and spec,
// then the whole status. A consumer that reads a condition therefore also reads the fields that it announces (BC-04).
// Cluster API's patch helper writes the conditions before the fields.
type Patch struct {
	live   client.Client
	before Object
	// latest is the newest known version of the stored object.
	latest Object
	// written is the resourceVersion of the written status, or empty.
	written string
}

// NewPatch returns a Patch for the changes to obj that follow. live reads from the API server.
func NewPatch(obj Object, live client.Client) *Patch {
	before := obj.DeepCopyObject().(Object)
	return &Patch{live: live, before: before, latest: before}
}

// Write writes the changes of obj. An object that does not exist any more is not an error.
func (p *Patch) Write(ctx context.Context, obj Object) error {
	switch err := p.writeSpec(ctx, obj); {
	case apierrors.IsInvalid(err):
		return errors.Join(err, p.showRefusal(ctx, err))
	case err != nil:
		return client.IgnoreNotFound(err)
	}
	return p.WriteStatus(ctx, obj)
}

// showRefusal shows in Ready that the API server refused the spec. The rest of the status stays as it was: it would announce fields of the
// spec that were not written.
func (p *Patch) showRefusal(ctx context.Context, refusal error) error {
	unchanged := p.before.DeepCopyObject().(Object)
	conditions.Set(unchanged, metav1.Condition{
		Type: clusterv1.ReadyCondition, Status: metav1.ConditionUnknown, Reason: clusterv1.InternalErrorReason,
		Message: "The API server refused the spec that the controller wrote: " + refusal.Error(),
	})
	return p.WriteStatus(ctx, unchanged)
}

// WriteStatus writes only the changes of the status. It is for a reconciler whose steps have written their changes of
// metadata and spec. An object that does not exist any more is not an error.
func (p *Patch) WriteStatus(ctx context.Context, obj Object) error {
	return client.IgnoreNotFound(p.writeStatus(ctx, obj))
}

// writeSpec needs no resourceVersion: a reconciler is the only writer of the lists in the spec of its kind, and the API
// server refuses new finalizers during a deletion. It needs the UID: another object with the same name keeps its finalizers.
func (p *Patch) writeSpec(ctx context.Context, obj Object) error {
	if p.unchanged(obj, "ObjectMeta", "Spec") {
		return nil
	}
	change, err := p.changes(obj)
	if err != nil {
		return err
	}
	delete(change, "status")
	if len(change) == 0 {
		return nil
	}
	requireUID(change, obj.GetUID())
	answer := obj.DeepCopyObject().(Object)
	patch, err := rawPatch(change)
	if err != nil {
		return err
	}
	if err := p.live.Patch(ctx, answer, patch); err != nil {
		return err
	}
	all := slices.Clone(obj.GetConditions())
	for i := range all {
		if all[i].ObservedGeneration == obj.GetGeneration() { // The new generation comes from this write.
			all[i].ObservedGeneration = answer.GetGeneration()
		}
	}
	obj.SetConditions(all)
	obj.SetGeneration(answer.GetGeneration())
	obj.SetResourceVersion(answer.GetResourceVersion())
	p.latest = answer
	return nil
}

// shortenMessages shortens the messages of conditions that are too long.
func shortenMessages(obj conditions.Setter) {
	all := obj.GetConditions()
	for i := range all {
		all[i].Message = shorten.ConditionMessage(all[i].Message)
	}
}

// writeStatus writes the status. A merge patch replaces the list of conditions, so the patch has a resourceVersion. If the
// stored object is newer, the changed conditions are applied to it, and conditions of other writers stay. The API server ignores a UID
// in a patch of the status. Another object with the same name has another resourceVersion, and its UID is compared here.
func (p *Patch) writeStatus(ctx context.Context, obj Object) error {
	setObservedGeneration(obj)
	shortenMessages(obj)
	if p.unchanged(obj, "Status") {
		return nil
	}
	change, err := p.changes(obj)
	if err != nil {
		return err
	}
	status, ok := change["status"].(map[string]any)
	if !ok {
		return nil
	}
	_, withConditions := status["conditions"]
	if withConditions {
		logConditions(ctx, p.before, obj)
	}
	return retry.RetryOnConflict(retry.DefaultBackoff, func() error {
		if withConditions {
			status["conditions"] = mergeConditions(p.before, obj, p.latest)
		}
		conflict := p.patchStatus(ctx, obj, map[string]any{"status": status, "metadata": map[string]any{"resourceVersion": p.latest.GetResourceVersion()}})
		if apierrors.IsConflict(conflict) {
			p.latest = obj.DeepCopyObject().(Object)
			if err := p.live.Get(ctx, client.ObjectKeyFromObject(obj), p.latest); err != nil {
				return err
			}
			if p.latest.GetUID() != obj.GetUID() {
				return apierrors.NewNotFound(schema.GroupResource{}, obj.GetName())
			}
		}
		return conflict
	})
}

// patchStatus does not change obj, because its caller has newer data than the response.
func (p *Patch) patchStatus(ctx context.Context, obj Object, change map[string]any) error {
	patch, err := rawPatch(change)
	if err != nil {
		return err
	}
	answer := obj.DeepCopyObject().(client.Object)
	if err := p.live.Status().Patch(ctx, answer, patch); err != nil {
		return err
	}
	p.written = answer.GetResourceVersion()
	return nil
}

// requireUID makes the API server refuse a patch if its object has another UID. Objects of unit tests have none.
func requireUID(change map[string]any, uid types.UID) {
	if uid == "" {
		return
	}
	metadata, ok := change["metadata"].(map[string]any)
	if !ok {
		metadata = map[string]any{}
		change["metadata"] = metadata
	}
	metadata["uid"] = uid
}

func rawPatch(change map[string]any) (client.Patch, error) {
	data, err := json.Marshal(change)
	return client.RawPatch(types.MergePatchType, data), err
}

// setObservedGeneration sets status.observedGeneration, which is the same field in all kinds with conditions.
func setObservedGeneration(obj Object) {
	status := reflect.Indirect(reflect.ValueOf(obj)).FieldByName("Status")
	if f := status.FieldByName("ObservedGeneration"); f.IsValid() {
		f.SetInt(obj.GetGeneration())
	}
}

// unchanged reports whether parts of obj are as they were before the reconcile. Most reconciles change nothing, and this comparison costs a
// fifth of the computation of both merge patches.
func (p *Patch) unchanged(obj Object, parts ...string) bool {
	before, after := reflect.Indirect(reflect.ValueOf(p.before)), reflect.Indirect(reflect.ValueOf(obj))
	return !slices.ContainsFunc(parts, func(part string) bool {
		return !equality.Semantic.DeepEqual(before.FieldByName(part).Interface(), after.FieldByName(part).Interface())
	})
}

// changes returns the merge patch from before to obj, without the fields of the API server.
func (p *Patch) changes(obj Object) (map[string]any, error) {
	data, err := client.MergeFrom(p.before).Data(obj)
	if err != nil {
		return nil, err
	}
	var change map[string]any
	if err := json.Unmarshal(data, &change); err != nil {
		return nil, err
	}
	if metadata, ok := change["metadata"].(map[string]any); ok {
		for _, field := range []string{"resourceVersion", "generation", "managedFields"} {
			delete(metadata, field)
		}
		if len(metadata) == 0 {
			delete(change, "metadata")
		}
	}
	return change, nil
}

// logConditions logs each condition that gets another status or reason.
func logConditions(ctx context.Context, before, after Object) {
	log := ctrl.LoggerFrom(ctx).V(4)
	for _, c := range after.GetConditions() {
		if old := conditions.Get(before, c.Type); old == nil || old.Status != c.Status || old.Reason != c.Reason {
			log.Info("Condition changed", "condition", c.Type, "status", c.Status, "reason", c.Reason, "message", c.Message)
		}
	}
}

// mergeConditions returns the conditions of latest with the changes from before to after.
func mergeConditions(before, after, latest Object) []metav1.Condition {
	merged := latest.DeepCopyObject().(Object)
	merged.SetGeneration(after.GetGeneration())
	for _, c := range after.GetConditions() {
		if old := conditions.Get(before, c.Type); old == nil || *old != c {
			conditions.Set(merged, c)
		}
	}
	for _, c := range before.GetConditions() {
		if !conditions.Has(after, c.Type) {
			conditions.Delete(merged, c.Type)
		}
	}
	return merged.GetConditions()
}
