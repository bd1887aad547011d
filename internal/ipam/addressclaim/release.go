package addressclaim

import (
	"context"
	"fmt"
	"slices"
	"time"

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

// release releases the claim's address (row IPAM-05). It works without the pool and the Cluster.
func (r *Reconciler) release(ctx context.Context, s *state) error {
	if !controllerutil.ContainsFinalizer(s.claim, ipamv1.ClaimFinalizer) {
		return nil
	}
	ip, err := r.addressToRelease(ctx, s)
	if err != nil {
		return err
	}
	if ip != nil {
		if err := r.giveBack(ctx, s.key, ip); err != nil {
			return err
		}
		if len(without(ip.Finalizers, ipamv1.AddressFinalizer)) > 0 {
			return nil // Another object owns it. Its deletion triggers the next reconcile of the claim.
		}
	}
	r.Ledger.Pool(s.key).Abandon(s.claim.UID)
	return client.IgnoreNotFound(reconciling.DropFinalizer(ctx, r.Client, s.claim, ipamv1.ClaimFinalizer)) // IPAM-05d
}

// addressToRelease returns the IPAddress of the claim, or nil. The cache may lack an object that was just created, so a
// missing IPAddress is read from the API server.
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
		// A user created it, and the claim has never adopted it. It is deleted only if it was moved with the claim from
		// another cluster.
		if metav1.GetControllerOf(ip) != nil || s.claim.Status.AddressRef.Name == ip.Name {
			return ip, nil
		}
	}
	return nil, nil //nolint:nilnil // another object owns it.
}

// giveBack deallocates the address and deletes the IPAddress (rows IPAM-05b and IPAM-05c). The rest is recorded first,
// so that the address is withheld even if this process ends.
func (r *Reconciler) giveBack(ctx context.Context, key ledger.Key, ip *capiipamv1.IPAddress) error {
	book := r.Ledger.Pool(key)
	if err := book.Rest(ctx, ip.Spec); err != nil {
		return err
	}
	book.Releasing(ip.UID)
	return r.removeAddress(ctx, ip)
}

// removeAddress removes the finalizer of an IPAddress and deletes it. The deletion is of this version: another manager can restore the
// finalizer meanwhile, and then the IPAddress would stay although its address counts as free.
func (r *Reconciler) removeAddress(ctx context.Context, ip *capiipamv1.IPAddress) error {
	rest := without(ip.Finalizers, ipamv1.AddressFinalizer)
	obj := ip.DeepCopy()
	if len(rest) != len(ip.Finalizers) {
		err := reconciling.DropFinalizer(ctx, r.Client, obj, ipamv1.AddressFinalizer)
		if err != nil && !apierrors.IsNotFound(err) {
			return fmt.Errorf("removing the finalizer of IPAddress %s/%s: %w", ip.Namespace, ip.Name, err)
		}
		if err == nil && len(rest) == 0 && !obj.DeletionTimestamp.IsZero() {
			r.Ledger.AddressGone(ip)
			return nil // The IPAddress only waited for the finalizer.
		}
	}
	err := r.Client.Delete(ctx, obj, client.Preconditions{UID: &obj.UID, ResourceVersion: &obj.ResourceVersion})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("deleting IPAddress %s/%s: %w", ip.Namespace, ip.Name, err)
	}
	ctrl.LoggerFrom(ctx).Info("Released an address", "IPAddress", klog.KObj(ip), "address", ip.Spec.Address)
	if len(rest) == 0 {
		r.Ledger.AddressGone(ip)
	}
	return nil
}

// reapOrphan removes an IPAddress whose claim was deleted without a release. The claim may have lost its finalizers, or
// the request to create the IPAddress may have arrived after the deletion.
func (r *Reconciler) reapOrphan(ctx context.Context, name types.NamespacedName) (ctrl.Result, error) {
	ip := &capiipamv1.IPAddress{}
	if err := r.Client.Get(ctx, name, ip); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	key, isOurs := ledger.KeyOf(ip.Spec.PoolRef, ip.Namespace)
	if !isOurs || !allocated(ip) {
		return ctrl.Result{}, nil // A user may have created it for a future claim.
	}
	if left := r.OrphanAge - metav1.Now().Sub(ip.CreationTimestamp.Time); left > 0 && ip.DeletionTimestamp.IsZero() {
		// There is no event for a claim that is not created.
		return ctrl.Result{RequeueAfter: left}, nil
	}
	claim, err := r.liveClaim(ctx, name)
	if err != nil || !abandoned(claim, ip) {
		return ctrl.Result{}, err
	}
	return ctrl.Result{}, r.giveBack(ctx, key, ip)
}

// dropLeftover removes the IPAddress of an earlier claim of this name, which triggers the claim. The cache can contain the earlier claim
// instead of the later one, to which another manager has allocated the IPAddress.
func (r *Reconciler) dropLeftover(ctx context.Context, s *state) (ctrl.Result, error) {
	claim, err := r.liveClaim(ctx, client.ObjectKeyFromObject(s.claim))
	if err != nil {
		return ctrl.Result{}, err
	}
	if !abandoned(claim, s.ip) {
		return ctrl.Result{RequeueAfter: time.Second}, nil
	}
	return ctrl.Result{}, r.giveBack(ctx, s.key, s.ip)
}

// dropIfClaimGone removes the new IPAddress if its claim was deleted meanwhile.
func (r *Reconciler) dropIfClaimGone(ctx context.Context, s *state) error {
	gone, err := r.claimGone(ctx, client.ObjectKeyFromObject(s.claim), s.claim.UID)
	if err != nil || !gone {
		return err
	}
	return r.giveBack(ctx, s.key, s.ip)
}

func (r *Reconciler) claimGone(ctx context.Context, name types.NamespacedName, uid types.UID) (bool, error) {
	alive, err := r.Exists(ctx, name, uid)
	return !alive && err == nil, err
}

// Exists reads a claim from the API server and reports whether it still exists.
func (r *Reconciler) Exists(ctx context.Context, name types.NamespacedName, uid types.UID) (bool, error) {
	claim, err := r.liveClaim(ctx, name)
	return claim != nil && claim.UID == uid, err
}

// liveClaim reads a claim from the API server. It returns nil if the claim does not exist.
func (r *Reconciler) liveClaim(ctx context.Context, name types.NamespacedName) (*capiipamv1.IPAddressClaim, error) {
	claim := &capiipamv1.IPAddressClaim{}
	err := r.Live.Get(ctx, name, claim)
	if apierrors.IsNotFound(err) {
		return nil, nil //nolint:nilnil // no claim and no error is an answer.
	}
	if err != nil {
		return nil, fmt.Errorf("reading IPAddressClaim %s: %w", name, err)
	}
	return claim, nil
}

func without(list []string, item string) []string {
	return slices.DeleteFunc(slices.Clone(list), func(s string) bool { return s == item })
}
