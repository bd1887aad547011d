package controlplane

import (
	"encoding/pem"
	"errors"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/backoff"
	"capstan.dev/capstan/internal/pki"
	"capstan.dev/capstan/internal/testenv/expect"
)

// TestCorrectedKubeconfig (CP-09): a probe that cannot succeed ends when the authority of the kubeconfig is corrected, or when the user gets
// another token. The endpoint is the same.
func TestCorrectedKubeconfig(t *testing.T) {
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "Bearer right" {
			w.WriteHeader(http.StatusUnauthorized)
		}
	}))
	defer server.Close()
	key, err := pki.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	other, err := pki.NewAuthority("other", key, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	encode := func(der []byte) rest.TLSClientConfig {
		return rest.TLSClientConfig{CAData: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})}
	}
	right, wrong := encode(server.Certificate().Raw), encode(other.Cert.Raw)
	p := newProber()
	defer p.cancel()
	cp := &controlplanev1.CapstanControlPlane{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: "b"}}
	var last *probe
	for _, config := range []*rest.Config{
		{Host: server.URL, BearerToken: "right", TLSClientConfig: wrong},
		{Host: server.URL, BearerToken: "wrong", TLSClientConfig: right},
		{Host: server.URL, BearerToken: "right", TLSClientConfig: right},
	} {
		for range 2 {
			if answered, err := p.answeredOrAsk(cp, config); answered || err != nil {
				t.Fatalf("answered %v, %v", answered, err)
			}
		}
		now := p.probes[client.ObjectKeyFromObject(cp)]
		if now == last {
			t.Fatal("the former probe goes on")
		}
		last = now
	}
	select {
	case <-p.events:
	case <-time.After(expect.Patience):
		t.Fatal("no answer")
	}
	if answered, err := p.answeredOrAsk(cp, &rest.Config{Host: server.URL, BearerToken: "right", TLSClientConfig: right}); !answered || err != nil {
		t.Errorf("answered %v, %v", answered, err)
	}
}

// TestProbePause: an API server that answers is asked often, but not for ever.
func TestProbePause(t *testing.T) {
	failed := errors.New("connection refused")
	pauses := backoff.Doubling(firstProbePause, longestProbePause)
	for i, attempt := range []struct {
		attempts int
		err      error
		want     time.Duration
	}{
		{1, failed, firstProbePause},
		{2, failed, 2 * firstProbePause},
		{3, nil, probePauseReady},
		{4, failed, firstProbePause},
		{frequentProbes, nil, probePauseReady},
		{frequentProbes + 1, nil, longestProbePause},
		{steadyProbes, failed, longestProbePause},
		{steadyProbes + 1, nil, rareProbePause},
		{steadyProbes + 2, failed, rareProbePause},
	} {
		if got := probePause(attempt.attempts, attempt.err, pauses); got != attempt.want {
			t.Errorf("attempt %d of the test: a pause of %s, want %s", i, got, attempt.want)
		}
	}
}
