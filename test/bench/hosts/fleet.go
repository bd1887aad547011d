package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/test/bench/measure"
	"capstan.dev/capstan/test/plane"
)

const (
	namespace   = metav1.NamespaceDefault
	hollowLabel = "hollow"
	// bootstrapData is the Secret of all machines. Hollow machines run no programs.
	bootstrapData = "bootstrap"
	// bootDelay keeps the machines from registering Nodes, because their clusters have no API servers. Each machine would try
	// it twice a second: the tries of 5,000 machines occupied one of two processors and slowed the manager down.
	bootDelay = 24 * time.Hour
	// limit bounds each step. A slow box takes an hour for thousands of machines.
	limit = 2 * time.Hour
	// reportEvery is the number of machines after which the costs since the last report are printed: they show whether a machine costs
	// more when there are more of them.
	reportEvery = 500
	// listEvery is the time between two looks at all objects. A list of thousands of objects occupies the API server.
	listEvery = 2 * time.Second
)

// fleet is a number of hollow hosts with one plane.
type fleet struct {
	o      options
	n      int
	root   string // of the plane
	config *rest.Config
	client client.Client
	meter  measure.Meter
	speed  measure.Yardstick // while machines are created
	hosts  []*exec.Cmd
}

func newFleet(p *plane.Plane, o options, n int) (*fleet, error) {
	meter, err := measure.NewMeter(p)
	return &fleet{o: o, n: n, root: p.Root, config: p.Config, client: p.Client, meter: meter}, err
}

func (f *fleet) measure(ctx context.Context) (*result, error) {
	r := &result{hosts: f.n, clusters: f.n * f.o.clusters, machines: f.n * f.o.machines}
	for _, step := range []struct {
		name string
		into *measure.Step
		run  func(context.Context) error
	}{
		{"hosts", &r.connect, f.startHosts},
		{"clusters", &r.provision, f.createClusters},
		{"machines", &r.create, f.createMachines},
	} {
		var err error
		if *step.into, err = f.meter.TimedUntilSettled(ctx, step.run); err != nil {
			return nil, fmt.Errorf("%s: %w", step.name, err)
		}
	}
	r.work = f.speed.Mean()
	err := f.spread(ctx, r)
	if err == nil {
		r.rest, err = f.meter.AtRest(ctx)
	}
	if err == nil {
		r.lost, err = f.loseHost(ctx)
	}
	return r, err
}

// stop ends the hosts.
func (f *fleet) stop() {
	for _, host := range f.hosts {
		_ = host.Process.Kill()
		_ = host.Wait()
	}
}

// startHosts starts the hosts and waits until all are Ready. Their sockets are in the folder of the plane's own sockets, and
// have the same owner, because the manager does not run as root.
func (f *fleet) startHosts(ctx context.Context) error {
	sockets := filepath.Join(f.root, "sockets")
	info, err := os.Stat(sockets)
	if err != nil {
		return err
	}
	uid := strconv.Itoa(int(info.Sys().(*syscall.Stat_t).Uid))
	for i := range f.n {
		name := hostName(i)
		socket := filepath.Join(sockets, name+".sock")
		cmd := exec.Command(filepath.Join(f.o.bin, "capstand"), "hollow", "--root", filepath.Join(f.root, name), "--name", name,
			"--socket", socket, "--socket-uid", uid, "--versions", f.o.version, "--cpus", "128", "--memory", "512Gi",
			"--boot-delay", bootDelay.String())
		if err := cmd.Start(); err != nil {
			return err
		}
		f.hosts = append(f.hosts, cmd)
		host := &infrav1.CapstanHost{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{hollowLabel: "true"}}}
		host.Spec = infrav1.CapstanHostSpec{
			Address: "unix://" + socket, ControlPlane: ptr.To(false), FailureDomain: fmt.Sprintf("rack-%d", i/10),
		}
		if err := f.client.Create(ctx, host); err != nil {
			return err
		}
	}
	return f.until(ctx, listEvery, func(ctx context.Context) (string, error) {
		list := &infrav1.CapstanHostList{}
		err := f.client.List(ctx, list, client.MatchingLabels{hollowLabel: "true"})
		ready := 0
		for i := range list.Items {
			if conditions.IsTrue(&list.Items[i], clusterv1.ReadyCondition) {
				ready++
			}
		}
		return remaining("hosts Ready", ready, f.n), err
	})
}

