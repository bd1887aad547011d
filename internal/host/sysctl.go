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
	// atLeast leaves a greater value alone.
	atLeast bool
	why     string
}

// sysctls that machines need and cannot set themselves: /proc/sys/{kernel,vm} is read-only in them.
// The first six are those that the kubelet insists on (setupKernelTunables).
var sysctls = []sysctl{
	{"vm.overcommit_memory", 1, false, "kubelet"},
	{"vm.panic_on_oom", 0, false, "kubelet"},
	{"kernel.panic", 10, false, "kubelet"},
	{"kernel.panic_on_oops", 1, false, "kubelet"},
	{"kernel.keys.root_maxkeys", 1_000_000, true, "kubelet"},
	{"kernel.keys.root_maxbytes", 25_000_000, true, "kubelet"},
	{"net.ipv4.ip_forward", 1, false, "machines reach the outside through the host"},
	// Every machine's processes count as the host's root. One machine can use these budgets up: capstand and its balancers go on
	// without inotify then (package changes).
	{"fs.inotify.max_user_instances", 8192, true, "containerd and kubelet of each machine"},
	{"fs.inotify.max_user_watches", 524_288, true, "containerd and kubelet of each machine"},
	// Machines have process ids of the host's, 16384 each by default: they must not use them up.
	{"kernel.pid_max", 4_194_304, true, "the processes of all machines"},
	{"net.ipv4.neigh.default.gc_thresh3", 8192, true, "one neighbour per machine"},
}

// setSysctls sets them and says so. What cannot be set is logged as an error and otherwise left to
// `capstan doctor`: some of it may be forbidden where capstand itself runs in a container.
func setSysctls(proc string, log *slog.Logger) {
	for _, s := range sysctls {
		was, err := s.set(proc)
		switch {
		case err != nil:
			log.Error("sysctl cannot be set", "name", s.name, "want", s.value, "have", was, "needed by", s.why, "error", err)
		case was != s.value:
			log.Info("sysctl set", "name", s.name, "value", s.value, "was", was, "needed by", s.why)
		}
	}
}

// set returns the value before, or the wanted one when there was nothing to do.
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
