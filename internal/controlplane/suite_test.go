package controlplane

import (
	"os"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/runtime"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/controlplane/model"
	"capstan.dev/capstan/internal/reconciling"
	"capstan.dev/capstan/internal/testenv"
	"capstan.dev/capstan/internal/testenv/testmanager"
)

// env is a real API server. The control plane provider and its webhooks run on it.
var env *testenv.Env

func TestMain(m *testing.M) {
	os.Exit(testenv.RunWith(m, testenv.Options{
		AddToScheme: []func(*runtime.Scheme) error{Provider.AddToScheme, infrav1.AddToScheme},
		Webhooks:    []string{"config/control-plane/webhook"},
	}, &env, startManager))
}

func startManager() (stop func(), err error) {
	env.Client = reconciling.Live(env.Client) // Reconcilers of tests have no cache.
	if err := installMembers(); err != nil {
		return nil, err
	}
	model.StuckAfter = time.Second
	return testmanager.Start(env, Provider, nil)
}
