package network

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// procIPv6 contains the kernel's IPv6 settings for the network namespace of the calling thread. It does not exist if the
// kernel has no IPv6.
const procIPv6 = "/proc/sys/net/ipv6"

// HasIPv6 reports whether the kernel has IPv6.
func HasIPv6() bool { return requireIPv6(procIPv6) == nil }

// requireIPv6 returns an error for a kernel without IPv6.
func requireIPv6(proc string) error {
	if _, err := os.Stat(filepath.Join(proc, "conf/all/forwarding")); errors.Is(err, fs.ErrNotExist) {
		return ConflictError{message: "this box has no IPv6, which the IPv6 network of the machines needs: boot it without ipv6.disable=1, or choose an IPv4 network"}
	}
	return nil
}

// RoutesIPv6 returns whether the box forwards the IPv6 packets of the network. Machines in a LAN have its gateway.
func (n Network) RoutesIPv6() bool {
	subnets, err := Subnets(n.CIDR, n.IPv6CIDR)
	return err == nil && n.LAN == nil && hasIPv6(subnets)
}

// ForwardIPv6 makes the box forward IPv6 packets, and returns whether it did not before.
func ForwardIPv6() (changed bool, err error) { return forwardIPv6(procIPv6) }

// forwardIPv6 makes the box forward IPv6 packets, like IPv4 packets, for machines with IPv6. A box that
// forwards ignores router advertisements unless accept_ra is 2. Interfaces that accepted advertisements before get the value
// 2, because the box would otherwise lose its default route. The default for later interfaces stays: containers of other programs
// could set the box's route.
func forwardIPv6(proc string) (changed bool, err error) {
	if err := requireIPv6(proc); err != nil {
		return false, err
	}
	forwarding := filepath.Join(proc, "conf/all/forwarding")
	now, err := os.ReadFile(forwarding)
	if err != nil || strings.TrimSpace(string(now)) == "1" {
		return false, err
	}
	listening, err := filepath.Glob(filepath.Join(proc, "conf/*/accept_ra"))
	if err != nil {
		return false, err
	}
	for _, path := range listening {
		if name := filepath.Base(filepath.Dir(path)); name == "all" || name == "default" {
			continue // Not the setting of an interface.
		}
		// An interface can disappear between the two calls.
		if have, err := os.ReadFile(path); err == nil && strings.TrimSpace(string(have)) == "1" {
			if err := set(path, "2"); err != nil {
				return false, err
			}
		}
	}
	if err := set(forwarding, "1"); err != nil {
		return false, fmt.Errorf("forwarding IPv6: %w", err)
	}
	return true, nil
}

// setBridgeIPv6 makes the box ignore router advertisements from machines, and enables IPv6 on the bridge of a network
// with IPv6, even if the default is off.
func setBridgeIPv6(proc, bridge string, ipv6 bool) error {
	conf := filepath.Join(proc, "conf", bridge)
	err := set(filepath.Join(conf, "accept_ra"), "0")
	if ipv6 {
		err = errors.Join(err, set(filepath.Join(conf, "disable_ipv6"), "0"))
	}
	return err
}

// setMachineIPv6 sets the defaults of a machine's eth0: it accepts no address and no route from its neighbours, announces its addresses
// when it comes up, and has the link-local address that follows from its MAC address.
func setMachineIPv6(proc string) (err error) {
	for name, value := range map[string]string{"accept_ra": "0", "autoconf": "0", "accept_redirects": "0", "ndisc_notify": "1", "addr_gen_mode": "0"} {
		err = errors.Join(err, set(filepath.Join(proc, "conf/default", name), value))
	}
	return err
}

// set writes a setting. A setting that does not exist, because the kernel has no IPv6, is no error: forwardIPv6 checks that
// first.
func set(path, value string) error {
	if err := os.WriteFile(path, []byte(value), 0); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
