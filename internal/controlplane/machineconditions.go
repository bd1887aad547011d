package controlplane

import (
	"context"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"capstan.dev/capstan/internal/controlplane/model"
)

// machineStatus is the step that writes the conditions of Machines.
type machineStatus struct{ *machineWriter }

// reconcile writes on each Machine whether it is up to date (CP-18), and the health of its API server and etcd member, which
// are its readiness gates (CP-10).
func (r *machineStatus) reconcile(ctx context.Context, s *scope) (result, error) {
	f := s.CompleteFleet()
	for n := range f.Instances {
		i := &f.Instances[n]
		wanted := []metav1.Condition{model.UpToDate(i.Outdated)}
		// The last known state remains.
		if !s.Interrupted {
			wanted = append(wanted, model.MachineHealth(i, f)...)
		}
		if err := r.setMachineConditions(ctx, i.Machine, wanted...); err != nil {
			return result{}, err
		}
	}
	return result{}, nil
}
