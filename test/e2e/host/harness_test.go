//go:build e2e

// Package host_test runs real capstands as root. Machines are real runc containers with testinit as PID 1, so that a
// test takes seconds.
package host_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/test/e2e/harness"
	"capstan.dev/capstan/test/versions"
)

const version = versions.Default

// patience bounds every wait. It is not less than the minimum of harness.Wait.
const patience = 3 * time.Minute

var programs string // folder with testinit

func TestMain(m *testing.M) { os.Exit(harness.RunWithPrograms(m, &programs)) }

func copyFile(t *testing.T, from, to string) {
	t.Helper()
	data, err := os.ReadFile(from)
	if err != nil {
		t.Fatalf("%v; run `make build` first", err)
	}
	expect.NoError(t, os.MkdirAll(filepath.Dir(to), 0o755))
	expect.NoError(t, os.WriteFile(to, data, 0o755))
}

// capstand is a running capstand.
type capstand struct {
	t      *testing.T
	binary string
	root   string
	assets string
	args   []string
	cmd    *exec.Cmd
	exited chan error
	output *bytes.Buffer
	conn   *grpc.ClientConn
	hostpb.HostClient
}

// newCapstand starts a capstand with an empty state. At the end of the test, it deletes all objects of the capstand and
// stops it.
func newCapstand(t *testing.T, args ...string) *capstand {
	t.Helper()
	return newCapstandIn(t, filepath.Join(t.TempDir(), "host"), args...)
}

// newCapstandIn is newCapstand with a prepared state folder.
func newCapstandIn(t *testing.T, root string, args ...string) *capstand {
	t.Helper()
	files := harness.StandIns(t, programs)
	c := &capstand{t: t, binary: filepath.Join(harness.Bin(), "capstand"), root: root, assets: files, args: append([]string{
		"--root", root, "--assets", files, "--name", "test", "--reserve-memory", "256Mi", "--reserve-disk", "0",
	}, args...)}
	c.start()
	t.Cleanup(c.cleanUp)
	hostIDs[t.Name()] = append(hostIDs[t.Name()], hostID(t, c), root)
	return c
}

func (c *capstand) socket() string { return filepath.Join(c.root, "capstand.sock") }

