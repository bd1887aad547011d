package bootstrap

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/cluster-api/util/secret"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	"capstan.dev/capstan/internal/bootstrap/render"
	"capstan.dev/capstan/internal/reconciling"
)

// The data of an update in place is in a Secret of its own, because the bootstrap data never changes (ALL-17). The Secret
// exists while the CapstanConfig, or the MachinePool that owns it, has Cluster API's annotation of an update in progress.

// reconcileUpdate writes the Secret with the data of an update in place, or deletes it when no update is in progress.
func (r *Reconciler) reconcileUpdate(ctx context.Context, s *scope) (ctrl.Result, error) {
	if !updating(s) {
		conditions.Delete(s.config, bootstrapv1.UpdateDataAvailableCondition)
		return ctrl.Result{}, r.dropUpdateData(ctx, s, "")
	}
	if err := r.updateData(ctx, s); err != nil {
		reconciling.SetCondition(s.config, bootstrapv1.UpdateDataAvailableCondition, metav1.ConditionFalse, reasonOf(err), "%s", err)
		return retry(err)
	}
	reconciling.SetCondition(s.config, bootstrapv1.UpdateDataAvailableCondition, metav1.ConditionTrue, bootstrapv1.DataSecretAvailableReason, "")
	return ctrl.Result{}, nil
}

// updating reports whether an update in place is in progress. A machine that has not started needs none: it starts from
// bootstrap data.
func updating(s *scope) bool {
	if s.owner.deleting {
		return false
	}
	_, marked := s.config.Annotations[clusterv1.UpdateInProgressAnnotation]
	if s.owner.pool != nil {
		_, pool := s.owner.pool.Annotations[clusterv1.UpdateInProgressAnnotation]
		return marked || pool
	}
	return marked && s.owner.started
}

// updateData renders the data and writes the Secret if its content or its annotations differ. The error is a *notYet if an
// input is missing.
func (r *Reconciler) updateData(ctx context.Context, s *scope) error {
	in, err := r.settings(ctx, s, render.ForUpdate(s.config.Spec))
	if err != nil {
		return err
	}
	if err := r.addSecrets(ctx, s, &in); err != nil {
		return err
	}
	data, err := render.Update(in)
	if err != nil {
		return waitFor(bootstrapv1.InvalidConfigReason, "%s", err)
	}
	want := updateSecret(s, in.KubernetesVersion, data)
	if err := r.dropUpdateData(ctx, s, want.Name); err != nil { // A pool has other data for each spec and version.
		return err
	}
	if err := r.writeUpdateData(ctx, s, want); err != nil {
		return err
	}
	s.config.Status.Update = bootstrapv1.ConfigUpdateStatus{
		ID: want.Annotations[bootstrapv1.UpdateIDAnnotation], DataSecretName: want.Name,
		KubernetesVersion: in.KubernetesVersion, ObservedGeneration: s.config.Generation,
	}
	return nil
}

func updateSecret(s *scope, version string, data []byte) *corev1.Secret {
	return &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: s.config.Namespace,
			Name:      bootstrapv1.UpdateSecretName(dataSecretName(s)),
			Labels:    map[string]string{clusterv1.ClusterNameLabel: s.cluster.Name},
			Annotations: map[string]string{
				bootstrapv1.UpdateIDAnnotation:          updateID(version, data),
				bootstrapv1.KubernetesVersionAnnotation: version,
				bootstrapv1.ConfigGenerationAnnotation:  strconv.FormatInt(s.config.Generation, 10),
			},
			OwnerReferences: []metav1.OwnerReference{controllerRef(s.config)},
		},
		Type: clusterv1.ClusterSecretType,
		Data: map[string][]byte{secret.KubeconfigDataName: data},
	}
}

// updateID depends on everything that the data changes.
func updateID(version string, data []byte) string {
	hash := sha256.New()
	_, _ = fmt.Fprintf(hash, "%s\n", version)
	_, _ = hash.Write(data)
	return hex.EncodeToString(hash.Sum(nil)[:16])
}

// writeUpdateData creates or changes the Secret. It changes no Secret of another owner.
func (r *Reconciler) writeUpdateData(ctx context.Context, s *scope, want *corev1.Secret) error {
	have := &corev1.Secret{}
	err := r.SecretCachingClient.Get(ctx, client.ObjectKeyFromObject(want), have)
	if apierrors.IsNotFound(err) {
		if err = r.Client.Create(ctx, want.DeepCopy()); err == nil {
			ctrl.LoggerFrom(ctx).Info("Created the data of an update in place", "Secret", klog.KObj(want), "updateID", want.Annotations[bootstrapv1.UpdateIDAnnotation])
		}
		if !apierrors.IsAlreadyExists(err) {
			return err
		}
		// The cache was stale, or the Secret lacks the label of the cluster.
		err = r.Client.Get(ctx, client.ObjectKeyFromObject(want), have)
	}
	if err != nil {
		return err
	}
	if !isController(have, s.config) || have.Type != want.Type {
		return &notYet{reason: bootstrapv1.InvalidConfigReason, unseen: true, message: fmt.Sprintf(
			"the Secret %s has the name that the update data needs, but this provider did not create it: delete or rename it", have.Name)}
	}
	before := have.DeepCopy()
	have.Data = want.Data
	if have.Annotations == nil {
		have.Annotations = map[string]string{}
	}
	maps.Copy(have.Annotations, want.Annotations)
	if have.Labels == nil {
		have.Labels = map[string]string{}
	}
	maps.Copy(have.Labels, want.Labels)
	if equality.Semantic.DeepEqual(before, have) {
		return nil
	}
	return r.Client.Patch(ctx, have, client.MergeFrom(before))
}

// dropUpdateData deletes the data of former updates, which can contain credentials, except for the Secret named keep. The status does not
// name a Secret if the manager ended directly after its creation.
func (r *Reconciler) dropUpdateData(ctx context.Context, s *scope, keep string) error {
	secrets, err := r.updateSecrets(ctx, s)
	if err != nil {
		return err
	}
	for i := range secrets {
		former := &secrets[i]
		if former.Name == keep || !isController(former, s.config) || !isUpdateData(former) {
			continue
		}
		if err := r.Client.Delete(ctx, former, client.Preconditions{UID: &former.UID}); client.IgnoreNotFound(err) != nil {
			return errors.Join(errors.New("cannot delete the data of the last update"), err)
		}
	}
	if s.config.Status.Update.DataSecretName != keep {
		s.config.Status.Update.DataSecretName = ""
	}
	return nil
}

// updateSecrets returns the Secrets that can have update data of the config. The one of a machine always has the same name. The caller must
// not change the Secrets: they belong to the cache.
func (r *Reconciler) updateSecrets(ctx context.Context, s *scope) ([]corev1.Secret, error) {
	if s.owner.pool != nil {
		all := &corev1.SecretList{}
		err := r.SecretCachingClient.List(ctx, all, reconciling.OfCluster(client.ObjectKeyFromObject(s.cluster)), client.UnsafeDisableDeepCopy)
		return all.Items, err
	}
	one := corev1.Secret{}
	err := r.SecretCachingClient.Get(ctx, client.ObjectKey{Namespace: s.config.Namespace, Name: bootstrapv1.UpdateSecretName(dataSecretName(s))}, &one)
	return []corev1.Secret{one}, client.IgnoreNotFound(err)
}

// isUpdateData reports whether a Secret of a config has the data of an update.
func isUpdateData(s *corev1.Secret) bool {
	_, ok := s.Annotations[bootstrapv1.UpdateIDAnnotation]
	return ok
}
