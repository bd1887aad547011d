//go:build e2e

// Package node starts machines with runc and their own namespaces, without capstand. It gives them bootstrap data as the
// bootstrap provider writes it, and checks the result of capstan-init. It needs root and the assets of `make build`.
package node

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/cert"

	"capstan.dev/capstan/internal/host/cgroup"
	"capstan.dev/capstan/internal/host/runc"
	"capstan.dev/capstan/internal/node/initapi"
	"capstan.dev/capstan/internal/node/machine"
	"capstan.dev/capstan/internal/node/nodeconfig"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/test/e2e/harness"
)

// testNetwork is a bridge in its own network namespace, and the folder that the machines share.
type testNetwork struct {
	t      *testing.T
	prefix string
	dir    string
	assets string
	runc   runc.Runc
	bridge netns.NsHandle
}

// the prefix of all names that this process creates on the host
func prefix() string { return fmt.Sprintf("capstan-e2e-%d", os.Getpid()) }

const (
	gateway = "10.77.0.1"
	kubectl = "/opt/capstan/kubernetes/" + version + "/kubectl"
)

func newTestNetwork(t *testing.T) *testNetwork {
	t.Helper()
	if os.Getuid() != 0 {
		t.Fatal("this test needs root")
	}
	assets := harness.Bin()
	// This is not t.TempDir: a machine's mounts must be removed before its folder.
	dir, err := os.MkdirTemp("", prefix()+"-node-")
	expect.NoError(t, err)
	w := &testNetwork{t: t, prefix: prefix(), dir: dir, assets: assets}
	t.Cleanup(func() { expect.NoError(t, os.RemoveAll(dir)) })
	w.runc = runc.Runc{Binary: filepath.Join(assets, "node/bin/runc"), Root: filepath.Join(dir, "runc")}
	w.bridge = w.namespace("br")
	w.inside(w.bridge, func() {
		// The bridge has its own hardware address. Otherwise it has the lowest one of its ports, and changes it with the
		// ports.
		link := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br0", HardwareAddr: net.HardwareAddr{0x02, 0xca, 0, 0, 0, 1}}}
		expect.NoError(t, netlink.LinkAdd(link))
		addr, err := netlink.ParseAddr(gateway + "/24")
		expect.NoError(t, err)
		expect.NoError(t, netlink.AddrAdd(link, addr))
		expect.NoError(t, netlink.LinkSetUp(link))
		lo, err := netlink.LinkByName("lo") // The test and its services reach the address of the bridge through it.
		expect.NoError(t, err)
		expect.NoError(t, netlink.LinkSetUp(lo))
		// The pods of two machines must reach each other without it.
		_ = os.WriteFile("/proc/sys/net/bridge/bridge-nf-call-iptables", []byte("0"), 0)
	})
	w.copyAssets()
	return w
}

// copyAssets creates an assets folder with capstan-init, in which the machines mount the other assets.
func (w *testNetwork) copyAssets() {
	w.t.Helper()
	dir := filepath.Join(w.dir, "assets")
	for _, name := range []string{"kubernetes", "node", "images"} {
		expect.NoError(w.t, os.MkdirAll(filepath.Join(dir, name), 0o755))
	}
	data, err := os.ReadFile(filepath.Join(w.assets, "capstan-init"))
	expect.NoError(w.t, err)
	expect.NoError(w.t, os.WriteFile(filepath.Join(dir, "capstan-init"), data, 0o755))
}

// namespace creates a named network namespace. It is removed at the end of the test.
func (w *testNetwork) namespace(name string) netns.NsHandle {
	w.t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	old, err := netns.Get()
	expect.NoError(w.t, err)
	defer old.Close()
	handle, err := netns.NewNamed(w.prefix + "-" + name)
	expect.NoError(w.t, err)
	expect.NoError(w.t, netns.Set(old))
	w.t.Cleanup(func() {
		_ = handle.Close()
		expect.NoError(w.t, netns.DeleteNamed(w.prefix+"-"+name))
	})
	return handle
}

