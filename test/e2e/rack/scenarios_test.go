//go:build e2e && rack

package rack_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/controller-runtime/pkg/client"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/test/e2e/harness"
	"capstan.dev/capstan/test/rack"
	"capstan.dev/capstan/test/versions"
)

const (
	name, nodes = "rack", 6
	// slowest bounds each wait for the cluster to be well again.
	slowest = 10 * time.Minute
)

// scene is a cluster with three control plane machines and three workers on three boxes, and a client that writes all the time.
type scene struct {
	*testing.T
	plane, other *harness.Plane // other takes the cluster in a move
	cluster      *harness.Cluster
	boxes        []*rack.Box
	router       rack.Space
	stack        stack
	writer       *writer
	addresses    *addresses
}

// stack contains the addresses of a cluster for its clients: the virtual one of the endpoint, that of a Service, and their network.
type stack struct{ endpoint, service, network string }

var (
	ipv4Stack = stack{rack.VirtualAddress, rack.ServiceAddress, rack.ClientNetwork}
	ipv6Stack = stack{rack.VirtualIPv6Address, rack.ServiceIPv6Address, rack.ClientIPv6Network}
)

// part is a part of a long test.
type part struct {
	name string
	play func(*scene)
}

// IM-02, CP-16, CP-15, CTL-12: what a rack must survive, in one long run: see `make test-rack`. Each part prints the longest time
// without a write and the time until the cluster was well again. No part loses an acknowledged write or gives an address to two
// machines.
func TestScenarios(t *testing.T) {
	from, err := versions.FormerMinor(harness.Bin(), harness.KubernetesVersion)
	expect.NoError(t, err)
	newScene(t, ipv4Stack, "--kubernetes-version", from).play(
		part{"loss of each host", (*scene).eachHost},
		part{"cut between two hosts", (*scene).cut},
		part{"loss of the management plane with a host", (*scene).planeAndHost},
		part{"slow host", (*scene).slowHost},
		part{"full hosts", (*scene).fullHosts},
		part{"loss of the host of a Service", (*scene).serviceMoves},
		part{"Kubernetes upgrade", (*scene).upgrade},
		part{"rotation of the certificate authority", (*scene).rotate},
		part{"move to another management plane", (*scene).move},
		part{"return of a host whose machines were replaced", (*scene).replaced},
	)
}

// IC-10, CTL-12: a cluster with IPv6 only, whose endpoint is an IPv6 virtual address.
func TestIPv6Scenarios(t *testing.T) {
	t.Setenv("CAPSTAN_MACHINE_IPV6_CIDR", "fd00:231:17::/64")
	newScene(t, ipv6Stack, "--flavor", "ipv6").play(
		part{"loss of the host with the endpoint", (*scene).endpointMoves},
		part{"loss of the host of a Service", (*scene).serviceMoves},
		part{"move to another management plane", (*scene).move},
	)
}

// play plays the parts, each with the cluster of the previous one.
func (s *scene) play(parts ...part) {
	for _, p := range parts {
		if !s.Run(p.name, func(t *testing.T) { p.play(s.in(t)) }) {
			s.Fatalf("%s failed: the following parts need a cluster that is well", p.name)
		}
		s.writer.t = s.T
		s.writer.check()
		s.addresses.check(s.T)
	}
}

func newScene(t *testing.T, of stack, args ...string) *scene {
	t.Helper()
	s := &scene{T: t, stack: of, addresses: &addresses{owners: map[string]string{}}}
	for _, start := range []struct {
		plane **harness.Plane
		args  []string
	}{{&s.plane, nil}, {&s.other, []string{"--no-hosts"}}} {
		*start.plane = startPlane(t, start.args...)
	}
	s.boxes, s.router = rack.Register(t.Context(), t, s.plane, 3, "--reserve-memory", reserve(t, "8Gi"))
	emptyAtTheEnd(t, s.boxes)
	s.cluster = s.plane.CreateCluster(t, "default", name, append([]string{"--control-plane-machines", "3", "--workers", "3", "--timeout", "9m"}, args...)...)
	s.endpointIs(of.endpoint)
	s.writer = newWriter(t, s.cluster)
	s.addresses.watch(t, s)
	s.well("creation", time.Now())
	return s
}

