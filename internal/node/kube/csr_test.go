package kube

import (
	"context"
	"encoding/base64"
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
)

func newFake() *fake.FakeDynamicClient {
	return fake.NewSimpleDynamicClientWithCustomListKinds(runtime.NewScheme(), map[schema.GroupVersionResource]string{CSRs: "CertificateSigningRequestList"})
}

// TestAsksAgain: kube-controller-manager deletes a request that nobody has answered for a day. It is made again,
// whether its end is seen or it is gone before anybody looks.
func TestAsksAgain(t *testing.T) {
	for name, end := range map[string]func(t *testing.T, client *fake.FakeDynamicClient){
		"seen to go": func(t *testing.T, client *fake.FakeDynamicClient) {
			var once sync.Once
			client.PrependWatchReactor("*", func(k8stesting.Action) (bool, watch.Interface, error) {
				events, err := client.Tracker().Watch(CSRs, "")
				once.Do(func() { go deleteAll(t, client) }) // The fake is locked meanwhile.
				return true, events, err
			})
		},
		"gone at once": func(_ *testing.T, client *fake.FakeDynamicClient) {
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