func hostName(i int) string { return fmt.Sprintf("hollow-%03d", i) }

func clusterName(i int) string { return fmt.Sprintf("fleet-%03d", i) }

// createClusters creates clusters with an external endpoint.
func (f *fleet) createClusters(ctx context.Context) error {
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: bootstrapData}, Type: clusterv1.ClusterSecretType,
		StringData: map[string]string{"value": "#cloud-config\n", "format": "cloud-config"}}
	if err := f.client.Create(ctx, secret); err != nil {
		return err
	}
	n := f.n * f.o.clusters
	for i := range n {
		meta := metav1.ObjectMeta{Namespace: namespace, Name: clusterName(i)}
		capstan := &infrav1.CapstanCluster{ObjectMeta: meta}
		capstan.Labels = map[string]string{clusterv1.ClusterNameLabel: meta.Name}
		capstan.Spec.LoadBalancer.Mode = infrav1.LoadBalancerExternal
		capstan.Spec.ControlPlaneEndpoint = clusterv1.APIEndpoint{Host: "198.19.0.1", Port: 6443}
		capstan.Spec.HostSelector = &metav1.LabelSelector{MatchLabels: map[string]string{hollowLabel: "true"}}
		cluster := &clusterv1.Cluster{ObjectMeta: meta}
		cluster.Spec.InfrastructureRef = clusterv1.ContractVersionedObjectReference{APIGroup: infrav1.GroupVersion.Group, Kind: "CapstanCluster", Name: meta.Name}
		for _, o := range []client.Object{cluster, capstan} {
			if err := f.client.Create(ctx, o); err != nil {
				return err
			}
		}
	}
	return f.until(ctx, listEvery, func(ctx context.Context) (string, error) {
		list := &clusterv1.ClusterList{}
		err := f.client.List(ctx, list)
		ready := 0
		for _, c := range list.Items {
			if ptr.Deref(c.Status.Initialization.InfrastructureProvisioned, false) {
				ready++
			}
		}
		return remaining("clusters provisioned", ready, n), err
	})
}

// createMachines creates the Machines of all clusters and waits until all run on hosts. The same number is on its way with any number of
// hosts, so that two results differ by their hosts and not by the length of the queue.
func (f *fleet) createMachines(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	machines, err := f.watchMachines(ctx)
	if err != nil {
		return err
	}
	n, created := f.n*f.o.machines, 0
	report, err := f.newReport(ctx)
	if err != nil {
		return err
	}
	return f.until(ctx, listEvery, func(ctx context.Context) (string, error) {
		running, why, err := running(ctx, machines)
		err = errors.Join(err, f.speed.Work())
		for ; err == nil && created < min(n, running+f.o.atOnce); created++ {
			err = f.createMachine(ctx, created)
		}
		if err == nil && running >= report.machines+reportEvery {
			report, err = report.print(ctx, running)
		}
		return remaining("machines running. "+why, running, n), err
	})
}

// report is the state of the fleet when costs were last printed.
type report struct {
	meter    measure.Meter
	machines int
	at       time.Time
	cost     measure.Cost
}

func (f *fleet) newReport(ctx context.Context) (report, error) {
	cost, err := f.meter.Read(ctx)
	return report{meter: f.meter, at: time.Now(), cost: cost}, err
}

// print prints the costs since r, and returns the report of now.
func (r report) print(ctx context.Context, machines int) (report, error) {
	cost, err := r.meter.Read(ctx)
	if err != nil {
		return r, err
	}
	now := report{meter: r.meter, machines: machines, at: time.Now(), cost: cost}
	since, more := cost.Since(r.cost), float64(machines-r.machines)
	fmt.Printf("  machines %5d to %5d %10.1f/s %8.1f ms of the manager's CPU each, %.1f writes each\n",
		r.machines, machines, more/now.at.Sub(r.at).Seconds(), since.CPU.Seconds()*1000/more, float64(since.Ours)/more)
	return now, nil
}

