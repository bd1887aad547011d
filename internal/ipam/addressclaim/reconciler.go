// Package addressclaim serves the IPAddressClaims that reference a Capstan pool (rows IPAM-03 to IPAM-05).
//
// Layer: reconciler. Allowed imports: api, library, contract.
package addressclaim

import (
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/events"
	"k8s.io/klog/v2"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"
	"sigs.k8s.io/cluster-api/util/annotations"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
	"capstan.dev/capstan/internal/ipam/ledger"
	"capstan.dev/capstan/internal/reconciling"
)

// Reconciler serves claims.
type Reconciler struct {
	Client client.Client
	// Live reads from the API server, past the cache.
	Live     client.Reader
	Ledger   *ledger.Registry
	Recorder events.EventRecorder
	// Serves reports whether a claim is for this provider (rows IPAM-03 and IPAM-04a). The request may come from an
	// event of another object.
	Serves func(client.Object) bool
	// Watches returns true if a pool passes the watch filter of this manager (ALL-07).
	Watches func(client.Object) bool
	// OrphanAge is the age after which an IPAddress without its claim is removed. A restored backup may create the claim
	// after the address.
	OrphanAge time.Duration
}

// state contains the objects of one reconciliation.
type state struct {
	claim *capiipamv1.IPAddressClaim
	key   ledger.Key
	pool  ipamv1.Pool // nil when it does not exist
	ip    *capiipamv1.IPAddress
}

// Reconcile serves one claim.
func (r *Reconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	claim := &capiipamv1.IPAddressClaim{}
	if err := r.Client.Get(ctx, req.NamespacedName, claim); err != nil {
		if apierrors.IsNotFound(err) {
			return r.reapOrphan(ctx, req.NamespacedName)
		}
		return ctrl.Result{}, err
	}
	key, isOurs := ledger.KeyOf(claim.Spec.PoolRef, claim.Namespace)
	if !isOurs || !r.Serves(claim) { // IPAM-04a
		return ctrl.Result{}, nil
	}
	g, err := r.gate(ctx, claim)
	if err != nil {
		return ctrl.Result{}, err
	}
	if g != open { // IPAM-04b, IPAM-05a: an event of the Cluster triggers the next reconcile.
		r.Ledger.Park(claim)
		return ctrl.Result{}, nil
	}
	s := &state{claim: claim, key: key}
	if s.pool, err = r.getPool(ctx, key); err != nil {
		return ctrl.Result{}, err
	}
	if s.pool != nil && annotations.HasPaused(s.pool) {
		r.Ledger.Park(claim)
		return ctrl.Result{}, nil
	}
	if !claim.DeletionTimestamp.IsZero() {
		return ctrl.Result{}, quiet(r.release(ctx, s))
	}
	res, err := r.serve(ctx, s)
	return res, quiet(err)
}

// quiet turns a conflict into another attempt without a stack trace. The watch will deliver the newer object, or has
// done so already.
func quiet(err error) error {
	if apierrors.IsConflict(err) {
		return fmt.Errorf("another write came first, retrying: %w", err)
	}
	return err
}

func (r *Reconciler) gate(ctx context.Context, claim *capiipamv1.IPAddressClaim) (gate, error) {
	name := ClusterNameOf(claim)
	if name == "" {
		return gateOf(claim, nil), nil
	}
	cluster := &clusterv1.Cluster{}
	err := r.Client.Get(ctx, client.ObjectKey{Namespace: claim.Namespace, Name: name}, cluster)
	if apierrors.IsNotFound(err) {
		return gateOf(claim, nil), nil
	}
	if err != nil {
		return paused, fmt.Errorf("reading Cluster %s/%s: %w", claim.Namespace, name, err)
	}
	return gateOf(claim, cluster), nil
}

func (r *Reconciler) getPool(ctx context.Context, key ledger.Key) (ipamv1.Pool, error) {
	pool := ledger.NewObject(key.Kind)
	err := r.Client.Get(ctx, client.ObjectKey{Namespace: key.Namespace, Name: key.Name}, pool)
	if apierrors.IsNotFound(err) {
		return nil, nil //nolint:nilnil // no pool and no error is an answer.
	}
	if err != nil {
		return nil, fmt.Errorf("reading %s: %w", key, err)
	}
	return pool, nil
}

