package capstanhost

import (
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
)

// The status of a host never gets the WireGuard key of another host.
func TestSetOverlayKey(t *testing.T) {
	host := func(name, tunnel, key string) *infrav1.CapstanHost {
		return &infrav1.CapstanHost{
			ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: infrav1.CapstanHostSpec{TunnelAddress: tunnel}, Status: infrav1.CapstanHostStatus{OverlayPublicKey: key},
		}
	}
	owner := host("owner", "192.0.2.1", "k")
	for name, tc := range map[string]struct {
		host           *infrav1.CapstanHost
		reported, want string
	}{
		"a first key":                {host("h", "192.0.2.2", ""), "new", "new"},
		"another key":                {host("h", "192.0.2.2", "old"), "new", "new"},
		"the end of the encryption":  {host("h", "192.0.2.2", "old"), "", ""},
		"the key of the owner":       {host("h", "192.0.2.2", "old"), "k", ""},
		"the same tunnel address":    {host("h", "192.0.2.1", ""), "k", "k"},
		"the owner's own":            {owner, "k", "k"},
		"the owner with another one": {owner, "new", "new"},
	} {
		t.Run(name, func(t *testing.T) {
			scheme := runtime.NewScheme()
			if err := infrav1.AddToScheme(scheme); err != nil {
				t.Fatal(err)
			}
			h := tc.host.DeepCopy()
			r := &Reconciler{Client: fake.NewClientBuilder().WithScheme(scheme).WithObjects(owner.DeepCopy()).Build()}
			if err := r.setOverlayKey(t.Context(), h, tc.reported); err != nil || h.Status.OverlayPublicKey != tc.want {
				t.Errorf("found %q, %v, want %q", h.Status.OverlayPublicKey, err, tc.want)
			}
		})
	}
}
