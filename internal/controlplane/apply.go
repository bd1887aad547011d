package controlplane

import (
	"context"
	"crypto/sha256"
	"encoding/json"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// fieldManager owns the fields that this provider applies. A field that it does not apply any more is removed; fields of
// other managers stay.
const fieldManager = "capstan-control-plane"

// applier applies objects as the field manager of this provider.
type applier struct {
	*clients
	// applied are the states of objects that need no further write.
	applied memory
}

// apply uses server-side apply and stores the answer in the object.
func (r *applier) apply(ctx context.Context, obj client.Object) error {
	u, ok := obj.(*unstructured.Unstructured)
	if !ok {
		content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(obj)
		if err != nil {
			return err
		}
		u = &unstructured.Unstructured{Object: content}
	}
	unstructured.RemoveNestedField(u.Object, "status")
	unstructured.RemoveNestedField(u.Object, "metadata", "creationTimestamp")
	if err := r.Client.Apply(ctx, client.ApplyConfigurationFromUnstructured(u), client.FieldOwner(fieldManager), client.ForceOwnership); err != nil {
		return err
	}
	if ok {
		return nil
	}
	return runtime.DefaultUnstructuredConverter.FromUnstructured(u.Object, obj)
}

// applyOnce applies an object, unless neither the desired nor the stored state has changed since the last time.
func (r *applier) applyOnce(ctx context.Context, stored, desired client.Object) error {
	want, err := json.Marshal(desired)
	if err != nil {
		return err
	}
	before, err := stateOf(stored, want)
	if err != nil || r.applied.is(stored.GetUID(), before) {
		return err
	}
	if _, ok := desired.(*clusterv1.Machine); ok {
		// It repeats the stored spec.version, and must not overwrite the one that an update in place has written since.
		desired.SetResourceVersion(stored.GetResourceVersion())
	}
	err = r.apply(ctx, desired)
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return nil // It has changed, or it was deleted and another one has its name: these are events.
	}
	if err != nil {
		return err
	}
	// The answer of the API server, not the content of the cache, is the state that needs no further write.
	return r.record(desired, want)
}

// remember records that a stored object needs no write until it or the desired one changes.
func (r *applier) remember(stored, desired client.Object) error {
	want, err := json.Marshal(desired)
	if err != nil {
		return err
	}
	return r.record(stored, want)
}

// record keeps the sum of a stored object and of the desired one.
func (r *applier) record(stored client.Object, want []byte) error {
	state, err := stateOf(stored, want)
	if err != nil {
		return err
	}
	r.applied.set(stored.GetUID(), state)
	return nil
}

// stateOf returns the sum of the stored content that an application can change, and of the desired object.
func stateOf(stored client.Object, want []byte) ([sha256.Size]byte, error) {
	has, err := json.Marshal([]any{stored.GetLabels(), stored.GetAnnotations(), stored.GetOwnerReferences(), specOf(stored)})
	return sha256.Sum256(append(has, want...)), err
}

// specOf returns the spec of a Machine without the fields that core writes: they are never applied.
func specOf(obj client.Object) any {
	machine, ok := obj.(*clusterv1.Machine)
	if !ok {
		return nil
	}
	spec := machine.Spec
	spec.Bootstrap.DataSecretName, spec.ProviderID = nil, ""
	return spec
}
