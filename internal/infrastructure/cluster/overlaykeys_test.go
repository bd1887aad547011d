package cluster

import (
	"context"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/infrastructure/connections"
	"capstan.dev/capstan/internal/infrastructure/connections/fakehost"
	"capstan.dev/capstan/internal/testenv/expect"
)

// A host that reports the WireGuard key of another host has no key: the others would send the packets for the owner there.
func TestForgedOverlayKey(t *testing.T) {
	scheme := runtime.NewScheme()
	if err := infrav1.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	b, pool := fake.NewClientBuilder().WithScheme(scheme), connections.NewPool(t.Context(), nil)
	for _, h := range []struct{ name, tunnel, recorded, reported string }{
		{"a-forger", "192.0.2.3", "own", "k"}, {"owner", "192.0.2.1", "k", "k"}, {"renewed", "192.0.2.2", "old", "new"},
	} {
		host := &infrav1.CapstanHost{ObjectMeta: metav1.ObjectMeta{Name: h.name}}
		host.Spec.Address = fakehost.New(t, func(f *fakehost.Host) {
			f.SetInfo(func(info *hostpb.HostInfo) { info.OverlayPublicKey = h.reported })
		}).Address()
		host.Spec.TunnelAddress, host.Status.OverlayPublicKey = h.tunnel, h.recorded
		b.WithObjects(host)
		conn, err := pool.Connect(t.Context(), host)
		if err == nil {
			err = wait.PollUntilContextTimeout(t.Context(), 10*time.Millisecond, expect.Patience, true, func(context.Context) (bool, error) { return conn.ConnectionError() == nil, nil })
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	hosts, err := (&Reconciler{Client: b.Build(), Pool: pool}).overlayHosts(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"a-forger": "", "owner": "k", "renewed": "new"} {
		if got := hosts[name].Key; got != want {
			t.Errorf("%s has the key %q, want %q", name, got, want)
		}
	}
}