// serve makes sure that the claim has its address (row IPAM-04).
func (r *Reconciler) serve(ctx context.Context, s *state) (ctrl.Result, error) {
	if !marked(s.claim) { // IPAM-04c
		if err := reconciling.Change(ctx, r.Client, s.claim, func() { mark(s.claim) }); err != nil {
			return ctrl.Result{}, r.notMarked(ctx, s, err)
		}
	}
	if err := r.findAddress(ctx, s); err != nil {
		return ctrl.Result{}, err
	}
	switch relationOf(s.claim, s.ip) {
	case foreign:
		// Until the IPAddress is deleted or changed, which triggers the claim, the claim must not delay later claims.
		r.Ledger.Park(s.claim)
		if err := r.fail(ctx, s, capiipamv1.IPAddressClaimReadyAllocationFailedReason, inTheWay(s.claim, s.ip)); err != nil {
			return ctrl.Result{}, err
		}
		return r.reapOrphan(ctx, client.ObjectKeyFromObject(s.claim))
	case leftover:
		return r.dropLeftover(ctx, s)
	case ours:
		if s.claim.Status.AddressRef.Name == s.ip.Name && (s.pool == nil || complete(s.ip, s.claim, s.pool)) {
			return ctrl.Result{}, r.succeed(ctx, s)
		}
	}
	return r.allocate(ctx, s)
}

// notMarked handles a failed write of the mark. The claim must not delay later claims until its next attempt: the pool may not even serve
// its namespace. The API server refuses a claim whose annotations have no room left, until they change.
func (r *Reconciler) notMarked(ctx context.Context, s *state, err error) error {
	if apierrors.IsNotFound(err) {
		return nil
	}
	r.Ledger.Park(s.claim)
	if !apierrors.IsInvalid(err) {
		return err
	}
	return r.fail(ctx, s, capiipamv1.IPAddressClaimReadyAllocationFailedReason,
		fmt.Sprintf("expected to add a finalizer and an annotation to the claim, found that the API server refuses them: %v", err))
}

// findAddress reads the claim's IPAddress from the cache. If it is missing there, the ledger decides.
func (r *Reconciler) findAddress(ctx context.Context, s *state) error {
	ip := &capiipamv1.IPAddress{}
	err := r.Client.Get(ctx, client.ObjectKeyFromObject(s.claim), ip)
	if apierrors.IsNotFound(err) {
		return nil
	}
	s.ip = ip
	return err
}

// allocate chooses an address, creates the IPAddress and reports it (rows
// IPAM-04d to IPAM-04f).
func (r *Reconciler) allocate(ctx context.Context, s *state) (ctrl.Result, error) {
	switch {
	case s.pool == nil:
		return ctrl.Result{}, r.fail(ctx, s, capiipamv1.IPAddressClaimReadyPoolNotReadyReason,
			fmt.Sprintf("%s does not exist: create it, or name another pool", s.key))
	case !controllerutil.ContainsFinalizer(s.pool, ipamv1.PoolFinalizer):
		return ctrl.Result{}, r.fail(ctx, s, capiipamv1.IPAddressClaimReadyPoolNotReadyReason,
			unclaimed(s.key, s.pool, r.Watches(s.pool)))
	}
	book := r.Ledger.Pool(s.key)
	res, err := r.choose(ctx, s, book)
	if errors.Is(err, ledger.ErrPoolGone) {
		return ctrl.Result{}, r.fail(ctx, s, capiipamv1.IPAddressClaimReadyPoolNotReadyReason,
			fmt.Sprintf("%s does not exist any more", s.key))
	}
	if err != nil {
		return ctrl.Result{}, err
	}
	if res.Outcome != ledger.Granted {
		// RetryAfter is set if no event follows the end of the wait.
		return ctrl.Result{RequeueAfter: res.RetryAfter}, r.fail(ctx, s, reasonOf(res.Outcome), res.Message)
	}
	if err := r.ensureAddress(ctx, s, res); err != nil {
		return ctrl.Result{}, err
	}
	book.Created(s.claim.UID, s.ip)
	err = r.succeed(ctx, s)
	if apierrors.IsNotFound(err) || apierrors.IsInvalid(err) {
		// The claim was deleted while its address was created. No other reconcile will detect this.
		return ctrl.Result{}, r.dropIfClaimGone(ctx, s)
	}
	return ctrl.Result{}, err
}

