//go:build e2e

// Package rack runs several real capstands on one machine as if each had a box of its own: with a network namespace, a mount
// namespace, a /run/capstan and a machine-id. The boxes reach each other through a router, and clients through a LAN with
// IPv4 and IPv6. Tests and demonstrations use it. It needs root.
//
// Layer: test. Allowed imports: api, library, contract, reconciler, manager, host, node, tool.
package rack

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/vishvananda/netns"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/thread"
)

// Patience bounds every wait.
const Patience = time.Minute

// T is the part of testing.T that a rack needs. Programs have an implementation of their own.
type T interface {
	Helper()
	Cleanup(f func())
	TempDir() string
	Fatalf(format string, args ...any)
}

func check(t T, err error) {
	t.Helper()
	if err != nil {
		t.Fatalf("%v", err)
	}
}

// Eventually waits for a state that no event announces.
func Eventually(t T, what string, f func() error) {
	t.Helper()
	var err error
	for deadline := time.Now().Add(Patience); time.Now().Before(deadline); {
		start := time.Now()
		if err = f(); err == nil {
			return
		}
		time.Sleep(max(20*time.Millisecond, 2*time.Since(start))) // Most attempts start programs.
	}
	t.Fatalf("%s: %v", what, err)
}

// Space is a process that holds a network namespace and a mount namespace.
type Space struct {
	t T
	// PID of the process.
	PID string
}

// newSpace creates the namespaces and runs a shell script in them.
func newSpace(t T, script string) Space {
	t.Helper()
	ready := filepath.Join(t.TempDir(), "ready")
	cmd := exec.Command("unshare", "--net", "--mount", "--propagation", "private", "/bin/sh", "-euc", script+"\ntouch "+ready+"\nexec sleep infinity")
	var output bytes.Buffer
	cmd.Stdout, cmd.Stderr = &output, &output
	check(t, cmd.Start())
	t.Cleanup(func() { _, _ = cmd.Process.Kill(), cmd.Wait() })
	Eventually(t, "namespaces", func() error {
		if _, err := os.Stat(ready); err != nil {
			return fmt.Errorf("%w: %s", err, output.String())
		}
		return nil
	})
	return Space{t, fmt.Sprint(cmd.Process.Pid)}
}

// Command returns a command in the namespaces.
func (s Space) Command(args ...string) *exec.Cmd {
	return exec.Command("nsenter", append([]string{"--target", s.PID, "--net", "--mount", "--"}, args...)...)
}

// Run runs a shell command in the namespaces and returns its output.
func (s Space) Run(script string) string {
	s.t.Helper()
	out, err := s.Command("/bin/sh", "-euc", script).CombinedOutput()
	if err != nil {
		s.t.Fatalf("%s: %v: %s", script, err, out)
	}
	return strings.TrimSpace(string(out))
}

// Dial connects from the network namespace.
func (s Space) Dial(ctx context.Context, network, address string) (conn net.Conn, err error) {
	thread.Throwaway(func() {
		var ns netns.NsHandle
		if ns, err = netns.GetFromPath("/proc/" + s.PID + "/ns/net"); err != nil {
			return
		}
		defer func() { _ = ns.Close() }()
		if err = netns.Set(ns); err == nil {
			conn, err = (&net.Dialer{Timeout: time.Second}).DialContext(ctx, network, address)
		}
	})
	return conn, err
}

// Software are the programs of a box.
type Software struct {
	// Capstand is the path of the program, and Assets that of the folder with the programs of machines.
	Capstand, Assets string
	// Args of capstand.
	Args []string
}

// Box is a host of the rack.
type Box struct {
	Space
	Software
	// Number of the box, from 1.
	Number int
	// Root is capstand's state folder.
	Root string
	// Process of capstand. Exited is closed when it has ended.
	Process *os.Process
	Exited  chan struct{}
	// Output of capstand.
	Output *bytes.Buffer
	conn   *grpc.ClientConn
	hostpb.HostClient
}

// New creates boxes with running capstands, and the router between them.
func New(t T, size int, s Software) (boxes []*Box, router Space) {
	t.Helper()
	check(t, os.MkdirAll("/run/capstan", 0o755)) // The folder on which each box mounts its own.
	// A bridge without a MAC address of its own has that of a port, and forgets its neighbours when this port leaves.
	router = newSpace(t, "ip link set lo up; echo 1 > /proc/sys/net/ipv4/ip_forward; ip link add lan address 02:00:00:00:00:fe type bridge; ip link set lan up; "+
		"ip addr add 2001:db8:5::fe/64 dev lan nodad")
	for i := range size {
		boxes = append(boxes, newBox(t, router, i+1, s))
	}
	return boxes, router
}

// keepIPv6 lets the LAN keep its IPv6 address while its cable is cut.
const keepIPv6 = "echo 1 > /proc/sys/net/ipv6/conf/lan/keep_addr_on_down"

