package embedded

import (
	"context"
	"errors"
	"net"
	"strconv"
	"strings"
	"testing"
	"time"

	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/internal/testenv/ports"
)

func TestTakePorts(t *testing.T) {
	portPatience = 10 * time.Millisecond
	t.Cleanup(func() { portPatience = 3 * time.Second })
	const second, third = firstPort + blockSize, firstPort + 2*blockSize
	for name, test := range map[string]struct {
		kept    int
		busy    int // a port
		claimed int // the first port of a block
		want    int
	}{
		"the first block":                              {0, 0, 0, firstPort},
		"the previous block":                           {third, 0, 0, third},
		"a port of the first block is in use":          {0, firstPort + 3, 0, second},
		"another plane has claimed it":                 {0, 0, firstPort, second},
		"a port of the previous block is in use":       {second, second + 1, 0, firstPort},
		"another plane has claimed the previous block": {second, 0, second, firstPort},
	} {
		t.Run(name, func(t *testing.T) {
			held := map[int]bool{test.claimed: true}
			claim := func(base int) (func(), bool) {
				if held[base] {
					return nil, false
				}
				held[base] = true
				return func() { delete(held, base) }, true
			}
			base, release, err := takePorts(context.Background(), test.kept, claim, func(_ string, p int) bool { return p != test.busy })
			if err != nil || base != test.want {
				t.Fatalf("got %d, %v; want %d", base, err, test.want)
			}
			if len(held) != 2 {
				t.Errorf("unused claims are held: %v", held)
			}
			release()
			if held[base] {
				t.Error("the claim was not released")
			}
		})
	}
}

func TestTakePortsWithoutFreeBlock(t *testing.T) {
	_, _, err := takePorts(context.Background(), 0, claimNothing, func(string, int) bool { return false })
	if err == nil || !strings.Contains(err.Error(), "on 127.0.0.1 between 24000 and 29999, found none: stop programs that listen there") {
		t.Errorf("got %v", err)
	}
}

func claimNothing(int) (func(), bool) { return func() {}, true }

// Two planes that start at the same moment take different blocks.
func TestClaimPorts(t *testing.T) {
	const base = 1 // not the number of a plane's block
	release, ok := claimPorts(base)
	if !ok {
		t.Fatal("cannot claim")
	}
	if _, ok := claimPorts(base); ok {
		t.Error("claimed twice")
	}
	release()
	again, ok := claimPorts(base)
	if !ok {
		t.Fatal("the block is still claimed after its release")
	}
	again()
}

// TestPortsBesideLoadBalancers: a plane keeps its ports although a load balancer has one of them on another address than loopback.
func TestPortsBesideLoadBalancers(t *testing.T) {
	base, release, err := takePorts(t.Context(), 0, claimPorts, componentPortFree)
	expect.NoError(t, err)
	defer release()
	for i, name := range portNames {
		listener, err := net.Listen("tcp", net.JoinHostPort("127.0.0.77", strconv.Itoa(base+i)))
		expect.NoError(t, err)
		if want := name != portCoreWebhook; blockFree(base, componentPortFree) != want { // Core listens on all addresses.
			t.Errorf("the plane keeps its ports although a load balancer has that of %s: %v", name, !want)
		}
		expect.NoError(t, listener.Close())
	}
}

func TestPortFree(t *testing.T) {
	listener, err := net.Listen("tcp", ports.Address(t))
	if err != nil {
		t.Fatal(err)
	}
	port := listener.Addr().(*net.TCPAddr).Port
	if portFree(port) {
		t.Error("a port with a listener is reported as free")
	}
	listener.Close()
	if !portFree(port) {
		t.Error("a port without a listener is reported as in use")
	}
}

// TestCheckAPIPort: a load balancer has the port on another address than loopback. The running API server has its own port.
func TestCheckAPIPort(t *testing.T) {
	portPatience = 10 * time.Millisecond
	t.Cleanup(func() { portPatience = 3 * time.Second })
	listener, err := net.Listen("tcp", strings.Replace(ports.Address(t), "127.0.0.1", "127.0.0.77", 1))
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	port := listener.Addr().(*net.TCPAddr).Port
	address := "10.0.0.1:" + strconv.Itoa(port)
	for name, test := range map[string]struct {
		state  State
		served string
		ok     bool
	}{
		"loopback only":              {State{PortBase: port - 2}, "", true},
		"used by a load balancer":    {State{Settings: Settings{APIAddress: address}}, loopback("https", firstPort), false},
		"used, and no plane runs":    {State{Settings: Settings{APIAddress: address}}, "", false},
		"used by the own API server": {State{Settings: Settings{APIAddress: address}}, loopback("https", port), true},
	} {
		if err := checkAPIPort(t.Context(), test.state, test.served, portFree); (err == nil) != test.ok || err != nil && !errors.As(err, &InvalidOptions{}) {
			t.Errorf("%s: %v", name, err)
		}
	}
	listener.Close()
	if err := checkAPIPort(t.Context(), State{Settings: Settings{APIAddress: address}}, "", portFree); err != nil {
		t.Errorf("a free port: %v", err)
	}
}

