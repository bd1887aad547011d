//go:build e2e

package inplace

import (
	"context"
	"fmt"
	"maps"
	"strings"
	"testing"
	"time"

	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/controller-runtime/pkg/client"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/test/e2e/harness"
)

// pool is a machine pool of two machines, with the policy Only and a pod with local data on each machine.
type pool struct {
	*harness.Cluster
	t   *testing.T
	key client.ObjectKey

	machines   map[string]member
	containers map[string]string
}

// newPool sets the policy of the pool of a cluster, waits for its machines, and writes data into their pods.
func newPool(t *testing.T, c *harness.Cluster, version string) *pool {
	t.Helper()
	p := &pool{Cluster: c, t: t, key: client.ObjectKey{Namespace: c.Namespace, Name: c.Name + "-mp-0"}}
	p.patch(&infrav1.CapstanMachinePool{}, `{"spec":{"rollingUpdate":{"inPlace":"Only"}}}`)
	p.machines = p.settled("two machines", version)
	c.Apply(t, pods)
	c.MustKubectl(t, "rollout", "status", "daemonset/staying", "--timeout=5m")
	p.containers = containers(t, c)
	p.inPods(func(file string) string { return "echo kept > " + file })
	return p
}

// inPods runs a command for the local data of each pod, on its machine, and returns the output.
func (p *pool) inPods(command func(file string) string) (out []string) {
	p.t.Helper()
	for _, pod := range staying(p.t, p.Cluster) {
		file := "/var/lib/kubelet/pods/" + string(pod.UID) + "/volumes/kubernetes.io~empty-dir/data/file"
		out = append(out, strings.TrimSpace(shell(p.t, p.Namespace, pod.Spec.NodeName, "sh", "-c", command(file))))
	}
	return out
}

func (p *pool) patch(o client.Object, json string) {
	p.t.Helper()
	o.SetNamespace(p.key.Namespace)
	o.SetName(p.key.Name)
	if err := plane.Client.Patch(p.t.Context(), o, client.RawPatch("application/merge-patch+json", []byte(json))); err != nil {
		p.t.Fatal(err)
	}
}

// settled waits until the machines have the version, are up to date and are not being updated, and returns them by name.
func (p *pool) settled(what, version string) map[string]member {
	p.t.Helper()
	var out map[string]member
	harness.Eventually(p.t, what, limit, func(ctx context.Context) error {
		out = map[string]member{}
		got, mp := &infrav1.CapstanMachinePool{}, &clusterv1.MachinePool{}
		if err := plane.Client.Get(ctx, p.key, mp); err != nil {
			return err
		}
		if err := plane.Client.Get(ctx, p.key, got); err != nil {
			return err
		}
		s := got.Status
		_, announced := mp.Annotations[clusterv1.UpdateInProgressAnnotation]
		if announced || mp.Spec.Template.Spec.Version != version || ptr.Deref(s.Replicas, -1) != 2 || ptr.Deref(s.AvailableReplicas, -1) != 2 || ptr.Deref(s.UpToDateReplicas, -1) != 2 {
			return fmt.Errorf("MachinePool %v, pool %+v\n%s", mp.Annotations, s, p.explain(ctx))
		}
		list := &clusterv1.MachineList{}
		if err := plane.Client.List(ctx, list, client.InNamespace(p.Namespace), client.MatchingLabels{clusterv1.MachinePoolNameLabel: p.key.Name}); err != nil {
			return err
		}
		if len(list.Items) != 2 {
			return fmt.Errorf("%d Machines", len(list.Items))
		}
		for i := range list.Items {
			m, kubelet, err := read(ctx, p.Cluster, &list.Items[i])
			if err != nil || kubelet != version {
				return fmt.Errorf("Machine %s has the kubelet %s: %w", list.Items[i].Name, kubelet, err)
			}
			out[list.Items[i].Name] = m
		}
		return nil
	})
	return out
}

// explain describes the state of the updates.
func (p *pool) explain(ctx context.Context) (out string) {
	list := &infrav1.CapstanMachineList{}
	_ = plane.Client.List(ctx, list, client.InNamespace(p.Namespace), client.HasLabels{infrav1.MachinePoolLabel})
	for _, m := range list.Items {
		out += fmt.Sprintf("%s: %v, %+v, %s\n", m.Name, m.Annotations, m.Status.Update, conditions.GetMessage(&m, infrav1.UpdatingCondition))
	}
	return out
}

// condition waits until the condition Updating of the pool has the reason and the text.
func (p *pool) condition(what, reason, text string) {
	p.t.Helper()
	harness.Eventually(p.t, what, limit, func(ctx context.Context) error {
		got := &infrav1.CapstanMachinePool{}
		if err := plane.Client.Get(ctx, p.key, got); err != nil {
			return err
		}
		c := conditions.Get(got, infrav1.UpdatingCondition)
		if c == nil || c.Reason != reason || !strings.Contains(c.Message, text) {
			return fmt.Errorf("condition %v\n%s", c, p.explain(ctx))
		}
		return nil
	})
}

// same fails unless the machines, and the containers and the data of their pods, are those of the beginning.
func (p *pool) same(now map[string]member) {
	p.t.Helper()
	if !maps.Equal(p.machines, now) {
		p.t.Errorf("the machines were %+v and are %+v", p.machines, now)
	}
	if now := containers(p.t, p.Cluster); !maps.Equal(p.containers, now) {
		p.t.Errorf("the containers were %v and are %v", p.containers, now)
	}
	for _, data := range p.inPods(func(file string) string { return "cat " + file }) {
		if data != "kept" {
			p.t.Errorf("a pod has the data %q", data)
		}
	}
}

// update changes the version, and then a field that needs other machines. The manager is killed during the update.
func (p *pool) update(version string) {
	p.t.Helper()
	p.patch(&clusterv1.MachinePool{}, fmt.Sprintf(`{"spec":{"template":{"spec":{"version":%q}}}}`, version))
	p.condition("the update of the pool begins", infrav1.UpdateRunningReason, "2 of 2 machines remain")
	plane.KillManager(p.t)
	p.condition("the update of the second machine", infrav1.UpdateRunningReason, "1 of 2 machines remain")
	p.same(p.settled("the update of the pool in place", version))
	p.withoutData()

	p.patch(&bootstrapv1.CapstanConfig{}, `{"spec":{"preCommands":["true"]}}`)
	p.condition("a condition names the field", infrav1.UpdateFailedReason, "preCommands")
}

// withoutData waits until the data of the update is deleted.
func (p *pool) withoutData() {
	p.t.Helper()
	harness.Eventually(p.t, "the deletion of the update data", time.Minute, func(ctx context.Context) error {
		config := &bootstrapv1.CapstanConfig{}
		if err := plane.Client.Get(ctx, p.key, config); err != nil {
			return err
		}
		if u := config.Status.Update; u.KubernetesVersion != harness.KubernetesVersion || u.DataSecretName != "" {
			return fmt.Errorf("update %+v", u)
		}
		return nil
	})
}
