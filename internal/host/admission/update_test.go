package admission

import (
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/refusal"
)

func runningMachine() *hostpb.Machine {
	return &hostpb.Machine{Spec: goodSpec(), Status: &hostpb.MachineStatus{
		Phase: hostpb.MachineStatus_RUNNING, Bootstrap: hostpb.MachineStatus_SUCCEEDED, ManagementCluster: "mc",
	}}
}

func TestUpdate(t *testing.T) {
	info := &hostpb.HostInfo{
		Cpus: 4, MemoryBytes: 4 << 30, AllocatedMemoryBytes: 3 << 30, Images: []string{HostImage},
		KubernetesVersions: []string{"v1.35.4", "v1.36.3", "v1.36.4", "v1.37.0", "v1.38.0"}, DiskBytes: 100 << 30,
	}
	type request = hostpb.UpdateMachineRequest
	for name, test := range map[string]struct {
		have   func(*hostpb.Machine)
		change func(*request)
		reason hostpb.Refusal_Reason
		says   string
		again  bool
	}{
		"nothing":              {},
		"the same update":      {have: lastUpdate("u-1", hostpb.UpdateStatus_RUNNING), again: true},
		"an update that ended": {have: lastUpdate("u-1", hostpb.UpdateStatus_ROLLED_BACK), again: true},
		"after another one":    {have: lastUpdate("u-0", hostpb.UpdateStatus_FAILED)},
		"beside another one":   {have: lastUpdate("u-0", hostpb.UpdateStatus_RUNNING), reason: hostpb.Refusal_UPDATE_IN_PROGRESS, says: "update u-0 has not ended"},
		"beside a pending one": {have: lastUpdate("u-0", hostpb.UpdateStatus_PENDING), reason: hostpb.Refusal_UPDATE_IN_PROGRESS},
		"limits":               {change: func(r *request) { r.Spec.Cpus, r.Spec.MemoryBytes, r.Spec.PidsLimit = 4, 2<<30, 1000 }},
		"memory that is reserved already": {change: func(r *request) {
			r.Spec.MemoryBytes = 2<<30 + 1
		}, reason: hostpb.Refusal_OUT_OF_MEMORY},
		"too many processors": {change: func(r *request) { r.Spec.Cpus = 5 }, reason: hostpb.Refusal_INVALID, says: "5 cpus"},
		"larger disk":         {change: func(r *request) { r.Spec.DiskBytes = 40 << 30 }},
		"disk of the default": {change: func(r *request) { r.Spec.DiskBytes = 20 << 30 }},
		"smaller disk":        {change: func(r *request) { r.Spec.DiskBytes = 10 << 30 }, reason: hostpb.Refusal_INVALID, says: "disk_bytes"},
		"disk larger than that of the host": {change: func(r *request) {
			r.Spec.DiskBytes = 200 << 30
		}, reason: hostpb.Refusal_NO_DISK_SPACE},
		"patch release":     {change: func(r *request) { r.Spec.KubernetesVersion = "v1.36.4" }},
		"minor release":     {change: func(r *request) { r.Spec.KubernetesVersion = "v1.37.0" }},
		"two minor release": {change: func(r *request) { r.Spec.KubernetesVersion = "v1.38.0" }, reason: hostpb.Refusal_INVALID, says: "more than one minor"},
		"downgrade":         {change: func(r *request) { r.Spec.KubernetesVersion = "v1.35.4" }, reason: hostpb.Refusal_INVALID, says: "downgrade"},
		"missing release":   {change: func(r *request) { r.Spec.KubernetesVersion = "v1.36.9" }, reason: hostpb.Refusal_NOT_PROVIDED},
		"another owner":     {change: func(r *request) { r.Spec.Namespace = "thief" }, reason: hostpb.Refusal_ID_IN_USE},
		"another management cluster": {change: func(r *request) {
			r.ManagementCluster = "other"
		}, reason: hostpb.Refusal_NOT_OWNER, says: "belongs to management cluster mc"},
		"unknown management cluster": {change: func(r *request) { r.ManagementCluster = "" }},
		"failed machine":             {have: func(m *hostpb.Machine) { m.Status.Phase = hostpb.MachineStatus_FAILED }, reason: hostpb.Refusal_NOT_RUNNING},
		"restarting machine":         {have: func(m *hostpb.Machine) { m.Status.Phase = hostpb.MachineStatus_RESTARTING }},
		"deleted machine":            {have: func(m *hostpb.Machine) { m.Status.Phase = hostpb.MachineStatus_DELETING }, reason: hostpb.Refusal_DELETED},
		"machine that boots":         {have: func(m *hostpb.Machine) { m.Status.Bootstrap = hostpb.MachineStatus_STARTED }, reason: hostpb.Refusal_NOT_RUNNING},
	} {
		t.Run(name, func(t *testing.T) {
			have := runningMachine()
			if test.have != nil {
				test.have(have)
			}
			req := &request{Spec: proto.CloneOf(have.Spec), UpdateId: "u-1", ManagementCluster: "mc"}
			if test.change != nil {
				test.change(req)
			}
			again, err := Update(req, have, info)
			if got := refusal.Of(err).Reason; got != test.reason || (err != nil) != (test.reason != 0) || again != test.again {
				t.Errorf("again %v, %v with reason %s; want again %v, reason %s", again, err, got, test.again, test.reason)
			}
			if err != nil && !strings.Contains(err.Error(), test.says) {
				t.Errorf("%v, want %q", err, test.says)
			}
		})
	}
}

