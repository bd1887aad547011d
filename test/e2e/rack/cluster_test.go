//go:build e2e

package rack_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/test/e2e/harness"
	"capstan.dev/capstan/test/rack"
)

// IM-02, CP-16, IC-04, IC-10, CTL-09, CTL-15: the clusters of both parts are on the same boxes, with one management plane on a fourth box. The boxes are
// empty after each cluster is deleted.
func TestClusterOnThreeBoxes(t *testing.T) {
	plane := startPlane(t)
	boxes, router := rack.Register(t.Context(), t, plane, 3)
	empty := emptyAtTheEnd(t, boxes)
	t.Run("loss of the endpoint", func(t *testing.T) { loseEndpoint(t, plane, empty, router) })
	for _, b := range empty {
		b.isEmpty()
	}
	t.Run("fenced host", func(t *testing.T) { loseFencedHost(t, plane, empty) })
}

// A control plane has a machine on each of three boxes, and its endpoint a virtual address. The cluster survives a cut between two
// boxes, and the loss of the box with the endpoint together with the management plane: it loses no
// write that it has acknowledged, and writes succeed again within seconds. Then the lost machines are replaced, and they do not
// start again when their box returns.
func loseEndpoint(t *testing.T, plane *harness.Plane, empty []*box, router rack.Space) {
	boxes := racks(empty)
	c := createHighlyAvailable(t, plane, "rack")
	on := map[string]int{}
	for _, m := range c.Machines(t) {
		on[m.Spec.HostName]++
	}
	if len(on) != len(boxes) {
		t.Errorf("the machines are on %v, want all boxes", on)
	}
	cluster := &infrav1.CapstanCluster{}
	expect.NoError(t, plane.Client.Get(t.Context(), client.ObjectKey{Namespace: c.Namespace, Name: c.Name}, cluster))
	if host := cluster.Spec.ControlPlaneEndpoint.Host; host != rack.VirtualAddress {
		t.Fatalf("the endpoint is %s, want the virtual address", host)
	}
	for _, b := range empty {
		healthy(b, 3)
	}
	w := newWriter(t, c)

	lost := rack.Holder(t, boxes)
	other := boxes[lost.Number%len(boxes)]
	mend := rack.Cut(router, lost, other)
	w.write("cut between two boxes", 10*time.Second)
	mend()
	w.write("end of the cut", 5*time.Second)

	lost = rack.Holder(t, boxes)
	old := idsOn(t, c, lost)
	replaceLostMachines(t, plane)
	freeze := func(sig syscall.Signal) {
		for _, p := range plane.Find(t, "", "manager") {
			expect.NoError(t, syscall.Kill(p.PID, sig))
		}
	}
	freeze(syscall.SIGSTOP)
	lost.Lose()
	since := time.Now()
	longest := w.write("loss of the endpoint's box and of the management plane", 12*time.Second)
	t.Logf("%s without a write", longest)
	if longest > 30*time.Second { // On a quiet box, it is less than 10 s.
		t.Errorf("%s without a write, want less than 30 s", longest)
	}
	rack.Holder(t, rack.Others(boxes, lost))
	if lost.Has(rack.VirtualAddress) {
		t.Error("the lost box still has the endpoint")
	}
	w.check()
	freeze(syscall.SIGCONT)

	harness.Eventually(t, "the control plane on two boxes", 3*time.Minute, func(context.Context) error { return replacedBy(t, c, lost) })
	t.Logf("the machines of the lost box were replaced after %s", time.Since(since).Round(time.Second))

	returned := time.Now()
	lost.Return()
	harness.Eventually(t, "no replaced machine on the returned box", time.Minute, func(ctx context.Context) error { return noneOf(ctx, lost, old) })
	t.Logf("the replaced machines were removed %s after the return of their box", time.Since(returned).Round(time.Second))
	for line := range strings.Lines(lost.Output.String()) {
		if strings.Contains(line, "Machine started") && slices.ContainsFunc(old, func(id string) bool { return strings.Contains(line, id) }) {
			t.Errorf("a replaced machine was started again: %s", line)
		}
	}
	w.write("return of the box", 3*time.Second)
	w.check()
}

