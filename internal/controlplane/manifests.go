package controlplane

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/controller-runtime/pkg/client"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/contentsource"
	"capstan.dev/capstan/internal/manifest"
	"capstan.dev/capstan/internal/reconciling"
	"capstan.dev/capstan/internal/shorten"
)

const (
	// manifestOwner is the field manager of the objects of manifests.
	manifestOwner = "capstan-manifests"
	// manifestRecord is the ConfigMap in kube-system of the workload cluster with the names of the applied manifests. It is part of
	// backups, so it always describes the cluster in which it is.
	manifestRecord = "capstan-manifests"
	// manifestRetry is the time until the next try. No event reports a kind that a controller in the cluster adds.
	manifestRetry = 15 * time.Second
	// manifestTimeout limits one try.
	manifestTimeout = 30 * time.Second
	// maxManifestObjects limits the objects of one manifest, and maxManifestMessage the condition's message about it.
	maxManifestObjects, maxManifestMessage = 200, 1024
)

// userManifests applies the manifests of the spec to the workload cluster, each once.
type userManifests struct {
	*clients
	// done remembers the control planes whose manifests were applied.
	done memory
}

// reconcile applies the manifests that the cluster does not have yet. A manifest that fails holds up no other step.
func (r *userManifests) reconcile(ctx context.Context, s *scope) (result, error) {
	wanted := s.Object.Spec.Manifests
	if len(wanted) == 0 {
		conditions.Delete(s.Object, controlplanev1.ManifestsAppliedCondition)
		return result{}, nil
	}
	sum := sumOfNames(wanted, s.Object.Annotations[controlplanev1.RestoredAnnotation])
	if r.done.is(s.Object.UID, sum) && conditions.IsTrue(s.Object, controlplanev1.ManifestsAppliedCondition) {
		reconciling.KeepCondition(s.Object, controlplanev1.ManifestsAppliedCondition)
		return result{}, nil
	}
	if !s.answers() {
		if !conditions.IsTrue(s.Object, controlplanev1.ManifestsAppliedCondition) {
			reconciling.SetCondition(s.Object, controlplanev1.ManifestsAppliedCondition, metav1.ConditionFalse, controlplanev1.WaitingForConnectionReason,
				"the manifests are applied as soon as there is a connection to the cluster")
		}
		return result{}, nil // The connection is an event, and a silent cluster is asked again.
	}
	if err := r.applyAll(ctx, s, wanted); err != nil {
		reconciling.SetCondition(s.Object, controlplanev1.ManifestsAppliedCondition, metav1.ConditionFalse, controlplanev1.ManifestsNotAppliedReason, "%s", err)
		return requeueAfter(manifestRetry), nil
	}
	r.done.set(s.Object.UID, sum)
	reconciling.SetCondition(s.Object, controlplanev1.ManifestsAppliedCondition, metav1.ConditionTrue, controlplanev1.ManifestsAppliedReason, "")
	return result{}, nil
}

func sumOfNames(wanted []controlplanev1.Manifest, restored string) [sha256.Size]byte {
	text := restored
	for _, m := range wanted {
		text += "\n" + m.Name
	}
	return sha256.Sum256([]byte(text))
}

// applyAll applies the manifests in their order and stops at the first that fails, because later ones can depend on it.
func (r *userManifests) applyAll(ctx context.Context, s *scope, wanted []controlplanev1.Manifest) error {
	ctx, cancel := context.WithTimeout(ctx, manifestTimeout)
	defer cancel()
	record := &corev1.ConfigMap{}
	err := s.client.Get(ctx, client.ObjectKey{Namespace: metav1.NamespaceSystem, Name: manifestRecord}, record)
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("the ConfigMap %s in kube-system of the cluster, with the names of applied manifests, cannot be read: %w", manifestRecord, err)
	}
	applied := maps.Clone(record.Data)
	if applied == nil {
		applied = map[string]string{}
	}
	for _, m := range wanted {
		if _, done := applied[m.Name]; done {
			continue
		}
		content, err := r.content(ctx, s.Object.Namespace, m)
		if err != nil {
			return fmt.Errorf("manifest %s: %w", m.Name, err)
		}
		if err := applyManifest(ctx, s.client, content, m.ContentFrom.Secret.Name != ""); err != nil {
			return errors.New(shorten.Marked(fmt.Sprintf("manifest %s: %s", m.Name, err), maxManifestMessage))
		}
		applied[m.Name] = s.Now.UTC().Format(time.RFC3339)
		if err := recordApplied(ctx, s.client, applied); err != nil {
			return fmt.Errorf("manifest %s was applied, and this cannot be recorded: %w", m.Name, err)
		}
	}
	return nil
}

