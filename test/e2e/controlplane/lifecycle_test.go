//go:build e2e

package controlplane

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/controller-runtime/pkg/client"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	etcdv1 "capstan.dev/capstan/api/etcd/v1beta2"
	"capstan.dev/capstan/test/e2e/harness"
)

// limit is the timeout of one step on a busy host.
const limit = 4 * time.Minute

// subject is the cluster whose control plane is tested.
type subject struct {
	*harness.Cluster
	etcd   client.Client // a client with the kind EtcdMember
	made   map[string]bool
	writer *writer // the writer of TestLife
	// volumes of the machines of TestLife after the upgrade
	volumes *harness.Volumes
}

// TestLife changes one control plane in many ways, with a client that writes: 1, 3, 5, 3 and 1 machines (CP-03), partly while
// components are killed, an upgrade to the next minor version (CP-05) with another template, whose machines have volumes and
// metrics-server, metadata of Nodes (CP-17), a deleted Machine, a machine that is killed permanently (CP-10), lost
// owner references (ALL-11). No acknowledged write is lost.
func TestLife(t *testing.T) {
	s := &subject{Cluster: plane.CreateCluster(t, "default", "ha", "--workers", "0", "--kubernetes-version", harness.FormerMinor(t)), made: map[string]bool{}}
	s.etcd = memberClient(t, s.Kubeconfig)
	s.settled(t, 1)
	w := startWriter(t, s.Cluster)
	s.writer, s.volumes = w, s.FollowVolumes(t)
	for _, part := range []struct {
		name string
		run  func(*testing.T, *subject)
	}{
		{"labels and annotations reach the Node", reachNode},
		{"from 1 to 3 while components are killed", func(t *testing.T, s *subject) { s.scaleUnderKills(t, 3) }},
		{"lost owner references", lostOwners},
		{"the machine of etcd's leader is cut off", cutOff},
		{"packets are lost", losePackets},
		{"messages between etcd members are delayed", slowMembers},
		{"an upgrade to machines with volumes", upgrade},
		{"a deleted Machine is replaced", deleteOne},
		{"a permanently killed machine is replaced", killOne},
		{"metrics after the loss of machines", haveMetrics},
		{"from 3 to 5", func(t *testing.T, s *subject) { s.scale(t, 5); s.settled(t, 5) }},
		{"from 5 to 3", func(t *testing.T, s *subject) { s.scale(t, 3); s.settled(t, 3) }},
		{"from 3 to 1 while components are killed", func(t *testing.T, s *subject) { s.scaleUnderKills(t, 1) }},
	} {
		if !t.Run(part.name, func(t *testing.T) {
			w.LongestGap()
			start := time.Now()
			part.run(t, s)
			t.Logf("took %.1f s; longest gap between acknowledged writes %.1f s", time.Since(start).Seconds(), w.LongestGap().Seconds())
		}) {
			t.FailNow()
		}
	}
	w.check(t)
	goneWithoutOwners(t, s)
	s.volumes.Removed(t)
}

// reachNode (CP-17): metadata for Nodes in the template of the machines is added to the Node of a running machine,
// changed and removed. The machine is not replaced. Metadata that is not for Nodes is not copied.
func reachNode(t *testing.T, s *subject) {
	machines := s.mustMachines(t)
	nodes := s.Client
	for _, value := range []string{"one", "two", ""} {
		s.change(t, func(cp *controlplanev1.CapstanControlPlane) {
			meta := clusterv1.ObjectMeta{}
			if value != "" {
				meta.Labels = map[string]string{"node-role.kubernetes.io/" + value: "", "node.cluster.x-k8s.io/team": value, "team": value}
				meta.Annotations = map[string]string{"node.cluster.x-k8s.io/note": value, "note": value}
			}
			cp.Spec.MachineTemplate.ObjectMeta = meta
		})
		harness.Eventually(t, "the Node has "+value, limit, func(ctx context.Context) error {
			for _, machine := range machines {
				node := &corev1.Node{}
				if err := nodes.Get(ctx, client.ObjectKey{Name: machine.Status.NodeRef.Name}, node); err != nil {
					return err
				}
				_, role := node.Labels["node-role.kubernetes.io/"+value]
				if node.Labels["node.cluster.x-k8s.io/team"] != value || node.Annotations["node.cluster.x-k8s.io/note"] != value || role != (value != "") {
					return fmt.Errorf("labels %v, annotations %v", node.Labels, node.Annotations)
				}
				if node.Labels["team"]+node.Annotations["note"] != "" {
					t.Errorf("the Node has metadata that is not for Nodes: %v, %v", node.Labels, node.Annotations)
				}
			}
			return nil
		})
	}
	s.settled(t, len(machines))
	for name, m := range s.mustMachines(t) {
		if m.UID != machines[name].UID {
			t.Errorf("Machine %s was replaced", name)
		}
	}
}

