package kube

import (
	"context"
	"crypto/rand"
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"math/big"
	"path/filepath"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/dynamic/fake"
	k8stesting "k8s.io/client-go/testing"

	"capstan.dev/capstan/internal/pki/certfiles"
)

func newFake() *fake.FakeDynamicClient {
	return fake.NewSimpleDynamicClientWithCustomListKinds(runtime.NewScheme(), map[schema.GroupVersionResource]string{CSRs: "CertificateSigningRequestList"})
}

// TestAsksAgain: kube-controller-manager deletes a request that has had no answer for a day. The client creates it again,
// whether its watch reports the deletion or the request was gone before the watch began.
func TestAsksAgain(t *testing.T) {
	for name, end := range map[string]func(t *testing.T, client *fake.FakeDynamicClient){
		"deleted during the watch": func(t *testing.T, client *fake.FakeDynamicClient) {
			var once sync.Once
			client.PrependWatchReactor("*", func(k8stesting.Action) (bool, watch.Interface, error) {
				events, err := client.Tracker().Watch(CSRs, "")
				once.Do(func() { go deleteAll(t, client) }) // The fake client holds its lock here.
				return true, events, err
			})
		},
		"deleted before the watch": func(_ *testing.T, client *fake.FakeDynamicClient) {
			lost := false
			client.PrependReactor("create", "*", func(action k8stesting.Action) (bool, runtime.Object, error) {
				if lost {
					return false, nil, nil
				}
				lost = true
				return true, action.(k8stesting.CreateAction).GetObject(), nil
			})
		},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
			defer cancel()
			client := newFake()
			end(t, client)
			made := 0
			client.PrependReactor("create", "*", func(action k8stesting.Action) (bool, runtime.Object, error) {
				if made++; made > 1 {
					csr := action.(k8stesting.CreateAction).GetObject().(*unstructured.Unstructured)
					_ = unstructured.SetNestedField(csr.Object, base64.StdEncoding.EncodeToString([]byte("issued")), "status", "certificate")
				}
				return false, nil, nil
			})
			got, err := RequestCertificate(ctx, client, Request{Name: "r", CommonName: "cn", KeyFile: filepath.Join(t.TempDir(), "key")})
			if err != nil || string(got) != "issued" {
				t.Errorf("%q, %v", got, err)
			}
		})
	}
}

// TestRenewalIsAnotherRequest: the cluster keeps an answered request for an hour. A renewal must not get the certificate
// that it replaces.
func TestRenewalIsAnotherRequest(t *testing.T) {
	client, dir := newFake(), t.TempDir()
	r := Request{Name: "r", CommonName: "cn", KeyFile: filepath.Join(dir, "key")}
	signer, err := certfiles.EnsureKey(r.KeyFile)
	if err != nil {
		t.Fatal(err)
	}
	issued, names := int64(0), map[string]bool{}
	client.PrependReactor("create", "*", func(action k8stesting.Action) (bool, runtime.Object, error) {
		issued++
		template := &x509.Certificate{SerialNumber: big.NewInt(issued), NotAfter: time.Now().Add(time.Hour)}
		der, err := x509.CreateCertificate(rand.Reader, template, template, signer.Public(), signer)
		if err != nil {
			return true, nil, err
		}
		pem := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
		csr := action.(k8stesting.CreateAction).GetObject().(*unstructured.Unstructured)
		names[csr.GetName()] = true
		return false, nil, unstructured.SetNestedField(csr.Object, base64.StdEncoding.EncodeToString(pem), "status", "certificate")
	})
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for want := 1; want <= 3; want++ {
		if err := EnsureCertificate(ctx, client, r, filepath.Join(dir, "crt")); err != nil {
			t.Fatal(err)
		}
		if len(names) != want {
			t.Errorf("%d certificates, by the requests %v", want, names)
		}
		deleteAll(t, client) // The fake client also returns objects with other names.
	}
}

func deleteAll(t *testing.T, client dynamic.Interface) {
	list, err := client.Resource(CSRs).List(context.Background(), metav1.ListOptions{})
	if err != nil || len(list.Items) != 1 {
		t.Errorf("%d requests, %v", len(list.Items), err)
		return
	}
	if err := client.Resource(CSRs).Delete(context.Background(), list.Items[0].GetName(), metav1.DeleteOptions{}); err != nil {
		t.Error(err)
	}
}
