package addressclaim

import (
	"context"
	"fmt"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
	"capstan.dev/capstan/internal/ipam/ledger"
	"capstan.dev/capstan/internal/reconciling"
)

// release gives the claim's address back (row IPAM-05). It needs neither the
// pool nor the Cluster to exist.
func (r *Reconciler) release(ctx context.Context, s *state) error {
	if !controllerutil.ContainsFinalizer(s.claim, ipamv1.ClaimFinalizer) {
		return nil
	}
	ip, err := r.addressToRelease(ctx, s)
	if err != nil {
		return err
	}
	if ip != nil {
		if err := r.giveBack(ctx, s, ip); err != nil {
			return err
		}
		if len(without(ip.Finalizers, ipamv1.AddressFinalizer)) > 0 {
			return nil // somebody else holds it: its going brings the claim back
		}
	}
	r.Ledger.Pool(s.key).Abandon(s.claim.UID)
	return client.IgnoreNotFound(reconciling.DropFinalizer(ctx, r.Client, s.claim, ipamv1.ClaimFinalizer)) // IPAM-05d
}

// addressToRelease returns the IPAddress of the claim, or nil. The cache may
// not show yet what was created a moment ago, so it is not believed when it
// has nothing.
func (r *Reconciler) addressToRelease(ctx context.Context, s *state) (*capiipamv1.IPAddress, error) {
	ip := &capiipamv1.IPAddress{}
	key := client.ObjectKeyFromObject(s.claim)
	err := r.Client.Get(ctx, key, ip)
	if apierrors.IsNotFound(err) {
		err = r.Live.Get(ctx, key, ip)
	}
	if apierrors.IsNotFound(err) {
		return nil, nil //nolint:nilnil // no address and no error is an answer.
	}
	if err != nil {
		return nil, fmt.Errorf("reading IPAddress %s: %w", key, err)
	}
	switch relationOf(s.claim, ip) {
	case ours:
		return ip, nil
	case adoptive:
		// Made beforehand and never taken over: it was not ours to delete,
		// unless it came along with the claim from another cluster.
		if metav1.GetControllerOf(ip) != nil || s.claim.Status.AddressRef.Name == ip.Name {
			return ip, nil
		}
	}
	return nil, nil //nolint:nilnil // it belongs to somebody else.
}

// giveBack deallocates the address and deletes the IPAddress (rows IPAM-05b
// and IPAM-05c). The rest goes on record first: after that, the address is
// kept whatever happens to this process.
func (r *Reconciler) giveBack(ctx context.Context, s *state, ip *capiipamv1.IPAddress) error {
	book := r.Ledger.Pool(s.key)
	if err := book.Rest(ctx, ip.Spec); err != nil {
		return err
	}
	book.Releasing(ip.UID)
	return r.removeAddress(ctx, ip)
}

// removeAddress takes our finalizer off an IPAddress and deletes it.
func (r *Reconciler) removeAddress(ctx context.Context, ip *capiipamv1.IPAddress) error {
	rest := without(ip.Finalizers, ipamv1.AddressFinalizer)
	if len(rest) != len(ip.Finalizers) {
		obj := ip.DeepCopy()
		err := reconciling.DropFinalizer(ctx, r.Client, obj, ipamv1.AddressFinalizer)
		if err != nil && !apierrors.IsNotFound(err) {
			return fmt.Errorf("removing the finalizer of IPAddress %s/%s: %w", ip.Namespace, ip.Name, err)
		}
		if err == nil && len(rest) == 0 && !obj.DeletionTimestamp.IsZero() {
			r.Ledger.AddressGone(ip)
			return nil // it was only waiting for this
		}
	}
	uid := ip.UID
	err := r.Client.Delete(ctx, ip, client.Preconditions{UID: &uid})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("deleting IPAddress %s/%s: %w", ip.Namespace, ip.Name, err)
	}
	ctrl.LoggerFrom(ctx).Info("Released an address", "IPAddress", klog.KObj(ip), "address", ip.Spec.Address)
	if len(rest) == 0 {
		r.Ledger.AddressGone(ip)
	}
	return nil
}

// reapOrphan removes an IPAddress whose claim has gone without giving it back,
// for example because its finalizers were removed by hand, or because a
// request to create it arrived after the claim had gone.
func (r *Reconciler) reapOrphan(ctx context.Context, name types.NamespacedName) (ctrl.Result, error) {
	ip := &capiipamv1.IPAddress{}
	if err := r.Client.Get(ctx, name, ip); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if _, isOurs := ledger.KeyOf(ip.Spec.PoolRef, ip.Namespace); !isOurs {
		return ctrl.Result{}, nil
	}
	owner := metav1.GetControllerOf(ip)
	if owner == nil || !isClaim(owner) {
		return ctrl.Result{}, nil // made beforehand, for a claim to come
	}
	if left := r.OrphanAge - metav1.Now().Sub(ip.CreationTimestamp.Time); left > 0 && ip.DeletionTimestamp.IsZero() {
		// That a claim does not come is no event.
		return ctrl.Result{RequeueAfter: left}, nil
	}
	gone, err := r.claimGone(ctx, name, owner.UID)
	if err != nil || !gone {
		return ctrl.Result{}, err
	}
	return ctrl.Result{}, r.removeAddress(ctx, ip)
}

// dropIfClaimGone removes the IPAddress that was just made if its claim has
// gone meanwhile.
func (r *Reconciler) dropIfClaimGone(ctx context.Context, s *state) error {
	gone, err := r.claimGone(ctx, client.ObjectKeyFromObject(s.claim), s.claim.UID)
	if err != nil || !gone {
		return err
	}
	return r.removeAddress(ctx, s.ip)
}

func (r *Reconciler) claimGone(ctx context.Context, name types.NamespacedName, uid types.UID) (bool, error) {
	alive, err := r.Exists(ctx, name, uid)
	return !alive && err == nil, err
}

// Exists asks the API server whether a claim still exists.
func (r *Reconciler) Exists(ctx context.Context, name types.NamespacedName, uid types.UID) (bool, error) {
	claim := &capiipamv1.IPAddressClaim{}
	err := r.Live.Get(ctx, name, claim)
	if apierrors.IsNotFound(err) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("reading IPAddressClaim %s: %w", name, err)
	}
	return claim.UID == uid, nil
}

func without(list []string, item string) []string {
	return slices.DeleteFunc(slices.Clone(list), func(s string) bool { return s == item })
}