// reserve returns the memory that capstand must reserve, so that its machines can have so much.
func reserve(t *testing.T, machines string) string {
	t.Helper()
	var info syscall.Sysinfo_t
	expect.NoError(t, syscall.Sysinfo(&info))
	left := resource.MustParse(machines)
	return fmt.Sprint(int64(info.Totalram)*int64(info.Unit) - left.Value())
}

// in returns the scene for a part of the test.
func (s *scene) in(t *testing.T) *scene {
	part := *s
	part.T = t
	part.writer.t = t
	return &part
}

// endpointIs expects the host of the endpoint.
func (s *scene) endpointIs(want string) {
	s.Helper()
	capstan := &infrav1.CapstanCluster{}
	expect.NoError(s.T, s.cluster.Plane.Client.Get(s.Context(), client.ObjectKey{Namespace: "default", Name: name}, capstan))
	if host := capstan.Spec.ControlPlaneEndpoint.Host; host != want {
		s.Fatalf("the endpoint is %s, want the virtual address %s", host, want)
	}
}

// holder waits until one of the boxes has the endpoint.
func (s *scene) holder() *rack.Box {
	s.Helper()
	return rack.HolderOf(s, s.boxes, s.stack.endpoint)
}

// well waits until all Nodes are Ready and the Cluster is available, and logs the time since an event.
func (s *scene) well(what string, since time.Time) {
	s.Helper()
	harness.Eventually(s.T, "well after "+what, slowest, func(ctx context.Context) error {
		cluster := &clusterv1.Cluster{}
		if err := s.cluster.Plane.Client.Get(ctx, client.ObjectKey{Namespace: "default", Name: name}, cluster); err != nil {
			return err
		}
		if !conditions.IsTrue(cluster, clusterv1.ClusterAvailableCondition) {
			return fmt.Errorf("the Cluster is not available: %v", cluster.Status.Conditions)
		}
		// The Nodes of a host that was away for some seconds were always Ready.
		for _, m := range s.cluster.Machines(s.T) {
			if !conditions.IsTrue(&m, clusterv1.ReadyCondition) {
				return fmt.Errorf("CapstanMachine %s is not Ready: %v", m.Name, m.Status.Conditions)
			}
		}
		return s.cluster.NodesReady(ctx, nodes)
	})
	s.Logf("%s: well again after %s", what, time.Since(since).Round(100*time.Millisecond))
}

// writing writes until a change has its effect. It returns the longest time without a write.
func (s *scene) writing(what string, effect func()) (longest time.Duration) {
	s.Helper()
	var done sync.WaitGroup
	ctx, cancel := context.WithCancel(s.Context())
	done.Go(func() { defer cancel(); effect() })
	got, err := s.writer.WriteUntil(s.Context(), func() bool { return ctx.Err() != nil })
	done.Wait()
	expect.NoError(s.T, err)
	s.Logf("%s: %s", what, got)
	return got.Longest
}

func (s *scene) eachHost() {
	for _, b := range s.boxes {
		endpoint := b == s.holder()
		b.Lose()
		s.writer.write(fmt.Sprintf("loss of %s (endpoint: %v)", b.Name(), endpoint), 15*time.Second)
		since := time.Now()
		b.Return()
		s.well("return of "+b.Name(), since)
	}
}

// endpointMoves loses the host that has the endpoint. No other one has it too, and it stays where it is when the lost host returns.
func (s *scene) endpointMoves() {
	lost := s.holder()
	lost.Lose()
	longest := s.writer.write("loss of "+lost.Name()+" with the endpoint "+s.stack.endpoint, 15*time.Second)
	if longest > 10*time.Second {
		s.Errorf("%s without a write", longest)
	}
	second := s.holder()
	if second == lost {
		s.Errorf("%s is lost, and has the endpoint", lost.Name())
	}
	since := time.Now()
	lost.Return()
	s.well("return of "+lost.Name(), since)
	if now := s.holder(); now != second || lost.Has(s.stack.endpoint) {
		s.Errorf("the endpoint moved when its previous host returned: from %s to %s", second.Name(), now.Name())
	}
}

func (s *scene) cut() {
	for i, b := range s.boxes {
		other := s.boxes[(i+1)%len(s.boxes)]
		mend := rack.Cut(s.router, b, other)
		s.writer.write(fmt.Sprintf("cut between %s and %s", b.Name(), other.Name()), 10*time.Second)
		mend()
		s.well("end of the cut", time.Now())
	}
}

