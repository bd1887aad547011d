package capstanhost

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/grpc/codes"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/cluster-api/util/conditions"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/expiry"
	"capstan.dev/capstan/internal/infrastructure/connections"
)

// renewRetry after a renewal that failed: a third of the certificate's life is left to try.
const renewRetry = time.Minute

// reconcileCertificates renews the manager's certificate over the connection that it protects, and shows when the
// certificates of the connection expire. It returns when to look again. The host renews its own.
func (r *Reconciler) reconcileCertificates(ctx context.Context, host *infrav1.CapstanHost, conn *connections.Host) time.Duration {
	certificates, now := conn.Certificates(), time.Now()
	if len(certificates) == 0 {
		conditions.Delete(host, infrav1.CertificatesExpiringCondition)
		return 0
	}
	why, next := "", certificates[0].Due().Sub(now)
	managed, err := r.reconcileManaged(ctx, host, conn)
	switch {
	case managed:
		// The next handshake, or the event of the Secret, shows the change.
		next = untilDue(conn.Certificates(), now)
		if err != nil {
			why, next = err.Error(), renewRetry
			ctrl.LoggerFrom(ctx).Error(err, "Cannot renew the certificates of the connection")
		}
	case err != nil:
		why, next = err.Error(), renewRetry
	case next <= 0 && conn.ConnectionError() != nil:
		why = "the host, which signs the next certificate of the manager, is not reached"
		next = renewRetry // A connection is an event.
	case next <= 0:
		next = renewRetry
		if err := r.renew(ctx, host, conn); err != nil {
			why = err.Error()
			ctrl.LoggerFrom(ctx).Error(err, "Cannot renew the manager's certificate")
		}
	default:
		if err := conn.Look(ctx, now); err != nil {
			why = fmt.Sprintf("cannot look whether the host has renewed its certificate: %s", err)
		}
	}
	certificates = conn.Certificates()
	expiry.Record(infrav1.HostKind, "", host.Name, certificates)
	condition, again := expiry.Condition(certificates, why, now)
	conditions.Set(host, condition)
	if condition.Status == metav1.ConditionTrue {
		again = renewRetry
	}
	if again > 0 {
		next = min(next, again)
	}
	return max(time.Second, next)
}

// untilDue is the time until the first certificate is due.
func untilDue(certificates []expiry.Certificate, now time.Time) time.Duration {
	next := renewRetry
	for i, c := range certificates {
		if left := c.Due().Sub(now); i == 0 || left < next {
			next = left
		}
	}
	return next
}

// renew puts credentials that the host has signed into the Secret. The change of the Secret is an event, with which the
// connection begins to use them. A Secret that has changed meanwhile is left alone: another manager was first.
func (r *Reconciler) renew(ctx context.Context, host *infrav1.CapstanHost, conn *connections.Host) error {
	ref := host.Spec.CredentialsRef
	secret := &corev1.Secret{}
	if err := r.LiveClient.Get(ctx, client.ObjectKey{Namespace: ref.Namespace, Name: ref.Name}, secret); err != nil {
		return err
	}
	renewed, err := conn.Renewed(ctx)
	switch connections.Code(err) {
	case codes.OK:
	case codes.Unimplemented:
		return errors.New("capstand on the host is of a version that does not renew certificates: upgrade it, or make new credentials with `capstan host credentials`")
	default:
		return fmt.Errorf("the host does not sign another certificate for the manager: %s", connections.Message(err))
	}
	before := secret.DeepCopy()
	secret.Data = renewed.Data()
	return r.Client.Patch(ctx, secret, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
}
