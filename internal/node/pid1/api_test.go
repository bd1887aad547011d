package pid1

import (
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"capstan.dev/capstan/internal/machineapi"
	"capstan.dev/capstan/internal/node/initapi"
)

// TestStalled: the reason of a stalled bootstrap is its message until it is withdrawn, and never replaces a result (IM-08).
func TestStalled(t *testing.T) {
	for name, test := range map[string]struct {
		state          initapi.Bootstrap
		message        string
		reasons        []string
		want           string
		wantedMessages int
	}{
		"stalls":             {initapi.Started, "", []string{"etcd: starting"}, "etcd: starting", 1},
		"the same again":     {initapi.Started, "", []string{"a", "a"}, "a", 1},
		"continues":          {initapi.Started, "", []string{"a", ""}, "", 2},
		"a very long reason": {initapi.Started, "", []string{strings.Repeat("é", maxReason)}, strings.Repeat("é", maxReason/2), 1},
		"has failed":         {initapi.Failed, "exit code 7", []string{"a", ""}, "exit code 7", 0},
		"has succeeded":      {initapi.Succeeded, "", []string{"a"}, "", 0},
	} {
		t.Run(name, func(t *testing.T) {
			m := &manager{log: slog.New(slog.DiscardHandler), changed: make(chan struct{})}
			m.setBootstrap(test.state, test.message)
			ended, changes := m.bootstrap.Times.Ended, 0
			for _, reason := range test.reasons {
				before := m.changed
				answer := httptest.NewRecorder()
				m.routes().ServeHTTP(answer, httptest.NewRequest(http.MethodPost, machineapi.StalledPath, strings.NewReader(reason)))
				if answer.Code != http.StatusOK {
					t.Fatal(answer.Code, answer.Body)
				}
				if before != m.changed {
					changes++
				}
			}
			if got := m.bootstrap; got.BootstrapMessage != test.want || got.Bootstrap != test.state || got.Times.Ended != ended || changes != test.wantedMessages {
				t.Errorf("%s %q after %d changes", got.Bootstrap, got.BootstrapMessage, changes)
			}
		})
	}
}

// TestVolumeLimits: PID 1 changes only folders with the name of a volume.
func TestVolumeLimits(t *testing.T) {
	name := "pvc-01234567-89ab-cdef-0123-456789abcdef"
	for path, want := range map[string]int{
		"/v1/volumes/" + name + "/limit":                http.StatusBadRequest,
		"/v1/volumes/" + name + "/limit?bytes=1Gi":      http.StatusBadRequest,
		"/v1/volumes/" + name + "/limit?bytes=0":        http.StatusConflict,
		"/v1/volumes/..%2F..%2Fetc/limit?bytes=1048576": http.StatusConflict,
		"/v1/volumes/etc/unlimit":                       http.StatusConflict,
	} {
		answer := httptest.NewRecorder()
		(&manager{}).routes().ServeHTTP(answer, httptest.NewRequest(http.MethodPost, path, nil))
		if answer.Code != want {
			t.Errorf("%s: %d %s, want %d", path, answer.Code, answer.Body, want)
		}
	}
}
