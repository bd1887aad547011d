package hostjoin

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/credentials"
	"capstan.dev/capstan/internal/host/joining"
	"capstan.dev/capstan/internal/pki"
)

// admit takes a host in. Each step can be repeated. The token is used first, so that it never serves two hosts. existing is the Secret
// with the credentials of a host that joins again, or nil.
func (r *Reconciler) admit(ctx context.Context, csr *certificatesv1.CertificateSigningRequest, j joiner, secret, existing *corev1.Secret, t token) error {
	if err := r.use(ctx, j, secret, t); err != nil {
		return err
	}
	authority, err := r.ensureCredentials(ctx, j, existing, t)
	if err != nil {
		return err
	}
	if err := r.ensureHost(ctx, j, t); err != nil {
		return err
	}
	if err := r.approve(ctx, csr, j); err != nil {
		return err
	}
	leaf := pki.Leaf{CommonName: "capstand", Usages: pki.Server}.For(j.host)
	made, err := authority.Sign(leaf, j.request.PublicKey, t.terms.Validity.Duration, time.Now())
	if err != nil {
		return err
	}
	before := csr.DeepCopy()
	// The host trusts the clients of its authority, so it gets the authority as well.
	csr.Status.Certificate = append(pki.EncodeCert(made), pki.EncodeCert(authority.Cert)...)
	if err := r.LiveClient.Status().Patch(ctx, csr, locked(before)); err != nil {
		return err
	}
	ctrl.LoggerFrom(ctx).Info("A host has joined", "host", j.Name, "address", j.Address, "dials", j.Dials, "token", secret.Name)
	return nil
}

// use records the key of the host at the token.
func (r *Reconciler) use(ctx context.Context, j joiner, secret *corev1.Secret, t token) error {
	if _, done := t.uses[j.fingerprint]; done {
		return nil
	}
	uses := maps.Clone(t.uses)
	uses[j.fingerprint] = j.Name
	data, err := json.Marshal(uses)
	if err != nil {
		return err
	}
	before := secret.DeepCopy()
	secret.Data[joining.KeyHosts] = data
	return r.LiveClient.Patch(ctx, secret, locked(before))
}

func credentialsName(host string) string { return host + "-credentials" }

// existingCredentials returns the Secret with the name of the host's credentials, or nil.
func (r *Reconciler) existingCredentials(ctx context.Context, j joiner) (*corev1.Secret, error) {
	secret := &corev1.Secret{}
	err := r.LiveClient.Get(ctx, client.ObjectKey{Namespace: r.namespace, Name: credentialsName(j.Name)}, secret)
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	return secret, err
}

// foreign returns the reason to refuse a host whose name leads to a Secret of another program; empty without such a Secret. A host chooses
// its name, and the name of the Secret follows from it.
func foreign(secret *corev1.Secret, host string, hosts []infrav1.CapstanHost) string {
	if secret == nil {
		return ""
	}
	_, ours := secret.Labels[infrav1.HostCredentialsLabel]
	for i := range hosts {
		ref := hosts[i].Spec.CredentialsRef
		ours = ours || hosts[i].Name == host && ref.Namespace == secret.Namespace && ref.Name == secret.Name
	}
	for _, owner := range secret.OwnerReferences {
		ours = ours && owner.Kind == infrav1.HostKind && owner.Name == host
	}
	if ours && secret.Type == corev1.SecretTypeTLS {
		return ""
	}
	return fmt.Sprintf("expected a free name for the credentials of the host, found the Secret %s/%s of another program: join with another --name", secret.Namespace, secret.Name)
}

// ensureCredentials returns the authority of the host. The Secret of a host that joins again keeps its authority.
func (r *Reconciler) ensureCredentials(ctx context.Context, j joiner, existing *corev1.Secret, t token) (pki.Authority, error) {
	next, changed, err := nextCredentials(existing, t.terms.Validity.Duration, time.Now())
	if err != nil || !changed {
		return next.Authority, err
	}
	if existing != nil {
		before := existing.DeepCopy()
		existing.Data = next.Data()
		return next.Authority, r.LiveClient.Patch(ctx, existing, locked(before))
	}
	// The label lets the controller of the CapstanHost see changes at once.
	return next.Authority, r.LiveClient.Create(ctx, &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: r.namespace, Name: credentialsName(j.Name), Labels: map[string]string{infrav1.HostCredentialsLabel: ""}},
		Type:       corev1.SecretTypeTLS, Data: next.Data(),
	})
}

