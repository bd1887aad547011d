// Package contentsource reads keys of Secrets and ConfigMaps to which specs refer.
//
// Layer: library. Allowed imports: api.
package contentsource

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
)

// MissingError is the error for an object that does not exist, or that lacks the key. It contains no content.
type MissingError struct {
	kind, name, key string
	// object is true if the object exists.
	object bool
}

func (e *MissingError) Error() string {
	if e.object {
		return fmt.Sprintf("the %s %s has no key %q", e.kind, e.name, e.key)
	}
	return fmt.Sprintf("the %s %s does not exist", e.kind, e.name)
}

// Secret reads a key of a Secret in a namespace.
func Secret(ctx context.Context, c client.Reader, namespace string, ref bootstrapv1.SecretKeyReference) ([]byte, error) {
	object := &corev1.Secret{}
	if err := get(ctx, c, namespace, ref.Name, object, &MissingError{kind: "Secret", name: ref.Name, key: ref.Key}); err != nil {
		return nil, err
	}
	if content, found := object.Data[ref.Key]; found {
		return content, nil
	}
	return nil, &MissingError{kind: "Secret", name: ref.Name, key: ref.Key, object: true}
}

// ConfigMap reads a key of a ConfigMap in a namespace, a text or binary.
func ConfigMap(ctx context.Context, c client.Reader, namespace string, ref bootstrapv1.ConfigMapKeyReference) ([]byte, error) {
	object := &corev1.ConfigMap{}
	if err := get(ctx, c, namespace, ref.Name, object, &MissingError{kind: "ConfigMap", name: ref.Name, key: ref.Key}); err != nil {
		return nil, err
	}
	if text, found := object.Data[ref.Key]; found {
		return []byte(text), nil
	}
	if content, found := object.BinaryData[ref.Key]; found {
		return content, nil
	}
	return nil, &MissingError{kind: "ConfigMap", name: ref.Name, key: ref.Key, object: true}
}

func get(ctx context.Context, c client.Reader, namespace, name string, object client.Object, missing error) error {
	err := c.Get(ctx, client.ObjectKey{Namespace: namespace, Name: name}, object)
	if apierrors.IsNotFound(err) {
		return missing
	}
	return err
}