func lastUpdate(id string, phase hostpb.UpdateStatus_Phase) func(*hostpb.Machine) {
	return func(m *hostpb.Machine) { m.Status.Update = &hostpb.UpdateStatus{Id: id, Phase: phase} }
}

// Every field of the spec is either one of those that change in place, or its change is refused with the field's name. The test
// fails for a new field that checkChange ignores.
func TestCheckChangeOfEveryField(t *testing.T) {
	inPlace := map[string]bool{"cpus": true, "memory_bytes": true, "pids_limit": true, "disk_bytes": true, "kubernetes_version": true}
	fields := (&hostpb.MachineSpec{}).ProtoReflect().Descriptor().Fields()
	for i := range fields.Len() {
		field, want := fields.Get(i), goodSpec()
		name := string(field.Name())
		switch {
		case name == "kubernetes_version":
			want.KubernetesVersion = "v1.37.0"
		case name == "network":
			want.Network.Cidr = "10.1.0.0/25"
		case name == "volumes":
			want.Volumes = []*hostpb.VolumeMount{{Id: "v-1", Path: "/srv/data"}}
		case name == "host_mounts":
			want.HostMounts = []*hostpb.HostMount{{Source: "/srv/a", Path: "/mnt/a"}}
		case name == "devices":
			want.Devices = []*hostpb.MachineDevice{{Name: "/dev/kvm", Count: 1}}
		case field.IsList():
			want.Addresses[0].Prefix = 25
		case field.Kind() == protoreflect.StringKind:
			want.ProtoReflect().Set(field, protoreflect.ValueOfString("other"))
		case field.Kind() == protoreflect.BoolKind:
			want.ProtoReflect().Set(field, protoreflect.ValueOfBool(true))
		case field.Kind() == protoreflect.Int64Kind:
			want.ProtoReflect().Set(field, protoreflect.ValueOfInt64(50<<30))
		case field.Kind() == protoreflect.Int32Kind:
			want.ProtoReflect().Set(field, protoreflect.ValueOfInt32(3))
		default:
			t.Fatalf("%s: the test has no value for a field of kind %s", name, field.Kind())
		}
		err := checkChange(goodSpec(), want)
		if inPlace[name] != (err == nil) {
			t.Errorf("%s: %v", name, err)
		}
		if err != nil && (status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), name)) {
			t.Errorf("%s: %v does not name the field", name, err)
		}
	}
}

// A client with the spec before or after an update is right; one with a third spec is not.
func TestSameUpdatedMachine(t *testing.T) {
	before, after, third := goodSpec(), goodSpec(), goodSpec()
	after.MemoryBytes, third.MemoryBytes = 2<<30, 3<<30
	for name, test := range map[string]struct {
		other, want *hostpb.MachineSpec
		ok          bool
	}{
		"after": {before, after, true}, "before": {before, before, true}, "third": {before, third, false}, "never updated": {nil, before, false},
	} {
		if err := SameUpdatedMachine(after, test.other, test.want); (err == nil) != test.ok {
			t.Errorf("%s: %v", name, err)
		}
	}
	thief := goodSpec()
	thief.Namespace = "thief"
	if err := SameUpdatedMachine(after, before, thief); refusal.Of(err).Reason != hostpb.Refusal_ID_IN_USE {
		t.Errorf("another owner: %v", err)
	}
}

func TestUndone(t *testing.T) {
	from, to := goodSpec(), goodSpec()
	to.Cpus, to.MemoryBytes, to.KubernetesVersion, to.DiskBytes = 3, 2<<30, "v1.37.0", 40<<30
	want := goodSpec()
	want.DiskBytes = 40 << 30
	if got := Undone(from, to); !proto.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}
