package bootstrap

import (
	"os"
	"testing"

	"k8s.io/apimachinery/pkg/runtime"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/testenv"
	"capstan.dev/capstan/internal/testenv/testmanager"
)

// env is a real API server. The bootstrap provider and its webhooks run on it. The tests act as the control plane provider.
var env *testenv.Env

func TestMain(m *testing.M) {
	os.Exit(testenv.RunWith(m, testenv.Options{
		AddToScheme: []func(*runtime.Scheme) error{Provider.AddToScheme, infrav1.AddToScheme},
		Webhooks:    []string{"config/bootstrap/webhook"},
	}, &env, func() (stop func(), err error) { return testmanager.Start(env, Provider, nil) }))
}
