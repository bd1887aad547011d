package capstanhost

import (
	"context"

	corev1 "k8s.io/api/core/v1"
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
)

// addSecrets adds a cache of the metadata of the hosts' Secrets, which the manager's own cache leaves out, and
// returns the source of their changes. The label comes with the ownership.
func addSecrets(mgr ctrl.Manager) (source.Source, error) {
	labelled, err := labels.NewRequirement(infrav1.HostCredentialsLabel, selection.Exists, nil)
	if err != nil {
		return nil, err
	}
	secret := &metav1.PartialObjectMetadata{}
	secret.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Secret"))
	secrets, err := cache.New(mgr.GetConfig(), cache.Options{
		HTTPClient: mgr.GetHTTPClient(), Scheme: mgr.GetScheme(), Mapper: mgr.GetRESTMapper(),
		ByObject: map[client.Object]cache.ByObject{secret: {Label: labels.NewSelector().Add(*labelled)}},
	})
	if err != nil {
		return nil, err
	}
	if err := mgr.Add(secrets); err != nil {
		return nil, err
	}
	return source.Kind[client.Object](secrets, secret, handler.EnqueueRequestsFromMapFunc(hostsOfSecret)), nil
}

func hostsOfSecret(_ context.Context, o client.Object) []reconcile.Request {
	var requests []reconcile.Request
	for _, owner := range o.GetOwnerReferences() {
		if owner.Kind == "CapstanHost" {
			requests = append(requests, request(owner.Name)...)
		}
	}
	return requests
}
