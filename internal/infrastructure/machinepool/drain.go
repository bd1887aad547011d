package machinepool

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/nodedrain"
	"capstan.dev/capstan/internal/reconciling"
)

// +kubebuilder:rbac:groups=cluster.x-k8s.io,resources=machinedrainrules,verbs=list

// drainTimeout bounds the requests of one attempt to drain a Node.
const drainTimeout = 30 * time.Second

// isDrained reports whether the Node of the machine was cordoned for an update, as far as the pool has recorded.
func (m member) isDrained() bool {
	_, ok := m.capstan.Annotations[infrav1.MachineDrainAnnotation]
	return ok
}

// toUncordon returns the machines whose Nodes were drained for an update that runs no more, or will not begin now. An update that waits for
// capacity keeps its Node drained: the host begins it as soon as there is room.
func toUncordon(instances []instance, start []string) (out []string) {
	for _, i := range instances {
		if i.update.drained && !i.leaving && (!i.update.busy() || i.update.rejected) && !slices.Contains(start, i.name) {
			out = append(out, i.name)
		}
	}
	return out
}

// drained returns those of the machines whose Nodes are drained, if the pool requests a drain. It records the reason of a wait.
func (r *Reconciler) drained(ctx context.Context, s *scope, names []string, byName map[string]member) (ready []string, err error) {
	if len(names) == 0 || !ptr.Deref(s.pool.Spec.RollingUpdate.DrainBeforeUpdate, false) {
		return names, nil
	}
	ctx, cancel := context.WithTimeout(ctx, drainTimeout)
	defer cancel()
	workload, err := r.Workload(ctx, s.cluster)
	if err != nil {
		return nil, fmt.Errorf("no connection to the workload cluster for the drain of %s: %w", strings.Join(names, ", "), err)
	}
	var errs []error
	for _, name := range names {
		waits, err := r.drainOne(ctx, s, workload, byName[name])
		switch {
		case err != nil:
			errs = append(errs, err)
		case waits != "":
			s.draining = cmp.Or(s.draining, waits)
		default:
			ready = append(ready, name)
		}
	}
	return ready, errors.Join(errs...)
}

func (r *Reconciler) drainOne(ctx context.Context, s *scope, workload client.Client, m member) (waits string, err error) {
	if m.machine == nil || !m.machine.Status.NodeRef.IsDefined() {
		return "", nil
	}
	if err := r.recordDrain(ctx, m, true); err != nil {
		return "", err
	}
	own, pool := m.machine.Spec.Deletion, s.machinePool.Spec.Template.Spec.Deletion
	return nodedrain.Drain{
		Management: r.LiveClient, Workload: workload, Cluster: s.cluster, Machine: m.machine, Now: time.Now(),
		DrainTimeout:  cmp.Or(own.NodeDrainTimeoutSeconds, pool.NodeDrainTimeoutSeconds),
		DetachTimeout: cmp.Or(own.NodeVolumeDetachTimeoutSeconds, pool.NodeVolumeDetachTimeoutSeconds),
	}.Run(ctx)
}

// uncordon makes the Nodes of machines schedulable again.
func (r *Reconciler) uncordon(ctx context.Context, s *scope, names []string, byName map[string]member) error {
	if len(names) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, drainTimeout)
	defer cancel()
	workload, err := r.Workload(ctx, s.cluster)
	if err != nil {
		return fmt.Errorf("no connection to the workload cluster to uncordon the Nodes of %s: %w", strings.Join(names, ", "), err)
	}
	return forEach(names, func(name string) error {
		m := byName[name]
		if m.machine != nil && m.machine.Status.NodeRef.IsDefined() {
			if err := nodedrain.Release(ctx, workload, m.machine.Status.NodeRef.Name); err != nil {
				return err
			}
		}
		return r.recordDrain(ctx, m, false)
	})
}

// recordDrain writes the annotation before the Node is cordoned, and removes it after the Node was uncordoned.
func (r *Reconciler) recordDrain(ctx context.Context, m member, wanted bool) error {
	if m.isDrained() == wanted {
		return nil
	}
	return client.IgnoreNotFound(reconciling.Change(ctx, r.Client, m.capstan, func() {
		if wanted {
			metav1.SetMetaDataAnnotation(&m.capstan.ObjectMeta, infrav1.MachineDrainAnnotation, "")
		} else {
			delete(m.capstan.Annotations, infrav1.MachineDrainAnnotation)
		}
	}))
}