func (s *scene) planeAndHost() {
	freeze := func(sig syscall.Signal) {
		for _, process := range []string{"manager", "capi-core-manager"} {
			for _, p := range s.plane.Find(s.T, "", process) {
				expect.NoError(s.T, syscall.Kill(p.PID, sig))
			}
		}
	}
	freeze(syscall.SIGSTOP)
	lost := s.holder()
	lost.Lose()
	s.writer.write("loss of the management plane and of "+lost.Name(), 20*time.Second)
	since := time.Now()
	freeze(syscall.SIGCONT)
	lost.Return()
	s.well("return of both", since)
}

func (s *scene) slowHost() {
	slow := s.holder()
	mend := rack.Slow(s, s.router, slow, rack.Line{Delay: 50 * time.Millisecond, Loss: 0.02})
	defer mend()
	s.writer.write(slow.Name()+" delays by 50 ms each way and loses 2 % of its packets", 30*time.Second)
	mend()
	s.well("end of the slow line", time.Now())
}

// fullHosts adds a worker for which no host has memory. It is placed when a host has more.
func (s *scene) fullHosts() {
	worker := s.largeWorker("8Gi")
	var message string
	harness.Eventually(s.T, "the reason of each host", time.Minute, func(context.Context) error {
		for _, m := range s.cluster.Machines(s.T) {
			if c := conditions.Get(&m, infrav1.HostAssignedCondition); c != nil && c.Reason == infrav1.NoHostReason {
				message = c.Message
				return nil
			}
		}
		return errors.New("every machine is placed")
	})
	for _, b := range s.boxes {
		if !strings.Contains(message, b.Name()+" has ") {
			s.Errorf("no reason of %s: %s", b.Name(), message)
		}
	}
	s.Logf("full hosts: %s", message)
	since, larger := time.Now(), s.boxes[0]
	larger.End(syscall.SIGTERM)
	larger.Args = slices.Replace(larger.Args, len(larger.Args)-1, len(larger.Args), "256Mi") // of --reserve-memory
	larger.Start()
	harness.Eventually(s.T, "seven Nodes Ready", slowest, func(ctx context.Context) error { return s.cluster.NodesReady(ctx, nodes+1) })
	s.Logf("full hosts: the worker was Ready %s after a host had memory for it", time.Since(since).Round(time.Second))
	expect.NoError(s.T, s.plane.Client.Delete(s.Context(), worker))
	s.well("deletion of the large worker", time.Now())
}

// largeWorker creates a MachineDeployment with one machine.
func (s *scene) largeWorker(memory string) *clusterv1.MachineDeployment {
	s.Helper()
	all := &clusterv1.MachineDeploymentList{}
	expect.NoError(s.T, s.plane.Client.List(s.Context(), all, client.InNamespace("default")))
	large := all.Items[0].DeepCopy()
	template := &infrav1.CapstanMachineTemplate{}
	expect.NoError(s.T, s.plane.Client.Get(s.Context(), client.ObjectKey{Namespace: "default", Name: large.Spec.Template.Spec.InfrastructureRef.Name}, template))
	template.ObjectMeta = metav1.ObjectMeta{Namespace: "default", Name: "large"}
	template.Spec.Template.Spec.Memory = ptr.To(resource.MustParse(memory))
	expect.NoError(s.T, s.plane.Client.Create(s.Context(), template))
	large.ObjectMeta = metav1.ObjectMeta{Namespace: "default", Name: "large", Labels: large.Labels}
	large.Spec.Replicas = ptr.To[int32](1)
	large.Spec.Selector.MatchLabels = map[string]string{"size": "large"}
	large.Spec.Template.Labels = map[string]string{"size": "large", clusterv1.ClusterNameLabel: name}
	large.Spec.Template.Spec.InfrastructureRef.Name = "large"
	large.Status = clusterv1.MachineDeploymentStatus{}
	expect.NoError(s.T, s.plane.Client.Create(s.Context(), large))
	return large
}

func (s *scene) controlPlane(ctx context.Context) (*controlplanev1.CapstanControlPlane, error) {
	cp := &controlplanev1.CapstanControlPlane{}
	err := s.cluster.Plane.Client.Get(ctx, client.ObjectKey{Namespace: "default", Name: name + "-control-plane"}, cp)
	return cp, err
}

