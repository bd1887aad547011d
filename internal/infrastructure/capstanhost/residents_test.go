package capstanhost

import (
	"context"
	"errors"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/infrastructure/connections"
)

func TestCounts_ALL18(t *testing.T) {
	failed := errors.New("cannot read the Namespace")
	for name, tc := range map[string]struct {
		disconnected, has, admitted bool
		err                         error
		want                        bool
	}{
		"nothing of a namespace that is not admitted":   {},
		"something of a namespace that is not admitted": {has: true, want: true},
		"nothing yet of an admitted namespace":          {admitted: true, want: true},
		"something of an admitted namespace":            {admitted: true, has: true, want: true},
		"unknown, because the host is not connected":    {disconnected: true, want: true},
		"an error of the API":                           {err: failed},
		"an error does not matter for what is there":    {has: true, err: failed, want: true},
	} {
		t.Run(name, func(t *testing.T) {
			r := residents{conn: &connections.Host{}, admits: func(string) (bool, error) { return tc.admitted, tc.err }}
			if tc.disconnected {
				r.conn = nil
			}
			got, err := r.counts(&infrav1.CapstanMachine{}, func() bool { return tc.has })
			if got != tc.want || (err != nil) != (tc.err != nil && !tc.want) {
				t.Errorf("%v, %v; want %v", got, err, tc.want)
			}
		})
	}
}

// A Namespace that cannot be read is named, because the remedy is another one than for objects. It does not hold up the drain of the others.
func TestUnreadableNamespace(t *testing.T) {
	denied := errors.New("denied")
	c := fake.NewClientBuilder().WithInterceptorFuncs(interceptor.Funcs{
		Get: func(context.Context, client.WithWatch, client.ObjectKey, client.Object, ...client.GetOption) error {
			return denied
		},
	}).Build()
	host := &infrav1.CapstanHost{Spec: infrav1.CapstanHostSpec{AllowedNamespaces: &infrav1.AllowedNamespaces{Selector: &metav1.LabelSelector{}}}}
	r := &Reconciler{Client: c, Pool: connections.NewPool(t.Context(), c)}
	_, unreadable := r.residentsOf(t.Context(), host).admits("tenant")
	if !errors.Is(unreadable, denied) || !strings.Contains(unreadable.Error(), "read Namespace tenant") {
		t.Errorf("the error does not name the Namespace: %v", unreadable)
	}
	namespaces := []string{"admitted", "refused", "tenant", "admitted"}
	kept, err := only(namespaces, func(namespace *string) (bool, error) {
		if *namespace == "tenant" {
			return false, unreadable
		}
		return *namespace == "admitted", nil
	})
	if got := strings.Join(kept, " "); got != "admitted tenant admitted" || !errors.Is(err, denied) {
		t.Errorf("found %q, %v", got, err)
	}
}
