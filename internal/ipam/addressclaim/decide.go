package addressclaim

import (
	"fmt"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"
	clusterctlv1 "sigs.k8s.io/cluster-api/cmd/clusterctl/api/v1alpha3"
	"sigs.k8s.io/cluster-api/util/annotations"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
)

// ClusterNameOf returns the name of the claim's Cluster: spec.clusterName, or
// the deprecated label (row IPAM-04b).
func ClusterNameOf(claim *capiipamv1.IPAddressClaim) string {
	if claim.Spec.ClusterName != "" {
		return claim.Spec.ClusterName
	}
	return claim.Labels[clusterv1.ClusterNameLabel]
}

// gate reports whether a claim may be reconciled (rows IPAM-04b and IPAM-05a).
type gate int

const (
	open gate = iota
	paused
	clusterMissing
)

// gateOf decides from the claim and its Cluster. The Cluster is nil if the claim references none or it does not exist. A
// claim that is being deleted passes if its Cluster does not exist, because then it cannot be paused.
func gateOf(claim *capiipamv1.IPAddressClaim, cluster *clusterv1.Cluster) gate {
	switch {
	case annotations.HasPaused(claim):
		return paused
	case ClusterNameOf(claim) == "":
		return open
	case cluster == nil && claim.DeletionTimestamp.IsZero():
		return clusterMissing
	case cluster != nil && annotations.IsPaused(cluster, cluster):
		return paused
	}
	return open
}

// relation is the relation of an IPAddress with the claim's name to the claim.
type relation int

const (
	none     relation = iota // The IPAddress does not exist.
	ours                     // created for this claim
	adoptive                 // created before the claim, to be adopted
	leftover                 // created for an earlier claim of this name, to be removed
	foreign                  // it belongs to another pool or object and blocks the claim
)

// relationOf decides the owner of an IPAddress. An owner with another UID is an earlier claim of the same name, unless
// it is this claim with its UID from before a move from another management cluster. A claim without an address does not adopt an
// IPAddress that is being deleted.
func relationOf(claim *capiipamv1.IPAddressClaim, ip *capiipamv1.IPAddress) relation {
	if ip == nil {
		return none
	}
	if ip.Spec.PoolRef != claim.Spec.PoolRef {
		return foreign
	}
	owner := metav1.GetControllerOf(ip)
	switch {
	case owner == nil && !ip.DeletionTimestamp.IsZero() && claim.Status.AddressRef.Name == "":
		return leftover
	case owner == nil:
		return adoptive
	case owner.UID == claim.UID:
		return ours
	case !isClaim(owner):
		return foreign
	case string(owner.UID) == claim.Annotations[ipamv1.OriginUIDAnnotation]:
		return adoptive
	default:
		return leftover
	}
}

// isClaim reports whether an owner is an IPAddressClaim.
func isClaim(owner *metav1.OwnerReference) bool {
	return owner.Kind == "IPAddressClaim" && groupOf(owner.APIVersion) == capiipamv1.GroupVersion.Group
}

// allocated reports whether the provider has allocated an IPAddress to a claim. When the claim is gone, the garbage collector removes the
// reference to it, because the pool, the other owner, still exists. The finalizer is left then.
func allocated(ip *capiipamv1.IPAddress) bool {
	if owner := metav1.GetControllerOf(ip); owner != nil {
		return isClaim(owner)
	}
	return controllerutil.ContainsFinalizer(ip, ipamv1.AddressFinalizer)
}

// abandoned reports whether the claim with the name of an allocated IPAddress, or nil, neither has it nor can adopt it.
func abandoned(claim *capiipamv1.IPAddressClaim, ip *capiipamv1.IPAddress) bool {
	if claim == nil {
		return true
	}
	if owner := metav1.GetControllerOf(ip); owner != nil && owner.UID == claim.UID {
		return false
	}
	r := relationOf(claim, ip)
	return r == leftover || r == foreign
}