func memberClient(t *testing.T, kubeconfig string) client.Client {
	t.Helper()
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	scheme := runtime.NewScheme()
	if err := etcdv1.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	config.Timeout = 5 * time.Second
	out, err := client.New(config, client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func (s *subject) controlPlane(ctx context.Context) (*controlplanev1.CapstanControlPlane, error) {
	list := &controlplanev1.CapstanControlPlaneList{}
	if err := plane.Client.List(ctx, list, client.InNamespace(s.Namespace), client.MatchingLabels{clusterv1.ClusterNameLabel: s.Name}); err != nil {
		return nil, err
	}
	if len(list.Items) != 1 {
		return nil, fmt.Errorf("%d control planes", len(list.Items))
	}
	return &list.Items[0], nil
}

// machines returns the Machines of the control plane by name.
func (s *subject) machines(ctx context.Context) (map[string]clusterv1.Machine, error) {
	list := &clusterv1.MachineList{}
	if err := plane.Client.List(ctx, list, client.InNamespace(s.Namespace), client.MatchingLabels{clusterv1.ClusterNameLabel: s.Name}, client.HasLabels{clusterv1.MachineControlPlaneLabel}); err != nil {
		return nil, err
	}
	out := map[string]clusterv1.Machine{}
	for _, m := range list.Items {
		out[m.Name], s.made[m.Name] = m, true
	}
	return out, nil
}

func (s *subject) mustMachines(t *testing.T) map[string]clusterv1.Machine {
	t.Helper()
	out, err := s.machines(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// change changes the control plane. It repeats the change after a conflict.
func (s *subject) change(t *testing.T, change func(*controlplanev1.CapstanControlPlane)) {
	t.Helper()
	harness.Eventually(t, "a change of the control plane", 30*time.Second, func(ctx context.Context) error {
		cp, err := s.controlPlane(ctx)
		if err != nil {
			return err
		}
		before := cp.DeepCopy()
		change(cp)
		return plane.Client.Patch(ctx, cp, client.MergeFrom(before))
	})
}

func (s *subject) scale(t *testing.T, n int32) {
	t.Helper()
	s.change(t, func(cp *controlplanev1.CapstanControlPlane) { cp.Spec.Replicas = &n })
}

// settled waits until there are exactly n Machines, all up to date, n healthy voting members, and n Nodes.
func (s *subject) settled(t *testing.T, n int) {
	t.Helper()
	harness.Eventually(t, fmt.Sprintf("%d healthy machines", n), limit, func(ctx context.Context) error {
		machines, err := s.machines(ctx)
		if err != nil {
			return err
		}
		cp, err := s.controlPlane(ctx)
		if err != nil {
			return err
		}
		if len(machines) != n || ptr.Deref(cp.Status.UpToDateReplicas, 0) != int32(n) || ptr.Deref(cp.Status.ReadyReplicas, 0) != int32(n) {
			return fmt.Errorf("%d Machines, up to date %d, ready %d: %s", len(machines), ptr.Deref(cp.Status.UpToDateReplicas, 0), ptr.Deref(cp.Status.ReadyReplicas, 0), explain(cp, machines))
		}
		if !conditions.IsTrue(cp, controlplanev1.AvailableCondition) || !conditions.IsTrue(cp, controlplanev1.EtcdClusterHealthyCondition) {
			return errors.New(explain(cp, machines))
		}
		members := &etcdv1.EtcdMemberList{}
		if err := s.etcd.List(ctx, members); err != nil {
			return err
		}
		for _, m := range members.Items {
			if _, ok := machines[m.Name]; !ok || !conditions.IsTrue(&m, etcdv1.JoinedCondition) {
				return fmt.Errorf("the member %s: %v", m.Name, m.Status.Conditions)
			}
		}
		if len(members.Items) != n {
			return fmt.Errorf("%d members", len(members.Items))
		}
		return s.NodesReady(ctx, n)
	})
}

func explain(cp *controlplanev1.CapstanControlPlane, machines map[string]clusterv1.Machine) string {
	var out strings.Builder
	describe := func(name string, all []metav1.Condition) {
		fmt.Fprintf(&out, "\n%s:", name)
		for _, c := range all {
			fmt.Fprintf(&out, " %s=%s", c.Type, c.Status)
			if c.Message != "" {
				fmt.Fprintf(&out, " (%s)", c.Message)
			}
		}
	}
	describe(cp.Name, cp.Status.Conditions)
	for _, name := range slices.Sorted(maps.Keys(machines)) {
		describe(name, machines[name].Status.Conditions)
	}
	return out.String()
}

// untilReplaced waits until all of some Machines are gone, and calls look with each seen state meanwhile. It returns the largest number
// of Machines that existed at once.
func (s *subject) untilReplaced(t *testing.T, before map[string]clusterv1.Machine, look func(*controlplanev1.CapstanControlPlane, map[string]clusterv1.Machine)) (most int) {
	t.Helper()
	harness.Eventually(t, "all Machines are replaced", 3*limit, func(ctx context.Context) error {
		now, err := s.machines(ctx)
		if err != nil {
			return err
		}
		cp, err := s.controlPlane(ctx)
		if err != nil {
			return err
		}
		look(cp, now)
		most = max(most, len(now))
		for name := range now {
			if _, old := before[name]; old {
				return errors.New(explain(cp, now))
			}
		}
		return nil
	})
	return most
}

// deleteOne deletes the Machine that has etcd's leader. From here on, each machine has the data of a predecessor in its volume.
func deleteOne(t *testing.T, s *subject) {
	s.volumes.Write(t, 3)
	leader := s.mustMachines(t)[s.leader(t)]
	if err := plane.Client.Delete(t.Context(), &leader); err != nil {
		t.Fatal(err)
	}
	s.replaced(t, leader.Name)
	s.volumes.Inherited(t, 3)
}

// haveMetrics waits until metrics-server is ready on the three machines and on no former one, and kubectl top has the values of their
// Nodes.
func haveMetrics(t *testing.T, s *subject) {
	harness.Eventually(t, "metrics of three machines", limit, func(ctx context.Context) error {
		list := &discoveryv1.EndpointSliceList{}
		if err := s.Client.List(ctx, list, client.InNamespace(metav1.NamespaceSystem), client.MatchingLabels{discoveryv1.LabelServiceName: "metrics-server"}); err != nil {
			return err
		}
		var ready []bool
		for _, slice := range list.Items {
			for _, endpoint := range slice.Endpoints {
				ready = append(ready, ptr.Deref(endpoint.Conditions.Ready, false))
			}
		}
		if !slices.Equal(ready, []bool{true, true, true}) {
			return fmt.Errorf("the endpoints are ready: %v", ready)
		}
		top, err := s.Kubectl(t, "top", "nodes", "--no-headers")
		if err != nil {
			return err
		}
		if strings.Count(top, "\n") != 3 || strings.Contains(top, "unknown") {
			return fmt.Errorf("the values are %q", top)
		}
		return nil
	})
}

// replaced waits until a deleted Machine is replaced.
func (s *subject) replaced(t *testing.T, name string) {
	t.Helper()
	harness.Eventually(t, name+" is removed", limit, func(ctx context.Context) error {
		now, err := s.machines(ctx)
		if err != nil {
			return err
		}
		if _, ok := now[name]; ok {
			cp, err := s.controlPlane(ctx)
			if err != nil {
				return err
			}
			return errors.New(explain(cp, now))
		}
		return nil
	})
	s.settled(t, 3)
}

// killOne removes a machine's disk and kills the machine, so that it can never start again. A MachineHealthCheck finds
// it.
func killOne(t *testing.T, s *subject) {
	s.checkHealth(t)
	victim := slices.Sorted(maps.Keys(s.mustMachines(t)))[0]
	destroy(t, s, victim)
	s.replaced(t, victim)
	s.volumes.Inherited(t, 3)
}

// unhealthyTimeout is how long a MachineHealthCheck of checkHealth waits.
const unhealthyTimeout = 20 * time.Second

// checkHealth creates a MachineHealthCheck of the control plane, until the test ends. It replaces machines whose etcd member does not
// work.
func (s *subject) checkHealth(t *testing.T) {
	t.Helper()
	check := &clusterv1.MachineHealthCheck{ObjectMeta: metav1.ObjectMeta{Namespace: s.Namespace, Name: s.Name}}
	check.Spec.ClusterName = s.Name
	check.Spec.Selector.MatchExpressions = []metav1.LabelSelectorRequirement{{Key: clusterv1.MachineControlPlaneLabel, Operator: metav1.LabelSelectorOpExists}}
	check.Spec.Checks.UnhealthyMachineConditions = []clusterv1.UnhealthyMachineCondition{
		{Type: controlplanev1.MachineEtcdMemberHealthyCondition, Status: metav1.ConditionFalse, TimeoutSeconds: ptr.To(int32(unhealthyTimeout.Seconds()))},
	}
	if err := plane.Client.Create(t.Context(), check); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = plane.Client.Delete(context.WithoutCancel(t.Context()), check) })
}
