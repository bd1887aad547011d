//go:build e2e

// Package inplace tests updates of machines in place, end to end. Needs root and the built programs, of two versions of
// Kubernetes.
package inplace

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/controller-runtime/pkg/client"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/test/e2e/harness"
)

var plane *harness.Plane

func TestMain(m *testing.M) { os.Exit(harness.Run(m, &plane)) }

// limit is the time for one change of all machines.
const limit = 5 * time.Minute

// workers are the machines of a MachineDeployment.
type workers struct {
	*harness.Cluster
	t  *testing.T
	md *clusterv1.MachineDeployment
}

// member is what an update in place does not change.
type member struct {
	machine, node types.UID
	id, host      string
	address       netip.Addr
	controlPlane  bool
}

// create creates templates and a MachineDeployment of two machines, with the policy Only.
func (w *workers) create(version string) {
	w.t.Helper()
	w.templates("one", func(*infrav1.CapstanMachineSpec, *bootstrapv1.CapstanConfigSpec) {})
	w.md = &clusterv1.MachineDeployment{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.Namespace, Name: w.Name + "-updated", Annotations: map[string]string{infrav1.InPlaceAnnotation: "Only"}},
		Spec: clusterv1.MachineDeploymentSpec{
			ClusterName: w.Name, Replicas: ptr.To[int32](2),
			Template: clusterv1.MachineTemplateSpec{Spec: clusterv1.MachineSpec{ClusterName: w.Name, Version: version}},
		},
	}
	w.md.Spec.Rollout.Strategy = clusterv1.MachineDeploymentRolloutStrategy{
		Type: clusterv1.RollingUpdateMachineDeploymentStrategyType,
		RollingUpdate: clusterv1.MachineDeploymentRolloutStrategyRollingUpdate{
			MaxSurge: ptr.To(intstr.FromInt32(0)), MaxUnavailable: ptr.To(intstr.FromInt32(1)),
		},
	}
	w.use("one")
	if err := plane.Client.Create(w.t.Context(), w.md); err != nil {
		w.t.Fatal(err)
	}
}

// templates creates both templates of a name.
func (w *workers) templates(name string, change func(*infrav1.CapstanMachineSpec, *bootstrapv1.CapstanConfigSpec)) {
	w.t.Helper()
	meta := metav1.ObjectMeta{Namespace: w.Namespace, Name: w.Name + "-" + name}
	infra, config := &infrav1.CapstanMachineTemplate{ObjectMeta: meta}, &bootstrapv1.CapstanConfigTemplate{ObjectMeta: meta}
	infra.Spec.Template.Spec = infrav1.CapstanMachineSpec{CPUs: 1, Memory: ptr.To(resource.MustParse("768Mi"))}
	config.Spec.Template.ObjectMeta.Labels = map[string]string{clusterv1.ClusterNameLabel: w.Name}
	change(&infra.Spec.Template.Spec, &config.Spec.Template.Spec)
	for _, o := range []client.Object{infra, config} {
		if err := plane.Client.Create(w.t.Context(), o); err != nil {
			w.t.Fatal(err)
		}
	}
}

// use sets the templates of the MachineDeployment.
func (w *workers) use(name string) {
	spec := &w.md.Spec.Template.Spec
	spec.Bootstrap.ConfigRef = clusterv1.ContractVersionedObjectReference{APIGroup: bootstrapv1.GroupVersion.Group, Kind: "CapstanConfigTemplate", Name: w.Name + "-" + name}
	spec.InfrastructureRef = clusterv1.ContractVersionedObjectReference{APIGroup: infrav1.GroupVersion.Group, Kind: "CapstanMachineTemplate", Name: w.Name + "-" + name}
}

// change changes the MachineDeployment.
func (w *workers) change(change func()) {
	w.t.Helper()
	harness.Eventually(w.t, "the change of the MachineDeployment", time.Minute, func(ctx context.Context) error {
		if err := plane.Client.Get(ctx, client.ObjectKeyFromObject(w.md), w.md); err != nil {
			return err
		}
		change()
		return plane.Client.Update(ctx, w.md)
	})
}

