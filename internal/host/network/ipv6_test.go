package network

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// fakeProc creates a folder with the given settings, as path=value.
func fakeProc(t *testing.T, settings ...string) string {
	t.Helper()
	proc := t.TempDir()
	for _, s := range settings {
		path, value, _ := strings.Cut(s, "=")
		path = filepath.Join(proc, "conf", path)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(value+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return proc
}

func have(t *testing.T, proc, setting string) string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(proc, "conf", setting))
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(data))
}

// IPAM-08: the box forwards IPv6 and still accepts the advertisements of its router.
func TestForwardIPv6(t *testing.T) {
	settings := []string{"all/accept_ra=1", "default/accept_ra=1", "eth0/accept_ra=1", "eth1/accept_ra=0", "eth2/accept_ra=2"}
	proc := fakeProc(t, append(settings, "all/forwarding=0")...)
	if changed, err := forwardIPv6(proc); err != nil || !changed {
		t.Fatal(changed, err)
	}
	for setting, want := range map[string]string{
		"all/forwarding": "1", "eth0/accept_ra": "2", "eth1/accept_ra": "0", "eth2/accept_ra": "2", "default/accept_ra": "1", "all/accept_ra": "1",
	} {
		if got := have(t, proc, setting); got != want {
			t.Errorf("%s is %s, want %s", setting, got, want)
		}
	}
	router := fakeProc(t, append(settings, "all/forwarding=1")...)
	if changed, err := forwardIPv6(router); err != nil || changed || have(t, router, "eth0/accept_ra") != "1" {
		t.Errorf("the settings of a box that forwards already changed (%v)", err)
	}
	var conflict ConflictError
	if _, err := forwardIPv6(t.TempDir()); !errors.As(err, &conflict) || !strings.Contains(err.Error(), "no IPv6") {
		t.Errorf("without IPv6: %v", err)
	}
}

func TestRoutesIPv6(t *testing.T) {
	for name, tc := range map[string]struct {
		network Network
		want    bool
	}{
		"IPv4":              {Network{CIDR: "10.1.0.0/24"}, false},
		"dual stack":        {Network{CIDR: "10.1.0.0/24", IPv6CIDR: "fd00:1::/64"}, true},
		"IPv6":              {Network{CIDR: "fd00:1::/64"}, true},
		"LAN":               {Network{CIDR: "10.1.0.0/24", IPv6CIDR: "fd00:1::/64", LAN: &LAN{}}, false},
		"an unknown record": {Network{}, false},
	} {
		if got := tc.network.RoutesIPv6(); got != tc.want {
			t.Errorf("%s: %t", name, got)
		}
	}
}

func TestBridgeIPv6(t *testing.T) {
	for dualStack, disabled := range map[bool]string{true: "0", false: "1"} {
		proc := fakeProc(t, "cap0/accept_ra=1", "cap0/disable_ipv6=1")
		if err := setBridgeIPv6(proc, "cap0", dualStack); err != nil {
			t.Fatal(err)
		}
		if have(t, proc, "cap0/accept_ra") != "0" || have(t, proc, "cap0/disable_ipv6") != disabled {
			t.Errorf("dual stack %v: accept_ra %s, disable_ipv6 %s", dualStack, have(t, proc, "cap0/accept_ra"), have(t, proc, "cap0/disable_ipv6"))
		}
	}
	if err := errors.Join(setBridgeIPv6(t.TempDir(), "cap0", false), setMachineIPv6(t.TempDir())); err != nil {
		t.Errorf("a kernel without IPv6: %v", err)
	}
}
