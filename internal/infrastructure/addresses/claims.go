// Package addresses is for infrastructure providers that take addresses from IP
// pools (row IPAM-07): one IPAddressClaim for each address, owned by the machine
// or cluster that it is for. It works with the pools of any IPAM provider.
//
// Layer: reconciler. Allowed imports: api, library, contract.
package addresses

import (
	"context"
	"errors"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"capstan.dev/capstan/internal/reconciling"
)

// ErrOtherPool is the error of EnsureClaim for a claim from another pool.
var ErrOtherPool = errors.New("the pools of a machine cannot be changed, replace the machine")

// Name is the name of the claim for an owner's n-th address, counted from 0.
func Name(owner string, n int) string { return fmt.Sprintf("%s-%d", owner, n) }

// EnsureClaim returns the claim of this name, which may be one that is being
// deleted, and creates it if it does not exist. The owner becomes its controller and, with blockOwnerDeletion, cannot
// go before it in a foreground deletion; clusterctl moves it along with the
// owner.
func EnsureClaim(ctx context.Context, c client.Client, owner client.Object, clusterName string, pool capiipamv1.IPPoolReference, name string) (*capiipamv1.IPAddressClaim, error) {
	ref, err := referenceTo(owner, c.Scheme())
	if err != nil {
		return nil, err
	}
	claim := &capiipamv1.IPAddressClaim{}
	key := client.ObjectKey{Namespace: owner.GetNamespace(), Name: name}
	err = c.Get(ctx, key, claim)
	if apierrors.IsNotFound(err) {
		return create(ctx, c, owner, ref, clusterName, pool, name)
	}
	if err != nil {
		return nil, fmt.Errorf("reading IPAddressClaim %s: %w", key, err)
	}
	if why := notOurs(claim, ref, clusterName); why != "" {
		return nil, fmt.Errorf("IPAddressClaim %s exists and does not belong to %s: %s", key, owner.GetName(), why)
	}
	if claim.Spec.PoolRef != pool {
		return nil, fmt.Errorf("IPAddressClaim %s is from pool %q, expected %q: %w", key, claim.Spec.PoolRef.Name, pool.Name, ErrOtherPool)
	}
	return claim, own(ctx, c, owner, claim, ref)
}

// Adopt gives claims of an owner that have lost their owner reference, or have an outdated one, the right one (row
// ALL-11), and the owner's watch label. It does nothing for claims that do not exist or belong to others. Pass a cached reader: a claim
// that is not in the cache yet was not made long ago, and the events of the watch lead here again.
func Adopt(ctx context.Context, cache client.Reader, c client.Client, owner client.Object, clusterName string, names ...string) error {
	for _, name := range names {
		claim := &capiipamv1.IPAddressClaim{}
		key := client.ObjectKey{Namespace: owner.GetNamespace(), Name: name}
		if err := cache.Get(ctx, key, claim); apierrors.IsNotFound(err) {
			continue
		} else if err != nil {
			return fmt.Errorf("reading IPAddressClaim %s: %w", key, err)
		}
		if err := AdoptClaim(ctx, c, owner, clusterName, claim); err != nil {
			return err
		}
	}
	return nil
}

// AdoptClaim is Adopt for a claim that the caller has read.
func AdoptClaim(ctx context.Context, c client.Client, owner client.Object, clusterName string, claim *capiipamv1.IPAddressClaim) error {
	ref, err := referenceTo(owner, c.Scheme())
	if err != nil || notOurs(claim, ref, clusterName) != "" {
		return err
	}
	return own(ctx, c, owner, claim, ref)
}

// referenceTo is the reference that claims have to their owner: controller, and with blockOwnerDeletion.
func referenceTo(owner client.Object, scheme *runtime.Scheme) (metav1.OwnerReference, error) {
	gvk, err := apiutil.GVKForObject(owner, scheme)
	if err != nil {
		return metav1.OwnerReference{}, err
	}
	return *metav1.NewControllerRef(owner, gvk), nil
}

// notOurs is the reason why a claim with an owner's name for it does not belong to the owner; "" if it does. A backup tool
// restores claims without owner references. The Cluster then decides, because the name follows from the owner. A
// reference can also have an older API version, or the UID of the owner before its restore.
func notOurs(claim *capiipamv1.IPAddressClaim, owner metav1.OwnerReference, clusterName string) string {
	controller := metav1.GetControllerOfNoCopy(claim)
	switch {
	case controller != nil && same(*controller, owner), controller == nil && claim.Spec.ClusterName == clusterName && clusterName != "":
		return ""
	case controller == nil:
		return fmt.Sprintf("it has no controller, and spec.clusterName is %q instead of %q. Use another name for one of them", claim.Spec.ClusterName, clusterName)
	}
	return fmt.Sprintf("the %s %s controls it. Use another name for one of them", controller.Kind, controller.Name)
}

// same reports whether two references are to one object, in any API version.
func same(a, b metav1.OwnerReference) bool {
	group := func(ref metav1.OwnerReference) string {
		return schema.FromAPIVersionAndKind(ref.APIVersion, ref.Kind).Group
	}
	return group(a) == group(b) && a.Kind == b.Kind && a.Name == b.Name
}

// own writes the reference of a claim to its owner, and the owner's watch label. A claim keeps its label if the owner has none: the user can
// have another filter for the IPAM provider.
func own(ctx context.Context, c client.Client, owner client.Object, claim *capiipamv1.IPAddressClaim, ref metav1.OwnerReference) error {
	err := reconciling.Own(ctx, c, claim, ref)
	if filter := owner.GetLabels()[clusterv1.WatchLabel]; err == nil && filter != "" && claim.Labels[clusterv1.WatchLabel] != filter {
		err = reconciling.Change(ctx, c, claim, func() { metav1.SetMetaDataLabel(&claim.ObjectMeta, clusterv1.WatchLabel, filter) })
	}
	if err != nil {
		return fmt.Errorf("cannot adopt the IPAddressClaim %s: %w", claim.Name, err)
	}
	return nil
}

