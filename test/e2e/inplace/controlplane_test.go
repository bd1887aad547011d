//go:build e2e

package inplace

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/controller-runtime/pkg/client"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/test/e2e/harness"
)

// Row CP-21: a control plane of one machine goes to the next minor version in place, under the policy Only and while the manager and
// the other processes that take part are killed. The machine, its Node and the data of its etcd stay. Before, its Node is drained, and
// a MachineDrainRule keeps a pod. A change that needs another machine stops, and a condition names the field. The machine pool of the
// cluster then follows in the same way, and its pods keep their containers and data. No acknowledged write is lost.
func TestControlPlaneAndPool(t *testing.T) {
	from := harness.FormerMinor(t)
	c := plane.CreateCluster(t, "default", "alone", "--flavor", "machinepool", "--workers", "2", "--kubernetes-version", from)
	p := newPool(t, c, from)
	cp := &controlplanev1.CapstanControlPlane{}
	cp.Namespace, cp.Name = c.Namespace, controlPlaneName(t, c)
	before := alone(t, c)
	c.MustKubectl(t, "create", "configmap", "kept", "--from-literal=a=b")
	node := c.ControlPlaneMachine(t).Name
	keepLogging(t, c.Namespace)
	pinned(t, c, node, "logging")
	l := startLoad(t, c, from)
	pinned(t, c, node, "leaving")
	k := startKiller(t, c, "etcd", "kube-apiserver", "kubelet")

	changeControlPlane(t, cp, func() {
		cp.Spec.Rollout.Strategy.InPlace = controlplanev1.InPlaceOnly
		cp.Spec.Rollout.Strategy.DrainBeforeUpdate = ptr.To(true)
		cp.Spec.Version = harness.KubernetesVersion
		cp.Spec.Config.Cluster.APIServer.CertSANs = []string{"alone.example.com"}
	})
	harness.Eventually(t, "the update begins", limit, func(ctx context.Context) error {
		return updating(ctx, cp, controlplanev1.UpdatingReason)
	})
	plane.KillManager(t)
	harness.Eventually(t, "the update in place", limit, func(ctx context.Context) error {
		if err := updating(ctx, cp, controlplanev1.NotUpdatingReason); err != nil {
			return err
		}
		if len(cp.Status.Versions) != 1 || cp.Status.Versions[0].Version != harness.KubernetesVersion || !conditions.IsTrue(cp, clusterv1.MachinesUpToDateCondition) {
			return fmt.Errorf("versions %v, conditions %v", cp.Status.Versions, cp.Status.Conditions)
		}
		return nil
	})
	if after := alone(t, c); after != before {
		t.Errorf("the machine was %+v and is %+v", before, after)
	}
	if out := c.MustKubectl(t, "get", "configmap", "kept", "-o", "jsonpath={.data.a}"); strings.TrimSpace(out) != "b" {
		t.Errorf("the ConfigMap has %q", out)
	}
	if out := c.MustKubectl(t, "get", "pods", "-l", "pinned", "-o", "name"); strings.TrimSpace(out) != "pod/logging" {
		t.Errorf("after the drain there are %q, want the pod of the MachineDrainRule", out)
	}
	if out := c.MustKubectl(t, "get", "node", node, "-o", "jsonpath={.spec.unschedulable}"); out != "" {
		t.Errorf("the Node is still cordoned: %q", out)
	}

	changeControlPlane(t, cp, func() { cp.Spec.Config.PreCommands = []string{"true"} })
	harness.Eventually(t, "a condition names the field", time.Minute, func(ctx context.Context) error {
		if err := updating(ctx, cp, controlplanev1.CannotUpdateReason); err != nil {
			return err
		}
		if message := conditions.GetMessage(cp, controlplanev1.UpdatingCondition); !strings.Contains(message, "spec.config.preCommands") {
			return fmt.Errorf("message %q", message)
		}
		return nil
	})
	if after := alone(t, c); after != before {
		t.Errorf("the machine was %+v and is %+v", before, after)
	}

	p.update(harness.KubernetesVersion)
	k.interrupted()
	l.check()
}

// keepLogging creates a rule that keeps pods with the label app=logging during a drain.
func keepLogging(t *testing.T, namespace string) {
	t.Helper()
	rule := &clusterv1.MachineDrainRule{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "logging"}}
	rule.Spec.Drain.Behavior = clusterv1.MachineDrainRuleDrainBehaviorSkip
	rule.Spec.Pods = []clusterv1.MachineDrainRulePodSelector{{Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "logging"}}}}
	if err := plane.Client.Create(t.Context(), rule); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = plane.Client.Delete(context.WithoutCancel(t.Context()), rule) })
}

// pinned runs a pod on a Node.
func pinned(t *testing.T, c *harness.Cluster, node, name string) {
	t.Helper()
	c.Apply(t, fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata: {name: %[1]s, labels: {app: %[1]s, pinned: ""}}
spec:
  nodeName: %[2]s
  terminationGracePeriodSeconds: 1
  tolerations: [{operator: Exists}]
  containers: [{name: pause, image: registry.capstan.dev/pause:v1, imagePullPolicy: Never}]
`, name, node))
	c.MustKubectl(t, "wait", "--for=condition=Ready", "pod/"+name, "--timeout=3m")
}

func controlPlaneName(t *testing.T, c *harness.Cluster) string {
	t.Helper()
	cluster := &clusterv1.Cluster{}
	if err := plane.Client.Get(t.Context(), client.ObjectKey{Namespace: c.Namespace, Name: c.Name}, cluster); err != nil {
		t.Fatal(err)
	}
	return cluster.Spec.ControlPlaneRef.Name
}

func changeControlPlane(t *testing.T, cp *controlplanev1.CapstanControlPlane, change func()) {
	t.Helper()
	harness.Eventually(t, "the change of the control plane", time.Minute, func(ctx context.Context) error {
		if err := plane.Client.Get(ctx, client.ObjectKeyFromObject(cp), cp); err != nil {
			return err
		}
		change()
		return plane.Client.Update(ctx, cp)
	})
}

// updating reads a control plane and fails unless its condition Updating has the reason.
func updating(ctx context.Context, cp *controlplanev1.CapstanControlPlane, reason string) error {
	if err := plane.Client.Get(ctx, client.ObjectKeyFromObject(cp), cp); err != nil {
		return err
	}
	c := conditions.Get(cp, controlplanev1.UpdatingCondition)
	if cp.Status.ObservedGeneration != cp.Generation || c == nil || c.Reason != reason {
		return fmt.Errorf("condition %v, want the reason %s; RollingOut: %s", c, reason, conditions.GetMessage(cp, clusterv1.RollingOutCondition))
	}
	return nil
}

// alone returns the only control plane machine.
func alone(t *testing.T, c *harness.Cluster) (out member) {
	t.Helper()
	harness.Eventually(t, "the control plane machine", time.Minute, func(ctx context.Context) error {
		machines := &clusterv1.MachineList{}
		if err := plane.Client.List(ctx, machines, client.InNamespace(c.Namespace), client.MatchingLabels{clusterv1.ClusterNameLabel: c.Name}, client.HasLabels{clusterv1.MachineControlPlaneLabel}); err != nil {
			return err
		}
		if len(machines.Items) != 1 {
			return fmt.Errorf("%d Machines", len(machines.Items))
		}
		var version string
		var err error
		out, version, err = read(ctx, c, &machines.Items[0])
		if err == nil && version != machines.Items[0].Spec.Version {
			err = fmt.Errorf("the kubelet is %s", version)
		}
		return err
	})
	return out
}
