//go:build e2e

// Package machinepool contains end-to-end tests of machine pools on real machines. A pool is scaled with a pod that must
// drain, upgraded, reconfigured, remediated and paused. A machine is deleted by the user. The manager is killed during
// each step. The tests need root and the binaries of two versions of Kubernetes.
package machinepool

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/test/e2e/harness"
)

var plane *harness.Plane

func TestMain(m *testing.M) { os.Exit(harness.Run(m, &plane)) }

// workload has two replicas on different Nodes. One of them must always be available.
const workload = `
apiVersion: apps/v1
kind: Deployment
metadata: {name: held}
spec:
  replicas: 2
  selector: {matchLabels: {app: held}}
  template:
    metadata: {labels: {app: held}}
    spec:
      containers: [{name: pause, image: registry.capstan.dev/pause:v1, imagePullPolicy: Never}]
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata: {name: held}
spec:
  minAvailable: 1
  selector: {matchLabels: {app: held}}
`

type pool struct {
	t       *testing.T
	cluster *harness.Cluster
	key     client.ObjectKey
}

func (p *pool) get() *infrav1.CapstanMachinePool {
	p.t.Helper()
	out := &infrav1.CapstanMachinePool{}
	if err := plane.Client.Get(p.t.Context(), p.key, out); err != nil {
		p.t.Fatal(err)
	}
	return out
}

func (p *pool) patch(json string) {
	p.t.Helper()
	mp := &clusterv1.MachinePool{}
	mp.Namespace, mp.Name = p.key.Namespace, p.key.Name
	if err := plane.Client.Patch(p.t.Context(), mp, client.RawPatch("application/merge-patch+json", []byte(json))); err != nil {
		p.t.Fatal(err)
	}
}

// settled waits until the pool has n machines, all of them available and up to date.
func (p *pool) settled(n int) []string {
	p.t.Helper()
	var names []string
	harness.Eventually(p.t, fmt.Sprintf("a pool of %d", n), 5*time.Minute, func(ctx context.Context) error {
		got := &infrav1.CapstanMachinePool{}
		if err := plane.Client.Get(ctx, p.key, got); err != nil {
			return err
		}
		s := got.Status
		if int(ptr.Deref(s.Replicas, -1)) != n || int(ptr.Deref(s.AvailableReplicas, -1)) != n || int(ptr.Deref(s.UpToDateReplicas, -1)) != n || len(s.Instances) != n ||
			!conditions.IsTrue(got, clusterv1.ReadyCondition) {
			return fmt.Errorf("replicas %v, available %v, up to date %v, conditions %v", ptr.Deref(s.Replicas, -1), ptr.Deref(s.AvailableReplicas, -1), ptr.Deref(s.UpToDateReplicas, -1), s.Conditions)
		}
		names = nil
		for _, i := range s.Instances {
			names = append(names, i.InstanceName)
		}
		return p.cluster.NodesReady(ctx, n+1)
	})
	return names
}