// settled waits until all machines have the version and are up to date, and returns them by name.
func (w *workers) settled(what, version string) map[string]member {
	w.t.Helper()
	var out map[string]member
	harness.Eventually(w.t, what, limit, func(ctx context.Context) error {
		out = map[string]member{}
		md := &clusterv1.MachineDeployment{}
		if err := plane.Client.Get(ctx, client.ObjectKeyFromObject(w.md), md); err != nil {
			return err
		}
		if md.Status.ObservedGeneration != md.Generation || ptr.Deref(md.Status.UpToDateReplicas, -1) != 2 || ptr.Deref(md.Status.Replicas, -1) != 2 || ptr.Deref(md.Status.AvailableReplicas, -1) != 2 {
			return fmt.Errorf("MachineDeployment %+v\n%s", md.Status, w.explain(ctx))
		}
		machines, err := w.machines(ctx)
		if err != nil || len(machines) != 2 {
			return fmt.Errorf("%d Machines: %w", len(machines), err)
		}
		for i := range machines {
			m, err := w.member(ctx, &machines[i], version)
			if err != nil {
				return err
			}
			out[machines[i].Name] = m
		}
		return nil
	})
	return out
}

func (w *workers) machines(ctx context.Context) ([]clusterv1.Machine, error) {
	list := &clusterv1.MachineList{}
	err := plane.Client.List(ctx, list, client.InNamespace(w.Namespace), client.MatchingLabels{clusterv1.MachineDeploymentNameLabel: w.md.Name})
	return list.Items, err
}

// explain describes the state of the updates.
func (w *workers) explain(ctx context.Context) (out string) {
	list := &infrav1.CapstanMachineList{}
	_ = plane.Client.List(ctx, list, client.InNamespace(w.Namespace))
	for _, m := range list.Items {
		out += fmt.Sprintf("%s: %+v, %s\n", m.Name, m.Status.Update, conditions.GetMessage(&m, infrav1.UpdatingCondition))
	}
	return out
}

// member reads a machine that has the version and no update in progress.
func (w *workers) member(ctx context.Context, machine *clusterv1.Machine, version string) (member, error) {
	if _, updates := machine.Annotations[clusterv1.UpdateInProgressAnnotation]; updates || machine.Spec.Version != version {
		return member{}, fmt.Errorf("Machine %s has version %s and the annotations %v", machine.Name, machine.Spec.Version, machine.Annotations)
	}
	out, kubelet, err := read(ctx, w.Cluster, machine)
	if err == nil && kubelet != version {
		err = fmt.Errorf("Machine %s has the kubelet %s", machine.Name, kubelet)
	}
	return out, err
}

// read reads what an update in place does not change, and the version of the kubelet.
func read(ctx context.Context, c *harness.Cluster, machine *clusterv1.Machine) (out member, kubelet string, err error) {
	capstan, node := &infrav1.CapstanMachine{}, &corev1.Node{}
	if err := plane.Client.Get(ctx, client.ObjectKey{Namespace: c.Namespace, Name: machine.Spec.InfrastructureRef.Name}, capstan); err != nil {
		return out, "", err
	}
	if !machine.Status.NodeRef.IsDefined() {
		return out, "", fmt.Errorf("Machine %s has no Node", machine.Name)
	}
	if err := c.Client.Get(ctx, client.ObjectKey{Name: machine.Status.NodeRef.Name}, node); err != nil {
		return out, "", err
	}
	address, err := netip.ParseAddr(capstan.Spec.Network.Addresses[0].Address)
	_, controlPlane := machine.Labels[clusterv1.MachineControlPlaneLabel]
	return member{controlPlane: controlPlane, machine: machine.UID, node: node.UID, id: capstan.Spec.ID, host: capstan.Spec.HostName, address: address}, node.Status.NodeInfo.KubeletVersion, err
}

