package capstanhost

import (
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"sigs.k8s.io/cluster-api/util"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/credentials"
	"capstan.dev/capstan/internal/infrastructure/connections"
	"capstan.dev/capstan/internal/reconciling"
)

// reconcileConnection connects to the host and reports its state. It returns the time until the next check of the
// certificates.
func (r *Reconciler) reconcileConnection(ctx context.Context, host *infrav1.CapstanHost) (time.Duration, error) {
	if err := r.ownCredentials(ctx, host); err != nil {
		setConnected(host, metav1.ConditionFalse, infrav1.HostCredentialsInvalidReason, err.Error())
		return 0, err
	}
	conn, err := r.connect(ctx, host)
	if err != nil {
		setConnected(host, metav1.ConditionFalse, infrav1.HostCredentialsInvalidReason, err.Error())
		return 0, err
	}
	switch err := conn.ConnectionError(); {
	case err == nil:
		setConnected(host, metav1.ConditionTrue, infrav1.HostConnectedReason, "")
	case errors.Is(err, connections.ErrConnecting):
		setConnected(host, metav1.ConditionUnknown, infrav1.HostConnectingReason, "The first connection attempt is in progress")
	case errors.As(err, &connections.IncompatibleError{}):
		setConnected(host, metav1.ConditionFalse, infrav1.HostIncompatibleVersionReason, err.Error())
	default:
		setConnected(host, metav1.ConditionFalse, infrav1.HostUnreachableReason, unreachable(host, err))
	}
	if info := conn.Info(); info != nil {
		setStatus(&host.Status, info)
		showTunnel(host, info)
		if err := r.setOverlayKey(ctx, host, overlayKey(info)); err != nil {
			return 0, err
		}
	}
	if err := r.reconcileFencing(ctx, host, conn); err != nil {
		return 0, err
	}
	res := r.reconcileCertificates(ctx, host, conn)
	if conn.ConnectionError() != nil {
		return res, nil
	}
	return res, r.reconcileUnknown(ctx, host, conn)
}

// connect connects to the host, after the expiry of the managers' certificate with another one.
func (r *Reconciler) connect(ctx context.Context, host *infrav1.CapstanHost) (*connections.Host, error) {
	conn, err := r.Pool.Connect(ctx, host)
	if !errors.Is(err, credentials.ErrExpired) {
		return conn, err
	}
	if done, failed := r.replaceExpired(ctx, host); failed != nil || !done {
		return nil, errors.Join(err, failed)
	}
	return r.Pool.Connect(ctx, host)
}

// unreachable is the message of a host without a connection.
func unreachable(host *infrav1.CapstanHost, err error) string {
	if host.Dials() {
		return fmt.Sprintf("no connection from the host: %s", err)
	}
	return fmt.Sprintf("cannot reach capstand at %s, check that it runs: %s", host.Spec.Address, err)
}

func setConnected(host *infrav1.CapstanHost, status metav1.ConditionStatus, reason, message string) {
	reconciling.SetCondition(host, infrav1.HostConnectedCondition, status, reason, "%s", message)
}

// ownCredentials makes the host the owner of its credentials' Secret, so that clusterctl moves both. It reads the Secret only if the cache
// does not show this yet.
func (r *Reconciler) ownCredentials(ctx context.Context, host *infrav1.CapstanHost) error {
	ref := host.Spec.CredentialsRef
	if ref.Name == "" || !host.DeletionTimestamp.IsZero() {
		return nil
	}
	key := client.ObjectKey{Namespace: ref.Namespace, Name: ref.Name}
	owner := metav1.OwnerReference{APIVersion: infrav1.GroupVersion.String(), Kind: infrav1.HostKind, Name: host.Name, UID: host.UID}
	if cached := secretMetadata(); r.secrets.Get(ctx, key, cached) == nil && ownedBy(cached, owner) {
		return nil
	}
	secret := &corev1.Secret{}
	if err := r.LiveClient.Get(ctx, key, secret); err != nil {
		return fmt.Errorf("cannot read the Secret %s/%s with the host's credentials: %w", ref.Namespace, ref.Name, err)
	}
	if ownedBy(secret, owner) {
		return nil
	}
	err := reconciling.Change(ctx, r.Client, secret, func() {
		metav1.SetMetaDataLabel(&secret.ObjectMeta, infrav1.HostCredentialsLabel, "")
		secret.OwnerReferences = util.EnsureOwnerRef(secret.OwnerReferences, owner)
	})
	if apierrors.IsForbidden(err) {
		return fmt.Errorf("the provider cannot patch the Secret with the host's credentials in namespace %s: move the Secret to the namespace of the infrastructure provider, or give the provider a Role that allows the patch: %w", ref.Namespace, err)
	}
	return err
}

// ownedBy reports whether a Secret has the owner and the label of credentials.
func ownedBy(secret client.Object, owner metav1.OwnerReference) bool {
	_, labelled := secret.GetLabels()[infrav1.HostCredentialsLabel]
	return labelled && util.HasExactOwnerRef(secret.GetOwnerReferences(), owner)
}
