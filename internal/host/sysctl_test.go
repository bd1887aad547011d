package host

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"capstan.dev/capstan/internal/testenv/testnetns"
)

// Settings are set again after another program has changed them. A setting that cannot be set is logged once, and one of IPv6 that does
// not exist is no error.
func TestSysctls(t *testing.T) {
	dir := t.TempDir()
	values := map[string][2]string{ // before, after
		"vm/overcommit_memory":              {"0\n", "1"},
		"kernel/panic":                      {"10\n", "10\n"},       // already correct: not written
		"fs/inotify/max_user_instances":     {"99999\n", "99999\n"}, // larger values stay
		"fs/inotify/max_user_watches":       {"100\n", "524288"},
		"net/ipv4/neigh/default/gc_thresh2": {"512\n", "4096"},
		"net/ipv4/neigh/default/gc_thresh3": {"1024\n", "8192"},
		"net/ipv6/neigh/default/gc_thresh2": {"512\n", "4096"},
		"net/ipv6/neigh/default/gc_thresh3": {"1024\n", "8192"},
	}
	var log bytes.Buffer
	var errs lastErrors
	for range 2 {
		for name, value := range values {
			path := filepath.Join(dir, name)
			if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, []byte(value[0]), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		setSysctls(dir, &errs, slog.New(slog.NewTextHandler(&log, nil))) // missing settings are ignored
		for name, value := range values {
			if got, err := os.ReadFile(filepath.Join(dir, name)); err != nil || string(got) != value[1] {
				t.Errorf("%s is %q, %v; want %q", name, got, err, value[1])
			}
		}
	}
	if n := strings.Count(log.String(), "name=net.ipv4.ip_forward "); n != 1 {
		t.Errorf("a setting that cannot be set is logged %d times:\n%s", n, log.String())
	}
	if n := strings.Count(log.String(), "name=net.ipv6.neigh.default.gc_thresh3 "); n != 2 {
		t.Errorf("the changes of a setting are logged %d times", n)
	}
	log.Reset()
	setSysctls(t.TempDir(), &lastErrors{}, slog.New(slog.NewTextHandler(&log, nil)))
	if strings.Contains(log.String(), "net.ipv6.") {
		t.Errorf("without IPv6:\n%s", log.String())
	}
}

// capstand forwards IPv6 again after another program has ended it, as long as a network has IPv6.
func TestIPv6ForwardingIsRestored(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	const forwarding = "/proc/sys/net/ipv6/conf/all/forwarding"
	h := recorded(t)
	for _, step := range []struct{ cidr, want string }{{"", "0"}, {"fd00:1::/64", "1"}} {
		h.networks.byID[goodSpec().Network.Id].Ipv6Cidr = step.cidr
		write(t, forwarding, "0")
		h.restoreIPv6()
		if got := strings.TrimSpace(read(t, forwarding)); got != step.want {
			t.Errorf("with the network %q the host has %s, want %s", step.cidr, got, step.want)
		}
	}
}