// TestCheckListens: the manager and capstand can listen on the addresses of the options, or the running plane does.
func TestCheckListens(t *testing.T) {
	portPatience = 10 * time.Millisecond
	t.Cleanup(func() { portPatience = 3 * time.Second })
	listener, err := net.Listen("tcp", ports.Address(t))
	expect.NoError(t, err)
	defer listener.Close()
	used := listener.Addr().String()
	_, port, err := net.SplitHostPort(used)
	expect.NoError(t, err)
	six, err := net.Listen("tcp", "[::1]:0")
	expect.NoError(t, err)
	defer six.Close()
	otherSpelling := strings.Replace(six.Addr().String(), "::1", "0:0::1", 1)
	hosts := func(address string) Settings { return Settings{HostListenAddress: address} }
	for name, test := range map[string]struct {
		s, running Settings
		refusal    string
	}{
		"no address":                     {Settings{APIAddress: used}, Settings{}, ""}, // checkAPIPort
		"all addresses, any free port":   {hosts(ports.Address(t)[len("127.0.0.1"):]), Settings{}, ""},
		"a name of this box":             {hosts(strings.Replace(ports.Address(t), "127.0.0.1", "localhost", 1)), Settings{}, ""},
		"an address of another box":      {hosts("192.0.2.1:7444"), Settings{}, "expected an address of this box for --host-listen-address, found 192.0.2.1:7444"},
		"the same, as before":            {hosts("192.0.2.1:7444"), hosts("192.0.2.1:7444"), "expected an address of this box"},
		"capstand, another box":          {Settings{Listen: "192.0.2.1:7443"}, Settings{}, "expected an address of this box for --listen"},
		"used by another program":        {hosts(used), Settings{}, "expected a free port for --host-listen-address " + used},
		"all addresses, used on one":     {hosts(":" + port), hosts(":7444"), "expected a free port"},
		"used by the running plane":      {hosts(used), hosts(used), ""},
		"by its capstand on all":         {hosts(used), Settings{Listen: ":" + port}, ""},
		"by its capstand, other address": {hosts(used), Settings{Listen: "127.0.0.2:" + port}, "expected a free port"},
		"by its capstand, by a name":     {hosts(used), Settings{Listen: "localhost:" + port}, ""},
		"by its capstand, spelling":      {hosts(six.Addr().String()), Settings{Listen: otherSpelling}, ""},
		"by its API server":              {hosts(used), Settings{APIAddress: "10.0.0.1:" + port}, ""},
	} {
		err := checkListens(t.Context(), test.s, test.running)
		if (err == nil) != (test.refusal == "") || err != nil && (!errors.As(err, &InvalidOptions{}) || !strings.Contains(err.Error(), test.refusal)) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestBlockHasRoom(t *testing.T) {
	if len(portNames) > blockSize {
		t.Errorf("%d ports do not fit into a block of %d", len(portNames), blockSize)
	}
	if s := (State{PortBase: firstPort}); s.port(portEtcd) == s.port(portAPIServer) || s.port(portManagerMetrics) != firstPort+len(portNames)-1 {
		t.Error("two names have the same port")
	}
}

// TestHostMetrics: each host of the box has a port behind those of the components. A port in use, or a host without one, changes
// nothing but its metrics.
func TestHostMetrics(t *testing.T) {
	portPatience = 10 * time.Millisecond
	t.Cleanup(func() { portPatience = 3 * time.Second })
	first := len(portNames)
	for name, test := range map[string]struct {
		host, busy int
		want       string
	}{
		"the first host":       {0, 0, hostPort(firstPort + first)},
		"the second host":      {1, firstPort + first, hostPort(firstPort + first + 1)},
		"a port in use":        {1, firstPort + first + 1, ""},
		"the last port":        {blockSize - first - 1, 0, hostPort(firstPort + blockSize - 1)},
		"no port in the block": {blockSize - first, 0, ""},
	} {
		address := State{PortBase: firstPort}.hostMetrics(t.Context(), test.host, func(p int) bool { return p != test.busy })
		if address != test.want {
			t.Errorf("%s: %q, want %q", name, address, test.want)
		}
		if args := strings.Join(metricsArgs("local", address), " "); (args == "--metrics-address="+test.want) != (test.want != "") {
			t.Errorf("%s: arguments %q", name, args)
		}
	}
}

func TestLoopbackFree(t *testing.T) {
	listener, err := net.Listen("tcp", ports.Address(t))
	if err != nil {
		t.Fatal(err)
	}
	port := listener.Addr().(*net.TCPAddr).Port
	if loopbackFree(port) {
		t.Error("a port with a listener is reported as free")
	}
	listener.Close()
	if !loopbackFree(port) {
		t.Error("a port without a listener is reported as in use")
	}
}