// MP-02 MP-04 MP-06: a pool of real machines is created, changed and deleted. The manager is killed during each step.
// Most steps use one machine, because machines take most of the time.
func TestPool(t *testing.T) {
	c := plane.CreateCluster(t, "pools", "pool", "--flavor", "machinepool", "--workers", "1")
	p := &pool{t: t, cluster: c, key: client.ObjectKey{Namespace: "pools", Name: "pool-mp-0"}}
	p.settled(1)
	older, newer := versions(t)

	// Scale up, change the version, and give the machines volumes, all at the same time.
	volumes := c.FollowVolumes(t)
	p.setVolumes(harness.DataVolume())
	p.patch(fmt.Sprintf(`{"spec":{"replicas":2,"template":{"spec":{"version":%q}}}}`, older))
	plane.KillManager(t)
	p.settled(2)
	p.runs(older)
	volumes.Write(t, 2)

	c.Apply(t, workload)
	c.MustKubectl(t, "rollout", "status", "deployment/held", "--timeout=5m")
	held := make(chan error, 1)
	ctx, stop := context.WithCancel(t.Context())
	go func() { held <- available(ctx, c) }()
	p.replaced("an upgrade", 2, func() {
		p.patch(fmt.Sprintf(`{"spec":{"template":{"spec":{"version":%q}}}}`, newer))
	})
	p.runs(newer)
	volumes.Inherited(t, 2)

	// Scale down to one machine: its Node drains.
	p.patch(`{"spec":{"replicas":1}}`)
	plane.KillManager(t)
	p.settled(1)
	stop()
	if err := <-held; err != nil {
		t.Error(err)
	}
	// The last Node cannot drain while the disruption budget requires a pod that no other Node can run.
	c.MustKubectl(t, "delete", "deployment,poddisruptionbudget", "held")

	p.replaced("a changed CapstanConfig, and no volumes", 1, func() {
		p.setVolumes(nil)
		plane.MustKubectl(t, "patch", "capstanconfig", p.key.Name, "--namespace", p.key.Namespace, "--type", "merge",
			"--patch", `{"spec":{"files":[{"path":"/etc/motd","content":"updated"}]}}`)
	})
	p.replaced("a Machine that the user deletes", 1, func() {
		plane.MustKubectl(t, "delete", "machine", p.names()[0], "--namespace", p.key.Namespace, "--wait=false")
	})
	p.replaced("a machine that a MachineHealthCheck reports as unhealthy", 1, p.breakOne)
	p.pause()
	p.patch(`{"spec":{"replicas":0}}`)
	plane.KillManager(t)
	p.settled(0)
	c.Delete(t)
	volumes.Removed(t)
}

// setVolumes changes the volumes of the pool's machines.
func (p *pool) setVolumes(volumes []infrav1.MachineVolume) {
	p.t.Helper()
	pool := p.get()
	before := pool.DeepCopy()
	pool.Spec.MachineTemplate.Spec.Volumes = volumes
	if err := plane.Client.Patch(p.t.Context(), pool, client.MergeFrom(before)); err != nil {
		p.t.Fatal(err)
	}
}

// versions returns the oldest and the newest version of Kubernetes that the host has.
func versions(t *testing.T) (oldest, newest string) {
	t.Helper()
	list := &infrav1.CapstanHostList{}
	if err := plane.Client.List(t.Context(), list); err != nil {
		t.Fatal(err)
	}
	all := list.Items[0].Status.Versions
	if len(all) < 2 {
		t.Fatalf("an upgrade needs two versions of Kubernetes, the host has %v: run `make build-kube`", all)
	}
	return slices.Min(all), slices.Max(all)
}

// runs checks that all Nodes of the pool have a version.
func (p *pool) runs(version string) {
	p.t.Helper()
	for _, i := range p.get().Status.Instances {
		if got := p.cluster.MustKubectl(p.t, "get", "node", i.InstanceName, "-o", "jsonpath={.status.nodeInfo.kubeletVersion}"); got != version || i.Version != version {
			p.t.Errorf("Node %s runs %s, the pool reports %s, want %s", i.InstanceName, got, i.Version, version)
		}
	}
}

func (p *pool) names() []string {
	p.t.Helper()
	var out []string
	for _, i := range p.get().Status.Instances {
		out = append(out, i.InstanceName)
	}
	return out
}

// replaced waits until each of the n machines was replaced for a reason. It kills the manager while the first one is
// being replaced.
func (p *pool) replaced(why string, n int, change func()) {
	p.t.Helper()
	before := p.names()
	change()
	harness.Eventually(p.t, why+" starts", time.Minute, func(ctx context.Context) error {
		machines := &infrav1.CapstanMachineList{}
		if err := plane.Client.List(ctx, machines, client.InNamespace(p.key.Namespace), client.HasLabels{infrav1.MachinePoolLabel}); err != nil {
			return err
		}
		for _, m := range machines.Items {
			if !m.DeletionTimestamp.IsZero() || !slices.Contains(before, m.Name) {
				return nil
			}
		}
		return errors.New("no machine was created or deleted")
	})
	plane.KillManager(p.t)
	harness.Eventually(p.t, why+" replaces "+fmt.Sprint(before), 5*time.Minute, func(context.Context) error {
		for _, name := range p.names() {
			if slices.Contains(before, name) {
				return fmt.Errorf("%s still exists", name)
			}
		}
		return nil
	})
	p.settled(n)
}

