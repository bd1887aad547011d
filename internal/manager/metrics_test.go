package manager

import (
	"context"
	"testing"

	ctrl "sigs.k8s.io/controller-runtime"

	"capstan.dev/capstan/internal/reconciling"
	"capstan.dev/capstan/internal/testenv/testmetrics"
	"capstan.dev/capstan/internal/version"
)

// TestInfo: the series of a manager differs from those of managers with other flags.
func TestInfo(t *testing.T) {
	t.Cleanup(info.Reset)
	provider := reconciling.Provider{Name: "ipam", Setup: func(context.Context, ctrl.Manager, reconciling.Options) error { return nil }}
	err := setup(t.Context(), nil, reconciling.Options{}, &Flags{WatchNamespace: "team", WatchFilter: "blue"}, []reconciling.Provider{provider})
	want := map[string]string{"provider": "ipam", "version": version.Version, "watched_namespace": "team", "watch_filter": "blue"}
	if n := testmetrics.Sum(t, "capstan_manager_info", want); n != 1 || err != nil {
		t.Errorf("expected one series with %v, found %v: %v", want, testmetrics.Gather(t, "capstan_manager_info", nil), err)
	}
}