// same fails unless both are the same machines.
func (w *workers) same(what string, before, after map[string]member) {
	w.t.Helper()
	for name, m := range before {
		if after[name] != m {
			w.t.Errorf("%s: Machine %s was %+v and is %+v", what, name, m, after[name])
		}
	}
}

// pods run on both workers.
const pods = `
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: staying}
spec:
  selector: {matchLabels: {app: staying}}
  template:
    metadata: {labels: {app: staying}}
    spec:
      containers:
      - name: pause
        image: registry.capstan.dev/pause:v1
        imagePullPolicy: Never
        volumeMounts: [{name: data, mountPath: /data}]
      volumes: [{name: data, emptyDir: {}}]
`

// Rows ALL-17, CP-21: real machines of a MachineDeployment go to the next minor version in place, through the hooks of the manager,
// which is killed meanwhile: version, memory, files and arguments of the kubelet at once. Their containers, their data and their
// addresses stay, and their limits change while they run. Then a change needs other machines.
func TestMachineDeployment(t *testing.T) {
	from := harness.FormerMinor(t)
	w := &workers{t: t}
	w.Cluster = plane.CreateCluster(t, "default", "real", "--workers", "0")
	w.create(from)
	before := w.settled("two machines", from)
	w.Apply(t, pods)
	w.MustKubectl(t, "rollout", "status", "daemonset/staying", "--timeout=5m")
	had := containers(t, w.Cluster)
	for name, m := range before {
		shell(t, w.Namespace, name, "sh", "-c", "echo "+m.id+" > /var/lib/local-data")
	}

	w.templates("two", updatable)
	w.change(func() {
		w.md.Spec.Template.Spec.Version = harness.KubernetesVersion
		w.use("two")
	})
	w.begun()
	plane.KillManager(t)
	after := w.settled("an update in place", harness.KubernetesVersion)
	w.same("an update in place", before, after)
	w.updated("1Gi")
	for name, m := range after {
		out := shell(t, w.Namespace, name, "cat", "/var/lib/local-data", "/etc/from-update", "/var/lib/update-commands")
		if want := m.id + "\nnewdone\n"; !strings.Contains(strings.ReplaceAll(out, "\r", ""), want) {
			t.Errorf("Machine %s has %q, want %q", name, out, want)
		}
	}
	if now := containers(t, w.Cluster); !maps.Equal(had, now) {
		t.Errorf("containers were %v and are %v", had, now)
	}
	w.replacement(after)
}

// updatable changes a machine in ways that an update in place can do.
func updatable(m *infrav1.CapstanMachineSpec, c *bootstrapv1.CapstanConfigSpec) {
	m.Memory = ptr.To(resource.MustParse("1Gi"))
	c.Kubelet.ExtraArgs = []bootstrapv1.Arg{{Name: "v", Value: "2"}}
	c.Files = []bootstrapv1.File{{Path: "/etc/from-update", Content: "new", Repeatable: ptr.To(true)}}
	c.UpdateCommands = []string{"echo done >> /var/lib/update-commands"}
}

// begun waits until the update of a machine has begun.
func (w *workers) begun() {
	w.t.Helper()
	harness.Eventually(w.t, "an update begins", limit, func(ctx context.Context) error {
		machines, err := w.machines(ctx)
		if err != nil {
			return err
		}
		for _, m := range machines {
			if _, updates := m.Annotations[clusterv1.UpdateInProgressAnnotation]; updates {
				return nil
			}
		}
		return fmt.Errorf("no Machine is being updated\n%s", w.explain(ctx))
	})
}

// replacement: a change that needs other machines stops under the policy Only, and replaces the machines under Prefer.
func (w *workers) replacement(before map[string]member) {
	w.t.Helper()
	w.templates("three", func(m *infrav1.CapstanMachineSpec, c *bootstrapv1.CapstanConfigSpec) {
		updatable(m, c)
		c.PreCommands = []string{"true"}
	})
	w.change(func() { w.use("three") })
	w.stopped("preCommands")
	w.stays(10*time.Second, before)
	w.change(func() { w.md.Annotations[infrav1.InPlaceAnnotation] = "Prefer" })
	replaced := w.settled("a replacement", harness.KubernetesVersion)
	for name := range before {
		if _, kept := replaced[name]; kept {
			w.t.Errorf("Machine %s was not replaced", name)
		}
	}
}

