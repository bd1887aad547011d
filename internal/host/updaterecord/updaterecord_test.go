package updaterecord

import (
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"capstan.dev/capstan/internal/host/hostpb"
)

// A record on disk has all of the update, also both specs.
func TestRecord(t *testing.T) {
	dir := t.TempDir()
	if u, err := Load(dir); u != nil || err != nil {
		t.Fatalf("a machine without an update: %v, %v", u, err)
	}
	saved := &Record{
		ID: "u", From: &hostpb.MachineSpec{Id: "m", Cpus: 1}, To: &hostpb.MachineSpec{Id: "m", Cpus: 2}, Phase: hostpb.UpdateStatus_RUNNING,
		StartedAt: time.Unix(1000, 0).UTC(), Grown: true,
	}
	if err := saved.Save(dir); err != nil {
		t.Fatal(err)
	}
	u, err := Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	if !proto.Equal(u.From, saved.From) || !proto.Equal(u.To, saved.To) {
		t.Errorf("from %v to %v", u.From, u.To)
	}
	u.From, u.To = saved.From, saved.To
	if *u != *saved {
		t.Errorf("loaded %+v, want %+v", u, saved)
	}
}

// Spec is the desired spec until the update is undone, and Other is the other one.
func TestSpec(t *testing.T) {
	for name, test := range map[string]struct {
		phase       hostpb.UpdateStatus_Phase
		rollingBack bool
		want        int32
	}{
		"pending":      {phase: hostpb.UpdateStatus_PENDING, want: 2},
		"running":      {phase: hostpb.UpdateStatus_RUNNING, want: 2},
		"rolling back": {phase: hostpb.UpdateStatus_RUNNING, rollingBack: true, want: 1},
		"succeeded":    {phase: hostpb.UpdateStatus_SUCCEEDED, want: 2},
		"rolled back":  {phase: hostpb.UpdateStatus_ROLLED_BACK, want: 1},
		"failed":       {phase: hostpb.UpdateStatus_FAILED, want: 1},
	} {
		u := &Record{From: &hostpb.MachineSpec{Cpus: 1}, To: &hostpb.MachineSpec{Cpus: 2}, Phase: test.phase, RollingBack: test.rollingBack}
		if got, other := u.Spec().Cpus, u.Other().Cpus; got != test.want || other != 3-test.want {
			t.Errorf("%s: spec with %d CPUs, other with %d, want %d", name, got, other, test.want)
		}
	}
	if none := (*Record)(nil); !none.Ended() || none.Other() != nil || none.Status() != nil {
		t.Error("a machine without an update")
	}
}
