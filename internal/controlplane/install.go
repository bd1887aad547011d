package controlplane

import (
	"context"
	"crypto/sha256"
	"fmt"
	"time"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/cluster-api/util/conditions"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/node/kube"
	"capstan.dev/capstan/internal/node/provision/manifests"
)

const (
	// installAfter is the time after initialization during which the first machine applies the same objects.
	installAfter   = 2 * time.Minute
	installTimeout = 30 * time.Second
)

// reconcile keeps the kinds and roles current that the agents of machines need in the workload cluster. A cluster has those
// of the version of Capstan that created its first machine, or those from a restored backup. Each manager applies them once,
// and again when the cluster does not have a kind. An error does not hold up other steps.
func (r *workloads) reconcile(ctx context.Context, s *scope) (result, error) {
	localVolumes := string(s.Object.Spec.Config.Cluster.LocalVolumes)
	sum := sha256.Sum256([]byte("installed " + localVolumes + " " + s.Object.Annotations[controlplanev1.RestoredAnnotation]))
	if !s.answers() || !installDue(s.Object, s.Now) || r.installed.is(s.Object.UID, sum) && !s.Workload.Missing {
		return result{}, nil
	}
	if err := install(ctx, s.client, s.Stacked(), localVolumes); err != nil {
		ctrl.LoggerFrom(ctx).Error(err, "Cannot bring the kinds and roles of the machines' agents up to date")
		return result{}, nil
	}
	r.installed.set(s.Object.UID, sum)
	return result{}, nil
}

// reinstall requests that the kinds and roles are applied again, because the cluster does not have a kind.
func (r *workloads) reinstall(s *scope) { r.installed.set(s.Object.UID, [sha256.Size]byte{}) }

// installDue reports whether the first machine had the time to apply the same objects.
func installDue(controlPlane *controlplanev1.CapstanControlPlane, now time.Time) bool {
	c := conditions.Get(controlPlane, controlplanev1.InitializedCondition)
	return c != nil && c.Status == metav1.ConditionTrue && now.Sub(c.LastTransitionTime.Time) >= installAfter
}

// install applies the kinds and roles as the first machine does; unchanged objects are not written. It removes objects that
// only former versions needed.
func install(ctx context.Context, c client.Client, stackedEtcd bool, localVolumes string) error {
	ctx, cancel := context.WithTimeout(ctx, installTimeout)
	defer cancel()
	objects, err := manifests.Parse(nil, manifests.ForAgents(stackedEtcd)...)
	if err != nil {
		return err
	}
	volumes, err := manifests.ForLocalVolumes(localVolumes)
	if err != nil {
		return err
	}
	for _, o := range append(objects, volumes...) {
		if err := c.Apply(ctx, client.ApplyConfigurationFromUnstructured(o), client.FieldOwner(kube.FieldManager), client.ForceOwnership); err != nil {
			return fmt.Errorf("applying %s %s: %w", o.GetKind(), o.GetName(), err)
		}
	}
	for _, name := range manifests.FormerClusterRoleBindings() {
		binding := &rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: name}}
		if err := c.Delete(ctx, binding); client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("removing ClusterRoleBinding %s: %w", name, err)
		}
	}
	return nil
}