func newBox(t T, router Space, number int, s Software) *Box {
	t.Helper()
	dir := t.TempDir()
	check(t, errors.Join(os.Chmod(filepath.Dir(dir), 0o711), os.Chmod(dir, 0o711))) // Managers connect to the socket.
	id := filepath.Join(dir, "machine-id")
	check(t, os.WriteFile(id, fmt.Appendf(nil, "%032x\n", number), 0o644))
	b := &Box{Software: s, Number: number, Root: filepath.Join(dir, "host")}
	b.Space = newSpace(t, `ip link set lo up
		echo 1 > /proc/sys/net/ipv4/ip_forward
		mount -t tmpfs capstan-e2e /run/capstan
		mount --bind `+id+` /etc/machine-id`)
	port := fmt.Sprint("port", number)
	router.Run("ip link add " + port + " type veth peer name uplink netns " + b.PID + `
		ip addr add 198.51.100.1/32 dev ` + port + `
		ip link set ` + port + ` up
		ip route add ` + b.Tunnel() + " dev " + port)
	lan := fmt.Sprint("lan", number)
	router.Run("ip link add " + lan + " type veth peer name lan netns " + b.PID + "; ip link set " + lan + " master lan up")
	b.Run(fmt.Sprintf("ip addr add %s/32 dev uplink; ip addr add 203.0.113.%d/24 dev lan; "+keepIPv6+"; ip addr add 2001:db8:5::%x/64 dev lan nodad", b.Tunnel(), number, number))
	b.Join()
	b.Start()
	return b
}

// Name of the box as a CapstanHost.
func (b *Box) Name() string { return fmt.Sprint("box-", b.Number) }

// Tunnel is the address of the box that the other boxes reach.
func (b *Box) Tunnel() string { return fmt.Sprintf("198.18.0.%d", b.Number) }

// Socket is the path of capstand's socket.
func (b *Box) Socket() string { return filepath.Join(b.Root, "capstand.sock") }

// Join connects the box with the others.
func (b *Box) Join() {
	b.t.Helper()
	b.Run("ip link set lan up; ip link set uplink up; ip route add 198.51.100.1 dev uplink; ip route add default via 198.51.100.1 src " + b.Tunnel())
}

// Unplug takes the cables of the box out of the router. The box still has its links and addresses.
func (b *Box) Unplug(router Space) {
	b.t.Helper()
	router.Run(fmt.Sprintf("ip link set port%d down; ip link set lan%d nomaster", b.Number, b.Number))
}

// Plug reverts Unplug.
func (b *Box) Plug(router Space) {
	b.t.Helper()
	router.Run(fmt.Sprintf("ip link set port%d up; ip route replace %s dev port%d; ip link set lan%d master lan", b.Number, b.Tunnel(), b.Number, b.Number))
}

// Leave cuts the cables of the box: to the router, and to the network of the clients.
func (b *Box) Leave() { b.t.Helper(); b.Run("ip link set uplink down; ip link set lan down") }

// Start starts capstand and waits until its socket accepts connections.
func (b *Box) Start() {
	b.t.Helper()
	b.Output, b.Exited = &bytes.Buffer{}, make(chan struct{})
	cmd := b.Command(append([]string{b.Capstand, "--root", b.Root, "--assets", b.Assets, "--name", b.Name(),
		"--reserve-memory", "256Mi", "--reserve-disk", "0"}, b.Args...)...)
	cmd.Stdout, cmd.Stderr = b.Output, b.Output
	check(b.t, cmd.Start())
	exited := b.Exited
	b.Process = cmd.Process
	go func() { defer close(exited); _ = cmd.Wait() }()
	Eventually(b.t, "socket", func() error { // gRPC itself would wait a second before it tries again.
		conn, err := net.Dial("unix", b.Socket())
		if err == nil {
			_ = conn.Close()
		}
		return err
	})
	conn, err := grpc.NewClient("unix://"+b.Socket(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	check(b.t, err)
	b.conn, b.HostClient = conn, hostpb.NewHostClient(conn)
}

// Runs reports whether capstand has not ended.
func (b *Box) Runs() bool {
	select {
	case <-b.Exited:
		return false
	default:
		return true
	}
}

// Signal sends a signal to capstand. nsenter replaces itself by capstand, so the signal reaches it.
func (b *Box) Signal(sig syscall.Signal) {
	b.t.Helper()
	check(b.t, b.Process.Signal(sig))
}

// End ends capstand with a signal, and waits for its end.
func (b *Box) End(sig syscall.Signal) {
	b.t.Helper()
	_ = b.conn.Close()
	b.Signal(sig)
	select {
	case <-b.Exited:
	case <-time.After(Patience):
		b.t.Fatalf("capstand does not end on %v", sig)
	}
}
