package controlplane

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/events"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/controlplane/model"
	"capstan.dev/capstan/internal/testenv/testcluster"
)

// TestRepairsInARow (CP-10): all three Machines and their replacements are unhealthy. They are replaced one at a time, so etcd
// has at least two members. Each replacement records the Machine that it replaces, so the number of retries is limited.
func TestRepairsInARow(t *testing.T) {
	w, cp, _ := connected(t, func(cp *controlplanev1.CapstanControlPlane) {
		cp.Spec.Replicas = ptr.To[int32](3)
		cp.Spec.Remediation.MaxRetry = ptr.To[int32](0)
	})
	w.until("three", w.settled(cp, 3))
	w.fewest = 3
	before := namesOfMachines(t, w)
	for _, name := range before {
		unhealthy(w, &clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{Namespace: w.cluster.Namespace, Name: name}})
	}
	w.until("all are replaced", func() bool {
		if voting := w.voting(); len(w.made) > 3 && voting < 2 {
			t.Fatalf("%d members vote", voting)
		}
		for _, name := range namesOfMachines(t, w) {
			if slices.Contains(before, name) {
				return false
			}
		}
		return w.settled(cp, 3)()
	})
	if w.fewest < 2 || len(w.made) != 6 {
		t.Errorf("at least %d voting members, %d Machines were created", w.fewest, len(w.made))
	}
	var replaced []string
	for _, m := range machinesOf(t, w.cluster) {
		if r := model.ReadRemediationRecord(&m, controlplanev1.RemediationForAnnotation); r != nil {
			replaced = append(replaced, r.Machine)
		}
	}
	slices.Sort(replaced)
	if slices.Sort(before); !slices.Equal(replaced, before) {
		t.Errorf("%v were replaced, and the new Machines record %v", before, replaced)
	}
	again := machinesOf(t, w.cluster)[0]
	unhealthy(w, &again)
	w.until("maxRetry binds", func() bool {
		return w.cluster.Get(cp) == nil && testcluster.Has(cp, clusterv1.RemediatingCondition, metav1.ConditionTrue, "maxRetry")
	})
}

// TestEventOfRemediation: the event Remediated follows only if the Machine was deleted. Another writer can change it just before.
func TestEventOfRemediation(t *testing.T) {
	machine := &clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "a", UID: "1"}}
	cp := &controlplanev1.CapstanControlPlane{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "demo"}}
	conflicts := 1
	c := fake.NewClientBuilder().WithScheme(env.Client.Scheme()).WithObjects(machine, cp).WithStatusSubresource(machine).WithInterceptorFuncs(interceptor.Funcs{
		Delete: func(ctx context.Context, c client.WithWatch, obj client.Object, opts ...client.DeleteOption) error {
			if conflicts--; conflicts >= 0 {
				return apierrors.NewConflict(corev1.Resource("machines"), obj.GetName(), nil)
			}
			return c.Delete(ctx, obj, opts...)
		},
	}).Build()
	clients, fake := &clients{Client: c, LiveClient: c}, events.NewFakeRecorder(10)
	recorder := &recorder{fake}
	r := &remediations{clients: clients, machineWriter: &machineWriter{clients, recorder}, annotator: &annotator{clients}, recorder: recorder}
	s := &scope{ControlPlane: &model.ControlPlane{Object: cp, Now: time.Unix(1000, 0)}}
	for _, step := range []struct {
		name   string
		events int
	}{{"another writer was faster", 0}, {"the Machine is deleted", 1}} {
		p := model.Repair{Machine: &model.Instance{Machine: machine.DeepCopy()}, Act: true, Record: model.RemediationRecord{Machine: "a"}}
		if err := r.remediate(t.Context(), s, p); err != nil {
			t.Fatal(err)
		}
		found := 0
		for len(fake.Events) > 0 {
			if strings.HasPrefix(<-fake.Events, "Warning Remediated") {
				found++
			}
		}
		if found != step.events {
			t.Errorf("%s: expected %d events, found %d", step.name, step.events, found)
		}
	}
}