// shell runs a command in a machine.
func shell(t *testing.T, namespace, machine string, command ...string) string {
	t.Helper()
	return plane.Must(t, append([]string{"shell", "--namespace", namespace, machine, "--"}, command...)...)
}

// staying lists the pods of the DaemonSet, one on each worker.
func staying(t *testing.T, c *harness.Cluster) []corev1.Pod {
	t.Helper()
	list := &corev1.PodList{}
	if err := c.Client.List(t.Context(), list, client.InNamespace("default"), client.MatchingLabels{"app": "staying"}); err != nil {
		t.Fatal(err)
	}
	if len(list.Items) != 2 {
		t.Fatalf("%d pods, want one on each of two workers", len(list.Items))
	}
	return list.Items
}

// containers returns the id of the container of each pod.
func containers(t *testing.T, c *harness.Cluster) map[string]string {
	t.Helper()
	out := map[string]string{}
	for _, pod := range staying(t, c) {
		for _, s := range pod.Status.ContainerStatuses {
			out[pod.Name] = fmt.Sprintf("%s, %d restarts", s.ContainerID, s.RestartCount)
		}
	}
	if len(out) != 2 {
		t.Fatalf("containers %v, want one in each pod", out)
	}
	return out
}

// updated checks the objects of the machines after an update.
func (w *workers) updated(memory string) {
	w.t.Helper()
	list, err := w.capstanMachines(w.t.Context())
	if err != nil {
		w.t.Fatal(err)
	}
	for _, m := range list {
		if m.Spec.Memory.String() != memory || m.Status.Update.Phase != infrav1.UpdateSucceeded || m.Status.Update.KubernetesVersion != harness.KubernetesVersion {
			w.t.Errorf("CapstanMachine %s: memory %s, %+v", m.Name, m.Spec.Memory, m.Status.Update)
		}
	}
}

// stopped waits until each machine names the field that stops the rollout.
func (w *workers) stopped(field string) {
	w.t.Helper()
	harness.Eventually(w.t, "conditions name the field", time.Minute, func(ctx context.Context) error {
		list, err := w.capstanMachines(ctx)
		if err != nil {
			return err
		}
		for _, m := range list {
			if c := conditions.Get(&m, infrav1.UpdatingCondition); c == nil || c.Reason != infrav1.CannotUpdateInPlaceReason || !strings.Contains(c.Message, field) {
				return fmt.Errorf("%s: condition %v", m.Name, c)
			}
		}
		return nil
	})
}

// capstanMachines returns the CapstanMachines of the two Machines.
func (w *workers) capstanMachines(ctx context.Context) ([]infrav1.CapstanMachine, error) {
	list := &infrav1.CapstanMachineList{}
	err := plane.Client.List(ctx, list, client.InNamespace(w.Namespace), client.MatchingLabels{clusterv1.MachineDeploymentNameLabel: w.md.Name})
	if err == nil && len(list.Items) != 2 {
		err = fmt.Errorf("%d CapstanMachines, want two", len(list.Items))
	}
	return list.Items, err
}

// stays checks that the machines stay for some time.
func (w *workers) stays(d time.Duration, want map[string]member) {
	w.t.Helper()
	for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(time.Second) {
		machines, err := w.machines(w.t.Context())
		if err != nil {
			w.t.Fatal(err)
		}
		for i := range machines {
			if m := machines[i]; want[m.Name].machine != m.UID || !m.DeletionTimestamp.IsZero() {
				w.t.Fatalf("Machine %s was created or is being deleted", m.Name)
			}
		}
		if len(machines) != len(want) {
			w.t.Fatalf("%d Machines, want %d", len(machines), len(want))
		}
	}
}
