package provision

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"

	"capstan.dev/capstan/internal/node/initapi"
	"capstan.dev/capstan/internal/node/kube"
	"capstan.dev/capstan/internal/node/machine"
	"capstan.dev/capstan/internal/node/nodeconfig"
	"capstan.dev/capstan/internal/node/supervisor"
)

// Update provisions a machine again that is a node of its cluster. Each method can be repeated.
type Update struct{ node *node }

// NewUpdate returns the Update of this machine to a configuration.
func NewUpdate(config *nodeconfig.NodeConfiguration, log *slog.Logger) (*Update, error) {
	metadata, err := machine.Load(machine.MetadataPath)
	if err != nil {
		return nil, err
	}
	hostname, err := os.Hostname()
	if err != nil {
		return nil, err
	}
	n, err := newNode(config, metadata, hostname)
	if err != nil {
		return nil, err
	}
	n.init, n.log = initapi.NewClient(initapi.Socket), log
	n.initialCluster = recordedInitialCluster()
	return &Update{n}, nil
}

// UpdatedPaths are the files and folders that the provisioning of a running machine can change. They do not contain the
// authorities that the machine trusts, because those change independently of updates.
func UpdatedPaths() []string {
	paths := []string{
		nodeconfig.Path, supervisor.Dir, configDir, filepath.Dir(containerdConfigFile), kubeletConfigFile,
		nodeconfig.AuditPolicyPath, nodeconfig.AuthenticationPath, nodeconfig.EncryptionConfigPath, nodeconfig.KubeletKubeconfig,
		filepath.Join(nodeconfig.PKIDir, "apiserver.crt"),
	}
	for _, path := range kubeconfigs {
		paths = append(paths, path)
	}
	slices.Sort(paths)
	return paths
}

// programsTimeout bounds the start of a program that prints its version. On a busy host it takes seconds.
const programsTimeout = time.Minute

// CheckPrograms returns an error if the folder of the Kubernetes version does not contain the programs of that version.
func (u *Update) CheckPrograms(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, programsTimeout)
	defer cancel()
	kubelet := u.node.program("kubelet")
	out, err := exec.CommandContext(ctx, kubelet, "--version").Output()
	if err != nil {
		return fmt.Errorf("the programs of Kubernetes %s on this host do not work: %s --version: %w", u.node.KubernetesVersion, kubelet, err)
	}
	if got := strings.TrimSpace(strings.TrimPrefix(string(out), "Kubernetes ")); got != u.node.KubernetesVersion {
		return fmt.Errorf("%s is of version %q, expected %s; repair the folder on the host", kubelet, got, u.node.KubernetesVersion)
	}
	return nil
}

// WriteFiles writes the files that the services read: certificates, kubeconfigs and configuration.
func (u *Update) WriteFiles() error {
	n := u.node
	if n.Role == nodeconfig.RoleWorker {
		return errors.Join(n.writeConfigs(), n.writeKubeletKubeconfig())
	}
	if err := errors.Join(n.writeCertificates(), n.writeConfigs()); err != nil {
		return err
	}
	return n.writeControlPlaneKubeconfigs()
}

// restartOrder is the order of the restarts: a service comes after those on which it depends.
var restartOrder = []string{
	"etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "coredns", nodeconfig.MetricsServer, "containerd", "kubelet", "kube-proxy", "node-agent",
}

// UpdateServices returns the names of all services that an update can restart, in the order of their restarts.
func UpdateServices() []string { return slices.Clone(restartOrder) }

func (u *Update) services() []supervisor.Service {
	services := u.node.nodeServices()
	if u.node.Role != nodeconfig.RoleWorker {
		services = append(u.node.controlPlaneServices(), services...)
	}
	return services
}

// UpdateService writes the file of a service. If the file differs from the present one, PID 1 restarts the service, and
// UpdateService waits until it is ready. A machine may not have the service.
func (u *Update) UpdateService(ctx context.Context, name string) error {
	services := restartedTogether(u.services(), name)
	if len(services) == 0 {
		return nil
	}
	if err := u.node.startServices(ctx, services...); err != nil {
		return err
	}
	return u.awaitReady(ctx, name)
}