func (c *capstand) start() {
	c.t.Helper()
	c.output, c.exited = &bytes.Buffer{}, make(chan error, 1)
	c.cmd = exec.Command(c.binary, c.args...)
	c.cmd.Stdout, c.cmd.Stderr = c.output, c.output
	expect.NoError(c.t, c.cmd.Start())
	cmd, exited := c.cmd, c.exited
	go func() { exited <- cmd.Wait() }()
	eventually(c.t, "socket", func() error { // gRPC itself would wait a second before the next attempt.
		conn, err := net.Dial("unix", c.socket())
		if err == nil {
			_ = conn.Close()
		}
		return err
	})
	conn, err := grpc.NewClient("unix://"+c.socket(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	expect.NoError(c.t, err)
	c.conn, c.HostClient = conn, hostpb.NewHostClient(conn)
	if _, err := c.GetInfo(c.ctx(), &hostpb.GetInfoRequest{}, grpc.WaitForReady(true)); err != nil {
		c.t.Fatalf("capstand does not answer: %v\n%s", err, c.output)
	}
}

func (c *capstand) end(sig syscall.Signal) {
	c.t.Helper()
	c.signal(sig)
	c.awaitEnd()
}

func (c *capstand) signal(sig syscall.Signal) {
	c.t.Helper()
	_ = c.conn.Close()
	expect.NoError(c.t, c.cmd.Process.Signal(sig))
}

func (c *capstand) awaitEnd() {
	c.t.Helper()
	select {
	case <-c.exited:
	case <-time.After(patience):
		c.t.Fatal("capstand does not end on a signal")
	}
}

func (c *capstand) kill() { c.t.Helper(); c.end(syscall.SIGKILL) }

func (c *capstand) cleanUp() {
	if c.t.Failed() {
		c.t.Logf("output of capstand:\n%s", c.output)
	}
	if c.cmd.ProcessState != nil {
		c.start()
	}
	defer c.end(syscall.SIGTERM) // also after a failure, so that the capstand cannot disturb other tests
	machines, err := c.ListMachines(c.ctx(), &hostpb.ListMachinesRequest{})
	expect.NoError(c.t, err)
	for _, m := range machines.Machines {
		c.deleteMachine(m.Spec)
	}
	for _, lb := range recorded(c, "balancers", func() *hostpb.LoadBalancer { return &hostpb.LoadBalancer{} }) {
		c.deleteBalancer(lb)
	}
	for _, n := range recorded(c, "networks", func() *hostpb.Network { return &hostpb.Network{} }) {
		_, err := c.DeleteNetwork(c.ctx(), &hostpb.DeleteNetworkRequest{Id: n.Id, Namespace: n.Namespace, Name: n.Name})
		expect.NoError(c.t, err)
	}
}

// recorded reads the records of a kind from a capstand's state.
func recorded[T proto.Message](c *capstand, kind string, empty func() T) (all []T) {
	c.t.Helper()
	files, err := filepath.Glob(filepath.Join(c.root, kind, "*", "spec.json"))
	expect.NoError(c.t, err)
	for _, file := range files {
		data, err := os.ReadFile(file)
		expect.NoError(c.t, err)
		object := empty()
		expect.NoError(c.t, protojson.Unmarshal(data, object))
		all = append(all, object)
	}
	return all
}

func (c *capstand) ctx() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	c.t.Cleanup(cancel)
	return ctx
}

// cluster contains the settings that the machines of a test share.
type cluster struct{ id, name, cidr string }

var (
	blue  = cluster{"e2e-blue", "blue", "10.231.0.0/24"}
	green = cluster{"e2e-green", "green", "10.231.1.0/24"}
)

func (k cluster) network() *hostpb.Network {
	return &hostpb.Network{Id: k.id, Namespace: "default", Name: k.name, Cidr: k.cidr}
}

func (k cluster) address(n int) string {
	return strings.TrimSuffix(k.cidr, "0/24") + fmt.Sprint(n)
}

// machine returns the spec of the cluster's machine with address n.
func (k cluster) machine(n int) *hostpb.MachineSpec {
	return &hostpb.MachineSpec{
		Id: fmt.Sprintf("%s-%d", k.id, n), Namespace: "default", Name: fmt.Sprintf("%s-%d", k.name, n), Cluster: k.name,
		Network: k.network(), Addresses: []*hostpb.Address{{Address: k.address(n), Prefix: 24}},
		Cpus: 1, MemoryBytes: 256 << 20, DiskBytes: 64 << 20, Image: "host", KubernetesVersion: version,
		ProviderId: "capstan://" + k.name,
	}
}

// make creates a machine and waits until it runs and has been bootstrapped.
func (c *capstand) make(spec *hostpb.MachineSpec) *hostpb.Machine {
	c.t.Helper()
	_, err := c.EnsureMachine(c.ctx(), &hostpb.EnsureMachineRequest{Spec: spec, BootstrapData: []byte("#cloud-config\n")})
	expect.NoError(c.t, err)
	return c.await(spec.Id, func(m *hostpb.Machine) bool {
		return m.Status.Phase == hostpb.MachineStatus_RUNNING && m.Status.Bootstrap == hostpb.MachineStatus_SUCCEEDED &&
			len(m.Status.Services) > 0
	})
}

// await follows the Watch stream until a machine has the wanted state.
func (c *capstand) await(id string, wanted func(*hostpb.Machine) bool) *hostpb.Machine {
	c.t.Helper()
	return awaitEvent(c, "machine "+id, func(e *hostpb.Event) *hostpb.Machine {
		if m := e.GetMachine(); m != nil && m.Spec.Id == id {
			return m
		}
		return nil
	}, wanted)
}

// awaitEvent follows the Watch stream until an object has the wanted state. pick returns nil for events of other objects.
func awaitEvent[T any](c *capstand, name string, pick func(*hostpb.Event) *T, wanted func(*T) bool) *T {
	c.t.Helper()
	stream, err := c.Watch(c.ctx(), &hostpb.WatchRequest{})
	expect.NoError(c.t, err)
	var last *T
	for {
		event, err := stream.Recv()
		if err != nil {
			c.t.Fatalf("%s: %v; last seen: %v\n%s", name, err, last, c.output)
		}
		if event.Type != hostpb.Event_CHANGED {
			continue
		}
		if obj := pick(event); obj != nil {
			if last = obj; wanted(obj) {
				return obj
			}
		}
	}
}

// deleteMachine repeats the call until the machine is removed, as a manager does: capstand answers after a few seconds.
func (c *capstand) deleteMachine(spec *hostpb.MachineSpec) {
	c.t.Helper()
	eventually(c.t, "the removal of machine "+spec.Id, func() error {
		res, err := c.DeleteMachine(c.ctx(), deletion(spec))
		if err == nil && !res.Done {
			err = errors.New("it is still being removed")
		}
		return err
	})
}

// deleteBalancer repeats the call until the load balancer is removed.
func (c *capstand) deleteBalancer(lb *hostpb.LoadBalancer) {
	c.t.Helper()
	eventually(c.t, "the removal of load balancer "+lb.Id, func() error {
		_, err := c.DeleteLoadBalancer(c.ctx(), &hostpb.DeleteLoadBalancerRequest{Id: lb.Id, Namespace: lb.Namespace, Name: lb.Name})
		return err
	})
}

func deletion(spec *hostpb.MachineSpec) *hostpb.DeleteMachineRequest {
	return &hostpb.DeleteMachineRequest{Id: spec.Id, Namespace: spec.Namespace, Name: spec.Name}
}

// web is an HTTPS client for testinit. Each request has its own connection.
var web = &http.Client{
	Timeout:   patience,
	Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, DisableKeepAlives: true},
}

