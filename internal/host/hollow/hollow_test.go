package hollow

import (
	"context"
	"errors"
	"log/slog"
	"strconv"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/client-go/rest"

	"capstan.dev/capstan/internal/host/hostpb"
)

func start(t *testing.T, root string, b Behaviour) (*Host, func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	h, err := New(ctx, Config{
		Root: root, Name: "h", CPUs: 4, MemoryBytes: 4 << 30, Versions: []string{"v1.36.3"}, Behaviour: b,
		Credentials: func(context.Context, Identity) (*rest.Config, error) { return nil, errors.New("no cluster here") },
	}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	stop := func() {
		cancel()
		h.Wait()
	}
	t.Cleanup(stop)
	return h, stop
}

func request(id, name string) *hostpb.EnsureMachineRequest {
	return &hostpb.EnsureMachineRequest{BootstrapData: []byte("secret"), Spec: &hostpb.MachineSpec{
		Id: id, Namespace: "n", Name: name, Image: "host", KubernetesVersion: "v1.36.3", MemoryBytes: 1 << 30, Network: network(),
		Addresses: []*hostpb.Address{{Address: "10.0.0." + strconv.Itoa(len(name)), Prefix: 24}},
	}}
}

func network() *hostpb.Network {
	return &hostpb.Network{Id: "net", Namespace: "n", Name: "c", Cidr: "10.0.0.0/24"}
}

func deletion(id, name string) *hostpb.DeleteMachineRequest {
	return &hostpb.DeleteMachineRequest{Id: id, Namespace: "n", Name: name}
}

func becomes(t *testing.T, h *Host, id string, ok func(*hostpb.MachineStatus) bool) {
	t.Helper()
	w, end := h.broadcaster.Subscribe()
	defer end()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	for {
		m, err := h.GetMachine(ctx, &hostpb.GetMachineRequest{Id: id})
		if err != nil {
			t.Fatal(err)
		}
		if ok(m.GetStatus()) {
			return
		}
		if _, err := w.Take(ctx); err != nil {
			t.Fatalf("machine %s is %v", id, m.GetStatus())
		}
	}
}

func isRunning(s *hostpb.MachineStatus) bool { return s.GetPhase() == hostpb.MachineStatus_RUNNING }

// A machine becomes running after a while and survives a restart of its host's process. A deleted machine does not come back.
func TestLife(t *testing.T) {
	root, ctx := t.TempDir(), context.Background()
	h, stop := start(t, root, Behaviour{StartDelay: 10 * time.Millisecond})
	m, err := h.EnsureMachine(ctx, request("a", "one"))
	if err != nil || m.GetStatus().GetPhase() != hostpb.MachineStatus_PENDING {
		t.Fatal(m, err)
	}
	becomes(t, h, "a", isRunning)
	if _, err := h.EnsureMachine(ctx, request("a", "one")); err != nil {
		t.Errorf("a second EnsureMachine: %v", err)
	}
	stop()

	h, _ = start(t, root, Behaviour{StartDelay: time.Hour})
	becomes(t, h, "a", isRunning)
	if res, err := h.DeleteMachine(ctx, deletion("a", "one")); err != nil || !res.GetDone() {
		t.Fatal(res, err)
	}
	if _, err := h.EnsureMachine(ctx, request("a", "one")); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("a deleted id: %v", err)
	}
	if _, err := h.EnsureMachine(ctx, request("b", "one")); err != nil {
		t.Errorf("a machine with the name and address of the deleted one: %v", err)
	}
	if _, err := h.DeleteMachine(ctx, deletion("b", "one")); err != nil {
		t.Error(err)
	}
	if info, _ := h.GetInfo(ctx, nil); info.GetMachines() != 0 || info.GetAllocatedMemoryBytes() != 0 {
		t.Errorf("info %v", info)
	}
}

func TestRefused(t *testing.T) {
	ctx := context.Background()
	h, _ := start(t, t.TempDir(), Behaviour{StartDelay: time.Hour})
	if _, err := h.EnsureMachine(ctx, request("a", "one")); err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		change func(*hostpb.MachineSpec)
		want   codes.Code
	}{
		"no id":          {func(s *hostpb.MachineSpec) { s.Id = "" }, codes.InvalidArgument},
		"a path":         {func(s *hostpb.MachineSpec) { s.Id = "../b" }, codes.InvalidArgument},
		"the same name":  {func(s *hostpb.MachineSpec) { s.Name = "one" }, codes.AlreadyExists},
		"its address":    {func(s *hostpb.MachineSpec) { s.Addresses[0].Address = "10.0.0.3" }, codes.AlreadyExists},
		"other version":  {func(s *hostpb.MachineSpec) { s.KubernetesVersion = "v1.0.0" }, codes.FailedPrecondition},
		"control plane":  {func(s *hostpb.MachineSpec) { s.ControlPlane = true }, codes.FailedPrecondition},
		"too much of it": {func(s *hostpb.MachineSpec) { s.MemoryBytes = 4 << 30 }, codes.ResourceExhausted},
	} {
		r := request("b", "three")
		tc.change(r.Spec)
		if _, err := h.EnsureMachine(ctx, r); status.Code(err) != tc.want {
			t.Errorf("%s: %v, want %v", name, err, tc.want)
		}
	}
	if _, err := h.DeleteNetwork(ctx, &hostpb.DeleteNetworkRequest{Id: "net", Namespace: "n", Name: "c"}); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("network in use: %v", err)
	}
}

