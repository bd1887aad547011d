package testenv_test

import (
	"context"
	"os"
	"testing"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"capstan.dev/capstan/internal/testenv"
)

var env *testenv.Env

func TestMain(m *testing.M) {
	os.Exit(testenv.Run(m, testenv.Options{
		AddToScheme: []func(*runtime.Scheme) error{apiextensionsv1.AddToScheme},
	}, &env))
}

// The API server serves Cluster API's kinds and Capstan's.
func TestServesBothCRDs(t *testing.T) {
	for _, name := range []string{"machines.cluster.x-k8s.io", "ipaddressclaims.ipam.cluster.x-k8s.io", "capstanmachines.infrastructure.capstan.dev"} {
		crd := &apiextensionsv1.CustomResourceDefinition{}
		if err := env.Client.Get(context.Background(), client.ObjectKey{Name: name}, crd); err != nil {
			t.Error(err)
		}
	}
}
