package controlplane

import (
	"context"
	"errors"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	"capstan.dev/capstan/internal/testenv/expect"
)

// interruptions is a client with one error around the creation of the next Machine.
type interruptions struct {
	client.Client
	// stored: the API server stores the Machine, and its answer is lost. owned: the Machine cannot become the owner of its
	// CapstanConfig.
	stored, owned bool
}

func (i *interruptions) Apply(ctx context.Context, obj runtime.ApplyConfiguration, opts ...client.ApplyOption) error {
	machine, ok := obj.(interface{ GetName() string })
	if !ok || !i.stored {
		return i.Client.Apply(ctx, obj, opts...)
	}
	list := &clusterv1.MachineList{}
	if err := i.Client.List(ctx, list); err != nil {
		return err
	}
	for n := range list.Items {
		if list.Items[n].Name == machine.GetName() { // The propagation applies existing Machines.
			return i.Client.Apply(ctx, obj, opts...)
		}
	}
	i.stored = false
	return errors.Join(i.Client.Apply(ctx, obj, opts...), apierrors.NewTimeoutError("the answer is lost", 0))
}

func (i *interruptions) Patch(ctx context.Context, obj client.Object, patch client.Patch, opts ...client.PatchOption) error {
	if _, ok := obj.(*bootstrapv1.CapstanConfig); ok && i.owned {
		i.owned = false
		return apierrors.NewInternalError(errors.New("the API server restarts"))
	}
	return i.Client.Patch(ctx, obj, patch, opts...)
}

// TestInterruptedCreation (CP-03): an error during or after the creation of a Machine does not stop the creation of the next one.
func TestInterruptedCreation(t *testing.T) {
	s := newStaleControlPlane(t)
	s.interrupted(3, &interruptions{Client: env.Client, stored: true})
	s.thaw("all vote", 3, func() bool { return s.voting() == 3 })
	s.interrupted(5, &interruptions{Client: env.Client, owned: true})
}

// interrupted scales the control plane with a client that has one error.
func (s *staleControlPlane) interrupted(replicas int, c *interruptions) {
	s.t.Helper()
	s.frozen(int32(replicas))
	s.cache.Client = c
	defer func() { s.cache.Client = env.Client }()
	var errs []error
	expect.True(s.t, "all Machines exist, or there is another error", func() bool {
		_, err := s.reconciler.Reconcile(context.Background(), ctrl.Request{NamespacedName: client.ObjectKeyFromObject(s.cp)})
		if err != nil {
			errs = append(errs, err)
		}
		return len(machinesOf(s.t, s.cluster)) == replicas || len(errs) > 1
	})
	if n := len(machinesOf(s.t, s.cluster)); n != replicas || len(errs) != 1 || c.stored || c.owned {
		s.t.Fatalf("%d Machines, want %d; errors: %v", n, replicas, errs)
	}
}
