package addressclaim

import (
	"context"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"
	clusterctlv1 "sigs.k8s.io/cluster-api/cmd/clusterctl/api/v1alpha3"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
	"capstan.dev/capstan/internal/ipam/ledger"
	"capstan.dev/capstan/internal/reconciling"
)

// addressLabels returns the labels of an IPAddress. The move label makes clusterctl move it even if only its claim has
// the same label (row IPAM-06).
func addressLabels(claim *capiipamv1.IPAddressClaim) map[string]string {
	labels := map[string]string{clusterctlv1.ClusterctlMoveLabel: ""}
	if name := ClusterNameOf(claim); name != "" {
		labels[clusterv1.ClusterNameLabel] = name
	}
	return labels
}

// succeed reports the address (row IPAM-04f).
func (r *Reconciler) succeed(ctx context.Context, s *state) error {
	before := apimeta.FindStatusCondition(s.claim.Status.Conditions, capiipamv1.IPAddressClaimReadyCondition)
	waited := before != nil && before.Status == metav1.ConditionFalse
	changed, err := r.report(ctx, s.claim, s.ip.Name, metav1.Condition{
		Type:   capiipamv1.IPAddressClaimReadyCondition,
		Status: metav1.ConditionTrue,
		Reason: ipamv1.ClaimAddressReadyReason,
	})
	if changed && waited && err == nil {
		r.event(s.claim, corev1.EventTypeNormal, ipamv1.ClaimAddressReadyReason, "got "+s.ip.Spec.Address+" from "+s.key.String())
	}
	if err == nil && ledger.Copied(s.claim) {
		// From now on, the annotation identifies copies of this claim.
		err = reconciling.Change(ctx, r.Client, s.claim, func() { setOrigin(s.claim) })
	}
	return err
}

// fail reports the reason why there is no address.
func (r *Reconciler) fail(ctx context.Context, s *state, reason, message string) error {
	changed, err := r.report(ctx, s.claim, s.claim.Status.AddressRef.Name, metav1.Condition{
		Type:    capiipamv1.IPAddressClaimReadyCondition,
		Status:  metav1.ConditionFalse,
		Reason:  reason,
		Message: message,
	})
	if changed && err == nil {
		ctrl.LoggerFrom(ctx).Info("Claim has no address", "reason", reason, "message", message)
		r.event(s.claim, corev1.EventTypeWarning, reason, message)
	}
	return client.IgnoreNotFound(err)
}

// report writes the claim's status if it has changed. The patch replaces the list of conditions, so it has a
// resourceVersion. It can therefore not change a later claim of the same name either.
func (r *Reconciler) report(ctx context.Context, claim *capiipamv1.IPAddressClaim, address string, ready metav1.Condition) (bool, error) {
	ready.ObservedGeneration = claim.Generation
	conditions := slices.Clone(claim.Status.Conditions)
	if !apimeta.SetStatusCondition(&conditions, ready) && claim.Status.AddressRef.Name == address {
		return false, nil
	}
	return true, reconciling.ChangeStatus(ctx, r.Client, claim, func() {
		claim.Status.Conditions = conditions
		if address != "" {
			claim.Status.AddressRef.Name = address
		}
	})
}
