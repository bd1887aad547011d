// Package provision is `capstan-init node up`: it makes a machine a node of its cluster, like kubeadm. Certificates and
// kubeconfigs have kubeadm's paths. Every step can be repeated: a second run changes only missing or different parts.
//
// Layer: node. Allowed imports: api, library, contract.
package provision

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/imagearchive"
	"capstan.dev/capstan/internal/machineapi"
	"capstan.dev/capstan/internal/node/images"
	"capstan.dev/capstan/internal/node/initapi"
	"capstan.dev/capstan/internal/node/kube"
	"capstan.dev/capstan/internal/node/machine"
	"capstan.dev/capstan/internal/node/nodeconfig"
	"capstan.dev/capstan/internal/node/supervisor"
)

// node is the machine that becomes a node.
type node struct {
	*nodeconfig.NodeConfiguration
	machine machine.Metadata
	name    string
	// hostname of the machine in lower case, as the kubelet uses it; name is the same unless the user chose a name.
	hostname string
	ips      []netip.Addr
	// cgroupV1 is true if the host does not have the unified hierarchy of cgroup v2.
	cgroupV1 bool
	// kernelProcesses is the largest number of processes of the host's kernel, 0 if it is unknown.
	kernelProcesses int64
	init            *initapi.Client
	log             *slog.Logger
	// reportImages reports why the machine does not have its images yet; an empty reason withdraws this.
	reportImages func(ctx context.Context, reason string)
	// initialCluster is the list of members that a joining etcd starts with.
	initialCluster string
}

// Run makes this machine a node and returns when it is ready. It has no time limit: a failed bootstrap is final, and a slow host
// is no failure. A MachineHealthCheck replaces a machine that needs too long.
func Run(ctx context.Context, log *slog.Logger) error {
	config, err := nodeconfig.Load(nodeconfig.Path)
	if err != nil {
		return err
	}
	metadata, err := machine.Load(machine.MetadataPath)
	if err != nil {
		return err
	}
	hostname, err := os.Hostname()
	if err != nil {
		return err
	}
	n, err := newNode(config, metadata, hostname)
	if err != nil {
		return err
	}
	n.init, n.log = initapi.NewClient(initapi.Socket), log
	if n.Role == nodeconfig.RoleInit && n.ControlPlane.ExternalEtcd == nil {
		// A restore starts no service, so the stall deadline would end it.
		if err := n.restoreEtcd(ctx, nodeconfig.RestorePath); err != nil {
			return err
		}
	}
	start := &persistence{watch: n.init.Watch, report: n.init.Stalled, log: log}
	n.reportImages = start.reportImages
	return start.run(ctx, n.up)
}

// up can be repeated at any time.
func (n *node) up(ctx context.Context) error {
	if n.Role == nodeconfig.RoleWorker {
		return n.upWorker(ctx)
	}
	return n.upControlPlane(ctx)
}

func newNode(config *nodeconfig.NodeConfiguration, m machine.Metadata, hostname string) (*node, error) {
	n := &node{
		NodeConfiguration: config, machine: m, name: config.NodeName(hostname), hostname: strings.ToLower(hostname),
		kernelProcesses: kernelProcesses(),
	}
	var err error
	if n.ips, err = m.IPs(); err != nil {
		return nil, err
	}
	if _, err := os.Stat("/sys/fs/cgroup/cgroup.controllers"); errors.Is(err, fs.ErrNotExist) {
		n.cgroupV1 = true
	}
	if n.Node.ProviderID == "" {
		n.Node.ProviderID = m.ProviderID
	}
	kube := n.program("kube-apiserver")
	if _, err := os.Stat(filepath.Dir(kube)); err != nil {
		return nil, fmt.Errorf("this host has no Kubernetes %s: %w; build it, or use one of the versions in %s",
			n.KubernetesVersion, err, filepath.Join(machineapi.AssetsFolder, "kubernetes"))
	}
	err = n.checkArguments()
	return n, err
}

// program returns the path of a program of the node's Kubernetes version.
func (n *node) program(name string) string {
	return filepath.Join(machineapi.AssetsFolder, "kubernetes", n.KubernetesVersion, name)
}

