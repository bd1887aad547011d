package testenv_test

import (
	"os"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"capstan.dev/capstan/internal/testenv"
	"capstan.dev/capstan/internal/testenv/expect"
)

var env *testenv.Env

func TestMain(m *testing.M) {
	os.Exit(testenv.Run(m, testenv.Options{
		AddToScheme: []func(*runtime.Scheme) error{apiextensionsv1.AddToScheme},
		Webhooks:    []string{"config/infrastructure/webhook"}, // Its CRDs have a conversion.
	}, &env))
}

type crd = apiextensionsv1.CustomResourceDefinition

// TestCRDs: the API server has Cluster API's kinds and Capstan's. It accepts their CRDs, and stores them as Start does.
func TestCRDs(t *testing.T) {
	stored := &apiextensionsv1.CustomResourceDefinitionList{}
	if err := env.Client.List(t.Context(), stored); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"machines.cluster.x-k8s.io", "ipaddressclaims.ipam.cluster.x-k8s.io", "capstanmachines.infrastructure.capstan.dev"} {
		if !slices.ContainsFunc(stored.Items, func(c crd) bool { return c.Name == name }) {
			t.Errorf("no CRD %s", name)
		}
	}
	if err := env.Client.DeleteAllOf(t.Context(), &crd{}); err != nil {
		t.Fatal(err)
	}
	for _, c := range stored.Items {
		expect.True(t, c.Name+" is deleted", func() bool {
			return apierrors.IsNotFound(env.Client.Get(t.Context(), client.ObjectKeyFromObject(&c), &crd{}))
		})
		if err := env.Client.Create(t.Context(), &crd{ObjectMeta: metav1.ObjectMeta{Name: c.Name, Labels: c.Labels, Annotations: c.Annotations}, Spec: c.Spec}); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range stored.Items {
		server, start := crd{}, c
		expect.True(t, c.Name+" is established", func() bool {
			return env.Client.Get(t.Context(), client.ObjectKeyFromObject(&c), &server) == nil && established(server)
		})
		removeTimes(&server)
		removeTimes(&start)
		if diff := cmp.Diff(server.ObjectMeta, start.ObjectMeta) + cmp.Diff(server.Spec, start.Spec) + cmp.Diff(server.Status, start.Status); diff != "" {
			t.Errorf("%s: the API server stores another CRD than Start (-server +Start):\n%s", c.Name, diff)
		}
	}
}

func established(c crd) bool {
	for _, condition := range c.Status.Conditions {
		if condition.Type == apiextensionsv1.Established {
			return condition.Status == apiextensionsv1.ConditionTrue
		}
	}
	return false
}

// removeTimes removes the fields that differ between two API servers.
func removeTimes(c *crd) {
	c.UID, c.ResourceVersion, c.CreationTimestamp, c.ManagedFields = "", "", metav1.Time{}, nil
	for i := range c.Status.Conditions {
		c.Status.Conditions[i].LastTransitionTime = metav1.Time{}
	}
}
