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
	"capstan.dev/capstan/internal/reconciling"
)

// reconcileManaged renews the certificates of a host that joined, of its managers, and their authority. done is false for a host
// that has its authority to itself. It takes one step: the change that it makes is an event.
func (r *Reconciler) reconcileManaged(ctx context.Context, host *infrav1.CapstanHost, conn *connections.Host) (done bool, err error) {
	if host.Spec.CredentialsRef.Name == "" {
		return false, nil
	}
	secret, m, err := r.managed(ctx, host)
	if secret == nil || err != nil {
		return secret != nil, err
	}
	now := time.Now()
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
	return true, r.store(ctx, secret, *changed)
}

// managed reads the Secret of a host that joined. The Secret is nil for a host that has its authority to itself.
func (r *Reconciler) managed(ctx context.Context, host *infrav1.CapstanHost) (*corev1.Secret, credentials.Managed, error) {
	ref, secret := host.Spec.CredentialsRef, &corev1.Secret{}
	if err := r.LiveClient.Get(ctx, client.ObjectKey{Namespace: ref.Namespace, Name: ref.Name}, secret); err != nil {
		return nil, credentials.Managed{}, err
	}
	m, err := credentials.AuthorityFromSecret(secret.Data)
	if errors.Is(err, credentials.ErrNoAuthority) {
		return nil, credentials.Managed{}, nil
	}
	if err != nil {
		err = fmt.Errorf("the Secret %s/%s: %w", ref.Namespace, ref.Name, err)
	}
	return secret, m, err
}

// store writes credentials, unless the Secret was changed meanwhile.
func (r *Reconciler) store(ctx context.Context, secret *corev1.Secret, m credentials.Managed) error {
	return reconciling.Change(ctx, r.Client, secret, func() { secret.Data = m.Data() })
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
	secret, m, err := r.managed(ctx, host)
	if secret == nil || err != nil {
		return false, err
	}
	now := time.Now()
	next, err := m.WithClient(now)
	if err != nil || !next.Usable(now) {
		return false, err
	}
	return true, r.store(ctx, secret, next)
}
