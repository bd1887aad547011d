package etcd

import (
	"context"
	"log/slog"
	"slices"
	"time"

	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/dynamic"

	etcdv1 "capstan.dev/capstan/api/etcd/v1beta2"
)

// selfRetry is the pause after an error, because the API server can be unavailable for a moment.
const selfRetry = time.Second

// Self maintains the part of a machine's EtcdMember that the machine owns. It reports when the certificates expire, and
// stops the machine's servers when the member must leave.
type Self struct {
	Name string
	// Client uses the cluster's endpoint, because Self stops the machine's own API server.
	Client dynamic.Interface
	// Expires receives the earliest expiration of the machine's certificates, after each renewal.
	Expires <-chan time.Time
	// Stop stops a service until the next start of the machine.
	Stop func(ctx context.Context, service string) error
	Log  *slog.Logger

	expires *metav1.Time
	stopped level
}

// level counts the stopped servers.
type level int

const (
	nothing level = iota
	serving
	everything
)

// servers are stopped in this order when a member may leave. The server that other machines use is the last one.
var servers = []string{"kube-scheduler", "kube-controller-manager", "kube-apiserver"}

// Run runs until ctx ends.
func (s *Self) Run(ctx context.Context) error {
	objects, err := WatchObjects(ctx, s.Client, s.Name)
	if err != nil {
		return err
	}
	for {
		var again <-chan time.Time
		if err := s.look(ctx, objects.List()[s.Name]); err != nil {
			s.Log.Warn("the machine's own EtcdMember", "error", err, "again in", selfRetry)
			again = time.After(selfRetry)
		}
		select {
		case <-ctx.Done():
			return nil
		case at := <-s.Expires:
			s.expires = &metav1.Time{Time: at.UTC().Truncate(time.Second)}
		case <-objects.Changed():
		case <-again:
		}
	}
}

// look carries out the request of the object, and writes the machine's own part of the status after changes.
func (s *Self) look(ctx context.Context, o etcdv1.EtcdMember) error {
	if o.Name == "" {
		return nil // not created yet
	}
	if want := toStop(o); want > s.stopped {
		if err := s.stop(ctx, want); err != nil {
			return err
		}
	}
	want := etcdv1.EtcdMemberStatus{CertificatesExpire: s.expires}
	if s.expires == nil {
		want.CertificatesExpire = o.Status.CertificatesExpire
	}
	serves := apimeta.FindStatusCondition(o.Status.Conditions, etcdv1.ServingCondition)
	if s.stopped > nothing {
		stopped := metav1.Condition{
			Type: etcdv1.ServingCondition, Status: metav1.ConditionFalse, Reason: etcdv1.StoppedReason,
			Message: "The API server of this machine has stopped, because the member must leave", LastTransitionTime: metav1.NewTime(time.Now().Truncate(time.Second)),
		}
		if serves != nil {
			stopped = *serves
		}
		want.Conditions = []metav1.Condition{stopped}
	}
	if want.CertificatesExpire.Equal(o.Status.CertificatesExpire) && (serves != nil) == (s.stopped > nothing) {
		return nil
	}
	return applyStatus(ctx, s.Client, selfManager, o.Name, want)
}

func toStop(o etcdv1.EtcdMember) level {
	joined := apimeta.FindStatusCondition(o.Status.Conditions, etcdv1.JoinedCondition)
	switch {
	case !o.Spec.Leave:
		return nothing
	case joined != nil && joined.Reason == etcdv1.LeftReason:
		return everything
	case apimeta.IsStatusConditionTrue(o.Status.Conditions, etcdv1.LeavingCondition):
		return serving
	}
	return nothing
}

// stop stops the machine's servers, and etcd after its removal from the members. Without that, etcd would end and
// restart again and again.
func (s *Self) stop(ctx context.Context, want level) error {
	names := servers
	if want == everything {
		names = append(slices.Clone(servers), "etcd")
	}
	s.Log.Info("this machine's etcd member must leave", "stopping", names)
	for _, name := range names {
		if err := s.Stop(ctx, name); err != nil {
			return err
		}
	}
	s.stopped = want
	return nil
}