// nextCredentials returns the credentials after a join, and whether they differ from those in the Secret, which can be nil. The host trusts
// one authority after its join, and a rotation can be at any step.
func nextCredentials(existing *corev1.Secret, validity time.Duration, now time.Time) (next credentials.Managed, changed bool, err error) {
	if existing != nil {
		if old, err := credentials.AuthorityFromSecret(existing.Data); err == nil && old.Usable(now) {
			return old.Settled(now)
		}
	}
	next, err = credentials.NewAuthority(validity, now)
	return next, true, err
}

// ensureHost creates the CapstanHost, or changes the one that exists.
func (r *Reconciler) ensureHost(ctx context.Context, j joiner, t token) error {
	host := &infrav1.CapstanHost{}
	ref := infrav1.SecretReference{Namespace: r.namespace, Name: credentialsName(j.Name)}
	err := r.LiveClient.Get(ctx, client.ObjectKey{Name: j.Name}, host)
	if err == nil {
		before := host.DeepCopy()
		rejoin(&host.Spec, j, ref)
		return r.LiveClient.Patch(ctx, host, locked(before))
	}
	if !apierrors.IsNotFound(err) {
		return err
	}
	host = desiredHost(j, t.terms, ref)
	if r.WatchFilter != "" {
		metav1.SetMetaDataLabel(&host.ObjectMeta, clusterv1.WatchLabel, r.WatchFilter)
	}
	return r.LiveClient.Create(ctx, host)
}

// rejoin changes the spec of a host that joins again: its address and its credentials, and what its user has set. The rest stays, because
// an administrator may have changed it.
func rejoin(spec *infrav1.CapstanHostSpec, j joiner, ref infrav1.SecretReference) {
	spec.Address, spec.Connection, spec.CredentialsRef = j.Address, connection(j), ref
	if j.TunnelSet {
		spec.TunnelAddress = j.TunnelAddress
	}
	spec.FailureDomain = cmp.Or(j.FailureDomain, spec.FailureDomain)
}

// connection returns spec.connection of the host; empty is the default.
func connection(j joiner) infrav1.HostConnection {
	if j.Dials {
		return infrav1.HostConnectionFromHost
	}
	return ""
}

// desiredHost returns the CapstanHost of a host that joins for the first time.
func desiredHost(j joiner, terms joining.Terms, ref infrav1.SecretReference) *infrav1.CapstanHost {
	host := &infrav1.CapstanHost{
		ObjectMeta: metav1.ObjectMeta{Name: j.Name, Labels: maps.Clone(terms.Labels)},
		Spec:       infrav1.CapstanHostSpec{Address: j.Address, Connection: connection(j), CredentialsRef: ref, FailureDomain: j.FailureDomain, TunnelAddress: j.TunnelAddress},
	}
	if terms.FailureDomain != "" {
		host.Spec.FailureDomain = terms.FailureDomain
	}
	if len(terms.AllowedNamespaces) > 0 {
		host.Spec.AllowedNamespaces = &infrav1.AllowedNamespaces{Names: terms.AllowedNamespaces}
	}
	return host
}

func (r *Reconciler) approve(ctx context.Context, csr *certificatesv1.CertificateSigningRequest, j joiner) error {
	for _, c := range csr.Status.Conditions {
		if c.Type == certificatesv1.CertificateApproved {
			return nil
		}
	}
	before := csr.DeepCopy()
	csr.Status.Conditions = append(csr.Status.Conditions, certificatesv1.CertificateSigningRequestCondition{
		Type: certificatesv1.CertificateApproved, Status: corev1.ConditionTrue, Reason: "TokenValid",
		Message: fmt.Sprintf("The host joins as CapstanHost %s", j.Name),
	})
	return r.LiveClient.SubResource("approval").Patch(ctx, csr, locked(before))
}