// choose asks the ledger for an address.
func (r *Reconciler) choose(ctx context.Context, s *state, book *ledger.Pool) (ledger.Result, error) {
	labels, err := r.namespaceLabels(ctx, s)
	if err != nil {
		return ledger.Result{}, err
	}
	if s.ip != nil {
		// The ledger gets the event later than the cache, but needs the IPAddress for its decision.
		r.Ledger.AddressSeen(s.ip)
	}
	return book.Allocate(ctx, ledger.Request{
		Ticket: ledger.TicketOf(s.claim),
		Ask:    s.claim.Annotations[ipamv1.AddressAnnotation],
		// A claim of a Cluster cannot arrive before its address: clusterctl keeps the Cluster paused until all objects
		// have arrived.
		Copied:          s.ip == nil && ledger.Copied(s.claim) && ClusterNameOf(s.claim) == "",
		Out:             isOut(s.ip),
		NamespaceLabels: labels,
	})
}

// unclaimed explains why a pool has no finalizer yet: its manager adds it before the first address (ALL-07).
func unclaimed(key ledger.Key, pool ipamv1.Pool, watched bool) string {
	if watched {
		return fmt.Sprintf("%s is not ready yet", key)
	}
	return fmt.Sprintf("%s is not in use: its label %s is %q, and the manager of this claim has another --watch-filter. Give the pool the label of a manager that runs",
		key, clusterv1.WatchLabel, pool.GetLabels()[clusterv1.WatchLabel])
}

// namespaceLabels returns the labels by which a GlobalCapstanIPPool selects its claims.
func (r *Reconciler) namespaceLabels(ctx context.Context, s *state) (map[string]string, error) {
	if s.pool.GetNamespace() != "" {
		return nil, nil
	}
	namespace := &corev1.Namespace{}
	if err := r.Client.Get(ctx, client.ObjectKey{Name: s.claim.Namespace}, namespace); err != nil {
		return nil, fmt.Errorf("reading Namespace %s: %w", s.claim.Namespace, err)
	}
	return namespace.Labels, nil
}

func reasonOf(o ledger.Outcome) string {
	switch o {
	case ledger.NotReady:
		return capiipamv1.IPAddressClaimReadyPoolNotReadyReason
	case ledger.Exhausted:
		return capiipamv1.IPAddressClaimReadyPoolExhaustedReason
	default:
		return capiipamv1.IPAddressClaimReadyAllocationFailedReason
	}
}

// ensureAddress creates the IPAddress, or completes the existing one (row IPAM-04e).
func (r *Reconciler) ensureAddress(ctx context.Context, s *state, res ledger.Result) error {
	if s.ip != nil && s.ip.Spec.Address != res.Address {
		return r.lookAgain(s, s.ip, res)
	}
	if s.ip != nil {
		return r.completeAddress(ctx, s)
	}
	ip := newAddress(s.claim, s.pool, res)
	if time.Now().After(res.Before) {
		return fmt.Errorf("the creation of IPAddress %s was delayed too long: the address is requested again", ip.Name)
	}
	create, cancel := context.WithTimeout(ctx, r.Ledger.RequestTimeout())
	defer cancel()
	err := r.Client.Create(create, ip)
	switch {
	case err == nil:
		ctrl.LoggerFrom(ctx).Info("Allocated an address", "IPAddress", klog.KObj(ip), "address", res.Address, "pool", s.key.String())
		s.ip = ip
		return nil
	case apierrors.IsAlreadyExists(err):
		return r.useExisting(ctx, s, res)
	case apierrors.IsTooManyRequests(err): // The server is overloaded: the claim keeps its address and writes no status.
		return fmt.Errorf("creating IPAddress %s with %s: %w", ip.Name, res.Address, err)
	case refused(err):
		return r.reportRefusal(ctx, s, fmt.Errorf("creating IPAddress %s: %w", ip.Name, err))
	}
	r.Ledger.Pool(s.key).Unanswered(s.claim.UID)
	return fmt.Errorf("creating IPAddress %s with %s: %w", ip.Name, res.Address, err)
}