func (w *testNetwork) inside(ns netns.NsHandle, do func()) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	old, err := netns.Get()
	expect.NoError(w.t, err)
	defer old.Close()
	expect.NoError(w.t, netns.Set(ns))
	defer func() { expect.NoError(w.t, netns.Set(old)) }()
	do()
}

// host is a machine of the test.
type host struct {
	*testNetwork
	name string
	ip   string
	id   string
	ns   netns.NsHandle
	run  string // shared folder
	root string
	// images is the folder with the container images of the host; none if empty.
	images string
	// memory limit in bytes.
	memory int64
	// devices of the host in the machine.
	devices []specs.LinuxDevice
	// members is the client of etcdMembers.
	members dynamic.ResourceInterface
}

// newMachine creates a machine with its network and disk. It does not start it.
func (w *testNetwork) newMachine(name, ip string) *host {
	w.t.Helper()
	h := &host{testNetwork: w, name: name, ip: ip, id: w.prefix + "-" + name, memory: 4 << 30}
	h.run, h.root = filepath.Join(w.dir, "run", name), filepath.Join(w.dir, "machines", name)
	h.ns = w.namespace(name)
	w.inside(w.bridge, func() {
		veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "v-" + name}, PeerName: "eth0", PeerNamespace: netlink.NsFd(h.ns)}
		expect.NoError(w.t, netlink.LinkAdd(veth))
		br, err := netlink.LinkByName("br0")
		expect.NoError(w.t, err)
		expect.NoError(w.t, netlink.LinkSetMaster(veth, br))
		expect.NoError(w.t, netlink.LinkSetUp(veth))
	})
	w.inside(h.ns, func() {
		eth0, err := netlink.LinkByName("eth0")
		expect.NoError(w.t, err)
		addr, err := netlink.ParseAddr(ip + "/24")
		expect.NoError(w.t, err)
		expect.NoError(w.t, netlink.AddrAdd(eth0, addr))
		expect.NoError(w.t, netlink.LinkSetUp(eth0))
		expect.NoError(w.t, netlink.RouteAdd(&netlink.Route{Gw: net.ParseIP(gateway)}))
	})
	h.makeDisk()
	w.t.Cleanup(h.remove)
	return h
}

func (h *host) makeDisk() {
	for _, dir := range []string{"dev", "etc", "opt/capstan", "proc", "root", "run", "sys", "tmp", "usr", "var/log", "var/lib"} {
		expect.NoError(h.t, os.MkdirAll(filepath.Join(h.root, dir), 0o755))
	}
	for name, content := range map[string]string{"group": "root:x:0:\ntty:x:5:\nnogroup:x:65534:\n", "shadow": "root:*:19000:0:99999:7:::\n"} {
		expect.NoError(h.t, os.WriteFile(filepath.Join(h.root, "etc", name), []byte(content), map[bool]os.FileMode{true: 0o600, false: 0o644}[name == "shadow"]))
	}
	for name, target := range runc.HostSystem().Links {
		expect.NoError(h.t, os.Symlink(target, filepath.Join(h.root, name)))
	}
	alternatives, _ := filepath.Glob("/etc/alternatives/*")
	expect.NoError(h.t, os.MkdirAll(filepath.Join(h.root, "etc/alternatives"), 0o755))
	for _, path := range alternatives {
		if target, err := os.Readlink(path); err == nil {
			expect.NoError(h.t, os.Symlink(target, filepath.Join(h.root, path)))
		}
	}
}

