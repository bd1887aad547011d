// Package replace lets `kubectl replace` work on live objects. A manifest has none of the fields that controllers write,
// so a replacement would remove them (docs/gitops.md).
//
// Layer: library. Allowed imports: api.
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

// domain is the domain of the annotations that Capstan's controllers write.
const domain = "capstan.dev"

// Restore restores the finalizers, the owner references, and the labels and annotations of controllers in an object that
// a manifest replaces. It decodes the stored object into before. The caller restores the other fields that controllers
// write. For all other requests it returns false and changes nothing. The lost finalizer of the provider identifies a
// replacement: other updates keep it unless the object is being deleted. Mutating webhooks call Restore.
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

// missing returns the map has with the selected keys of before that it lacks.
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