// idsOn are the ids of the machines on a box.
func idsOn(t *testing.T, c *harness.Cluster, b *rack.Box) (ids []string) {
	t.Helper()
	for _, m := range c.Machines(t) {
		if m.Spec.HostName == b.Name() {
			ids = append(ids, m.Spec.ID)
		}
	}
	return ids
}

// replacedBy returns nil if all machines of a lost box are being deleted, and the other boxes have three control plane machines that are
// Ready. The Nodes of the lost box stay until it returns, and its workers are replaced then: their Machines wait for the box.
func replacedBy(t *testing.T, c *harness.Cluster, lost *rack.Box) error {
	t.Helper()
	ready := 0
	for _, m := range c.Machines(t) {
		_, controlPlane := m.Labels[clusterv1.MachineControlPlaneLabel]
		switch {
		case m.Spec.HostName == lost.Name() && m.DeletionTimestamp.IsZero():
			return fmt.Errorf("%s is not replaced", m.Name)
		case m.Spec.HostName != lost.Name() && !conditions.IsTrue(&m, clusterv1.ReadyCondition):
			return fmt.Errorf("%s is not Ready", m.Name)
		case m.Spec.HostName != lost.Name() && controlPlane:
			ready++
		}
	}
	if ready != 3 {
		return fmt.Errorf("%d control plane machines are Ready on the other boxes", ready)
	}
	return nil
}

// noneOf returns nil if a box has none of the machines.
func noneOf(ctx context.Context, b *rack.Box, ids []string) error {
	list, err := b.ListMachines(ctx, &hostpb.ListMachinesRequest{})
	if err != nil {
		return err
	}
	for _, m := range list.Machines {
		if slices.Contains(ids, m.GetSpec().GetId()) {
			return fmt.Errorf("%s has the machine %s", b.Name(), m.GetSpec().GetName())
		}
	}
	return nil
}

// replaceLostMachines creates a MachineHealthCheck for machines whose host is lost.
func replaceLostMachines(t *testing.T, plane *harness.Plane) {
	t.Helper()
	health := &clusterv1.MachineHealthCheck{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "lost-hosts"},
		Spec: clusterv1.MachineHealthCheckSpec{
			ClusterName: "rack",
			Selector:    metav1.LabelSelector{MatchLabels: map[string]string{clusterv1.ClusterNameLabel: "rack"}},
			Checks: clusterv1.MachineHealthCheckChecks{UnhealthyMachineConditions: []clusterv1.UnhealthyMachineCondition{
				{Type: clusterv1.MachineInfrastructureReadyCondition, Status: metav1.ConditionUnknown, TimeoutSeconds: ptr.To[int32](5)},
			}},
		},
	}
	expect.NoError(t, plane.Client.Create(t.Context(), health))
	t.Cleanup(func() {
		expect.NoError(t, client.IgnoreNotFound(plane.Client.Delete(context.WithoutCancel(t.Context()), health)))
	})
}

// writer is a client that must lose no write.
type writer struct {
	*rack.Writer
	t *testing.T
}

func newWriter(t *testing.T, c *harness.Cluster) *writer {
	t.Helper()
	config, err := clientcmd.BuildConfigFromFlags("", c.Kubeconfig)
	expect.NoError(t, err)
	w, err := rack.NewWriter(config)
	expect.NoError(t, err)
	return &writer{w, t}
}

// write writes for a time, and until one more write succeeds. It returns the longest time without a write.
func (w *writer) write(what string, d time.Duration) (longest time.Duration) {
	w.t.Helper()
	got, err := w.Write(w.t.Context(), d)
	if err != nil {
		w.t.Fatalf("%s: %v", what, err)
	}
	w.t.Logf("%s: %s", what, got)
	return got.Longest
}

// check expects that every acknowledged write is there.
func (w *writer) check() {
	w.t.Helper()
	lost, err := w.Lost(w.t.Context())
	expect.NoError(w.t, err)
	if len(lost) > 0 {
		w.t.Errorf("acknowledged, and lost: %v", lost)
	}
}
