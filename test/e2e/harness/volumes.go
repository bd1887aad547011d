//go:build e2e

package harness

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
)

// volumeFile contains the ID of its volume.
const volumeFile = "/srv/data/id"

// DataVolume returns the volume of machines whose data the tests follow. It is deleted with the owner of the machines.
func DataVolume() []infrav1.MachineVolume {
	return []infrav1.MachineVolume{{Name: "data", Path: "/srv/data", SizeGiB: 1, ReclaimPolicy: infrav1.VolumeDelete}}
}

// Volumes follows the CapstanVolumes of a cluster.
type Volumes struct {
	cluster *Cluster
	// written has the IDs of the volumes with data.
	written map[string]bool
	// stop ends the watch and returns the number of steps of volumes from one holder to another that it saw.
	stop func() (steps int)
}

// FollowVolumes fails the test if a volume gets another machine before it was free, or is free before its machine is gone.
func (c *Cluster) FollowVolumes(t *testing.T) *Volumes {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done, steps := make(chan struct{}), 0
	go func() {
		defer close(done)
		holders := map[string]string{}
		for ctx.Err() == nil {
			if err := c.watchVolumes(ctx, func(v *infrav1.CapstanVolume) {
				former, now := holders[v.Spec.ID], v.Spec.MachineName
				holders[v.Spec.ID] = now
				if former != now {
					steps++
				}
				if why := wrongHolder(former, now); why != "" {
					t.Errorf("CapstanVolume %s: %s", v.Name, why)
				}
			}); err != nil {
				select { // The API server restarts.
				case <-ctx.Done():
				case <-time.After(time.Second):
				}
			}
		}
	}()
	v := &Volumes{cluster: c, written: map[string]bool{}, stop: func() int { cancel(); <-done; return steps }}
	t.Cleanup(func() { v.stop() })
	return v
}

// watchVolumes calls seen for each state of each volume until the watch ends.
func (c *Cluster) watchVolumes(ctx context.Context, seen func(*infrav1.CapstanVolume)) error {
	list := &infrav1.CapstanVolumeList{}
	of := []client.ListOption{client.InNamespace(c.Namespace), client.MatchingLabels{clusterv1.ClusterNameLabel: c.Name}}
	w, err := c.Plane.Client.Watch(ctx, list, of...)
	if err != nil {
		return err
	}
	defer w.Stop()
	for e := range w.ResultChan() {
		if v, ok := e.Object.(*infrav1.CapstanVolume); ok {
			seen(v)
		}
	}
	return nil
}

// wrongHolder explains why a volume must not go from one machine to another; empty for a correct step. A machine that is gone never
// comes back, so a late look at the processes reports no correct step.
func wrongHolder(former, now string) string {
	if former == "" || former == now {
		return ""
	}
	if now != "" {
		return fmt.Sprintf("it went from machine %s to machine %s and was never free", former, now)
	}
	all, err := Processes()
	if err != nil {
		return err.Error()
	}
	if i := slices.IndexFunc(all, func(p Process) bool { return p.Machine == former }); i >= 0 {
		return fmt.Sprintf("it is free, and %s of its machine %s runs", all[i].Name, former)
	}
	return ""
}

// Write writes the ID of each volume into it, and checks that n machines have one.
func (v *Volumes) Write(t *testing.T, n int) {
	t.Helper()
	for id, machine := range v.held(t, n) {
		v.cluster.InMachine(t, machine, "mountpoint -q /srv/data; echo "+id+" >"+volumeFile+"; sync")
		v.written[id] = true
	}
}

// Inherited checks that n machines have volumes with the data of their predecessors.
func (v *Volumes) Inherited(t *testing.T, n int) {
	t.Helper()
	for id, machine := range v.held(t, n) {
		if !v.written[id] {
			t.Errorf("the volume %s of machine %s is new", id, machine)
			continue
		}
		if got := v.cluster.InMachine(t, machine, "mountpoint -q /srv/data; cat "+volumeFile); got != id {
			t.Errorf("the volume of machine %s has the data of %q, want %s", machine, got, id)
		}
	}
}

// held returns the machine of each volume that has one, and checks that both are on one host.
func (v *Volumes) held(t *testing.T, n int) map[string]string {
	t.Helper()
	hosts, held := map[string]string{}, map[string]string{}
	for _, m := range v.cluster.Machines(t) {
		hosts[m.Name] = m.Spec.HostName
	}
	list := &infrav1.CapstanVolumeList{}
	if err := v.cluster.Plane.Client.List(t.Context(), list, client.InNamespace(v.cluster.Namespace), client.MatchingLabels{clusterv1.ClusterNameLabel: v.cluster.Name}); err != nil {
		t.Fatal(err)
	}
	for _, volume := range list.Items {
		if volume.Spec.MachineName == "" {
			continue
		}
		held[volume.Spec.ID] = volume.Spec.MachineName
		if host := hosts[volume.Spec.MachineName]; host != volume.Spec.HostName {
			t.Errorf("CapstanVolume %s is on host %s, and its machine %s on host %q", volume.Name, volume.Spec.HostName, volume.Spec.MachineName, host)
		}
	}
	if len(held) != n {
		t.Errorf("%d machines have a volume, want %d: %v", len(held), n, held)
	}
	return held
}

// Removed deletes the volumes after the deletion of the cluster. Each volume had at least one machine, and one volume at least two.
func (v *Volumes) Removed(t *testing.T) {
	t.Helper()
	if steps := v.stop(); steps < len(v.written)+2 {
		t.Errorf("the watch saw %d steps of %d volumes: this test proves nothing about their order", steps, len(v.written))
	}
	if err := v.cluster.Plane.Client.DeleteAllOf(t.Context(), &infrav1.CapstanVolume{}, client.InNamespace(v.cluster.Namespace)); err != nil {
		t.Fatal(err)
	}
	Eventually(t, "the volumes of the cluster are deleted", patience, func(ctx context.Context) error {
		list := &infrav1.CapstanVolumeList{}
		if err := v.cluster.Plane.Client.List(ctx, list, client.InNamespace(v.cluster.Namespace)); err != nil {
			return err
		}
		if len(list.Items) > 0 {
			return fmt.Errorf("%d CapstanVolumes, the first one is %s", len(list.Items), list.Items[0].Name)
		}
		return nil
	})
}

// InMachine runs a script in a machine and returns its output.
func (c *Cluster) InMachine(t *testing.T, machine, script string) string {
	t.Helper()
	return strings.TrimSpace(c.Plane.Must(t, "shell", "--namespace", c.Namespace, machine, "--", "sh", "-ec", script))
}
