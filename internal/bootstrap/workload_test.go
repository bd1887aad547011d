package bootstrap

import (
	"encoding/pem"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strconv"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/reconciling"
	"capstan.dev/capstan/internal/testenv/expect"
)

// TestRequestsForToken: a token costs the API server of the workload cluster one request for its Secret, and none for the list of kinds.
func TestRequestsForToken(t *testing.T) {
	var mu sync.Mutex
	var requests []string
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		requests = append(requests, req.Method+" "+req.URL.Path)
		http.NotFound(w, req)
	}))
	t.Cleanup(server.Close)
	r, s := directly(t, server)
	workload, err := r.workloadClient(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}
	config := &bootstrapv1.CapstanConfig{}
	if found, err := readToken(t.Context(), workload, "abcdef.0123456789abcdef", config); found != nil || err != nil {
		t.Errorf("got %v, %v, want no token", found, err)
	}
	if err := removeToken(t.Context(), workload, "abcdef.0123456789abcdef", config); err != nil {
		t.Error(err)
	}
	mu.Lock()
	defer mu.Unlock()
	const path = "/api/v1/namespaces/kube-system/secrets/bootstrap-token-abcdef"
	if want := []string{"GET " + path, "DELETE " + path}; !slices.Equal(requests, want) {
		t.Errorf("requests: got %q, want %q", requests, want)
	}
}

// TestDropTokenWithoutKubeconfig: the removal of a token is not repeated without an event while the kubeconfig is refused or missing.
func TestDropTokenWithoutKubeconfig(t *testing.T) {
	for name, spoil := range map[string]func(*Reconciler, *corev1.Secret) error{
		"refused": func(r *Reconciler, s *corev1.Secret) error { s.Data = nil; return r.Client.Update(t.Context(), s) },
		"missing": func(r *Reconciler, s *corev1.Secret) error { return r.Client.Delete(t.Context(), s) },
	} {
		t.Run(name, func(t *testing.T) {
			server := httptest.NewTLSServer(http.NotFoundHandler())
			t.Cleanup(server.Close)
			r, s := directly(t, server)
			expect.NoError(t, spoil(r, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "demo-kubeconfig"}}))
			s.config = &bootstrapv1.CapstanConfig{}
			reconciling.SetCondition(s.config, bootstrapv1.BootstrapTokenAvailableCondition, metav1.ConditionTrue, bootstrapv1.BootstrapTokenAvailableReason, "")
			if err := r.dropToken(t.Context(), s, "abcdef.0123456789abcdef"); err != nil || tokenRemoved(s.config) {
				t.Errorf("error %v, the token is reported as removed: %v", err, tokenRemoved(s.config))
			}
		})
	}
}

// directly returns a reconciler without a ClusterCache, and a cluster with a kubeconfig for a server.
func directly(t *testing.T, server *httptest.Server) (*Reconciler, *scope) {
	t.Helper()
	u, err := url.Parse(server.URL)
	if err != nil {
		t.Fatal(err)
	}
	port, err := strconv.ParseInt(u.Port(), 10, 32)
	if err != nil {
		t.Fatal(err)
	}
	data, err := clientcmd.Write(clientcmdapi.Config{
		Clusters: map[string]*clientcmdapi.Cluster{"c": {
			Server: server.URL, CertificateAuthorityData: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}),
		}},
		AuthInfos:      map[string]*clientcmdapi.AuthInfo{"u": {Token: "token"}},
		Contexts:       map[string]*clientcmdapi.Context{"x": {Cluster: "c", AuthInfo: "u"}},
		CurrentContext: "x",
	})
	if err != nil {
		t.Fatal(err)
	}
	scheme := runtime.NewScheme()
	if err := corev1.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	c := fake.NewClientBuilder().WithScheme(scheme).WithObjects(&corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "demo-kubeconfig"}, Data: map[string][]byte{"value": data},
	}).Build()
	s := &scope{cluster: &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "demo"}}, controlPlane: &controlplanev1.CapstanControlPlane{}}
	s.cluster.Spec.ControlPlaneEndpoint = clusterv1.APIEndpoint{Host: u.Hostname(), Port: int32(port)}
	s.controlPlane.Status.Initialization.ControlPlaneInitialized = ptr.To(true)
	return &Reconciler{Options: reconciling.Options{SecretCachingClient: c}, Client: c}, s
}