// breakOne makes a MachineHealthCheck report the pool's machine as unhealthy, with a condition of its Node like that of
// node-problem-detector.
func (p *pool) breakOne() {
	p.t.Helper()
	check := &clusterv1.MachineHealthCheck{
		ObjectMeta: metav1.ObjectMeta{Namespace: p.key.Namespace, Name: "pool"},
		Spec: clusterv1.MachineHealthCheckSpec{
			ClusterName: p.cluster.Name,
			Selector:    metav1.LabelSelector{MatchLabels: map[string]string{clusterv1.MachinePoolNameLabel: p.key.Name}},
			Checks: clusterv1.MachineHealthCheckChecks{UnhealthyNodeConditions: []clusterv1.UnhealthyNodeCondition{
				{Type: "Broken", Status: corev1.ConditionTrue, TimeoutSeconds: ptr.To[int32](0)},
			}},
		},
	}
	if err := plane.Client.Create(p.t.Context(), check); err != nil {
		p.t.Fatal(err)
	}
	p.cluster.MustKubectl(p.t, "patch", "node", p.names()[0], "--subresource", "status", "--type", "strategic", "--patch",
		`{"status":{"conditions":[{"type":"Broken","status":"True","reason":"Test","message":"for the test","lastTransitionTime":"2026-01-01T00:00:00Z"}]}}`)
}

// pause checks that a paused pool does not change, also after a restart of the manager, and that it continues
// afterwards.
func (p *pool) pause() {
	p.t.Helper()
	plane.MustKubectl(p.t, "annotate", "capstanmachinepool", p.key.Name, "--namespace", p.key.Namespace, clusterv1.PausedAnnotation+"=")
	p.paused(metav1.ConditionTrue)
	names := p.names()
	p.patch(`{"spec":{"replicas":2}}`)
	plane.KillManager(p.t)
	p.managerActs()
	for range 20 { // A pool that is not paused creates its machine within one second.
		if now := p.get().Status.Instances; len(now) != len(names) {
			p.t.Fatalf("a paused pool has %d machines, had %d", len(now), len(names))
		}
		time.Sleep(250 * time.Millisecond)
	}
	plane.MustKubectl(p.t, "annotate", "capstanmachinepool", p.key.Name, "--namespace", p.key.Namespace, clusterv1.PausedAnnotation+"-")
	p.paused(metav1.ConditionFalse)
	p.settled(2)
}

// managerActs waits until the manager has reconciled an object that is not paused.
func (p *pool) managerActs() {
	p.t.Helper()
	template := &infrav1.CapstanMachineTemplate{ObjectMeta: metav1.ObjectMeta{Namespace: p.key.Namespace, Name: "sign-of-life"}}
	template.Spec.Template.Spec.CPUs = 1
	harness.Eventually(p.t, "the manager runs again", 3*time.Minute, func(ctx context.Context) error {
		if err := plane.Client.Create(ctx, template.DeepCopy()); err != nil && !apierrors.IsAlreadyExists(err) {
			return err // the manager's webhook
		}
		described := &infrav1.CapstanMachineTemplate{}
		if err := plane.Client.Get(ctx, client.ObjectKeyFromObject(template), described); err != nil {
			return err
		}
		if len(described.Status.Capacity) == 0 {
			return errors.New("not yet")
		}
		return nil
	})
	if err := plane.Client.Delete(p.t.Context(), template); err != nil {
		p.t.Fatal(err)
	}
}

func (p *pool) paused(status metav1.ConditionStatus) {
	p.t.Helper()
	harness.Eventually(p.t, "Paused is "+string(status), time.Minute, func(context.Context) error {
		if c := conditions.Get(p.get(), clusterv1.PausedCondition); c == nil || c.Status != status {
			return fmt.Errorf("got %v", c)
		}
		return nil
	})
}

// available returns an error if no pod of the workload was available at any time until ctx ends.
func available(ctx context.Context, c *harness.Cluster) error {
	for {
		held := &appsv1.Deployment{}
		request, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		err := c.Client.Get(request, client.ObjectKey{Namespace: metav1.NamespaceDefault, Name: "held"}, held)
		cancel()
		if err == nil && held.Status.AvailableReplicas == 0 {
			return errors.New("the workload had no available pod: its disruption budget was broken")
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(500 * time.Millisecond):
		}
	}
}