// reportRefusal releases the address of an IPAddress that the API server has refused, and shows the cause. It returns
// the refusal for another attempt, because the end of a full quota has no event.
func (r *Reconciler) reportRefusal(ctx context.Context, s *state, refusal error) error {
	r.Ledger.Pool(s.key).Refused(ledger.TicketOf(s.claim))
	if err := r.fail(ctx, s, capiipamv1.IPAddressClaimReadyAllocationFailedReason, refusal.Error()); err != nil {
		return err
	}
	return refusal
}

// refused reports whether the API server has refused a request and will not execute it later. After an error of the
// server or of the connection it may.
func refused(err error) bool {
	var answer apierrors.APIStatus
	return errors.As(err, &answer) && answer.Status().Code >= 400 && answer.Status().Code < 500
}

// useExisting handles an IPAddress that was missing in the cache.
func (r *Reconciler) useExisting(ctx context.Context, s *state, res ledger.Result) error {
	ip := &capiipamv1.IPAddress{}
	if err := r.Live.Get(ctx, client.ObjectKeyFromObject(s.claim), ip); err != nil {
		return fmt.Errorf("reading IPAddress %s, which exists already: %w", s.claim.Name, err)
	}
	if ip.Spec.Address != res.Address || relationOf(s.claim, ip) == leftover || relationOf(s.claim, ip) == foreign {
		return r.lookAgain(s, ip, res)
	}
	s.ip = ip
	return r.completeAddress(ctx, s)
}

// lookAgain releases the address that was allocated to the claim, because an IPAddress with its name has a different
// one.
func (r *Reconciler) lookAgain(s *state, ip *capiipamv1.IPAddress, res ledger.Result) error {
	r.Ledger.AddressSeen(ip)
	r.Ledger.Pool(s.key).Retract(s.claim.UID)
	return fmt.Errorf("IPAddress %s exists with %s, expected %s: retrying", ip.Name, ip.Spec.Address, res.Address)
}

func newAddress(claim *capiipamv1.IPAddressClaim, pool ipamv1.Pool, res ledger.Result) *capiipamv1.IPAddress {
	prefix := res.Prefix
	ip := &capiipamv1.IPAddress{
		ObjectMeta: metav1.ObjectMeta{
			Name:       claim.Name,
			Namespace:  claim.Namespace,
			Finalizers: []string{ipamv1.AddressFinalizer},
			Labels:     addressLabels(claim),
		},
		Spec: capiipamv1.IPAddressSpec{
			ClaimRef: capiipamv1.IPAddressClaimReference{Name: claim.Name},
			PoolRef:  claim.Spec.PoolRef,
			Address:  res.Address,
			Prefix:   &prefix,
			Gateway:  res.Gateway,
		},
	}
	ip.OwnerReferences = owners(ip, claim, pool)
	return ip
}

func (r *Reconciler) completeAddress(ctx context.Context, s *state) error {
	if complete(s.ip, s.claim, s.pool) {
		return nil
	}
	s.ip = s.ip.DeepCopy()
	return reconciling.Change(ctx, r.Client, s.ip, func() {
		if s.ip.DeletionTimestamp.IsZero() {
			controllerutil.AddFinalizer(s.ip, ipamv1.AddressFinalizer)
		}
		for key, value := range addressLabels(s.claim) {
			metav1.SetMetaDataLabel(&s.ip.ObjectMeta, key, value)
		}
		s.ip.OwnerReferences = owners(s.ip, s.claim, s.pool)
	})
}

// event emits an event for a claim. A normal allocation emits none, because it would cost one write per claim.
func (r *Reconciler) event(claim *capiipamv1.IPAddressClaim, kind, reason, message string) {
	if r.Recorder != nil {
		r.Recorder.Eventf(claim, nil, kind, reason, "Allocate", "%s", message)
	}
}
