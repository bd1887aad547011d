package model

import (
	"fmt"
	"slices"
	"strings"
	"time"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/order"
)

// StuckAfter is the duration of the deletion of an infrastructure machine after which its Machine counts as gone. A restarted
// host is back long before. A variable for tests.
var StuckAfter = 30 * time.Second

// stuckIn returns the time until a Machine that is being deleted counts as gone: 0 now, negative never. Nothing depends on
// such a Machine: its member has left etcd and our hook is removed. Only infrastructure remains that cannot be removed,
// usually because its host is lost. Only the infrastructure provider has the cause, so time decides.
func (f Fleet) stuckIn(i *Instance, going time.Time, now time.Time) time.Duration {
	_, hook := i.Machine.Annotations[controlplanev1.PreTerminateHookAnnotation]
	if !i.Deleting() || hook || going.IsZero() {
		return -1
	}
	if f.Stacked && (f.Unknown != "" || i.Member != nil && !i.Member.Left) {
		return -1
	}
	return max(0, StuckAfter-now.Sub(going))
}

// withoutStuck removes the Machines that count as gone. going maps Machines to the deletion timestamp of their
// infrastructure.
func (f Fleet) withoutStuck(going map[string]time.Time, now time.Time) Fleet {
	out := f
	out.Instances = slices.DeleteFunc(slices.Clone(f.Instances), func(i Instance) bool {
		return f.stuckIn(&i, going[i.Name()], now) == 0
	})
	return out
}

// NextStuckDeletion returns the time until the next Machine counts as gone; 0 when none will. No event exists for it.
func (cp *ControlPlane) NextStuckDeletion(now time.Time) time.Duration {
	var next time.Duration
	f := cp.CompleteFleet()
	for n := range f.Instances {
		i := &f.Instances[n]
		next = order.Sooner(next, f.stuckIn(i, cp.InfrastructureDeletedAt[i.Name()], now))
	}
	return next
}

// StuckMachines describes the Machines that count as gone although they exist.
func (cp *ControlPlane) StuckMachines() []string {
	var out []string
	known := cp.Fleet()
	for _, m := range cp.Machines.SortedByCreationTimestamp() {
		if known.Find(m.Name) == nil {
			out = append(out, fmt.Sprintf("Machine %s has left the cluster, and %s", m.Name, infrastructureRemains(m)))
		}
	}
	return out
}

func infrastructureRemains(m *clusterv1.Machine) string {
	return fmt.Sprintf("its %s %s is still there: the host may not answer; bring it back, or see that object's conditions", m.Spec.InfrastructureRef.Kind, m.Spec.InfrastructureRef.Name)
}

// FormerMachines describes the deletion of Machines by a restore, and returns the time until the description changes without an event; 0 when
// it does not. A restore waits for every Machine, also for one on a lost host: the etcd of this machine may still run.
func (cp *ControlPlane) FormerMachines(machines []*clusterv1.Machine) (message string, again time.Duration) {
	var names, remain []string
	for _, m := range machines {
		names = append(names, m.Name)
		at, going := cp.InfrastructureDeletedAt[m.Name]
		switch left := StuckAfter - cp.Now.Sub(at); {
		case !going:
		case left <= 0:
			remain = append(remain, fmt.Sprintf("Machine %s is being deleted, and %s", m.Name, infrastructureRemains(m)))
		default:
			again = order.Sooner(again, left)
		}
	}
	return JoinReasons(append([]string{"Control plane machines are being deleted: " + strings.Join(names, ", ")}, remain...)), again
}