// createMachine creates the Machine with a number. The clusters get their machines in turns.
func (f *fleet) createMachine(ctx context.Context, i int) error {
	cluster := clusterName(i % (f.n * f.o.clusters))
	meta := metav1.ObjectMeta{Namespace: namespace, Name: fmt.Sprintf("%s-%05d", cluster, i), Labels: map[string]string{clusterv1.ClusterNameLabel: cluster}}
	capstan := &infrav1.CapstanMachine{ObjectMeta: meta}
	capstan.Spec.CPUs, capstan.Spec.Memory = 1, ptr.To(resource.MustParse("1Gi"))
	machine := &clusterv1.Machine{ObjectMeta: meta}
	machine.Spec = clusterv1.MachineSpec{
		ClusterName: cluster, Version: f.o.version, Bootstrap: clusterv1.Bootstrap{DataSecretName: ptr.To(bootstrapData)},
		InfrastructureRef: clusterv1.ContractVersionedObjectReference{APIGroup: infrav1.GroupVersion.Group, Kind: "CapstanMachine", Name: meta.Name},
	}
	if err := f.client.Create(ctx, machine); err != nil {
		return err
	}
	return f.client.Create(ctx, capstan)
}

// watchMachines returns a cache of the CapstanMachines that ends with ctx. A list of thousands of machines every two seconds would cost the
// API server up to a third of a processor.
func (f *fleet) watchMachines(ctx context.Context) (client.Reader, error) {
	machines, err := cache.New(f.config, cache.Options{Scheme: f.client.Scheme()})
	if err != nil {
		return nil, err
	}
	if _, err := machines.GetInformer(ctx, &infrav1.CapstanMachine{}); err != nil {
		return nil, err
	}
	go func() { _ = machines.Start(ctx) }()
	if !machines.WaitForCacheSync(ctx) {
		return nil, errors.New("cannot watch the machines")
	}
	return machines, nil
}

// running returns the number of machines that run on hosts, and why another one does not.
func running(ctx context.Context, machines client.Reader) (n int, why string, err error) {
	list := &infrav1.CapstanMachineList{}
	err = machines.List(ctx, list, client.UnsafeDisableDeepCopy)
	for i := range list.Items {
		if m := &list.Items[i]; m.Spec.HostName != "" && conditions.IsTrue(m, infrav1.MachineRunningCondition) {
			n++
		} else {
			why = m.Name + ": " + conditions.GetMessage(m, clusterv1.ReadyCondition)
		}
	}
	return n, why, err
}

// spread reads how the machines are distributed.
func (f *fleet) spread(ctx context.Context, r *result) error {
	list := &infrav1.CapstanMachineList{}
	if err := f.client.List(ctx, list); err != nil {
		return err
	}
	on := map[string]int{}
	for _, m := range list.Items {
		on[m.Spec.HostName]++
	}
	r.hostsInUse, r.leastBusy = len(on), len(list.Items)
	for _, n := range on {
		r.busiest, r.leastBusy = max(r.busiest, n), min(r.leastBusy, n)
	}
	return nil
}

// loseHost stops a host without notice, and returns the seconds until its CapstanHost is not Ready.
func (f *fleet) loseHost(ctx context.Context) (float64, error) {
	start := time.Now()
	// A stopped process keeps its connections, like a host without power.
	if err := f.hosts[0].Process.Signal(syscall.SIGSTOP); err != nil {
		return 0, err
	}
	err := f.until(ctx, 100*time.Millisecond, func(ctx context.Context) (string, error) {
		host := &infrav1.CapstanHost{}
		err := f.client.Get(ctx, client.ObjectKey{Name: hostName(0)}, host)
		if conditions.IsTrue(host, clusterv1.ReadyCondition) {
			return "the stopped host is still Ready", err
		}
		return "", err
	})
	return time.Since(start).Seconds(), err
}

func remaining(what string, have, want int) string {
	if have >= want {
		return ""
	}
	return fmt.Sprintf("%d of %d %s", have, want, what)
}

// until waits until missing returns nothing.
func (f *fleet) until(ctx context.Context, every time.Duration, missing func(context.Context) (string, error)) error {
	last := ""
	err := wait.PollUntilContextTimeout(ctx, every, limit, true, func(ctx context.Context) (done bool, err error) {
		last, err = missing(ctx)
		return last == "" && err == nil, err
	})
	if err != nil && last != "" {
		return errors.Join(err, errors.New(last))
	}
	return err
}