// A copied object in another namespace has no access to the machine and network of the original.
func TestCopyInAnotherNamespace_ALL18(t *testing.T) {
	root, ctx := t.TempDir(), context.Background()
	h, stop := start(t, root, Behaviour{})
	if _, err := h.EnsureMachine(ctx, request("a", "one")); err != nil {
		t.Fatal(err)
	}
	becomes(t, h, "a", isRunning)
	stop()
	h, _ = start(t, root, Behaviour{})

	copied, guest := request("a", "one"), request("b", "three")
	copied.Spec.Namespace, guest.Spec.Namespace, guest.Spec.Network.Namespace = "thief", "thief", "thief"
	for name, tc := range map[string]struct {
		call func() error
		want codes.Code
	}{
		"make it":                 {func() error { _, err := h.EnsureMachine(ctx, copied); return err }, codes.AlreadyExists},
		"make one in its network": {func() error { _, err := h.EnsureMachine(ctx, guest); return err }, codes.AlreadyExists},
		"make its network":        {func() error { _, err := h.EnsureNetwork(ctx, guest.GetSpec().GetNetwork()); return err }, codes.AlreadyExists},
		"delete it":               {func() error { _, err := h.DeleteMachine(ctx, deletion("a", "other")); return err }, codes.PermissionDenied},
		"delete without an owner": {func() error { _, err := h.DeleteMachine(ctx, &hostpb.DeleteMachineRequest{Id: "a"}); return err }, codes.InvalidArgument},
		"delete its network": {func() error {
			_, err := h.DeleteNetwork(ctx, &hostpb.DeleteNetworkRequest{Id: "net", Namespace: "thief", Name: "c"})
			return err
		}, codes.PermissionDenied},
		"delete network without an owner": {func() error { _, err := h.DeleteNetwork(ctx, &hostpb.DeleteNetworkRequest{Id: "net"}); return err }, codes.InvalidArgument},
	} {
		if err := tc.call(); status.Code(err) != tc.want {
			t.Errorf("%s: %v, want %v", name, err, tc.want)
		}
	}
	becomes(t, h, "a", isRunning)
}

// Each namespace can choose the id of its volume, also that of a machine of another namespace. The deletion of one leaves the other.
func TestVolumeWithTheIDOfAMachine(t *testing.T) {
	root, ctx := t.TempDir(), t.Context()
	h, stop := start(t, root, Behaviour{})
	for id, name := range map[string]string{"a": "one", "b": "three"} {
		if _, err := h.EnsureMachine(ctx, request(id, name)); err != nil {
			t.Fatal(err)
		}
		if _, err := h.EnsureVolume(ctx, &hostpb.Volume{Id: id, Namespace: "thief", Name: "data-" + id, SizeBytes: 16 << 20}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := h.DeleteVolume(ctx, &hostpb.DeleteVolumeRequest{Id: "a", Namespace: "thief", Name: "data-a"}); err != nil {
		t.Error(err)
	}
	if _, err := h.DeleteMachine(ctx, deletion("b", "three")); err != nil {
		t.Error(err)
	}
	stop()
	h, _ = start(t, root, Behaviour{})
	if h.machines["a"] == nil || h.machines["b"] != nil || h.volumes["a"] != nil || h.volumes["b"] == nil {
		t.Errorf("the host has the machines %v and the volumes %v", h.machines, h.volumes)
	}
}

func TestFailures(t *testing.T) {
	ctx := context.Background()
	for name, tc := range map[string]struct {
		behaviour Behaviour
		want      func(*hostpb.MachineStatus) bool
	}{
		"start":     {Behaviour{FailStart: 1}, func(s *hostpb.MachineStatus) bool { return s.GetPhase() == hostpb.MachineStatus_FAILED }},
		"bootstrap": {Behaviour{FailBootstrap: 1}, func(s *hostpb.MachineStatus) bool { return s.GetBootstrap() == hostpb.MachineStatus_BOOTSTRAP_FAILED }},
		"later":     {Behaviour{FailAfter: time.Millisecond}, func(s *hostpb.MachineStatus) bool { return s.GetPhase() == hostpb.MachineStatus_FAILED }},
	} {
		t.Run(name, func(t *testing.T) {
			h, _ := start(t, t.TempDir(), tc.behaviour)
			if _, err := h.EnsureMachine(ctx, request("a", "one")); err != nil {
				t.Fatal(err)
			}
			becomes(t, h, "a", tc.want)
		})
	}
}
