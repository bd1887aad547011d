// Package hostjoin lets hosts join: it approves and signs the CertificateSigningRequests that hosts create with the tokens of
// `capstan host token`, and creates their CapstanHosts.
//
// Each host has an authority of its own. Its key is in the Secret with the credentials of the managers, because both equal root
// access to this one host. The authority signs the certificate of the host and that of the managers.
//
// Layer: reconciler. Allowed imports: api, library, contract.
package hostjoin

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/joining"
	"capstan.dev/capstan/internal/reconciling"
)

// +kubebuilder:rbac:groups=certificates.k8s.io,resources=certificatesigningrequests,verbs=get;list;watch
// +kubebuilder:rbac:groups=certificates.k8s.io,resources=certificatesigningrequests/approval;certificatesigningrequests/status,verbs=patch
// +kubebuilder:rbac:groups=certificates.k8s.io,resources=signers,resourceNames=infrastructure.capstan.dev/host,verbs=approve;sign
// +kubebuilder:rbac:groups=infrastructure.capstan.dev,resources=capstanhosts,verbs=get;list;create;patch
// Secrets are created, changed and deleted in the provider's own namespace only: config/infrastructure/rbac/host_credentials_role.yaml.
// +kubebuilder:rbac:groups="",resources=secrets,verbs=get;list;watch

const joinController = "CapstanHostJoin"

// Reconciler decides about CertificateSigningRequests of hosts, and deletes the Secrets of expired tokens.
type Reconciler struct {
	reconciling.Options
	Client client.Client

	namespace string
	// requests contains only the CertificateSigningRequests of this signer, and the metadata of the Secrets of tokens.
	requests cache.Cache
}

// SetupWithManager adds the reconciler. CertificateSigningRequests have names without a namespace, and Secrets names with one.
func (r *Reconciler) SetupWithManager(ctx context.Context, mgr ctrl.Manager) error {
	r.namespace = cmp.Or(os.Getenv("POD_NAMESPACE"), joining.DefaultNamespace)
	ofToken, err := labels.NewRequirement(infrav1.HostTokenLabel, selection.Exists, nil)
	if err != nil {
		return err
	}
	secret := &metav1.PartialObjectMetadata{}
	secret.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Secret"))
	csr := &certificatesv1.CertificateSigningRequest{}
	r.requests, err = cache.New(mgr.GetConfig(), cache.Options{
		HTTPClient: mgr.GetHTTPClient(), Scheme: mgr.GetScheme(), Mapper: mgr.GetRESTMapper(),
		ByObject: map[client.Object]cache.ByObject{
			csr: {Field: fields.OneTermEqualSelector("spec.signerName", infrav1.HostSignerName)},
			secret: {
				Label: labels.NewSelector().Add(*ofToken), Namespaces: map[string]cache.Config{r.namespace: {}},
			},
		},
	})
	if err != nil {
		return err
	}
	if err := mgr.Add(r.requests); err != nil {
		return err
	}
	// One at a time: a decision depends on the hosts that joined before.
	one := reconciling.Options{Concurrency: map[string]int{joinController: 1}}
	return one.Controller(mgr, joinController).
		WatchesRawSource(source.Kind[client.Object](r.requests, csr, &handler.EnqueueRequestForObject{})).
		WatchesRawSource(source.Kind[client.Object](r.requests, secret, &handler.EnqueueRequestForObject{})).
		Complete(ctx, reconciling.Traced("CertificateSigningRequest", r))
}

// Reconcile implements reconcile.Reconciler.
func (r *Reconciler) Reconcile(ctx context.Context, req ctrl.Request) (reconcile.Result, error) {
	if req.Namespace != "" {
		return r.reconcileToken(ctx, req.NamespacedName)
	}
	csr := &certificatesv1.CertificateSigningRequest{}
	if err := r.LiveClient.Get(ctx, req.NamespacedName, csr); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	if csr.Spec.SignerName != infrav1.HostSignerName || decided(csr) || csr.Spec.Username != r.username() {
		return reconcile.Result{}, nil
	}
	err := r.reconcileRequest(ctx, csr)
	if apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) {
		return reconcile.Result{RequeueAfter: time.Second}, nil // Another request changed the same token or host.
	}
	return reconcile.Result{}, err
}

