package host

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
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
	{"net.ipv4.neigh.default.gc_thresh3", 8192, true, "one neighbour per machine"},
}

// setSysctls applies and logs the settings. If one cannot be set, for example because capstand runs in a container, it logs
// an error and `capstan doctor` reports it.
func setSysctls(proc string, log *slog.Logger) {
	for _, s := range sysctls {
		was, err := s.set(proc)
		switch {
		case err != nil:
			log.Error("Cannot set the sysctl", "name", s.name, "want", s.value, "have", was, "neededBy", s.why, "error", err)
		case was != s.value:
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
