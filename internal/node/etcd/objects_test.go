package etcd

import (
	"context"
	"fmt"
	"log/slog"
	"path/filepath"
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/dynamic"
	"k8s.io/utils/ptr"
	ctrlclient "sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	etcdv1 "capstan.dev/capstan/api/etcd/v1beta2"
	"capstan.dev/capstan/internal/testenv"
	"capstan.dev/capstan/internal/testenv/expect"
)

// objectsTest is an EtcdMember on a real API server, with the agent of its machine and with the view of the leader's agent.
type objectsTest struct {
	env     *testenv.Env
	client  dynamic.Interface
	log     *slog.Logger
	objects Objects
	self    *Self
	// stopped are the components that the machine has stopped.
	stopped []string
	// view is the view of the leader's agent.
	view view
}

// TestObjects covers the requests of agents for EtcdMembers, on a real API server. Each part depends on the previous ones.
func TestObjects(t *testing.T) {
	o := watched(t)
	for _, part := range []struct {
		name string
		run  func(*testing.T)
	}{
		{"a second creation succeeds, as after a crash", o.create},
		{"the leader's agent and the machine's agent keep each other's fields", o.share},
		{"an unchanged status is not written again, now or a bit later", o.unchanged},
		{"the API server refuses to unset leave", o.unsetLeave},
		{"the machine stops its API server, and its etcd after it has left", o.leave},
		{"a status does not create a deleted object again", o.deleted},
		{"the lease names its last holder", o.lease},
	} {
		if !t.Run(part.name, part.run) {
			return
		}
	}
}

// watched creates the CRD while the agent waits for it.
func watched(t *testing.T) *objectsTest {
	env, err := testenv.Start(testenv.Options{AddToScheme: []func(*runtime.Scheme) error{etcdv1.AddToScheme}})
	expect.NoError(t, err)
	t.Cleanup(func() { expect.NoError(t, env.Stop()) })
	o := &objectsTest{env: env, log: slog.New(slog.NewTextHandler(t.Output(), nil))}
	o.client, err = dynamic.NewForConfig(env.Config)
	expect.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), expect.Patience)
	t.Cleanup(cancel)
	watching := make(chan error, 1)
	go func() {
		var err error
		o.objects, err = WatchObjects(ctx, o.client, "")
		watching <- err
	}()
	_, err = envtest.InstallCRDs(env.Config, envtest.CRDInstallOptions{
		Paths: []string{filepath.Join(testenv.Root(), "internal/node/provision/manifests/etcd.capstan.dev_etcdmembers.yaml")}, ErrorIfPathMissing: true,
		MaxTime: expect.Patience,
	})
	expect.NoError(t, err)
	expect.NoError(t, <-watching)
	return o
}

func (o *objectsTest) create(t *testing.T) {
	spec := etcdv1.EtcdMemberSpec{PeerURL: "https://10.0.0.1:2380", ClientURL: "https://10.0.0.1:2379"}
	expect.NoError(t, o.objects.Create(t.Context(), "a", spec))
	expect.NoError(t, o.objects.Create(t.Context(), "a", spec))
	o.becomes(t, "created", func(m etcdv1.EtcdMember) bool { return m.Spec == spec })
}

func (o *objectsTest) share(t *testing.T) {
	o.view = viewOf([]Member{voter(leaderID, "a")}, o.objects.List()["a"])
	expect.NoError(t, o.objects.ApplyStatus(t.Context(), "a", o.view.status(o.objects.List()["a"])))
	expires := metav1.NewTime(time.Now().Add(time.Hour).UTC().Truncate(time.Second))
	stop := func(_ context.Context, name string) error { o.stopped = append(o.stopped, name); return nil }
	o.self = &Self{Name: "a", Client: o.client, Log: o.log, expires: &expires, Stop: stop}
	expect.NoError(t, o.self.look(t.Context(), o.objects.List()["a"]))
	o.becomes(t, "with the fields of both", func(m etcdv1.EtcdMember) bool {
		return m.Status.CertificatesExpire != nil && m.Status.MemberID == "1" && ptr.Deref(m.Status.Leader, false) && len(m.Status.Conditions) == 2
	})
}

func (o *objectsTest) unchanged(t *testing.T) {
	member := o.objects.List()["a"]
	o.view = viewOf([]Member{voter(leaderID, "a")}, member)
	o.view.now = noon.Add(time.Minute)
	if want := o.view.status(member); differs(member.Status, want) {
		t.Errorf("an unchanged status would be written again: %+v, have %+v", want, member.Status)
	}
}