func (s *scene) changeControlPlane(change func(*controlplanev1.CapstanControlPlane)) {
	s.Helper()
	cp, err := s.controlPlane(s.Context())
	expect.NoError(s.T, err)
	before := cp.DeepCopy()
	change(cp)
	expect.NoError(s.T, s.cluster.Plane.Client.Patch(s.Context(), cp, client.MergeFrom(before)))
}

func (s *scene) upgrade() {
	since := time.Now()
	s.changeControlPlane(func(cp *controlplanev1.CapstanControlPlane) { cp.Spec.Version = harness.KubernetesVersion })
	s.writing("upgrade of the control plane", func() {
		s.versionsAre("control plane", func(m *clusterv1.Machine) bool { _, ok := m.Labels[clusterv1.MachineControlPlaneLabel]; return ok })
	})
	all := &clusterv1.MachineDeploymentList{}
	expect.NoError(s.T, s.plane.Client.List(s.Context(), all, client.InNamespace("default")))
	for i := range all.Items {
		before := all.Items[i].DeepCopy()
		all.Items[i].Spec.Template.Spec.Version = harness.KubernetesVersion
		expect.NoError(s.T, s.plane.Client.Patch(s.Context(), &all.Items[i], client.MergeFrom(before)))
	}
	s.writing("upgrade of the workers", func() { s.versionsAre("all", func(*clusterv1.Machine) bool { return true }) })
	s.well("upgrade", since)
	on := map[string]int{}
	for _, m := range s.cluster.Machines(s.T) {
		if _, ok := m.Labels[clusterv1.MachineControlPlaneLabel]; ok {
			on[m.Spec.HostName]++
		}
	}
	if len(on) != len(s.boxes) {
		s.Errorf("the control plane machines are on %v, want one on each host", on)
	}
}

// versionsAre waits until the selected Machines have the new version and are Ready, and as many exist as before.
func (s *scene) versionsAre(what string, selected func(*clusterv1.Machine) bool) {
	harness.Eventually(s.T, "the version of "+what, slowest, func(ctx context.Context) error {
		list := &clusterv1.MachineList{}
		if err := s.plane.Client.List(ctx, list, client.InNamespace("default")); err != nil {
			return err
		}
		for i := range list.Items {
			m := &list.Items[i]
			if selected(m) && (m.Spec.Version != harness.KubernetesVersion || !conditions.IsTrue(m, clusterv1.MachineReadyCondition)) {
				return fmt.Errorf("%s has version %s", m.Name, m.Spec.Version)
			}
		}
		if len(list.Items) != nodes {
			return fmt.Errorf("%d Machines", len(list.Items))
		}
		return nil
	})
}

func (s *scene) rotate() {
	since := time.Now()
	s.changeControlPlane(func(cp *controlplanev1.CapstanControlPlane) { cp.Spec.Certificates.RotateCAAfter = metav1.Now() })
	rotating := func(want string) {
		harness.Eventually(s.T, want, slowest, func(ctx context.Context) error {
			cp, err := s.controlPlane(ctx)
			if err != nil {
				return err
			}
			if reason := conditions.GetReason(cp, controlplanev1.CertificateAuthorityRotatingCondition); reason != want || cp.Status.ObservedGeneration != cp.Generation {
				return fmt.Errorf("%s: %s", reason, conditions.GetMessage(cp, controlplanev1.CertificateAuthorityRotatingCondition))
			}
			return nil
		})
	}
	rotating(controlplanev1.SigningNewReason)
	rotating(controlplanev1.NotRotatingReason)
	s.Logf("rotation of the certificate authority: %s", time.Since(since).Round(time.Second))
	s.cluster.Connect(s.T) // The client trusted the previous authority.
	fresh := newWriter(s.T, s.cluster)
	s.writer.Trust(fresh.Writer)
	s.writer.write("new certificate authority", 3*time.Second)
	s.well("rotation", since)
}

