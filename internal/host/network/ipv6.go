package network

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// procIPv6 holds the kernel's IPv6 settings of the calling thread's network namespace. It is missing where
// the kernel has no IPv6.
const procIPv6 = "/proc/sys/net/ipv6"

// forwardIPv6 makes the box pass IPv6 packets on, as it does IPv4's, for the machines of dual stack networks.
// The kernel ignores router advertisements on a box that forwards, unless accept_ra is 2: interfaces of the
// box that listened to them go on doing so, or it would lose its default route.
func forwardIPv6(proc string) error {
	forwarding := filepath.Join(proc, "conf/all/forwarding")
	now, err := os.ReadFile(forwarding)
	if errors.Is(err, fs.ErrNotExist) {
		return ConflictError{message: "this box has no IPv6, which a dual-stack network needs: boot it without ipv6.disable=1, or omit the IPv6 network"}
	}
	if err != nil || strings.TrimSpace(string(now)) == "1" {
		return err
	}
	listening, err := filepath.Glob(filepath.Join(proc, "conf/*/accept_ra"))
	if err != nil {
		return err
	}
	for _, path := range listening {
		if name := filepath.Base(filepath.Dir(path)); name == "all" || name == "default" {
			continue // of no interface
		}
		// An interface may go between the two.
		if have, err := os.ReadFile(path); err == nil && strings.TrimSpace(string(have)) == "1" {
			if err := set(path, "2"); err != nil {
				return err
			}
		}
	}
	if err := set(forwarding, "1"); err != nil {
		return fmt.Errorf("forwarding IPv6: %w", err)
	}
	return nil
}

// setBridgeIPv6 makes the box deaf to what machines say of routes, and sees to it that the bridge of a dual
// stack network has IPv6, also where that is off by default.
func setBridgeIPv6(proc, bridge string, dualStack bool) error {
	conf := filepath.Join(proc, "conf", bridge)
	err := set(filepath.Join(conf, "accept_ra"), "0")
	if dualStack {
		err = errors.Join(err, set(filepath.Join(conf, "disable_ipv6"), "0"))
	}
	return err
}

// setMachineIPv6 sets what a machine's eth0 will have: it takes no address and no route from what its
// neighbours say, and tells its address when it comes up.
func setMachineIPv6(proc string) error {
	conf := filepath.Join(proc, "conf/default")
	return errors.Join(set(filepath.Join(conf, "accept_ra"), "0"), set(filepath.Join(conf, "ndisc_notify"), "1"))
}

// set writes a setting. One that the kernel does not have, because it has no IPv6, is fine: who needs
// IPv6 has asked before.
func set(path, value string) error {
	if err := os.WriteFile(path, []byte(value), 0); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
