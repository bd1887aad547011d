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

// TestObjects covers the requests of agents for EtcdMembers, on a real API server.
func TestObjects(t *testing.T) {
	env, err := testenv.Start(testenv.Options{AddToScheme: []func(*runtime.Scheme) error{etcdv1.AddToScheme}})
	expect.NoError(t, err)
	t.Cleanup(func() { expect.NoError(t, env.Stop()) })
	dynamicClient, err := dynamic.NewForConfig(env.Config)
	expect.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()

	// The CRD is created while the agent waits for it.
	type result struct {
		objects Objects
		err     error
	}
	watching := make(chan result, 1)
	go func() {
		objects, err := WatchObjects(ctx, dynamicClient, "")
		watching <- result{objects, err}
	}()
	_, err = envtest.InstallCRDs(env.Config, envtest.CRDInstallOptions{
		Paths: []string{filepath.Join(testenv.Root(), "internal/node/provision/manifests/etcd.capstan.dev_etcdmembers.yaml")}, ErrorIfPathMissing: true,
		MaxTime: testenv.Patience,
	})
	expect.NoError(t, err)
	r := <-watching
	expect.NoError(t, r.err)
	objects := r.objects

	spec := etcdv1.EtcdMemberSpec{PeerURL: "https://10.0.0.1:2380", ClientURL: "https://10.0.0.1:2379"}
	expect.NoError(t, objects.Create(ctx, "a", spec))
	expect.NoError(t, objects.Create(ctx, "a", spec)) // A second call succeeds, as after a crash.
	eventually(t, func() error { return seen(objects, func(m etcdv1.EtcdMember) bool { return m.Spec == spec }) })

	// The leader's agent and the machine's agent keep each other's fields.
	a := voter(leaderID, "a")
	v := viewOf([]Member{a}, objects.List()["a"])
	expect.NoError(t, objects.ApplyStatus(ctx, "a", v.status(objects.List()["a"])))
	expires := metav1.NewTime(time.Now().Add(time.Hour).UTC().Truncate(time.Second))
	self := &Self{Name: "a", Client: dynamicClient, Log: slog.New(slog.NewTextHandler(t.Output(), nil)), expires: &expires, Stop: func(context.Context, string) error { return nil }}
	expect.NoError(t, self.look(ctx, objects.List()["a"]))
	eventually(t, func() error {
		return seen(objects, func(m etcdv1.EtcdMember) bool {
			return m.Status.CertificatesExpire != nil && m.Status.MemberID == "1" && ptr.Deref(m.Status.Leader, false) && len(m.Status.Conditions) == 2
		})
	})

	// An unchanged status is not written again, now or a bit later.
	o := objects.List()["a"]
	v = viewOf([]Member{a}, o)
	v.now = noon.Add(time.Minute)
	if want := v.status(o); differs(o.Status, want) {
		t.Errorf("an unchanged status would be written again: %+v, have %+v", want, o.Status)
	}

	// The API server refuses to unset leave, with the value false and without the field.
	member := &etcdv1.EtcdMember{}
	expect.NoError(t, env.Client.Get(ctx, ctrlclient.ObjectKey{Name: "a"}, member))
	member.Spec.Leave = true
	expect.NoError(t, env.Client.Update(ctx, member))
	member.Spec.Leave = false
	if err := env.Client.Update(ctx, member); err == nil || !strings.Contains(err.Error(), "cannot be unset") {
		t.Errorf("leave was unset: %v", err)
	}

	// The machine stops its API server and sets a condition. The leader's agent keeps the condition.
	var stopped []string
	self.Stop = func(_ context.Context, name string) error { stopped = append(stopped, name); return nil }
	expect.NoError(t, env.Client.Get(ctx, ctrlclient.ObjectKey{Name: "a"}, member))
	b := voter(2, "b")
	v = viewOf([]Member{with(a, func(m *Member) { m.Leader = 2 }), with(b, func(m *Member) { m.Leader = 2 })}, *member)
	v.self = 2
	expect.NoError(t, objects.ApplyStatus(ctx, "a", v.status(*member)))
	eventually(t, func() error {
		return seen(objects, func(m etcdv1.EtcdMember) bool {
			return apimeta.IsStatusConditionTrue(m.Status.Conditions, etcdv1.LeavingCondition)
		})
	})
	expect.NoError(t, self.look(ctx, objects.List()["a"]))
	if got := strings.Join(stopped, " "); got != "kube-scheduler kube-controller-manager kube-apiserver" {
		t.Errorf("stopped %s", got)
	}
	eventually(t, func() error {
		return seen(objects, func(m etcdv1.EtcdMember) bool {
			return apimeta.IsStatusConditionFalse(m.Status.Conditions, etcdv1.ServingCondition)
		})
	})
	v.objects["a"] = objects.List()["a"]
	if got := decide(v); got.kind != actRemove {
		t.Errorf("%+v", got)
	}
	v.members = v.members[1:]
	expect.NoError(t, objects.ApplyStatus(ctx, "a", v.status(objects.List()["a"])))
	eventually(t, func() error {
		return seen(objects, func(m etcdv1.EtcdMember) bool {
			joined := apimeta.FindStatusCondition(m.Status.Conditions, etcdv1.JoinedCondition)
			return joined.Reason == etcdv1.LeftReason && apimeta.FindStatusCondition(m.Status.Conditions, etcdv1.ServingCondition) != nil && m.Status.CertificatesExpire != nil
		})
	})
	stopped = nil
	expect.NoError(t, self.look(ctx, objects.List()["a"]))
	if got := strings.Join(stopped, " "); !strings.HasSuffix(got, " etcd") {
		t.Errorf("stopped %s", got)
	}

	// A status for a deleted object returns no error and does not create the object again.
	expect.NoError(t, env.Client.Delete(ctx, member))
	expect.NoError(t, objects.ApplyStatus(ctx, "a", v.status(*member)))
	eventually(t, func() error { return seen(objects, func(m etcdv1.EtcdMember) bool { return m.Name == "" }) })

	expect.NoError(t, objects.RenewLease(ctx, "a", time.Now()))
	expect.NoError(t, objects.RenewLease(ctx, "b", time.Now()))
	lease := &coordinationv1.Lease{}
	expect.NoError(t, env.Client.Get(ctx, ctrlclient.ObjectKey{Namespace: etcdv1.CareLeaseNamespace, Name: etcdv1.CareLeaseName}, lease))
	if *lease.Spec.HolderIdentity != "b" || time.Since(lease.Spec.RenewTime.Time) > time.Hour || *lease.Spec.LeaseDurationSeconds != 40 {
		t.Errorf("%+v", lease.Spec)
	}
}

func seen(objects Objects, is func(etcdv1.EtcdMember) bool) error {
	if m := objects.List()["a"]; !is(m) {
		return fmt.Errorf("not yet: %+v", m)
	}
	return nil
}
