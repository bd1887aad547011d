package writeload

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/rest"

	"capstan.dev/capstan/internal/testenv/expect"
)

// server stores ConfigMaps. It fails every second creation, and loses the ConfigMap whose name ends with lost.
type server struct {
	mu    sync.Mutex
	calls int
	items []corev1.ConfigMap
	lost  string
}

func (s *server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	w.Header().Set("Content-Type", "application/json")
	if r.Method == http.MethodGet {
		_ = json.NewEncoder(w).Encode(corev1.ConfigMapList{Items: s.items})
		return
	}
	s.calls++
	if s.calls%2 == 1 {
		http.Error(w, "{}", http.StatusInternalServerError)
		return
	}
	var m corev1.ConfigMap
	if err := json.NewDecoder(r.Body).Decode(&m); err != nil {
		http.Error(w, "{}", http.StatusBadRequest)
		return
	}
	if !strings.HasSuffix(m.Name, s.lost) {
		s.items = append(s.items, m)
	}
	w.WriteHeader(http.StatusCreated)
	_ = json.NewEncoder(w).Encode(m)
}

// The writer retries failed writes, and reports an acknowledged write that the server does not contain.
func TestWriter(t *testing.T) {
	srv := httptest.NewServer(&server{lost: "-000001"})
	defer srv.Close()
	config := &rest.Config{Host: srv.URL, ContentConfig: rest.ContentConfig{ContentType: "application/json"}}
	w, err := Start(t.Context(), config, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	expect.True(t, "three writes are acknowledged", func() bool { return w.Acknowledged() >= 3 })
	w.Stop()
	lost, err := w.Lost(t.Context())
	if err != nil || len(lost) != 1 || !strings.HasSuffix(lost[0], "-000001") {
		t.Errorf("got the lost writes %v, %v", lost, err)
	}
	if failed := w.Failed(); len(failed) != 0 || w.Acknowledged() < 3 {
		t.Errorf("got the failed writes %v and %d acknowledged ones", failed, w.Acknowledged())
	}
	if gap := w.LongestGap(); gap < retryInterval || w.LongestGap() != 0 {
		t.Errorf("got the gap %v, want at least %v, and 0 in the next call", gap, retryInterval)
	}
}
