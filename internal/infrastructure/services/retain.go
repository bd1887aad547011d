package services

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/reconciling"
)

// An address is free for other claims after its IPAddress is gone, whichever provider the pool has. So the finalizer is on the IPAddress:
// on the claim, it would only delay the end of the claim.

// retained reports whether an IPAddress has the finalizer.
func retained(o client.Object) bool {
	return controllerutil.ContainsFinalizer(o, infrav1.ServiceAddressFinalizer)
}

// retain adds the finalizer to an address before a host gets the address. It returns the reason why the address cannot be used any more,
// or "".
func (r *Reconciler) retain(ctx context.Context, address *capiipamv1.IPAddress) (waiting string, err error) {
	if retained(address) {
		return "", nil
	}
	if !address.DeletionTimestamp.IsZero() {
		return fmt.Sprintf("IPAddress %[1]s is being deleted: delete IPAddressClaim %[1]s for another address", address.Name), nil
	}
	return "", reconciling.Change(ctx, r.LiveClient, address, func() { controllerutil.AddFinalizer(address, infrav1.ServiceAddressFinalizer) })
}

// freeAddress removes the finalizer from the address of a claim.
func (r *Reconciler) freeAddress(ctx context.Context, claim client.ObjectKey) error {
	address := &capiipamv1.IPAddress{}
	if err := r.LiveClient.Get(ctx, claim, address); err != nil {
		return client.IgnoreNotFound(err)
	}
	return free(ctx, r.LiveClient, address)
}

func free(ctx context.Context, c client.Client, address *capiipamv1.IPAddress) error {
	if !retained(address) {
		return nil
	}
	if err := reconciling.DropFinalizer(ctx, c, address, infrav1.ServiceAddressFinalizer); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("freeing the address %s of IPAddress %s: %w", address.Spec.Address, address.Name, err)
	}
	return nil
}

// freeAll frees the addresses of a cluster's Services that fulfil a condition.
func freeAll(ctx context.Context, reader client.Reader, c client.Client, cluster client.ObjectKey, due func(client.Object) bool) (err error) {
	list := &capiipamv1.IPAddressList{}
	if err := reader.List(ctx, list, client.InNamespace(cluster.Namespace)); err != nil {
		return err
	}
	for i := range list.Items {
		if address := &list.Items[i]; isClaimName(cluster.Name, address.Name) && due(address) {
			err = errors.Join(err, free(ctx, c, address))
		}
	}
	return err
}

// held reports whether an IPAddress only waits for the finalizer, or for others.
func held(o client.Object) bool { return !o.GetDeletionTimestamp().IsZero() && retained(o) }

// freeUnclaimed frees the deleted addresses whose claims are gone: a user removed the finalizers of a claim, or the IPAM provider does not
// keep the claim as long as its address. All connected hosts have confirmed that they do not have these addresses.
func (r *Reconciler) freeUnclaimed(ctx context.Context, s *scope) error {
	if !s.asked {
		return nil // The next attempt follows the error.
	}
	return freeAll(ctx, r.Client, r.LiveClient, client.ObjectKeyFromObject(s.capstan), func(o client.Object) bool {
		return held(o) && !s.isClaimed(o) && !s.mayBeOut(o.(*capiipamv1.IPAddress))
	})
}

// isClaimed reports whether the claim of an address exists. A claim that was created later has the same name.
func (s *scope) isClaimed(address client.Object) bool {
	claim, controller := s.claims[address.GetName()], metav1.GetControllerOfNoCopy(address)
	return claim != nil && (controller == nil || controller.UID == claim.UID)
}

// mayBeOut reports whether a host that is not connected may have an address whose record was lost with its claim.
func (s *scope) mayBeOut(address *capiipamv1.IPAddress) bool {
	parsed, err := netip.ParseAddr(address.Spec.Address)
	for _, h := range s.hosts {
		if err == nil && !h.connected && h.allows(parsed) {
			return true
		}
	}
	return false
}

// freeOrphans frees the addresses of a cluster that does not exist any more, so that nothing waits for a cluster that lost its own
// finalizer.
func (r *Reconciler) freeOrphans(ctx context.Context, cluster client.ObjectKey) error {
	// The caches of both kinds can be of different ages.
	if err := r.LiveClient.Get(ctx, cluster, &infrav1.CapstanCluster{}); !apierrors.IsNotFound(err) {
		return err
	}
	return freeAll(ctx, r.Client, r.LiveClient, cluster, held)
}

// clusterOfAddress returns the request for the cluster of an IPAddress with the name of a Service's claim.
func clusterOfAddress(_ context.Context, o client.Object) []ctrl.Request {
	i := strings.LastIndex(o.GetName(), claimPrefix(""))
	if i <= 0 || !isClaimName(o.GetName()[:i], o.GetName()) {
		return nil
	}
	return []ctrl.Request{{NamespacedName: client.ObjectKey{Namespace: o.GetNamespace(), Name: o.GetName()[:i]}}}
}