// restartedTogether returns the named service and those that require it. They stop for its restart, so their files are written
// at the same time: otherwise they would restart twice.
func restartedTogether(services []supervisor.Service, name string) []supervisor.Service {
	if len(named(services, name)) == 0 {
		return nil
	}
	return slices.DeleteFunc(services, func(s supervisor.Service) bool {
		return s.Name != name && !slices.Contains(s.Requires, name)
	})
}

// ReloadAll makes PID 1 restart the services whose files differ from those that run.
func (u *Update) ReloadAll(ctx context.Context) error { return u.node.init.Reload(ctx) }

// maxCrashes is the number of ends of a service during an update before it counts as broken. With the pauses of the supervisor
// this takes about a quarter of a minute.
const maxCrashes = 8

// readyTimeout for services that were ready before. An API server on a very slow host, such as an emulated one, needs more than
// five minutes.
const readyTimeout = 20 * time.Minute

// awaitReady waits until the services are ready. It gives up early if one of them ends again and again.
func (u *Update) awaitReady(ctx context.Context, names ...string) error {
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	var missing []string
	var broken error
	first := map[string]int32{}
	err := u.node.init.Watch(ctx, func(s initapi.Status) bool {
		missing = s.NotReady(names)
		broken = crashing(s, names, first)
		return len(missing) > 0 && broken == nil
	})
	switch {
	case err == nil:
		return broken
	case ctx.Err() != nil:
		return fmt.Errorf("services are not ready after %s: %s", readyTimeout, strings.Join(missing, "; "))
	}
	return err
}

// crashing returns an error if one of the services is not ready and has ended maxCrashes times since its count in first, which
// crashing fills.
func crashing(s initapi.Status, names []string, first map[string]int32) error {
	for _, service := range s.Services {
		before, known := first[service.Name]
		if !known || service.Restarts < before {
			before = service.Restarts
			first[service.Name] = before
		}
		if slices.Contains(names, service.Name) && service.State != initapi.StateReady && service.Restarts-before >= maxCrashes {
			return fmt.Errorf("service %s ended %d times: %s", service.Name, service.Restarts-before, service.Message)
		}
	}
	return nil
}

// nodeTimeout bounds the wait for the Node. A kubelet reports its version within seconds.
const nodeTimeout = 3 * time.Minute

// Verify waits until all services are ready, and the Node is Ready with the version of the configuration. The readiness of etcd
// includes a linearizable read, so that its member is part of the quorum.
func (u *Update) Verify(ctx context.Context) error {
	var names []string
	for _, service := range u.services() {
		names = append(names, service.Name)
	}
	if err := u.awaitReady(ctx, names...); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, nodeTimeout)
	defer cancel()
	client, err := kube.NewClient(nodeconfig.KubeletKubeconfig)
	if err != nil {
		return err
	}
	found := "not found"
	err = kube.WaitFor(ctx, client, kube.Nodes, u.node.name, func(object *unstructured.Unstructured) (bool, error) {
		var seen corev1.Node
		if err := runtime.DefaultUnstructuredConverter.FromUnstructured(object.Object, &seen); err != nil {
			return false, err
		}
		ready := corev1.ConditionUnknown
		for _, c := range seen.Status.Conditions {
			if c.Type == corev1.NodeReady {
				ready = c.Status
			}
		}
		found = fmt.Sprintf("Ready %s with version %s", ready, seen.Status.NodeInfo.KubeletVersion)
		return ready == corev1.ConditionTrue && seen.Status.NodeInfo.KubeletVersion == u.node.KubernetesVersion, nil
	})
	if err != nil {
		return fmt.Errorf("expected the Node %s to become Ready with version %s, found it %s: %w", u.node.name, u.node.KubernetesVersion, found, err)
	}
	return nil
}

// SameRole refuses a configuration that makes another machine of this one (its cluster, role or networks).
func SameRole(have, want *nodeconfig.NodeConfiguration) error {
	describe := func(c *nodeconfig.NodeConfiguration) string {
		return fmt.Sprintf("cluster %s, role %s, node name %q, networks %v", c.ClusterName, c.Role, c.Node.Name, c.Network)
	}
	if a, b := describe(have), describe(want); a != b {
		return fmt.Errorf("an update in place cannot change %s into %s", a, b)
	}
	return nil
}
