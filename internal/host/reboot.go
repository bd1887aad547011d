package host

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/proc"
	"capstan.dev/capstan/internal/host/refusal"
)

// SystemdReboot returns the function that reboots the box through systemd, or nil if capstand is not a service of systemd: nothing
// would start it after the reboot.
func SystemdReboot() func(context.Context) error {
	if _, err := os.Stat("/run/systemd/system"); errors.Is(err, fs.ErrNotExist) || !startedBySystemd() {
		return nil
	}
	return func(ctx context.Context) error {
		if out, err := exec.CommandContext(ctx, "systemctl", "--no-block", "reboot").CombinedOutput(); err != nil {
			return fmt.Errorf("systemctl reboot: %w: %s", err, out)
		}
		return nil
	}
}

// startedBySystemd returns whether systemd has started this process: it writes the id of the process into the environment. A capstand
// that a process of another service starts, for example a test, inherits the id of that process.
func startedBySystemd() bool { return os.Getenv("SYSTEMD_EXEC_PID") == strconv.Itoa(os.Getpid()) }

// Reboot reboots the box.
func (h *Host) Reboot(ctx context.Context, req *hostpb.RebootRequest) (*hostpb.RebootResponse, error) {
	if h.config.Reboot == nil {
		return nil, refusal.Errorf(hostpb.Refusal_UNSUPPORTED, "capstand does not run as a service of systemd, so nothing would start it after a reboot: reboot the host by hand")
	}
	if req.BootId == "" {
		return nil, refusal.Errorf(hostpb.Refusal_INVALID, "boot_id is empty: expected the one that the host reports")
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if req.BootId != proc.BootID() {
		return &hostpb.RebootResponse{}, nil
	}
	if n := len(h.machines.byID); n > 0 {
		return nil, refusal.Errorf(hostpb.Refusal_HOST_IN_USE, "the host has %d machines: remove them first, also those of other management clusters and those without an object", n)
	}
	h.log.Info("Rebooting the host on the request of a manager")
	if err := h.config.Reboot(ctx); err != nil {
		return nil, status.Errorf(codes.Internal, "the host was not rebooted: %v", err)
	}
	return &hostpb.RebootResponse{}, nil
}

var bootTime = regexp.MustCompile(`(?m)^btime (\d+)$`)

// bootedAt is the time at which the kernel started, or nil.
func bootedAt() *timestamppb.Timestamp {
	data, _ := os.ReadFile("/proc/stat")
	found := bootTime.FindSubmatch(data)
	if found == nil {
		return nil
	}
	seconds, err := strconv.ParseInt(string(found[1]), 10, 64)
	if err != nil {
		return nil
	}
	return timestamppb.New(time.Unix(seconds, 0))
}