// get sends a request to a testinit and returns the status and the body.
func get(address, path string, query ...string) (int, string, error) {
	values := url.Values{}
	for i := 0; i < len(query); i += 2 {
		values.Set(query[i], query[i+1])
	}
	res, err := web.Get("https://" + net.JoinHostPort(address, "6443") + path + "?" + values.Encode())
	if err != nil {
		return 0, "", err
	}
	defer func() { _ = res.Body.Close() }()
	body, err := io.ReadAll(res.Body)
	return res.StatusCode, string(body), err
}

// inside runs a shell command in a machine.
func inside(t *testing.T, address, command string) string {
	t.Helper()
	code, out, err := get(address, "/run", "command", command)
	expect.NoError(t, err)
	if code != http.StatusOK {
		t.Fatalf("%s: %s", command, out)
	}
	return strings.TrimSpace(out)
}

// eventually waits for a state for which there is no event.
func eventually(t *testing.T, what string, f func() error) {
	t.Helper()
	harness.Wait(t, what, patience, f)
}

// ownNames lists texts, one of which is in the name of each object that these tests create on the host. Other clusters may
// run on this host at the same time.
func ownNames() []string {
	all := []string{"10.233.0.", "e2e-out"}
	for _, id := range []string{blue.id, green.id, "e2e-moved", "e2e-other", "e2e-blue-twin"} {
		all = append(all, hash(id))
	}
	for n := 10; n <= 20; n++ {
		all = append(all, hash(blue.machine(n).Id), hash(green.machine(n).Id))
	}
	return all
}

// leftovers lists all objects on the host with such a name.
func leftovers(t *testing.T, names []string) []string {
	t.Helper()
	pattern := strings.ReplaceAll(strings.Join(names, "|"), ".", "[.]")
	out := host(t, `{
		ip -o link | awk '{print "link", $2}'
		ip route | sed 's/^/route /'
		nft list tables
		awk '{print "mount", $5}' /proc/self/mountinfo
		losetup --noheadings --output NAME,BACK-FILE | sed 's/^/loop /'
		find /sys/fs/cgroup /run/capstan -path '*capstan*' 2>/dev/null
		for p in /proc/[0-9]*; do sed "s|^|process $p |" $p/cgroup $p/mountinfo 2>/dev/null; done | grep -v '(deleted)' # zombies
	} | grep -E '`+pattern+`' || true`)
	return strings.FieldsFunc(out, func(r rune) bool { return r == '\n' })
}

// leavesNothing fails the test if a link, route, table, mount, cgroup or process of it remains on the host after its
// clean-up. It must be called first, because clean-up functions run in reverse order.
func leavesNothing(t *testing.T) {
	t.Helper()
	if before := leftovers(t, ownNames()); len(before) > 0 {
		t.Fatalf("objects of another test exist: %s", strings.Join(before, "\n"))
	}
	t.Cleanup(func() {
		names := append(ownNames(), hostIDs[t.Name()]...)
		eventually(t, "all objects are removed", func() error { // Killed processes may take a moment to end.
			if left := leftovers(t, names); len(left) > 0 {
				return fmt.Errorf("%s", strings.Join(left, "\n"))
			}
			return nil
		})
	})
}

// hostIDs contains the ids of the capstands of each test, and their state folders.
var hostIDs = map[string][]string{}
