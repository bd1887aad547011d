package manager

import (
	"cmp"
	"context"
	"os"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"

	"capstan.dev/capstan/internal/expiry"
	"capstan.dev/capstan/internal/reconciling"
)

// certificatesPeriod is the interval between two checks of a manager's certificate files. There is no event at the end
// of two thirds of a certificate's lifetime.
const certificatesPeriod = time.Hour

// certificates reports certificates whose renewal is overdue: those with which the process serves webhooks and metrics,
// and those in the folders of the flags. They belong to no object with conditions, so each report is a line of the log
// and an event of the manager's Lease.
type certificates struct {
	recorder events.EventRecorder
	lease    *coordinationv1.Lease
	period   time.Duration
}

func addCertificates(mgr ctrl.Manager, flags *Flags, lease string) error {
	return mgr.Add(&certificates{
		recorder: reconciling.EventRecorder(mgr, "capstan-manager"),
		lease: &coordinationv1.Lease{
			TypeMeta:   metav1.TypeMeta{APIVersion: coordinationv1.SchemeGroupVersion.String(), Kind: "Lease"},
			ObjectMeta: metav1.ObjectMeta{Namespace: cmp.Or(flags.LeaderElectNamespace, podNamespace(), metav1.NamespaceDefault), Name: lease},
		},
		period: certificatesPeriod,
	})
}

// podNamespace is empty outside of a Pod.
func podNamespace() string {
	name, _ := os.ReadFile("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
	return strings.TrimSpace(string(name))
}

// NeedLeaderElection is false, because each replica serves webhooks with its own files.
func (*certificates) NeedLeaderElection() bool { return false }

// Start reports until ctx is done.
func (c *certificates) Start(ctx context.Context) error {
	ticks := time.NewTicker(c.period)
	defer ticks.Stop()
	for {
		if condition := expiry.Folders(time.Now()); condition.Status == metav1.ConditionTrue {
			ctrl.LoggerFrom(ctx).Error(nil, "Certificates of this manager were not renewed", "certificates", condition.Message)
			c.recorder.Eventf(c.lease, nil, corev1.EventTypeWarning, condition.Reason, "Renew", "%s", condition.Message)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-ticks.C:
		}
	}
}
