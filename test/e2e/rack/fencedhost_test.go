//go:build e2e

package rack_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/test/e2e/harness"
	"capstan.dev/capstan/test/rack"
)

// IM-02: the machines of a host with fencing that is cut off, and whose capstand hangs, are removed without an answer of the host,
// after they have stopped, and not before. They do not start when the host returns.
func loseFencedHost(t *testing.T, plane *harness.Plane, empty []*box) {
	boxes := racks(empty)
	for _, b := range boxes {
		fence(t, plane, b)
	}
	c := plane.CreateCluster(t, "default", "rack", "--control-plane-machines", "1", "--workers", "2", "--timeout", "5m")
	harness.Eventually(t, "three Nodes Ready", time.Minute, func(ctx context.Context) error { return c.NodesReady(ctx, 3) })
	var lost *rack.Box
	var victim infrav1.CapstanMachine
	for _, m := range c.Machines(t) {
		if _, controlPlane := m.Labels[clusterv1.MachineControlPlaneLabel]; !controlPlane {
			victim = m
		}
	}
	for _, b := range boxes {
		if b.Name() == victim.Spec.HostName {
			lost = b
		}
	}
	for _, m := range c.Machines(t) {
		if m.Name != victim.Name && m.Spec.HostName == lost.Name() {
			t.Fatalf("%s and %s are on one host: this test proves nothing", m.Name, victim.Name)
		}
	}
	address := victim.Spec.Network.Addresses[0].Address + ":10250"
	runs := func() bool {
		conn, err := lost.Dial(t.Context(), "tcp", address)
		if err == nil {
			_ = conn.Close()
		}
		return err == nil
	}
	if !runs() {
		t.Fatal("the kubelet does not answer: this test proves nothing")
	}
	since := time.Now()
	lost.Lose()
	machine := &clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{Namespace: victim.Namespace, Name: victim.Name}}
	expect.NoError(t, plane.Client.Delete(t.Context(), machine))
	harness.Eventually(t, "the machine of the lost host is removed", 4*time.Minute, func(ctx context.Context) error {
		running := runs()
		m := &infrav1.CapstanMachine{}
		err := plane.Client.Get(ctx, client.ObjectKeyFromObject(&victim), m)
		if client.IgnoreNotFound(err) != nil {
			return err
		}
		if err == nil {
			return fmt.Errorf("its machine runs: %v, %s", running, conditions.GetMessage(m, clusterv1.DeletingCondition))
		}
		if running {
			t.Fatal("the machine was removed while it ran")
		}
		return nil
	})
	t.Logf("the machine of the lost host was removed after %s", time.Since(since).Round(time.Second))
	harness.Eventually(t, "three Nodes Ready", 2*time.Minute, func(ctx context.Context) error { return c.NodesReady(ctx, 3) })

	lost.Return()
	harness.Eventually(t, "the returned host", time.Minute, func(ctx context.Context) error {
		host := &infrav1.CapstanHost{}
		if err := plane.Client.Get(ctx, client.ObjectKey{Name: lost.Name()}, host); err != nil {
			return err
		}
		for _, u := range host.Status.UnknownMachines {
			if u.ID == victim.Spec.ID && conditions.IsTrue(host, infrav1.HostConnectedCondition) {
				return nil
			}
		}
		return fmt.Errorf("unknown machines %v", host.Status.UnknownMachines)
	})
	if runs() {
		t.Error("the replaced machine was started again")
	}
	for _, b := range empty {
		if b.Name() == lost.Name() {
			plane.Must(t, "host", "prune", lost.Name(), victim.Spec.ID)
		}
	}
	harness.Eventually(t, "no unknown machine", time.Minute, func(ctx context.Context) error {
		host := &infrav1.CapstanHost{}
		err := plane.Client.Get(ctx, client.ObjectKey{Name: lost.Name()}, host)
		if err == nil && len(host.Status.UnknownMachines) > 0 {
			err = fmt.Errorf("unknown machines %v", host.Status.UnknownMachines)
		}
		return err
	})
}

// fence sets the fencing of a host, and waits until the host has acknowledged it.
func fence(t *testing.T, plane *harness.Plane, b *rack.Box) {
	t.Helper()
	harness.Eventually(t, "fencing of "+b.Name(), time.Minute, func(ctx context.Context) error {
		host := &infrav1.CapstanHost{}
		if err := plane.Client.Get(ctx, client.ObjectKey{Name: b.Name()}, host); err != nil {
			return err
		}
		before := host.DeepCopy()
		host.Spec.Fencing.StopAfterSeconds = ptr.To[int32](30)
		if err := plane.Client.Patch(ctx, host, client.MergeFrom(before)); err != nil {
			return err
		}
		if ptr.Deref(host.Status.Fencing.StopAfterSeconds, 0) != 30 || !conditions.IsTrue(host, infrav1.HostFencingCondition) {
			return fmt.Errorf("status %+v", host.Status.Fencing)
		}
		return nil
	})
}