// content reads the documents of a manifest.
func (r *userManifests) content(ctx context.Context, namespace string, m controlplanev1.Manifest) ([]byte, error) {
	switch from := m.ContentFrom; {
	case from.Secret.Name != "":
		return contentsource.Secret(ctx, r.Client, namespace, from.Secret)
	case from.ConfigMap.Name != "":
		return contentsource.ConfigMap(ctx, r.Client, namespace, from.ConfigMap)
	}
	return []byte(m.Content), nil
}

// parseManifest reads the objects of a manifest. Errors do not quote it.
func parseManifest(content []byte) ([]*unstructured.Unstructured, error) {
	objects, err := manifest.Parse(content)
	if err != nil {
		return nil, errors.New("expected YAML documents with one object each, with apiVersion and kind; a document cannot be read")
	}
	if len(objects) == 0 || len(objects) > maxManifestObjects {
		return nil, fmt.Errorf("expected 1 to %d objects, found %d", maxManifestObjects, len(objects))
	}
	for i, o := range objects {
		switch {
		case o.GetAPIVersion() == "" || o.IsList():
			return nil, fmt.Errorf("object %d: expected one object with apiVersion and kind; write the objects of a list as documents of their own", i+1)
		case o.GetName() == "":
			return nil, fmt.Errorf("object %d (%s): expected metadata.name", i+1, o.GetKind())
		}
	}
	return objects, nil
}

// applyManifest applies the objects of a manifest. An error about a secret one has the reason of the API server, and not its message,
// which can quote values.
func applyManifest(ctx context.Context, c client.Client, content []byte, secret bool) error {
	objects, err := parseManifest(content)
	if err != nil {
		return err
	}
	for _, o := range objects {
		if err := applyObject(ctx, c, o); err != nil {
			if status := apierrors.APIStatus(nil); secret && errors.As(err, &status) {
				err = fmt.Errorf("the API server refuses it with the reason %q", status.Status().Reason)
			}
			return fmt.Errorf("%s %s: %w", o.GetKind(), client.ObjectKeyFromObject(o), err)
		}
	}
	return nil
}

func applyObject(ctx context.Context, c client.Client, o *unstructured.Unstructured) error {
	namespaced, err := c.IsObjectNamespaced(o)
	switch {
	case apimeta.IsNoMatchError(err):
		return fmt.Errorf("the cluster has no kind %s of %s yet", o.GetKind(), o.GetAPIVersion())
	case err != nil:
		return err
	case namespaced && o.GetNamespace() == "":
		o.SetNamespace(metav1.NamespaceDefault)
	}
	return c.Apply(ctx, client.ApplyConfigurationFromUnstructured(o), client.FieldOwner(manifestOwner))
}

func recordApplied(ctx context.Context, c client.Client, applied map[string]string) error {
	data := map[string]any{}
	for name, at := range applied {
		data[name] = at
	}
	return c.Apply(ctx, client.ApplyConfigurationFromUnstructured(&unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "v1", "kind": "ConfigMap",
		"metadata": map[string]any{"name": manifestRecord, "namespace": metav1.NamespaceSystem},
		"data":     data,
	}}), client.FieldOwner(manifestOwner), client.ForceOwnership)
}
