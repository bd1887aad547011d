package bootstrap

import (
	"fmt"
	"os"
	"testing"

	"k8s.io/apimachinery/pkg/runtime"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/testenv"
	"capstan.dev/capstan/internal/testenv/testmanager"
)

// env is a real API server. The bootstrap provider and its webhooks run on it. The tests act as the control plane provider.
var env *testenv.Env

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	var err error
	env, err = testenv.Start(testenv.Options{
		AddToScheme: []func(*runtime.Scheme) error{Provider.AddToScheme, infrav1.AddToScheme},
		Webhooks:    []string{"config/bootstrap/webhook"},
	})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer func() { _ = env.Stop() }()
	stop, err := testmanager.Start(env, Provider, nil)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer stop()
	return m.Run()
}
