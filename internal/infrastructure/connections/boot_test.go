package connections

import (
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"capstan.dev/capstan/internal/host/hostpb"
)

// The clock of a host can be wrong. The manager computes the time of the boot from the uptime and its own clock.
func TestKeepBoot(t *testing.T) {
	received := time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)
	ahead := timestamppb.New(received.Add(time.Hour))
	noon, eleven := timestamppb.New(received), timestamppb.New(received.Add(-time.Hour))
	for name, tc := range map[string]struct {
		before, report *hostpb.HostInfo
		want           *timestamppb.Timestamp
	}{
		"the first report":  {nil, &hostpb.HostInfo{BootId: "a", BootedAt: ahead, UptimeMilliseconds: 3_600_000}, eleven},
		"a later report":    {&hostpb.HostInfo{BootId: "a", BootedAt: noon}, &hostpb.HostInfo{BootId: "a", BootedAt: ahead, UptimeMilliseconds: 3_600_000}, noon},
		"another boot":      {&hostpb.HostInfo{BootId: "b", BootedAt: noon}, &hostpb.HostInfo{BootId: "a", BootedAt: ahead, UptimeMilliseconds: 3_600_000}, eleven},
		"an older capstand": {nil, &hostpb.HostInfo{BootId: "a", BootedAt: ahead}, ahead},
		"no boot":           {&hostpb.HostInfo{}, &hostpb.HostInfo{}, nil},
	} {
		keepBoot(tc.before, tc.report, received)
		if got := tc.report; got.BootedAt.GetSeconds() != tc.want.GetSeconds() || got.UptimeMilliseconds != 0 {
			t.Errorf("%s: %v, want %v", name, got, tc.want)
		}
	}
}

// The uptime grows with each report. That alone is no change.
func TestUptimeIsNoChange(t *testing.T) {
	h := &Host{}
	for minute, want := range []int{1, 0, 0} {
		report := &hostpb.HostInfo{BootId: "a", BootedAt: timestamppb.Now(), UptimeMilliseconds: int64(minute+1) * 60_000}
		if got := h.mirror(&hostpb.Event{Object: &hostpb.Event_Host{Host: report}}); len(got) != want {
			t.Errorf("report %d has the changes %v, want %d", minute, got, want)
		}
	}
	if age := time.Since(h.Info().GetBootedAt().AsTime()); age < time.Minute {
		t.Errorf("the host booted %s ago, want at least a minute", age)
	}
}