// inTheWay returns the reason why an IPAddress with the claim's name does not belong to the claim.
func inTheWay(claim *capiipamv1.IPAddressClaim, ip *capiipamv1.IPAddress) string {
	if ip.Spec.PoolRef != claim.Spec.PoolRef {
		return fmt.Sprintf("IPAddress %s exists and is from %s %q: delete it, or use another name for this claim", ip.Name, ip.Spec.PoolRef.Kind, ip.Spec.PoolRef.Name)
	}
	owner := metav1.GetControllerOf(ip)
	return fmt.Sprintf("IPAddress %s exists and belongs to %s %q, not to this claim: remove that controlling owner, delete the IPAddress, or use another name for this claim", ip.Name, owner.Kind, owner.Name)
}

// isOut reports whether the claim's address was allocated before, here or on the management cluster from which both were moved. The
// status of the claim is no evidence: a tenant may have the right to write it. IPAddresses with a controller are, see
// config/ipam/webhook/addresses.yaml.
func isOut(ip *capiipamv1.IPAddress) bool { return ip != nil && metav1.GetControllerOf(ip) != nil }

// marked reports whether the claim has the provider's finalizer (row IPAM-04c), and the UID that distinguishes a copy
// from the original.
func marked(claim *capiipamv1.IPAddressClaim) bool {
	return controllerutil.ContainsFinalizer(claim, ipamv1.ClaimFinalizer) &&
		claim.Annotations[ipamv1.OriginUIDAnnotation] != ""
}

// mark adds the provider's finalizer, label and annotation. The label makes clusterctl move the claim even if no moved
// object owns the claim (row IPAM-06).
func mark(claim *capiipamv1.IPAddressClaim) {
	controllerutil.AddFinalizer(claim, ipamv1.ClaimFinalizer)
	metav1.SetMetaDataLabel(&claim.ObjectMeta, clusterctlv1.ClusterctlMoveLabel, "")
	if claim.Annotations[ipamv1.OriginUIDAnnotation] == "" {
		setOrigin(claim)
	}
}

// setOrigin records the claim's UID: a copy in another management cluster has another UID.
func setOrigin(claim *capiipamv1.IPAddressClaim) {
	metav1.SetMetaDataAnnotation(&claim.ObjectMeta, ipamv1.OriginUIDAnnotation, string(claim.UID))
}

// owners returns the owner references that an IPAddress must have (row IPAM-04e). It keeps other references, but no
// other controller, because there can only be one.
func owners(ip *capiipamv1.IPAddress, claim *capiipamv1.IPAddressClaim, pool ipamv1.Pool) []metav1.OwnerReference {
	yes, no := true, false
	wanted := []metav1.OwnerReference{{
		APIVersion: capiipamv1.GroupVersion.String(), Kind: "IPAddressClaim",
		Name: claim.Name, UID: claim.UID, Controller: &yes, BlockOwnerDeletion: &yes,
	}, {
		APIVersion: ipamv1.GroupVersion.String(), Kind: pool.PoolKind(),
		Name: pool.GetName(), UID: pool.GetUID(), Controller: &no, BlockOwnerDeletion: &yes,
	}}
	for _, ref := range ip.OwnerReferences {
		same := slices.ContainsFunc(wanted, func(w metav1.OwnerReference) bool {
			return w.Kind == ref.Kind && w.Name == ref.Name && sameGroup(w.APIVersion, ref.APIVersion)
		})
		if !same && (ref.Controller == nil || !*ref.Controller) {
			wanted = append(wanted, ref)
		}
	}
	return wanted
}

func sameGroup(a, b string) bool { return groupOf(a) == groupOf(b) }

func groupOf(apiVersion string) string {
	for i := range apiVersion {
		if apiVersion[i] == '/' {
			return apiVersion[:i]
		}
	}
	return ""
}

// complete reports whether an IPAddress has all fields that row IPAM-04e requires.
func complete(ip *capiipamv1.IPAddress, claim *capiipamv1.IPAddressClaim, pool ipamv1.Pool) bool {
	if !controllerutil.ContainsFinalizer(ip, ipamv1.AddressFinalizer) && ip.DeletionTimestamp.IsZero() {
		return false
	}
	for _, want := range owners(ip, claim, pool)[:2] {
		if !slices.ContainsFunc(ip.OwnerReferences, func(ref metav1.OwnerReference) bool {
			return ref.UID == want.UID && ref.Kind == want.Kind &&
				isSet(ref.Controller) == isSet(want.Controller) && isSet(ref.BlockOwnerDeletion)
		}) {
			return false
		}
	}
	return true
}

func isSet(b *bool) bool { return b != nil && *b }
