package host

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"capstan.dev/capstan/internal/host/network"
)

// sysctl is a setting of the host's kernel.
type sysctl struct {
	name  string
	value int64
	// atLeast keeps a greater value.
	atLeast bool
	why     string
}

// sysctls lists the settings that machines need and cannot change, because /proc/sys/{kernel,vm} is read-only for them. The
// kubelet requires the first six (setupKernelTunables).
var sysctls = []sysctl{
	{"vm.overcommit_memory", 1, false, "kubelet"},
	{"vm.panic_on_oom", 0, false, "kubelet"},
	{"kernel.panic", 10, false, "kubelet"},
	{"kernel.panic_on_oops", 1, false, "kubelet"},
	{"kernel.keys.root_maxkeys", 1_000_000, true, "kubelet"},
	{"kernel.keys.root_maxbytes", 25_000_000, true, "kubelet"},
	{"net.ipv4.ip_forward", 1, false, "machines reach the outside through the host"},
	// The processes of all machines count as the host's root, so one machine can use up these budgets. capstand and its
	// balancers then continue without inotify (package changes).
	{"fs.inotify.max_user_instances", 8192, true, "containerd and kubelet of each machine"},
	{"fs.inotify.max_user_watches", 524_288, true, "containerd and kubelet of each machine"},
	// Machines use process ids of the host, 16384 each by default. They must not use them up.
	{"kernel.pid_max", 4_194_304, true, "the processes of all machines"},
	// The limits of the host hold for the neighbours of all machines together, because the kernel has one table per family. Above
	// gc_thresh2 it looks for neighbours to forget at each new one, above gc_thresh3 it refuses new ones.
	{"net.ipv4.neigh.default.gc_thresh3", 8192, true, neighbours},
	{"net.ipv4.neigh.default.gc_thresh2", 4096, true, neighbours},
	{"net.ipv6.neigh.default.gc_thresh3", 8192, true, neighbours},
	{"net.ipv6.neigh.default.gc_thresh2", 4096, true, neighbours},
}

const neighbours = "the machines and their neighbours"

// keepSysctls sets the settings again that another program has changed, until ctx ends: `sysctl --system` sets those of all
// programs, and a program for firewalls may end forwarding.
func (h *Host) keepSysctls(ctx context.Context) {
	keepLooking(ctx, func() {
		setSysctls("/proc/sys", &h.sysctlErrors, h.log)
		h.restoreIPv6()
	})
}

// restoreIPv6 makes the box forward IPv6 again, if a network needs it.
func (h *Host) restoreIPv6() {
	h.mu.Lock()
	routed := h.networks.routeIPv6()
	h.mu.Unlock()
	if !routed {
		return
	}
	changed, err := network.ForwardIPv6()
	if h.sysctlErrors.news("forwarding of IPv6", err) {
		h.log.Error("Machines do not reach the outside over IPv6", "error", err)
	}
	if changed {
		h.log.Warn("Another program on this host ended the forwarding of IPv6; capstand restored it")
	}
}

// setSysctls applies the settings and logs changes. If one cannot be set, for example because capstand runs in a container, it logs
// the error once, and `capstan doctor` reports it.
func setSysctls(proc string, errs *lastErrors, log *slog.Logger) {
	for _, s := range sysctls {
		was, err := s.set(proc)
		if errors.Is(err, fs.ErrNotExist) && strings.HasPrefix(s.name, "net.ipv6.") {
			continue // The kernel has no IPv6.
		}
		failed := errs.news(s.name, err)
		switch {
		case failed:
			log.Error("Cannot set the sysctl", "name", s.name, "want", s.value, "have", was, "neededBy", s.why, "error", err)
		case err == nil && was != s.value:
			log.Info("Sysctl set", "name", s.name, "value", s.value, "oldValue", was, "neededBy", s.why)
		}
	}
}

// set returns the previous value.
func (s sysctl) set(proc string) (was int64, err error) {
	path := filepath.Join(proc, strings.ReplaceAll(s.name, ".", "/"))
	data, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	was, err = strconv.ParseInt(strings.TrimSpace(string(data)), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", path, err)
	}
	if was == s.value || s.atLeast && was > s.value {
		return s.value, nil
	}
	return was, os.WriteFile(path, []byte(strconv.FormatInt(s.value, 10)), 0)
}
