package controlplane

import (
	"fmt"
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

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	var err error
	env, err = testenv.Start(testenv.Options{
		AddToScheme: []func(*runtime.Scheme) error{Provider.AddToScheme, infrav1.AddToScheme},
		Webhooks:    []string{"config/control-plane/webhook"},
	})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer func() { _ = env.Stop() }()
	env.Client = reconciling.Live(env.Client) // Reconcilers of tests have no cache.
	if err := installMembers(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	model.StuckAfter = time.Second
	stop, err := testmanager.Start(env, Provider, nil)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer stop()
	return m.Run()
}
