// Package webhook checks the rules of pools at admission that their schema cannot express.
//
// Layer: reconciler. Allowed imports: api, library, contract.
package webhook

import (
	"context"
	"fmt"
	"slices"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/validation/field"
	clusterctlv1 "sigs.k8s.io/cluster-api/cmd/clusterctl/api/v1alpha3"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
	"capstan.dev/capstan/internal/ipam/alloc"
	"capstan.dev/capstan/internal/ipam/ledger"
	"capstan.dev/capstan/internal/ipam/pool"
	"capstan.dev/capstan/internal/reconciling"
)

// +kubebuilder:webhook:verbs=create;update;delete,path=/validate-ipam-capstan-dev-v1beta2-capstanippool,mutating=false,failurePolicy=fail,matchPolicy=Equivalent,groups=ipam.capstan.dev,resources=capstanippools,versions=v1beta2,name=validation.capstanippool.ipam.capstan.dev,sideEffects=None,admissionReviewVersions=v1
// +kubebuilder:webhook:verbs=create;update;delete,path=/validate-ipam-capstan-dev-v1beta2-globalcapstanippool,mutating=false,failurePolicy=fail,matchPolicy=Equivalent,groups=ipam.capstan.dev,resources=globalcapstanippools,versions=v1beta2,name=validation.globalcapstanippool.ipam.capstan.dev,sideEffects=None,admissionReviewVersions=v1

// Setup adds the webhooks of both kinds of pool to a manager. They serve all namespaces, although the manager's cache
// may contain only one. They therefore read from the API server: the other pools if the spec is new, and the IPAddresses
// of the pool if its spec changes or it is deleted.
func Setup(mgr ctrl.Manager) error {
	if err := ctrl.NewWebhookManagedBy(mgr, &ipamv1.CapstanIPPool{}).
		WithValidator(&validator[*ipamv1.CapstanIPPool]{mgr.GetAPIReader()}).Complete(); err != nil {
		return err
	}
	return ctrl.NewWebhookManagedBy(mgr, &ipamv1.GlobalCapstanIPPool{}).
		WithValidator(&validator[*ipamv1.GlobalCapstanIPPool]{mgr.GetAPIReader()}).Complete()
}

type validator[P ipamv1.Pool] struct{ client client.Reader }

// mostNamed is the maximum number of objects in a refusal.
const mostNamed = 5

// ValidateCreate refuses an invalid spec, and one that overlaps a pool against the policy of one of them. It accepts the
// overlaps of a copy from clusterctl or a backup: the original had them if a global pool was created later. The annotation
// of a copy can be forged, but the reconciler decides which of the two pools allocates no new addresses.
func (v *validator[P]) ValidateCreate(ctx context.Context, p P) (admission.Warnings, error) {
	_, errs := compile(p)
	if len(errs) == 0 && !ledger.Copied(p) {
		var err error
		if errs, err = v.overlaps(ctx, p, nil); err != nil {
			return nil, err
		}
	}
	return nil, reconciling.Invalid(ipamv1.GroupVersion.WithKind(p.PoolKind()), p.GetName(), errs)
}

// ValidateUpdate refuses an invalid spec, one that no longer contains the allocated addresses, and one with more overlaps
// than before against the policy of a pool. It accepts a pool that is being deleted or whose spec does not change, so that
// finalizers can always be removed.
func (v *validator[P]) ValidateUpdate(ctx context.Context, old, p P) (admission.Warnings, error) {
	if !p.GetDeletionTimestamp().IsZero() || equality.Semantic.DeepEqual(old.PoolSpec(), p.PoolSpec()) {
		return nil, nil
	}
	plan, errs := compile(p)
	if len(errs) > 0 {
		return nil, reconciling.Invalid(ipamv1.GroupVersion.WithKind(p.PoolKind()), p.GetName(), errs)
	}
	errs, err := v.overlaps(ctx, p, old)
	if err != nil {
		return nil, err
	}
	lost, err := v.lost(ctx, p, old, plan)
	if err != nil {
		return nil, err
	}
	return nil, reconciling.Invalid(ipamv1.GroupVersion.WithKind(p.PoolKind()), p.GetName(), append(errs, lost...))
}