// runtimeProgram returns the path of a program that all versions share.
func runtimeProgram(name string) string {
	return filepath.Join(machineapi.AssetsFolder, "node/bin", name)
}

func (n *node) ip() string { return n.ips[0].String() }

func (n *node) ipStrings() []string {
	var out []string
	for _, ip := range n.ips {
		out = append(out, ip.String())
	}
	return out
}

// localServer returns the API server of this control plane machine.
func (n *node) localServer() string {
	return "https://" + net.JoinHostPort(n.ip(), fmt.Sprint(n.ControlPlane.APIServerPort))
}

// server returns the API server that this machine uses: its own, or the cluster's endpoint.
func (n *node) server() string {
	if n.ControlPlane != nil && n.Role != nodeconfig.RoleWorker {
		return n.localServer()
	}
	return "https://" + n.Endpoint
}

// upControlPlane starts etcd and the API server first and everything else after them, because on a small host the others
// would slow them down. On a machine that joins, etcd joins before that, because an API server cannot work with an etcd that
// has no vote.
func (n *node) upControlPlane(ctx context.Context) error {
	step := n.steps()
	if err := errors.Join(n.writeCertificates(), n.writeConfigs()); err != nil {
		return err
	}
	if err := n.writeControlPlaneKubeconfigs(); err != nil {
		return err
	}
	if n.Role == nodeconfig.RoleControlPlane && n.ControlPlane.ExternalEtcd == nil {
		step("files written")
		if err := n.joinEtcd(ctx); err != nil {
			return err
		}
		step("etcd joined")
	}
	if err := n.leaveFormerEtcd(supervisor.Dir); err != nil {
		return err
	}
	// The kubelet needs the API server, and all images that the user wants before it.
	later := func(s supervisor.Service) bool { return s.Name == "kubelet" }
	services := n.nodeServices()
	if err := n.startServices(ctx, slices.DeleteFunc(append(n.controlPlaneServices(), services...), later)...); err != nil {
		return err
	}
	step("files written, services started")
	if err := n.init.WaitReady(ctx, "kube-apiserver"); err != nil {
		return err
	}
	step("API server ready")
	group, groupCtx := errgroup.WithContext(ctx)
	if n.Role == nodeconfig.RoleInit {
		group.Go(func() error { return n.applyManifests(groupCtx) })
	}
	group.Go(func() error { return n.loadPause(groupCtx) })
	group.Go(func() error { return n.register(groupCtx, named(services, "kubelet")) })
	if err := group.Wait(); err != nil {
		return err
	}
	step("objects applied, node registered")
	err := n.waitForServices(ctx)
	step("all services ready")
	return err
}

// register starts the kubelet as soon as the machine has its images, and labels the Node.
func (n *node) register(ctx context.Context, kubelet []supervisor.Service) error {
	if err := n.pullImages(ctx); err != nil {
		return err
	}
	if err := n.startServices(ctx, kubelet...); err != nil {
		return err
	}
	return n.labelControlPlane(ctx)
}

// upWorker starts containerd while the cluster signs the kubelet's certificate, and then the other services.
func (n *node) upWorker(ctx context.Context) error {
	step := n.steps()
	if err := n.writeConfigs(); err != nil {
		return err
	}
	services := n.nodeServices()
	if err := n.startServices(ctx, named(services, "containerd")...); err != nil {
		return err
	}
	client, err := kube.NewTokenClient(n.server(), caFile, n.BootstrapToken)
	if err != nil {
		return err
	}
	group, groupCtx := errgroup.WithContext(ctx)
	group.Go(func() error { return n.loadPause(groupCtx) })
	group.Go(func() error {
		if err := n.joinKubelet(groupCtx, client); err != nil {
			return err
		}
		step("kubelet's certificate issued")
		if err := n.pullImages(groupCtx); err != nil {
			return err
		}
		return n.startServices(groupCtx, named(services, "kubelet", "node-agent")...)
	})
	group.Go(func() error {
		// The agent starts with the kubelet's credential and waits for its own.
		if err := n.joinClients(groupCtx, client); err != nil {
			return err
		}
		step("certificates of kube-proxy and the node agent issued")
		return nil
	})
	if err := group.Wait(); err != nil {
		return err
	}
	if err := n.startServices(ctx, services...); err != nil {
		return err
	}
	if err := n.waitForServices(ctx); err != nil {
		return err
	}
	step("all services ready")
	return n.forgetToken()
}

