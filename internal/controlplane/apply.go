package controlplane

import (
	"context"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
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
