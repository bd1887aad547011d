package host

import (
	"context"
	"os"
	"strconv"
	"testing"

	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/proc"
	"capstan.dev/capstan/internal/host/refusal"
)

// capstand reboots only in the boot of the request, and only without machines. Tests replace the reboot: a capstand without one
// refuses.
func TestReboot(t *testing.T) {
	h, reboots := recorded(t), 0
	ask := func(boot string, want hostpb.Refusal_Reason, count int) {
		t.Helper()
		_, err := h.Reboot(t.Context(), &hostpb.RebootRequest{BootId: boot})
		if refusal.Of(err).GetReason() != want || (err != nil) != (want != 0) || reboots != count {
			t.Errorf("boot %q: %v, %d reboots; want %s, %d", boot, err, reboots, want, count)
		}
	}
	if info := h.machines.info(); info.BootId != "" {
		t.Errorf("a host that cannot reboot reports its boot %q", info.BootId)
	}
	ask(proc.BootID(), hostpb.Refusal_UNSUPPORTED, 0)
	h.config.Reboot = func(context.Context) error { reboots++; return nil }
	info := h.machines.info()
	if info.BootId == "" || info.BootId != proc.BootID() || info.BootedAt.AsTime().Unix() <= 0 {
		t.Errorf("reported boot %q since %s", info.BootId, info.BootedAt.AsTime())
	}
	ask("", hostpb.Refusal_INVALID, 0)
	ask(info.BootId, hostpb.Refusal_HOST_IN_USE, 0)
	clear(h.machines.byID)
	ask("another", hostpb.Refusal_REASON_UNSPECIFIED, 0)
	ask(info.BootId, hostpb.Refusal_REASON_UNSPECIFIED, 1)
}

// systemd started capstand only if the environment has the id of capstand's own process. Another capstand must not reboot the box.
func TestStartedBySystemd(t *testing.T) {
	t.Setenv("INVOCATION_ID", "0123456789abcdef0123456789abcdef")
	for pid, want := range map[string]bool{"": false, "1": false, strconv.Itoa(os.Getpid()): true} {
		t.Setenv("SYSTEMD_EXEC_PID", pid)
		if startedBySystemd() != want {
			t.Errorf("process id %q in the environment: want %t", pid, want)
		}
	}
}
