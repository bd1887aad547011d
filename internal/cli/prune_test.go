package cli

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
)

// Machines are removed only if ids or --yes select them. If one of the ids is not listed, no machine is removed.
func TestPrune(t *testing.T) {
	for name, test := range map[string]struct {
		host      string
		ids       []string
		all       bool
		annotated string
		says      string
		code      int
	}{
		"dry run":              {"one", nil, false, "", "No machine was removed", 0},
		"one id":               {"one", []string{"b"}, false, "b", "will remove: b", 0},
		"all":                  {"one", nil, true, "a,b", "will remove: a, b", 0},
		"one id is not listed": {"one", []string{"a", "x"}, false, "", "", exitNotFound},
		"no such host":         {"two", nil, false, "", "", exitNotFound},
	} {
		t.Run(name, func(t *testing.T) {
			host := &infrav1.CapstanHost{}
			host.Name = "one"
			host.Status.UnknownMachines = []infrav1.UnknownMachine{{ID: "a"}, {ID: "b"}}
			scheme := runtime.NewScheme()
			if err := infrav1.AddToScheme(scheme); err != nil {
				t.Fatal(err)
			}
			c := fake.NewClientBuilder().WithScheme(scheme).WithObjects(host).Build()
			var out bytes.Buffer
			err := (&app{out: &out}).prune(t.Context(), c, test.host, test.ids, test.all)
			var failed coded
			if errors.As(err, &failed); failed.code != test.code || !strings.Contains(out.String(), test.says) {
				t.Errorf("%v, output %q", err, out.String())
			}
			if err := c.Get(t.Context(), client.ObjectKey{Name: "one"}, host); err != nil || host.Annotations[infrav1.HostPruneAnnotation] != test.annotated {
				t.Errorf("annotations %v, %v", host.Annotations, err)
			}
		})
	}
}
