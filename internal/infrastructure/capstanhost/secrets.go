package capstanhost

import (
	"context"
	"encoding/json"
	"errors"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
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
)

// addSecrets adds a cache of the metadata of the hosts' Secrets, which the manager's own cache leaves out, and
// returns it with the source of their changes. The label comes with the ownership.
func addSecrets(mgr ctrl.Manager) (client.Reader, source.Source, error) {
	labelled, err := labels.NewRequirement(infrav1.HostCredentialsLabel, selection.Exists, nil)
	if err != nil {
		return nil, nil, err
	}
	secret := secretMetadata()
	secrets, err := cache.New(mgr.GetConfig(), cache.Options{
		HTTPClient: mgr.GetHTTPClient(), Scheme: mgr.GetScheme(), Mapper: mgr.GetRESTMapper(),
		ByObject: map[client.Object]cache.ByObject{secret: {Label: labels.NewSelector().Add(*labelled)}},
	})
	if err != nil {
		return nil, nil, err
	}
	if err := mgr.Add(secrets); err != nil {
		return nil, nil, err
	}
	return secrets, source.Kind[client.Object](secrets, secret, handler.EnqueueRequestsFromMapFunc(hostsOfSecret)), nil
}

func secretMetadata() *metav1.PartialObjectMetadata {
	secret := &metav1.PartialObjectMetadata{}
	secret.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Secret"))
	return secret
}

func hostsOfSecret(_ context.Context, o client.Object) []reconcile.Request {
	var requests []reconcile.Request
	for _, owner := range o.GetOwnerReferences() {
		if owner.Kind == infrav1.HostKind {
			requests = append(requests, request(owner.Name)...)
		}
	}
	return requests
}

// endTokens ends the tokens with which a host joined, for this host: it must not return after the deletion of its CapstanHost.
func (r *Reconciler) endTokens(ctx context.Context, host *infrav1.CapstanHost) error {
	if host.Spec.CredentialsRef.Name == "" {
		return nil
	}
	tokens := &corev1.SecretList{}
	if err := r.LiveClient.List(ctx, tokens, client.InNamespace(host.Spec.CredentialsRef.Namespace), client.HasLabels{infrav1.HostTokenLabel}); err != nil {
		return err
	}
	var errs []error
	for i := range tokens.Items {
		// A Secret that the provider may not change is in another namespace than its own, and no token.
		if err := r.endToken(ctx, &tokens.Items[i], host.Name); !apierrors.IsForbidden(err) {
			errs = append(errs, client.IgnoreNotFound(err))
		}
	}
	return errors.Join(errs...)
}

func (r *Reconciler) endToken(ctx context.Context, token *corev1.Secret, host string) error {
	uses := joining.Uses{}
	if json.Unmarshal(token.Data[joining.KeyHosts], &uses) != nil {
		return nil // It was not used, or is damaged and admits nobody.
	}
	left, used := uses.Remove(host)
	if !used {
		return nil
	}
	data, err := json.Marshal(left)
	if err != nil {
		return err
	}
	before := token.DeepCopy()
	token.Data[joining.KeyHosts] = data
	return r.Client.Patch(ctx, token, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
}