// start starts PID 1 with a new /run, like capstand. Data may be nil.
func (h *host) start(data []byte) {
	h.t.Helper()
	expect.NoError(h.t, os.RemoveAll(h.run))
	expect.NoError(h.t, os.MkdirAll(h.run, 0o700))
	metadata, err := json.Marshal(machine.Metadata{
		ID: h.id, Name: h.name, Hostname: h.name, Cluster: "e2e", ProviderID: "capstan:///e2e/" + h.name,
		Addresses: []machine.Address{{Address: h.ip, Prefix: 24, Gateway: gateway}}, KubernetesVersion: version,
	})
	expect.NoError(h.t, err)
	expect.NoError(h.t, os.WriteFile(filepath.Join(h.run, "metadata.json"), metadata, 0o644))
	if data != nil {
		expect.NoError(h.t, os.WriteFile(filepath.Join(h.run, "bootstrap-data"), data, 0o600))
	}
	bundle := filepath.Join(h.dir, "bundles", h.name)
	expect.NoError(h.t, os.MkdirAll(bundle, 0o700))
	spec, err := json.Marshal(h.spec())
	expect.NoError(h.t, err)
	expect.NoError(h.t, os.WriteFile(filepath.Join(bundle, "config.json"), spec, 0o600))
	log, err := os.OpenFile(filepath.Join(h.dir, h.name+".log"), os.O_CREATE|os.O_APPEND|os.O_RDWR, 0o600)
	expect.NoError(h.t, err)
	defer log.Close()
	expect.NoError(h.t, h.runc.Start(context.Background(), h.id, bundle, log))
}

func (h *host) spec() *specs.Spec {
	capabilities, err := runc.OwnCapabilities()
	expect.NoError(h.t, err)
	p := runc.Params{
		Hostname: h.name, Rootfs: h.root, Assets: filepath.Join(h.dir, "assets"), Run: h.run, Views: filepath.Join(h.dir, "views", h.name),
		NetNS: "/run/netns/" + h.id, Cgroup: h.cgroup(), CPUs: 2, MemoryBytes: h.memory, PidsLimit: 16384,
		Capabilities: capabilities, System: runc.HostSystem(), ContainerImages: h.images, Devices: h.devices,
	}
	cpuinfo, err := os.ReadFile("/proc/cpuinfo")
	expect.NoError(h.t, err)
	expect.NoError(h.t, runc.WriteViews(p, string(cpuinfo)))
	spec := runc.Spec(p)
	for _, name := range []string{"kubernetes", "node", "images"} {
		spec.Mounts = append(spec.Mounts, specs.Mount{
			Source: filepath.Join(h.assets, name), Destination: "/opt/capstan/" + name, Type: "bind", Options: []string{"rbind", "rprivate", "ro"},
		})
	}
	return spec
}

func (h *host) cgroup() cgroup.Group { return cgroup.Group("/" + h.prefix + "/" + h.name) }

// kill ends the machine like a power failure.
func (h *host) kill() {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	// runc waits a second for the end of all processes, and a busy box needs longer.
	harness.Wait(h.t, "the container of "+h.name+" is deleted", patience, func() error { return h.runc.Delete(ctx, h.id) })
	expect.NoError(h.t, h.cgroup().Remove(ctx))
}

func (h *host) remove() {
	if h.t.Failed() {
		h.dump()
	}
	h.kill()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	expect.NoError(h.t, cgroup.Group("/"+h.prefix).Remove(ctx))
}

// dump prints the logs of a machine of a failed test.
func (h *host) dump() {
	log, _ := os.ReadFile(filepath.Join(h.dir, h.name+".log"))
	h.t.Logf("=== %s ===\n%s", h.name, tail(log, 3000))
	logs, _ := filepath.Glob(filepath.Join(h.root, "var/log/capstan/*.log"))
	for _, path := range logs {
		data, _ := os.ReadFile(path)
		h.t.Logf("=== %s %s ===\n%s", h.name, filepath.Base(path), tail(data, 2500))
	}
}

func tail(data []byte, n int) []byte { return data[max(0, len(data)-n):] }

// exec runs a program in the machine.
func (h *host) exec(args ...string) (string, error) { return h.execInput("", args...) }

func (h *host) execInput(input string, args ...string) (string, error) {
	return h.runcExec(input, append([]string{h.id}, args...)...)
}