func (s *scene) move() {
	here, there := admin(s.T, s.plane), admin(s.T, s.other)
	before := s.identities()
	since := time.Now()
	config := filepath.Join(s.TempDir(), "clusterctl.yaml")
	expect.NoError(s.T, os.WriteFile(config, nil, 0o600))
	move := func(from, to string, at *harness.Plane) {
		longest := s.writing("move", func() {
			_, err := harness.Command(s.Context(), nil, filepath.Join(harness.Bin(), "clusterctl"), "move", "--config", config,
				"--kubeconfig", from, "--to-kubeconfig", to, "--namespace", "default")
			if err != nil {
				s.Error(err)
			}
		})
		if longest > 5*time.Second {
			s.Errorf("%s without a write during the move", longest)
		}
		s.cluster.Plane = at
		s.well("move", since)
	}
	move(here, there, s.other)
	if after := s.identities(); !maps.Equal(before, after) {
		s.Errorf("before %v, after %v", before, after)
	}
	s.endpointIs(s.stack.endpoint)
	lost := s.holder()
	lost.Lose()
	if longest := s.writer.write("loss of "+lost.Name()+" after the move", 10*time.Second); longest > 10*time.Second {
		s.Errorf("%s without a write", longest)
	}
	since = time.Now()
	lost.Return()
	s.well("return of "+lost.Name()+" after the move", since)
	since = time.Now()
	move(there, here, s.plane)
}

// admin writes the kubeconfig of a plane to a file.
func admin(t *testing.T, plane *harness.Plane) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "kubeconfig")
	expect.NoError(t, os.WriteFile(path, []byte(plane.Must(t, "get", "kubeconfig", "--management")), 0o600))
	return path
}

// identities are the ids, hosts and addresses of the machines, by name.
func (s *scene) identities() map[string]string {
	out := map[string]string{}
	for _, m := range s.cluster.Machines(s.T) {
		out[m.Name] = fmt.Sprint(m.Spec.ID, m.Spec.HostName, m.Spec.Network.Addresses)
	}
	return out
}

func (s *scene) replaced() {
	lost, since := s.holder(), time.Now()
	old := idsOn(s.T, s.cluster, lost)
	replaceLostMachines(s.T, s.plane)
	lost.Lose()
	s.writing("replacement of the machines of "+lost.Name(), func() {
		harness.Eventually(s.T, "the control plane on two hosts", slowest, func(context.Context) error { return replacedBy(s.T, s.cluster, lost) })
	})
	s.Logf("the machines of %s were replaced after %s", lost.Name(), time.Since(since).Round(time.Second))
	since = time.Now()
	lost.Return()
	harness.Eventually(s.T, "no replaced machine on the returned host", slowest, func(ctx context.Context) error { return noneOf(ctx, lost, old) })
	s.well("return of "+lost.Name(), since)
}

// addresses watches that no address belongs to two machines.
type addresses struct {
	mu       sync.Mutex
	owners   map[string]string // id by address
	problems []string
}

// watch asks all hosts every second. An address is free again when no host and no CapstanMachine has it.
func (a *addresses) watch(t *testing.T, s *scene) {
	ctx, cancel := context.WithCancel(context.Background())
	var watching sync.WaitGroup
	watching.Go(func() {
		for ctx.Err() == nil {
			for _, b := range s.boxes {
				a.look(ctx, b)
			}
			select {
			case <-ctx.Done():
			case <-time.After(time.Second):
			}
		}
	})
	t.Cleanup(func() { cancel(); watching.Wait() })
}

// look records the machines of a host. One that does not answer keeps what it had: it may return.
func (a *addresses) look(ctx context.Context, b *rack.Box) {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	list, err := b.ListMachines(ctx, &hostpb.ListMachinesRequest{})
	if err != nil {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	maps.DeleteFunc(a.owners, func(_, owner string) bool { return strings.HasPrefix(owner, b.Name()+"/") })
	for _, m := range list.Machines {
		for _, address := range m.GetSpec().GetAddresses() {
			owner := b.Name() + "/" + m.GetSpec().GetId()
			if other, ok := a.owners[address.GetAddress()]; ok && other != owner {
				a.problems = append(a.problems, fmt.Sprintf("%s has the address %s of %s", owner, address.GetAddress(), other))
			}
			a.owners[address.GetAddress()] = owner
		}
	}
}

func (a *addresses) check(t *testing.T) {
	t.Helper()
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.owners) < nodes || len(a.problems) > 0 {
		t.Errorf("%d addresses, problems: %v", len(a.owners), a.problems)
	}
}