// unsetLeave tries the value false, which is also that of an object without the field.
func (o *objectsTest) unsetLeave(t *testing.T) {
	member := o.get(t)
	member.Spec.Leave = true
	expect.NoError(t, o.env.Client.Update(t.Context(), member))
	member.Spec.Leave = false
	if err := o.env.Client.Update(t.Context(), member); err == nil || !strings.Contains(err.Error(), "cannot be unset") {
		t.Errorf("leave was unset: %v", err)
	}
}

// leave: the machine stops its API server and sets a condition, which the leader's agent keeps.
func (o *objectsTest) leave(t *testing.T) {
	o.stopped = nil
	member := o.get(t)
	led := func(m *Member) { m.Leader = 2 }
	o.view = viewOf([]Member{with(voter(leaderID, "a"), led), with(voter(2, "b"), led)}, *member)
	o.view.self = 2
	expect.NoError(t, o.objects.ApplyStatus(t.Context(), "a", o.view.status(*member)))
	o.becomes(t, "leaving", func(m etcdv1.EtcdMember) bool {
		return apimeta.IsStatusConditionTrue(m.Status.Conditions, etcdv1.LeavingCondition)
	})
	expect.NoError(t, o.self.look(t.Context(), o.objects.List()["a"]))
	if got := strings.Join(o.stopped, " "); got != "kube-scheduler kube-controller-manager kube-apiserver" {
		t.Errorf("stopped %s", got)
	}
	o.becomes(t, "without an API server", func(m etcdv1.EtcdMember) bool {
		return apimeta.IsStatusConditionFalse(m.Status.Conditions, etcdv1.ServingCondition)
	})
	o.view.objects["a"] = o.objects.List()["a"]
	if got := decide(o.view); got.kind != actRemove {
		t.Errorf("%+v", got)
	}
	o.view.members = o.view.members[1:]
	expect.NoError(t, o.objects.ApplyStatus(t.Context(), "a", o.view.status(o.objects.List()["a"])))
	o.becomes(t, "removed, with the fields of its machine", func(m etcdv1.EtcdMember) bool {
		joined := apimeta.FindStatusCondition(m.Status.Conditions, etcdv1.JoinedCondition)
		return joined.Reason == etcdv1.LeftReason && apimeta.FindStatusCondition(m.Status.Conditions, etcdv1.ServingCondition) != nil && m.Status.CertificatesExpire != nil
	})
	o.stopped = nil
	expect.NoError(t, o.self.look(t.Context(), o.objects.List()["a"]))
	if got := strings.Join(o.stopped, " "); !strings.HasSuffix(got, " etcd") {
		t.Errorf("stopped %s", got)
	}
}

// deleted: a status for a deleted object returns no error.
func (o *objectsTest) deleted(t *testing.T) {
	member := o.get(t)
	expect.NoError(t, o.env.Client.Delete(t.Context(), member))
	expect.NoError(t, o.objects.ApplyStatus(t.Context(), "a", o.view.status(*member)))
	o.becomes(t, "deleted", func(m etcdv1.EtcdMember) bool { return m.Name == "" })
}

func (o *objectsTest) lease(t *testing.T) {
	expect.NoError(t, o.objects.RenewLease(t.Context(), "a", time.Now()))
	expect.NoError(t, o.objects.RenewLease(t.Context(), "b", time.Now()))
	lease := &coordinationv1.Lease{}
	expect.NoError(t, o.env.Client.Get(t.Context(), ctrlclient.ObjectKey{Namespace: etcdv1.CareLeaseNamespace, Name: etcdv1.CareLeaseName}, lease))
	if *lease.Spec.HolderIdentity != "b" || time.Since(lease.Spec.RenewTime.Time) > time.Hour || *lease.Spec.LeaseDurationSeconds != 40 {
		t.Errorf("%+v", lease.Spec)
	}
}

// get reads the object from the API server.
func (o *objectsTest) get(t *testing.T) *etcdv1.EtcdMember {
	t.Helper()
	member := &etcdv1.EtcdMember{}
	expect.NoError(t, o.env.Client.Get(t.Context(), ctrlclient.ObjectKey{Name: "a"}, member))
	return member
}

// becomes waits until the agent's watch shows an object that satisfies a condition.
func (o *objectsTest) becomes(t *testing.T, what string, is func(etcdv1.EtcdMember) bool) {
	t.Helper()
	expect.Eventually(t, what, func() error {
		if m := o.objects.List()["a"]; !is(m) {
			return fmt.Errorf("not yet: %+v", m)
		}
		return nil
	})
}
