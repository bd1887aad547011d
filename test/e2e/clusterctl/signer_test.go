//go:build e2e

package clusterctl

import (
	"context"
	"encoding/base64"
	"fmt"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/util/cert"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// A REPLACEMENT OF CERT-MANAGER, FOR TESTS ONLY. Its binaries cannot be built from its module and no image can be pulled
// here. The test itself therefore creates self-signed certificates and injects authorities, as far as the components of
// Cluster API core and Capstan need it. Users get the real one through clusterctl.

// signerKinds are the kinds of cert-manager that components use, without their schemas.
const signerKinds = `
apiVersion: v1
kind: Namespace
metadata: {name: cert-manager}
---
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: issuers.cert-manager.io}
spec:
  group: cert-manager.io
  scope: Namespaced
  names: {kind: Issuer, listKind: IssuerList, plural: issuers, singular: issuer}
  versions: [{name: v1, served: true, storage: true, schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}}]
---
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: certificates.cert-manager.io}
spec:
  group: cert-manager.io
  scope: Namespaced
  names: {kind: Certificate, listKind: CertificateList, plural: certificates, singular: certificate}
  versions: [{name: v1, served: true, storage: true, schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}}]
`

// injected are the kinds into which cert-manager's injector writes authorities.
var injected = []schema.GroupVersionKind{
	{Group: "apiextensions.k8s.io", Version: "v1", Kind: "CustomResourceDefinition"},
	{Group: "admissionregistration.k8s.io", Version: "v1", Kind: "ValidatingWebhookConfiguration"},
	{Group: "admissionregistration.k8s.io", Version: "v1", Kind: "MutatingWebhookConfiguration"},
}

// signer replaces cert-manager until the test ends.
func signer(t *testing.T, kubeconfig string, c client.Client) {
	t.Helper()
	mustKubectl(t, kubeconfig, signerKinds, "apply", "-f", "-")
	mustKubectl(t, kubeconfig, "", "wait", "--for=condition=Established", "crd/issuers.cert-manager.io", "crd/certificates.cert-manager.io")
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	t.Cleanup(func() { cancel(); <-done })
	go func() {
		defer close(done)
		tick := time.NewTicker(2 * time.Second) // Each look lists all CRDs.
		defer tick.Stop()
		looked := map[string]bool{}
		for {
			if err := sign(ctx, c, looked); err != nil && ctx.Err() == nil {
				fmt.Println("replacement of cert-manager:", err)
			}
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
		}
	}()
}

// sign creates the Secret of each Certificate without one, and injects the authorities. Objects that it has looked at are read again
// only after a change of them or of the authorities, because they are large.
func sign(ctx context.Context, c client.Client, looked map[string]bool) error {
	certificates := &unstructured.UnstructuredList{}
	certificates.SetGroupVersionKind(schema.GroupVersionKind{Group: "cert-manager.io", Version: "v1", Kind: "CertificateList"})
	if err := c.List(ctx, certificates); err != nil {
		return err
	}
	authorities := map[string]string{}
	for _, o := range certificates.Items {
		ca, err := ensureSecret(ctx, c, o)
		if err != nil {
			return err
		}
		authorities[o.GetNamespace()+"/"+o.GetName()] = ca
	}
	for _, kind := range injected {
		list := &metav1.PartialObjectMetadataList{}
		list.SetGroupVersionKind(kind.GroupVersion().WithKind(kind.Kind + "List"))
		if err := c.List(ctx, list); err != nil {
			return err
		}
		for _, meta := range list.Items {
			ca := authorities[meta.Annotations["cert-manager.io/inject-ca-from"]]
			state := fmt.Sprint(meta.UID, meta.Generation, ca)
			if ca == "" || looked[state] {
				continue
			}
			o := &unstructured.Unstructured{}
			o.SetGroupVersionKind(kind)
			if err := c.Get(ctx, client.ObjectKey{Name: meta.Name}, o); err != nil {
				return client.IgnoreNotFound(err)
			}
			if !inject(o, ca) {
				looked[state] = o.GetGeneration() == meta.Generation
			} else if err := c.Update(ctx, o); err != nil && !apierrors.IsConflict(err) {
				return err
			}
		}
	}
	return nil
}

// ensureSecret returns the certificate of a Certificate, base64 encoded. It is self-signed.
func ensureSecret(ctx context.Context, c client.Client, o unstructured.Unstructured) (string, error) {
	name, _, _ := unstructured.NestedString(o.Object, "spec", "secretName")
	secret := &unstructured.Unstructured{Object: map[string]any{"apiVersion": "v1", "kind": "Secret"}}
	err := c.Get(ctx, client.ObjectKey{Namespace: o.GetNamespace(), Name: name}, secret)
	if apierrors.IsNotFound(err) {
		names, _, _ := unstructured.NestedStringSlice(o.Object, "spec", "dnsNames")
		crt, key, err := cert.GenerateSelfSignedCertKey(names[0], nil, names)
		if err != nil {
			return "", err
		}
		secret.Object["type"] = "kubernetes.io/tls"
		secret.Object["data"] = map[string]any{
			"tls.crt": base64.StdEncoding.EncodeToString(crt), "tls.key": base64.StdEncoding.EncodeToString(key),
		}
		secret.SetNamespace(o.GetNamespace())
		secret.SetName(name)
		return base64.StdEncoding.EncodeToString(crt), c.Create(ctx, secret)
	}
	crt, _, _ := unstructured.NestedString(secret.Object, "data", "tls.crt")
	return crt, err
}

// inject writes the authority into every client configuration. It reports whether one changed.
func inject(o *unstructured.Unstructured, ca string) bool {
	changed := false
	set := func(config map[string]any) {
		if config["caBundle"] != ca {
			config["caBundle"], changed = ca, true
		}
	}
	if o.GetKind() == "CustomResourceDefinition" {
		if config, ok, _ := unstructured.NestedFieldNoCopy(o.Object, "spec", "conversion", "webhook", "clientConfig"); ok {
			set(config.(map[string]any))
		}
		return changed
	}
	if !strings.HasSuffix(o.GetKind(), "WebhookConfiguration") {
		return false
	}
	hooks, _, _ := unstructured.NestedFieldNoCopy(o.Object, "webhooks")
	for _, hook := range hooks.([]any) {
		set(hook.(map[string]any)["clientConfig"].(map[string]any))
	}
	return changed
}
