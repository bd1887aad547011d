package controlplane

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/controlplane/model"
	"capstan.dev/capstan/internal/node/kube"
	"capstan.dev/capstan/internal/node/provision/manifests"
)

const (
	managedByLabel = "app.kubernetes.io/managed-by"
	managedBy      = "capstan"
)

// metricsServers is the step that registers metrics.k8s.io in clusters with metrics-server, and removes the registration from
// others: an API without a server holds up the deletion of namespaces.
type metricsServers struct {
	// registered remembers which workload clusters are as their control plane says.
	registered memory
}

// reconcile registers the API with the authorities that API servers must trust, so it follows their rotation. Each manager does so
// once for each change. An error does not hold up other steps.
func (r *metricsServers) reconcile(ctx context.Context, s *scope) (result, error) {
	if !s.answers() || s.Authority == nil {
		return result{}, nil
	}
	wanted := s.Object.Spec.Config.Cluster.ResourceMetrics == bootstrapv1.ResourceMetricsServer
	bundle := s.Authority.Data[corev1.TLSCertKey]
	sum := sha256.Sum256(fmt.Appendf(nil, "%v %s %s", wanted, s.Object.Annotations[controlplanev1.RestoredAnnotation], bundle))
	if r.registered.is(s.Object.UID, sum) {
		return result{}, nil
	}
	if err := registerMetrics(ctx, s.client, wanted, bundle); err != nil {
		ctrl.LoggerFrom(ctx).Error(err, "Cannot bring the registration of metrics.k8s.io up to date")
		return requeueAfter(model.UnhealthyRetry), nil
	}
	r.registered.set(s.Object.UID, sum)
	return result{}, nil
}

func registerMetrics(ctx context.Context, c client.Client, wanted bool, bundle []byte) error {
	ctx, cancel := context.WithTimeout(ctx, installTimeout)
	defer cancel()
	objects, err := manifests.Parse(map[string]string{"CABundle": base64.StdEncoding.EncodeToString(bundle)}, manifests.MetricsServer)
	if err != nil {
		return err
	}
	for _, o := range objects {
		if wanted {
			err = c.Apply(ctx, client.ApplyConfigurationFromUnstructured(o), client.FieldOwner(kube.FieldManager), client.ForceOwnership)
		} else {
			err = removeOwn(ctx, c, o)
		}
		if err != nil {
			return fmt.Errorf("%s %s: %w", o.GetKind(), o.GetName(), err)
		}
	}
	return nil
}

// removeOwn deletes an object, unless it belongs to a metrics-server of the user's.
func removeOwn(ctx context.Context, c client.Client, o *unstructured.Unstructured) error {
	found := &unstructured.Unstructured{}
	found.SetGroupVersionKind(o.GroupVersionKind())
	if err := c.Get(ctx, client.ObjectKeyFromObject(o), found); err != nil {
		return client.IgnoreNotFound(err)
	}
	if found.GetLabels()[managedByLabel] != managedBy {
		return nil
	}
	version := found.GetResourceVersion()
	err := c.Delete(ctx, found, client.Preconditions{ResourceVersion: &version})
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}
