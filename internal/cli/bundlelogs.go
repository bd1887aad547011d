package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"capstan.dev/capstan/internal/accessapi"
	"capstan.dev/capstan/internal/cli/diagnosis"
)

// logViewerRole is a role of config/infrastructure/rbac/access_roles.yaml.
const logViewerRole = "capstan-infrastructure-machine-log-viewer"

// machineServices are the services of machines that have logs. The first ones run on each machine.
var machineServices = []string{
	accessapi.InitService, "bootstrap", "containerd", "kubelet", "kube-proxy", "node-agent", "update",
	"etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "coredns", "metrics-server",
}

// workerServices is the number of services that run on each machine.
const workerServices = 7

// logLimits bound the logs that a bundle gets through the management cluster. A tenant decides what its machines write.
type logLimits struct {
	// lines of each log, from its end.
	lines int32
	// log and total are the sizes of one log and of all logs in bytes.
	log, total int
	// each and all are the times for one log and for all logs.
	each, all time.Duration
	// parallel is the number of logs at a time. A manager serves 16 to one user.
	parallel int
}

var bundledLogs = logLimits{lines: 2000, log: 1 << 20, total: 64 << 20, each: 15 * time.Second, all: 3 * time.Minute, parallel: 4}

// collectLogs adds the logs of the machines that the bundle does not have from this box.
func (m *management) collectLogs(ctx context.Context, files map[string][]byte, limits logLimits) error {
	machines, err := m.listed(ctx, schema.GroupKind{Group: infraGroup, Kind: "CapstanMachine"}, "")
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, limits.all)
	defer cancel()
	c := &logCollector{limits: limits, files: files, refusals: map[string]error{}, open: func(ctx context.Context, namespace, name string, o accessapi.LogOptions) (io.ReadCloser, error) {
		request, _, err := m.accessRequest("GET", namespace, name, accessapi.Log, o.Query())
		if err != nil {
			return nil, err
		}
		return request.Stream(ctx)
	}}
	var group errgroup.Group
	group.SetLimit(limits.parallel)
	for _, machine := range withoutLogs(machines, files) {
		group.Go(func() error { c.machine(ctx, machine); return nil })
	}
	_ = group.Wait()
	for namespace, refusal := range c.refusals {
		m.refused(gap{
			Resource: accessapi.Resource + "/" + accessapi.Log + "." + accessapi.GroupVersion.Group, Scope: "namespace " + namespace, Reason: refusal.Error(),
			Do: "kubectl create rolebinding NAME -n " + namespace + " --clusterrole " + logViewerRole + " --user USER",
		})
	}
	return c.result()
}

// withoutLogs returns the machines whose logs are not in the files of this box. Those that wait for something come first.
func withoutLogs(machines []*unstructured.Unstructured, files map[string][]byte) (out []*unstructured.Unstructured) {
	here := map[string]bool{} // ids of machines
	for name := range files {
		if parts := strings.Split(name, "/"); len(parts) > 4 && parts[0] == "hosts" && parts[2] == "machines" {
			here[parts[3]] = true
		}
	}
	for _, o := range machines {
		if id := field(o, "spec.id"); id != "" && !here[id] {
			out = append(out, o)
		}
	}
	waits := func(o *unstructured.Unstructured) int { return len(diagnosis.Problems(diagnosis.ConditionsOf(o))) }
	slices.SortStableFunc(out, func(a, b *unstructured.Unstructured) int { return cmp.Compare(waits(b), waits(a)) })
	return out
}

// logCollector collects logs through the management cluster.
type logCollector struct {
	open   func(ctx context.Context, namespace, name string, o accessapi.LogOptions) (io.ReadCloser, error)
	limits logLimits

	mu    sync.Mutex
	files map[string][]byte
	size  int
	// refusals are the answers for namespaces in which the user has no right.
	refusals map[string]error
	errs     []error
	// noAPI is the answer of a management cluster without the API.
	noAPI error
	// omitted is the number of machines without logs because of a limit.
	omitted int
}

// machine collects the logs of a machine. After an error it asks for no further log of it: its host does not answer.
func (c *logCollector) machine(ctx context.Context, o *unstructured.Unstructured) {
	services := machineServices
	if _, controlPlane := o.GetLabels()[clusterv1.MachineControlPlaneLabel]; !controlPlane {
		services = services[:workerServices]
	}
	for _, service := range services {
		if !c.more(ctx, o.GetNamespace()) {
			return
		}
		data, err := c.log(ctx, o, service)
		if !c.add(o, service, data, err) {
			return
		}
	}
}

// more reports whether another log of a namespace can be read.
func (c *logCollector) more(ctx context.Context, namespace string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.noAPI != nil || c.refusals[namespace] != nil {
		return false
	}
	if c.size >= c.limits.total || ctx.Err() != nil {
		c.omitted++
		return false
	}
	return true
}

// log returns the end of a log.
func (c *logCollector) log(ctx context.Context, o *unstructured.Unstructured, service string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, c.limits.each)
	defer cancel()
	stream, err := c.open(ctx, o.GetNamespace(), o.GetName(), accessapi.LogOptions{Service: service, TailLines: c.limits.lines})
	if err != nil {
		return nil, err
	}
	defer stream.Close()
	data, err := io.ReadAll(io.LimitReader(stream, int64(c.limits.log)+1))
	if len(data) > c.limits.log {
		data = append(data[:c.limits.log], "\n(the rest is left out)\n"...)
	}
	return data, err
}

// add stores a log or its error. It returns false if no further log of this machine can be read.
func (c *logCollector) add(o *unstructured.Unstructured, service string, data []byte, err error) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case apierrors.IsForbidden(err):
		c.refusals[o.GetNamespace()] = err
		return false
	case apierrors.IsNotFound(err) && !namesObject(err):
		c.noAPI = accessError(err)
		return false
	case apierrors.IsNotFound(err):
		return true // The machine does not run this service.
	case err != nil:
		c.errs = append(c.errs, fmt.Errorf("log %s of machine %s/%s: %w", service, o.GetNamespace(), o.GetName(), err))
	}
	if len(data) > 0 {
		c.files["machines/"+o.GetNamespace()+"/"+o.GetName()+"/"+service+".log"] = data
		c.size += len(data)
	}
	return err == nil
}

func (c *logCollector) result() error {
	err := errors.Join(append(c.errs, c.noAPI)...)
	if c.omitted > 0 {
		err = errors.Join(err, fmt.Errorf("logs of %d machines are left out or incomplete: the limits are %d bytes and %s", c.omitted, c.limits.total, c.limits.all))
	}
	return err
}