// ValidateDelete refuses to delete a pool that is in use, except by clusterctl after a move.
func (v *validator[P]) ValidateDelete(ctx context.Context, p P) (admission.Warnings, error) {
	if _, moved := p.GetAnnotations()[clusterctlv1.DeleteForMoveAnnotation]; moved {
		return nil, nil
	}
	used, err := pool.Uses(ctx, v.client, p)
	if err != nil || len(used) == 0 {
		return nil, err
	}
	names := make([]string, 0, mostNamed)
	for _, ip := range used[:min(len(used), mostNamed)] {
		names = append(names, fmt.Sprintf("%s of claim %s/%s", ip.Spec.Address, ip.Namespace, ip.Spec.ClaimRef.Name))
	}
	return nil, apierrors.NewForbidden(ipamv1.GroupVersion.WithResource(resourceOf(p)).GroupResource(), p.GetName(),
		fmt.Errorf("the pool has %d addresses in use (%s): delete their claims first", len(used), list(names, len(used))))
}

func compile(p ipamv1.Pool) (*alloc.Plan, field.ErrorList) {
	plan, errs := alloc.Compile(p.PoolSpec(), field.NewPath("spec"))
	if p.GetNamespace() == "" {
		return plan, errs
	}
	for i, r := range p.PoolSpec().Reservations {
		if r.Namespace != "" {
			errs = append(errs, field.Forbidden(field.NewPath("spec", "reservations").Index(i).Child("namespace"),
				"a CapstanIPPool serves claims of its own namespace only: leave it out, or use a GlobalCapstanIPPool"))
		}
	}
	return plan, errs
}

// overlaps returns the forbidden overlaps of a pool that old, the pool before its change or nil, does not have.
func (v *validator[P]) overlaps(ctx context.Context, p P, old ipamv1.Pool) (field.ErrorList, error) {
	others, err := pool.Beside(ctx, v.client, p.GetNamespace())
	if err != nil {
		return nil, err
	}
	var errs field.ErrorList
	for _, o := range pool.Refused(p, old, others, pool.Compile) {
		errs = append(errs, field.Forbidden(field.NewPath("spec", "subnets"), o))
	}
	return errs, nil
}

// lost returns the allocated addresses that the old spec contains and the new one does not. Addresses that were out of
// range before are allowed.
func (v *validator[P]) lost(ctx context.Context, p, old P, plan *alloc.Plan) (field.ErrorList, error) {
	used, err := pool.Uses(ctx, v.client, p)
	if err != nil {
		return nil, err
	}
	before := pool.Compile(old)
	var names []string
	n := 0
	for _, ip := range used {
		if contains(plan, ip.Spec.Address, ip.Spec.Prefix) || before != nil && !contains(before, ip.Spec.Address, ip.Spec.Prefix) {
			continue
		}
		if n++; n <= mostNamed {
			names = append(names, fmt.Sprintf("%s of claim %s/%s", ip.Spec.Address, ip.Namespace, ip.Spec.ClaimRef.Name))
		}
	}
	if n == 0 {
		return nil, nil
	}
	return field.ErrorList{field.Forbidden(field.NewPath("spec", "subnets"), fmt.Sprintf(
		"would no longer contain %d allocated addresses (%s): set drain on the subnet and wait for the deletion of their claims", n, list(names, n)))}, nil
}

func contains(plan *alloc.Plan, address string, prefix *int32) bool {
	span, ok := plan.Span(address, prefix)
	return ok && plan.Contains(span)
}

func list(names []string, total int) string {
	slices.Sort(names)
	s := ""
	for i, n := range names {
		if i > 0 {
			s += ", "
		}
		s += n
	}
	if total > len(names) {
		s += ", …"
	}
	return s
}

func resourceOf(p ipamv1.Pool) string {
	if p.PoolKind() == ipamv1.GlobalCapstanIPPoolKind {
		return "globalcapstanippools"
	}
	return "capstanippools"
}
