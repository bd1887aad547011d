//go:build e2e

package rack

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/embedded"
	"capstan.dev/capstan/test/e2e/harness"
)

// LAN is this box's interface in the network of the clients.
const LAN = "rack-lan"

// The networks of the clients. The boxes offer one address of each for endpoints, and one for Services.
const (
	VirtualAddress     = "203.0.113.100"
	VirtualIPv6Address = "2001:db8:5::100"
	ServiceAddress     = "203.0.113.120"
	ServiceIPv6Address = "2001:db8:5::120"
	ClientNetwork      = "203.0.113.0/24"
	ClientIPv6Network  = "2001:db8:5::/64"
)

// Register creates boxes with CapstanHosts, and gives the plane a way to them. The plane's own host gets no machines. args are
// additional arguments of capstand.
func Register(ctx context.Context, t T, plane *harness.Plane, size int, args ...string) ([]*Box, Space) {
	t.Helper()
	managers, err := user.Lookup(embedded.SystemUser)
	check(t, err)
	boxes, router := New(t, size, Software{
		Capstand: filepath.Join(harness.Bin(), "capstand"), Assets: harness.Bin(), Args: append([]string{"--socket-uid", managers.Uid, "--absence", "10s"}, args...),
	})
	Uplink(t, router)
	JoinLAN(t, router)
	check(t, createHosts(ctx, plane.Client, boxes))
	return boxes, router
}

// JoinLAN connects this box with the network of the clients.
func JoinLAN(t T, router Space) {
	t.Helper()
	t.Cleanup(func() { _ = exec.Command("ip", "link", "del", LAN).Run() })
	out, err := exec.Command("/bin/sh", "-euc", `ip link add rack-lan type veth peer name plane-lan netns `+router.PID+`
		ip addr add 203.0.113.254/24 dev rack-lan
		ip addr add 2001:db8:5::fd/64 dev rack-lan nodad
		ip link set rack-lan up`).CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	router.Run("ip link set plane-lan master lan up")
}

// Uplink connects this box, with the address 198.18.0.254, to the router.
func Uplink(t T, router Space) {
	t.Helper()
	t.Cleanup(func() { _ = exec.Command("ip", "link", "del", "rack-uplink").Run() })
	out, err := exec.Command("/bin/sh", "-euc", `ip link add rack-uplink type veth peer name plane netns `+router.PID+`
		ip addr add 198.18.0.254/32 dev rack-uplink
		ip link set rack-uplink up
		ip route add 198.51.100.1 dev rack-uplink
		ip route add 198.18.0.0/24 via 198.51.100.1`).CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	router.Run("ip addr add 198.51.100.1/32 dev plane; ip link set plane up; ip route add 198.18.0.254 dev plane")
}

// createHosts creates a CapstanHost for each box. The existing ones, of the plane's own box, get no machines.
func createHosts(ctx context.Context, c client.Client, boxes []*Box) error {
	own := &infrav1.CapstanHostList{}
	if err := c.List(ctx, own); err != nil {
		return err
	}
	for i := range own.Items {
		before := own.Items[i].DeepCopy()
		own.Items[i].Spec.Unschedulable, own.Items[i].Spec.ControlPlane = ptr.To(true), ptr.To(false)
		if err := c.Patch(ctx, &own.Items[i], client.MergeFrom(before)); err != nil {
			return err
		}
	}
	for _, b := range boxes {
		if err := c.Create(ctx, b.Host()); err != nil {
			return err
		}
	}
	return nil
}

// Host returns the CapstanHost of the box.
func (b *Box) Host() *infrav1.CapstanHost {
	host := &infrav1.CapstanHost{ObjectMeta: metav1.ObjectMeta{Name: b.Name()}}
	host.Spec.Address, host.Spec.TunnelAddress = "unix://"+b.Socket(), b.Tunnel()
	host.Spec.VirtualAddresses = []string{VirtualAddress + "/32", VirtualIPv6Address + "/128"}
	names := infrav1.AllowedNamespaces{Names: []string{"default"}}
	host.Spec.AllowedNamespaces = &names
	host.Spec.Services = &infrav1.HostServices{Addresses: []string{ServiceAddress + "/32", ServiceIPv6Address + "/128"}, AllowedNamespaces: names}
	return host
}

// Cut drops the packets between two boxes, until the returned function is called.
func Cut(router Space, a, b *Box) (mend func()) {
	router.Run("nft 'add table inet cut; add chain inet cut forward { type filter hook forward priority 0; }'")
	for _, pair := range [][2]*Box{{a, b}, {b, a}} {
		router.Run("nft add rule inet cut forward ip saddr " + pair[0].Tunnel() + " ip daddr " + pair[1].Tunnel() + " drop")
	}
	return func() { router.Run("nft delete table inet cut") }
}

// Others returns the boxes other than b.
func Others(boxes []*Box, b *Box) []*Box {
	return slices.DeleteFunc(slices.Clone(boxes), func(other *Box) bool { return other == b })
}

// Has reports whether the box has one of the virtual addresses.
func (b *Box) Has(address string) bool {
	b.t.Helper()
	all := b.Run("ip addr")
	return strings.Contains(all, " "+address+"/32 ") || strings.Contains(all, " "+address+"/128 ")
}

// Holder waits until one of the boxes has the virtual address.
func Holder(t T, boxes []*Box) (found *Box) {
	t.Helper()
	return HolderOf(t, boxes, VirtualAddress)
}

// HolderOf waits until one of the boxes has one of the virtual addresses.
func HolderOf(t T, boxes []*Box, address string) (found *Box) {
	t.Helper()
	Eventually(t, "a box with "+address, func() error {
		for _, b := range boxes {
			if b.Has(address) {
				found = b
				return nil
			}
		}
		return errors.New("no box has it")
	})
	return found
}

// Lose takes a box off all networks, and freezes its capstand: the address of the endpoint must not stay.
func (b *Box) Lose() {
	b.t.Helper()
	b.Leave()
	b.Signal(syscall.SIGSTOP)
}

// Return starts a lost box again, as after a loss of power.
func (b *Box) Return() {
	b.t.Helper()
	b.Signal(syscall.SIGKILL)
	<-b.Exited
	check(b.t, b.killMachines())
	b.Join()
	b.Start()
}

// killMachines kills the PID 1 of each machine, and with it the machine. It waits for their ends: a capstand that starts would
// adopt a machine that is still ending.
func (b *Box) killMachines() error {
	states, err := filepath.Glob(filepath.Join(b.Root, "runc", "*", "state.json"))
	if err != nil {
		return err
	}
	for _, path := range states {
		var state struct {
			PID int `json:"init_process_pid"`
		}
		if err := atomicfile.ReadJSON(path, &state); err != nil {
			return err
		}
		if err := syscall.Kill(state.PID, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) { // Fencing may have stopped it.
			return fmt.Errorf("PID 1 of %s: %w", path, err)
		}
		Eventually(b.t, "the end of PID 1 of "+path, func() error {
			status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", state.PID))
			if err == nil && !bytes.Contains(status, []byte("State:\tZ")) {
				return fmt.Errorf("process %d still runs", state.PID)
			}
			return nil
		})
	}
	return nil
}
