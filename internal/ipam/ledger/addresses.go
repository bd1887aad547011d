package ledger

import (
	"maps"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"

	"capstan.dev/capstan/internal/ipam/alloc"
)

// addressIndex contains the existing IPAddresses of a pool. It follows the watch and the reads of all addresses.
type addressIndex struct {
	byUID   map[types.UID]*addressEntry
	byClaim map[types.NamespacedName]*addressEntry
	// gone contains the deleted IPAddresses and the times of their deletion. A read of all addresses can be older than
	// the watch, so the index does not add them again.
	gone map[types.UID]time.Time
}

// addressEntry is an existing IPAddress.
type addressEntry struct {
	uid       types.UID
	claim     types.NamespacedName
	spec      capiipamv1.IPAddressSpec
	span      alloc.Range
	claimUID  types.UID // UID of the controlling owner, or empty
	counted   bool      // The set contains span.
	alien     bool      // The address does not belong to the pool's family.
	releasing bool      // The provider deletes the IPAddress because its claim was deleted.
}

func newAddressIndex() addressIndex {
	return addressIndex{
		byUID:   map[types.UID]*addressEntry{},
		byClaim: map[types.NamespacedName]*addressEntry{},
		gone:    map[types.UID]time.Time{},
	}
}

// add returns the new entry of an IPAddress, or nil if the index has the IPAddress already or has seen its deletion.
func (x *addressIndex) add(ip *capiipamv1.IPAddress) *addressEntry {
	if _, gone := x.gone[ip.UID]; gone {
		return nil
	}
	var claimUID types.UID
	if owner := metav1.GetControllerOf(ip); owner != nil {
		claimUID = owner.UID
	}
	if e, ok := x.byUID[ip.UID]; ok {
		e.claimUID = claimUID
		return nil
	}
	claim := types.NamespacedName{Namespace: ip.Namespace, Name: ip.Name} // IPAM-04e: the claim's name
	e := &addressEntry{uid: ip.UID, claim: claim, claimUID: claimUID, spec: ip.Spec}
	x.byUID[ip.UID] = e
	x.byClaim[claim] = e
	return e
}

// remove removes a deleted IPAddress. It returns nil if the index did not contain it.
func (x *addressIndex) remove(uid types.UID, now time.Time) *addressEntry {
	if _, seen := x.gone[uid]; seen {
		return nil
	}
	x.gone[uid] = now
	e, ok := x.byUID[uid]
	if !ok {
		return nil
	}
	delete(x.byUID, uid)
	if x.byClaim[e.claim] == e {
		delete(x.byClaim, e.claim)
	}
	return e
}

// forgetOld forgets deletions that are older than the given period.
func (x *addressIndex) forgetOld(now time.Time, period time.Duration) {
	maps.DeleteFunc(x.gone, func(_ types.UID, at time.Time) bool { return now.Sub(at) > period })
}