// runcExec is `runc exec` with its options.
func (h *host) runcExec(input string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, h.runc.Binary, append([]string{"--root", h.runc.Root, "exec"}, args...)...)
	var out, errs bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(input), &out, &errs
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("%s: %w: %s", strings.Join(args, " "), err, errs.String())
	}
	return out.String(), nil
}

// kubectl runs kubectl on a control plane machine.
func (h *host) kubectl(args ...string) (string, error) {
	return h.exec(append([]string{kubectl, "--kubeconfig=/etc/kubernetes/admin.conf"}, args...)...)
}

func (h *host) mustKubectl(args ...string) string {
	h.t.Helper()
	out, err := h.kubectl(args...)
	expect.NoError(h.t, err)
	return out
}

func (h *host) apply(manifest string) {
	h.t.Helper()
	_, err := h.execInput(manifest, kubectl, "--kubeconfig=/etc/kubernetes/admin.conf", "apply", "-f", "-")
	expect.NoError(h.t, err)
}

// administrator returns the configuration of an administrator's client of an API server, for the network of the machines' gateway.
// Repeated requests should use it: each start of kubectl takes a quarter of a second of a processor.
func (h *host) administrator(address string) *rest.Config {
	pki := filepath.Join(h.root, nodeconfig.PKIDir)
	return &rest.Config{
		Host: "https://" + address, QPS: -1, Timeout: 10 * time.Second,
		TLSClientConfig: rest.TLSClientConfig{
			CAFile: filepath.Join(pki, "ca.crt"), CertFile: filepath.Join(pki, "clients/admin.crt"), KeyFile: filepath.Join(pki, "clients/admin.key"),
		},
		Dial: func(context.Context, string, string) (net.Conn, error) { return h.dial(address) },
	}
}

// anonymousGet sends a request without credentials to the API server, from the bridge, like a load balancer.
func (h *host) anonymousGet(path string) int {
	h.t.Helper()
	var conn net.Conn
	var err error
	h.inside(h.bridge, func() { conn, err = net.Dial("tcp", h.ip+":6443") })
	expect.NoError(h.t, err)
	defer conn.Close()
	roots, err := cert.NewPool(filepath.Join(h.root, "etc/kubernetes/pki/ca.crt"))
	expect.NoError(h.t, err)
	client := http.Client{Transport: &http.Transport{
		TLSClientConfig: &tls.Config{RootCAs: roots},
		DialContext:     func(context.Context, string, string) (net.Conn, error) { return conn, nil },
	}}
	resp, err := client.Get("https://" + h.ip + ":6443" + path)
	expect.NoError(h.t, err)
	defer resp.Body.Close()
	return resp.StatusCode
}

func (h *host) client() *initapi.Client { return initapi.NewClient(filepath.Join(h.run, "init.sock")) }

// until waits for a state that PID 1 reports.
func (h *host) until(what string, timeout time.Duration, ok func(initapi.Status) bool) initapi.Status {
	h.t.Helper()
	timeout = max(timeout, patience)
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	var last initapi.Status
	for {
		err := h.client().Watch(ctx, func(s initapi.Status) bool {
			last = s
			return !ok(s)
		})
		if err == nil {
			return last
		}
		if ctx.Err() != nil {
			h.t.Fatalf("%s: not %s after %s: %+v: %v", h.name, what, timeout, last, err)
		}
		time.Sleep(10 * time.Millisecond) // PID 1 has not created its socket yet.
	}
}

func (h *host) untilBootstrapped() {
	h.t.Helper()
	s := h.until("bootstrapped", 3*time.Minute, func(s initapi.Status) bool {
		return s.Bootstrap == initapi.Succeeded || s.Bootstrap == initapi.Failed
	})
	if s.Bootstrap != initapi.Succeeded {
		h.t.Fatalf("%s: bootstrap %s: %s", h.name, s.Bootstrap, s.BootstrapMessage)
	}
}

// patience is the minimum timeout of all waits. Only failing tests reach it.
const patience = 3 * time.Minute