// username is that of the tokens. Providers in other namespaces have tokens of their own.
func (r *Reconciler) username() string {
	return fmt.Sprintf("system:serviceaccount:%s:%s", r.namespace, infrav1.HostJoinServiceAccount)
}

// decided reports whether nothing is left to do for a request.
func decided(csr *certificatesv1.CertificateSigningRequest) bool {
	for _, c := range csr.Status.Conditions {
		if c.Type == certificatesv1.CertificateDenied || c.Type == certificatesv1.CertificateFailed {
			return true
		}
	}
	return len(csr.Status.Certificate) > 0
}

func (r *Reconciler) reconcileRequest(ctx context.Context, csr *certificatesv1.CertificateSigningRequest) error {
	j, err := read(csr)
	if err != nil {
		return r.deny(ctx, csr, err.Error())
	}
	secret, t, err := r.tokenOf(ctx, csr)
	if err != nil {
		return err
	}
	if secret == nil {
		return r.deny(ctx, csr, "the token has expired or was revoked: create another one with `capstan host token create`")
	}
	hosts := &infrav1.CapstanHostList{}
	if err := r.LiveClient.List(ctx, hosts); err != nil {
		return err
	}
	if why := refusal(j, t, hosts.Items, time.Now()); why != "" {
		return r.deny(ctx, csr, why)
	}
	existing, err := r.existingCredentials(ctx, j)
	if err != nil {
		return err
	}
	if why := foreign(existing, j.Name, hosts.Items); why != "" {
		return r.deny(ctx, csr, why)
	}
	return r.admit(ctx, csr, j, secret, existing, t)
}

// tokenOf returns the token of a request, or nil.
func (r *Reconciler) tokenOf(ctx context.Context, csr *certificatesv1.CertificateSigningRequest) (*corev1.Secret, token, error) {
	id := tokenID(csr)
	if id == "" {
		return nil, token{}, nil
	}
	list := &corev1.SecretList{}
	if err := r.LiveClient.List(ctx, list, client.InNamespace(r.namespace), client.HasLabels{infrav1.HostTokenLabel}); err != nil {
		return nil, token{}, err
	}
	for i := range list.Items {
		s := &list.Items[i]
		if string(s.Data[joining.KeyID]) != id || !s.DeletionTimestamp.IsZero() {
			continue
		}
		t := token{uses: joining.Uses{}}
		err := json.Unmarshal(s.Data[joining.KeyTerms], &t.terms)
		if hosts := s.Data[joining.KeyHosts]; err == nil && len(hosts) > 0 {
			err = json.Unmarshal(hosts, &t.uses)
		}
		if err != nil {
			return nil, token{}, fmt.Errorf("expected the terms of a token in the Secret %s/%s: %w", s.Namespace, s.Name, err)
		}
		return s, t, nil
	}
	return nil, token{}, nil
}

func (r *Reconciler) deny(ctx context.Context, csr *certificatesv1.CertificateSigningRequest, why string) error {
	ctrl.LoggerFrom(ctx).Info("Refused a host", "reason", why)
	before := csr.DeepCopy()
	csr.Status.Conditions = append(csr.Status.Conditions, certificatesv1.CertificateSigningRequestCondition{
		Type: certificatesv1.CertificateDenied, Status: corev1.ConditionTrue, Reason: "HostRefused", Message: why,
	})
	return r.LiveClient.SubResource("approval").Patch(ctx, csr, locked(before))
}

// reconcileToken deletes the Secret of a token when it expires, which revokes the token. Until then, a host whose join was
// interrupted can use a used token again.
func (r *Reconciler) reconcileToken(ctx context.Context, key client.ObjectKey) (reconcile.Result, error) {
	secret := &corev1.Secret{}
	if err := r.LiveClient.Get(ctx, key, secret); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	var terms joining.Terms
	if err := json.Unmarshal(secret.Data[joining.KeyTerms], &terms); err != nil {
		return reconcile.Result{}, reconcile.TerminalError(fmt.Errorf("expected the terms of a token in the Secret %s: %w", key, err))
	}
	if left := time.Until(terms.Expires.Time); left > 0 {
		return reconcile.Result{RequeueAfter: left}, nil
	}
	return reconcile.Result{}, client.IgnoreNotFound(r.LiveClient.Delete(ctx, secret, client.Preconditions{UID: &secret.UID}))
}

// locked is the patch of an object that nobody else has changed.
func locked(before client.Object) client.Patch {
	return client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})
}