// steps returns a function that logs the time since the start after each step.
func (n *node) steps() func(string) {
	start := time.Now()
	return func(what string) { n.log.Info(what, "after", time.Since(start).Round(time.Millisecond)) }
}

// startServices writes service files and makes PID 1 start the new and changed services.
func (n *node) startServices(ctx context.Context, services ...supervisor.Service) error {
	if err := os.MkdirAll(supervisor.Dir, 0o755); err != nil {
		return err
	}
	var writes []func() error
	for _, service := range services {
		writes = append(writes, func() error { return service.Write(supervisor.Dir) })
	}
	if err := atomicfile.Together(writes...); err != nil {
		return err
	}
	for _, service := range services {
		// A file of a service that already runs may have been replaced.
		if err := service.HandOver(); err != nil {
			return err
		}
	}
	return n.init.Reload(ctx)
}

// waitForServices waits for all services except metrics-server, without which the machine is a complete node.
func (n *node) waitForServices(ctx context.Context) error {
	services := n.nodeServices()
	if n.Role != nodeconfig.RoleWorker {
		services = append(services, n.controlPlaneServices()...)
	}
	var names []string
	for _, service := range services {
		if service.Name != nodeconfig.MetricsServer {
			names = append(names, service.Name)
		}
	}
	return n.init.WaitReady(ctx, names...)
}

func named(services []supervisor.Service, names ...string) []supervisor.Service {
	var out []supervisor.Service
	for _, service := range services {
		for _, name := range names {
			if service.Name == name {
				out = append(out, service)
			}
		}
	}
	return out
}

// loadPause imports the pause image, which no registry has. containerd keeps it because it is pinned.
func (n *node) loadPause(ctx context.Context) error {
	if err := n.init.WaitReady(ctx, "containerd"); err != nil {
		return err
	}
	if _, err := images.ImportFile(ctx, images.Socket, filepath.Join(machineapi.AssetsFolder, "images/pause.tar")); err != nil {
		return fmt.Errorf("loading the pause image: %w", err)
	}
	return nil
}

// pullPause is the time between two attempts to pull images. A registry sends no event when it has an image.
const pullPause = 10 * time.Second

// pullImages imports the images of the host and pulls those that the machine needs before its kubelet. It tries again until ctx ends,
// because a registry may be away for a while. Its error contains that of the last attempt.
func (n *node) pullImages(ctx context.Context) error {
	archives, err := imagearchive.Folder(machine.ContainerImagesDir)
	if err != nil {
		n.log.Error("Some container images of the host are not imported", "error", err)
	}
	if len(archives)+len(n.Images) == 0 {
		return nil
	}
	if err := n.init.WaitReady(ctx, "containerd"); err != nil {
		return err
	}
	n.importArchives(ctx, archives)
	if len(n.Images) == 0 {
		return ctx.Err()
	}
	return n.untilPulled(ctx, pullPause, func() error { return images.Pull(ctx, images.Socket, n.NodeConfiguration) })
}

// importArchives imports the container images of the host. An archive that cannot be used must not stop all machines of the host: the
// kubelet pulls its images as any others.
func (n *node) importArchives(ctx context.Context, archives []string) {
	for _, archive := range archives {
		names, err := images.ImportFile(ctx, images.Socket, archive)
		if err != nil {
			n.log.Error("Container images of the host are not imported; the machine continues without them", "archive", filepath.Base(archive), "error", err)
			continue
		}
		n.log.Info("Container images of the host imported", "archive", filepath.Base(archive), "images", names)
	}
}

// untilPulled repeats a pull and reports its error from the first attempt on.
func (n *node) untilPulled(ctx context.Context, pause time.Duration, pull func() error) error {
	for {
		err := pull()
		if err == nil {
			n.reportImages(ctx, "")
			return nil
		}
		err = fmt.Errorf("spec.images: %w", err)
		n.log.Warn("Cannot pull the images of the configuration; the kubelet waits for them", "error", err, "retryIn", pause)
		if ctx.Err() == nil { // Otherwise the error is the end of the attempt.
			n.reportImages(ctx, err.Error())
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(pause):
		}
	}
}
