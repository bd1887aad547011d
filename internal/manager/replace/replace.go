// Package replace lets `kubectl replace` work on live objects: a manifest has none of the fields that controllers write, and
// a replacement removes them (docs/gitops.md).
//
// Layer: library.
package replace

import (
	"context"
	"encoding/json"
	"strings"

	admissionv1 "k8s.io/api/admission/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
)

// domain of the annotations that controllers of Capstan write.
const domain = "capstan.dev"

// Restore gives an object that a manifest replaces its finalizers, owner references, and labels and annotations of controllers
// back, and decodes the stored object into before, whose controller-written fields the caller restores. It returns false,
// and changes nothing, for all other requests. A replacement is recognized by the lost finalizer of the provider: no
// other update of an object that is not being deleted removes it. Mutating webhooks call it.
func Restore(ctx context.Context, obj, before client.Object, finalizer string) (bool, error) {
	req, err := admission.RequestFromContext(ctx)
	if err != nil || req.Operation != admissionv1.Update || !obj.GetDeletionTimestamp().IsZero() {
		return false, nil //nolint:nilerr // not an admission request: nothing is replaced.
	}
	if controllerutil.ContainsFinalizer(obj, finalizer) {
		return false, nil
	}
	if err := json.Unmarshal(req.OldObject.Raw, before); err != nil {
		return false, err
	}
	if !controllerutil.ContainsFinalizer(before, finalizer) {
		return false, nil
	}
	metadata(obj, before)
	return true, nil
}

// metadata restores the metadata that controllers write and that obj lacks.
func metadata(obj, before client.Object) {
	for _, finalizer := range before.GetFinalizers() {
		controllerutil.AddFinalizer(obj, finalizer)
	}
	if len(obj.GetOwnerReferences()) == 0 {
		obj.SetOwnerReferences(before.GetOwnerReferences())
	}
	obj.SetLabels(missing(obj.GetLabels(), before.GetLabels(), func(key string) bool {
		return key == clusterv1.ClusterNameLabel || strings.HasPrefix(key, "topology.cluster.x-k8s.io/")
	}))
	obj.SetAnnotations(missing(obj.GetAnnotations(), before.GetAnnotations(), func(key string) bool {
		prefix, _, _ := strings.Cut(key, "/")
		return prefix == domain || strings.HasSuffix(prefix, "."+domain)
	}))
}

// missing adds the selected keys of before that has lacks.
func missing(has, before map[string]string, selected func(string) bool) map[string]string {
	for key, value := range before {
		if _, there := has[key]; there || !selected(key) {
			continue
		}
		if has == nil {
			has = map[string]string{}
		}
		has[key] = value
	}
	return has
}

// Field restores a field that a controller has written, if the replacement does not set it.
func Field[T comparable](field *T, before T) {
	var zero T
	if *field == zero {
		*field = before
	}
}
