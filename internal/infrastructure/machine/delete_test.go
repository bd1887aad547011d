package machine

import (
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
)

// ALL-18: the deletion of an object that only names a host calls the host only if it admits the namespace, or if this process has called it
// to make the machine. A copy with the id of another machine never does.
func TestDeletionCallsTheHost_ALL18(t *testing.T) {
	for name, tc := range map[string]struct {
		id       string
		object   string
		admitted bool
		called   bool
		calls    int
	}{
		"its machine":                                     {id: "m", object: "m", calls: 1},
		"a copy in an admitted namespace":                 {id: "m", object: "copy", admitted: true},
		"written by hand":                                 {id: "any", object: "by-hand"},
		"on the way in an admitted namespace":             {id: "any", object: "new", admitted: true, calls: 1},
		"on the way, and the namespace was excluded then": {id: "any", object: "new", called: true, calls: 1},
	} {
		t.Run(name, func(t *testing.T) {
			r, calls := hung(t, "DeleteMachine")
			host := &infrav1.CapstanHost{}
			if err := r.Client.Get(t.Context(), client.ObjectKey{Name: "other"}, host); err != nil {
				t.Fatal(err)
			}
			if !tc.admitted {
				host.Spec.AllowedNamespaces = &infrav1.AllowedNamespaces{Names: []string{"somebody-else"}}
			}
			if err := r.Client.Update(t.Context(), host); err != nil {
				t.Fatal(err)
			}
			s := &scope{cluster: &clusterv1.Cluster{}, machine: &clusterv1.Machine{}, capstan: &infrav1.CapstanMachine{
				ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: tc.object, UID: "uid"},
				Spec:       infrav1.CapstanMachineSpec{ID: tc.id, HostName: "other"},
			}}
			if tc.called {
				r.promises.note(s.capstan)
			}
			if err := r.deleteMachine(t.Context(), s); err != nil {
				t.Fatal(err)
			}
			if len(calls) != tc.calls {
				t.Errorf("%d calls, want %d", len(calls), tc.calls)
			}
		})
	}
}