func create(ctx context.Context, c client.Client, owner client.Object, ref metav1.OwnerReference, clusterName string, pool capiipamv1.IPPoolReference, name string) (*capiipamv1.IPAddressClaim, error) {
	claim := &capiipamv1.IPAddressClaim{
		ObjectMeta: metav1.ObjectMeta{
			Namespace:       owner.GetNamespace(),
			Name:            name,
			Labels:          labels(owner, clusterName),
			OwnerReferences: []metav1.OwnerReference{ref},
		},
		Spec: capiipamv1.IPAddressClaimSpec{ClusterName: clusterName, PoolRef: pool},
	}
	if err := c.Create(ctx, claim); err != nil {
		return nil, fmt.Errorf("creating IPAddressClaim %s/%s: %w", claim.Namespace, name, err)
	}
	return claim, nil
}

// labels returns the labels of a claim. They include the owner's watch label, so that an IPAM provider with
// --watch-filter serves the claim.
func labels(owner client.Object, clusterName string) map[string]string {
	out := map[string]string{clusterv1.ClusterNameLabel: clusterName}
	reconciling.CopyWatchLabel(out, owner)
	return out
}

// FetchAddress returns the address of a claim. While the claim has no address, it returns nil and the reason. Callers watch
// IPAddressClaims and call it again after a change. The address of a deleted claim does not count, because another claim will get it.
func FetchAddress(ctx context.Context, c client.Reader, claim *capiipamv1.IPAddressClaim) (address *capiipamv1.IPAddress, waiting string, err error) {
	if !claim.DeletionTimestamp.IsZero() {
		return nil, fmt.Sprintf("IPAddressClaim %s is being deleted: it is created again after its deletion", claim.Name), nil
	}
	if claim.Status.AddressRef.Name == "" {
		if ready := apimeta.FindStatusCondition(claim.Status.Conditions, capiipamv1.IPAddressClaimReadyCondition); ready != nil && ready.Status == metav1.ConditionFalse {
			return nil, fmt.Sprintf("IPAddressClaim %s: %s: %s", claim.Name, ready.Reason, ready.Message), nil
		}
		return nil, fmt.Sprintf("IPAddressClaim %s has no address yet", claim.Name), nil
	}
	address = &capiipamv1.IPAddress{}
	key := client.ObjectKey{Namespace: claim.Namespace, Name: claim.Status.AddressRef.Name}
	err = c.Get(ctx, key, address)
	if apierrors.IsNotFound(err) { // the cache lags behind the claim's
		return nil, fmt.Sprintf("IPAddress %s is not to be seen yet", key.Name), nil
	}
	if err != nil {
		return nil, "", fmt.Errorf("reading IPAddress %s: %w", key, err)
	}
	return address, "", nil
}

// OfOwner maps an IPAddress to the object of a kind that waits for it: the owner of the claim that names it already. An IPAddress that
// was removed by force is created again, and its claim does not change. A claim that does not name it yet will change.
func OfOwner(c client.Reader, kind string) handler.MapFunc {
	return func(ctx context.Context, o client.Object) []reconcile.Request {
		address, ok := o.(*capiipamv1.IPAddress)
		if !ok {
			return nil
		}
		claim := &capiipamv1.IPAddressClaim{}
		err := c.Get(ctx, client.ObjectKey{Namespace: o.GetNamespace(), Name: address.Spec.ClaimRef.Name}, claim)
		if !reconciling.Found(ctx, err) || claim.Status.AddressRef.Name != o.GetName() {
			return nil
		}
		owner := metav1.GetControllerOfNoCopy(claim)
		if owner == nil || owner.Kind != kind {
			return nil
		}
		return []reconcile.Request{{NamespacedName: client.ObjectKey{Namespace: o.GetNamespace(), Name: owner.Name}}}
	}
}

// ClaimsGone deletes the claims of an owner and reports whether none remains. The owner keeps its finalizer until then,
// so that no address is free while the machine still has it. A claim without owner reference counts if it is of the
// owner's Cluster. Pass a client whose reads are not older than the owner's last EnsureClaim, or the names of all
// claims that may exist.
func ClaimsGone(ctx context.Context, c client.Client, owner client.Object, clusterName string, names ...string) (bool, error) {
	ref, err := referenceTo(owner, c.Scheme())
	if err != nil {
		return false, err
	}
	gone := true
	for _, name := range names {
		claim := &capiipamv1.IPAddressClaim{}
		err := c.Get(ctx, client.ObjectKey{Namespace: owner.GetNamespace(), Name: name}, claim)
		if apierrors.IsNotFound(err) {
			continue
		}
		if err != nil {
			return false, fmt.Errorf("reading IPAddressClaim %s: %w", name, err)
		}
		if notOurs(claim, ref, clusterName) != "" {
			continue
		}
		gone = false
		// Its end is an event for the owner only with the reference, and the manager of the owner's watch label releases it.
		if err := own(ctx, c, owner, claim, ref); client.IgnoreNotFound(err) != nil {
			return false, err
		}
		if claim.DeletionTimestamp.IsZero() {
			uid := claim.UID
			if err := c.Delete(ctx, claim, client.Preconditions{UID: &uid}); client.IgnoreNotFound(err) != nil {
				return false, fmt.Errorf("deleting IPAddressClaim %s: %w", name, err)
			}
		}
	}
	return gone, nil
}
