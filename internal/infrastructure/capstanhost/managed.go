package capstanhost

import (
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/credentials"
	"capstan.dev/capstan/internal/infrastructure/connections"
)

// reconcileManaged renews the certificates of a host that joined, of its managers, and their authority. done is false for a host
// that has its authority to itself. It takes one step: the change that it makes is an event.
func (r *Reconciler) reconcileManaged(ctx context.Context, host *infrav1.CapstanHost, conn *connections.Host) (done bool, err error) {
	ref, now := host.Spec.CredentialsRef, time.Now()
	if ref.Name == "" {
		return false, nil
	}
	secret := &corev1.Secret{}
	if err := r.LiveClient.Get(ctx, client.ObjectKey{Namespace: ref.Namespace, Name: ref.Name}, secret); err != nil {
		return false, err
	}
	m, err := credentials.AuthorityFromSecret(secret.Data)
	if errors.Is(err, credentials.ErrNoAuthority) {
		return false, nil
	}
	if err != nil {
		return true, fmt.Errorf("the Secret %s/%s: %w", ref.Namespace, ref.Name, err)
	}
	_, rotate := host.Annotations[infrav1.HostRotateAuthorityAnnotation]
	step := m.Next(conn.Served(), rotate, now)
	if step != credentials.StepAuthority && conn.ConnectionError() != nil {
		step = credentials.StepNone
	}
	if step != credentials.StepAuthority {
		delete(host.Annotations, infrav1.HostRotateAuthorityAnnotation) // The new authority is in the Secret.
	}
	changed, err := r.take(ctx, step, m, conn, now)
	if err != nil || changed == nil {
		return true, err
	}
	before := secret.DeepCopy()
	secret.Data = changed.Data()
	return true, r.Client.Patch(ctx, secret, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
}

// take does the part of a step on the host, and returns the content of the Secret after it, nil if that does not change.
func (r *Reconciler) take(ctx context.Context, step credentials.Step, m credentials.Managed, conn *connections.Host, now time.Time) (*credentials.Managed, error) {
	var next credentials.Managed
	var err error
	switch step {
	case credentials.StepAuthority:
		next, err = m.WithAuthority(now)
	case credentials.StepServer:
		if err := m.Install(ctx, conn.Credentials(), now); err != nil {
			return nil, fmt.Errorf("the host does not accept its next certificate: %s", connections.Message(err))
		}
		return nil, conn.Handshake(ctx, now)
	case credentials.StepClient:
		next, err = m.WithClient(now)
	case credentials.StepForget:
		if err := m.Alone().Install(ctx, conn.Credentials(), now); err != nil {
			return nil, fmt.Errorf("the host does not forget its previous authority: %s", connections.Message(err))
		}
		next = m.Alone()
	default:
		return nil, nil
	}
	return &next, err
}

// replaceExpired replaces the expired certificate of the managers of a host that joined: they have its authority, and need no connection
// for it. done is false for another host, and if the authority has expired as well.
func (r *Reconciler) replaceExpired(ctx context.Context, host *infrav1.CapstanHost) (done bool, err error) {
	ref, now := host.Spec.CredentialsRef, time.Now()
	secret := &corev1.Secret{}
	if err := r.LiveClient.Get(ctx, client.ObjectKey{Namespace: ref.Namespace, Name: ref.Name}, secret); err != nil {
		return false, err
	}
	m, err := credentials.AuthorityFromSecret(secret.Data)
	if errors.Is(err, credentials.ErrNoAuthority) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	next, err := m.WithClient(now)
	if err != nil || !next.Usable(now) {
		return false, err
	}
	before := secret.DeepCopy()
	secret.Data = next.Data()
	return true, r.Client.Patch(ctx, secret, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
}
