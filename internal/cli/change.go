package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/util/retry"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"capstan.dev/capstan/internal/cli/diagnosis"
)

// unchanged is the value of a number that the command line does not set.
const unchanged = -1

// groupFlag names the workers that are scaled.
const groupFlag = "group"

// target is the wanted state of a changed cluster.
type target struct {
	controlPlanes, workers int
	// group names the workers that are scaled; "" for the only group.
	group   string
	version string
}

// parts are the objects that contain the sizes and versions of a cluster.
type parts struct {
	cluster *unstructured.Unstructured
	// controlPlane and workers are nil for a cluster of a ClusterClass: its Cluster contains sizes and version.
	controlPlane *unstructured.Unstructured
	workers      []*unstructured.Unstructured
}

func (a *app) scaleCommand() *cobra.Command {
	to := target{controlPlanes: unchanged, workers: unchanged}
	return group("scale", "Change the number of machines of a cluster", a.changeCommand(&to, &cobra.Command{
		Use: "cluster NAME", Short: "Change the number of machines of a cluster, and wait until they are ready",
		Long: `Change the number of control plane machines or workers of a cluster, and wait until they are ready.
For a cluster of a ClusterClass, the command changes the topology of the Cluster; else its control plane and its workers.`,
	}, func(c *cobra.Command) {
		c.Flags().IntVar(&to.controlPlanes, "control-plane-machines", unchanged, "number of control plane machines; must be odd (default: unchanged)")
		c.Flags().IntVar(&to.workers, "workers", unchanged, "number of worker machines (default: unchanged)")
		c.Flags().StringVar(&to.group, groupFlag, "", "MachineDeployment or MachinePool of the workers; only needed if the cluster has several")
		c.MarkFlagsOneRequired("control-plane-machines", "workers")
		c.PreRunE = func(*cobra.Command, []string) error { return checkControlPlanes(to.controlPlanes) }
	}))
}

func (a *app) upgradeCommand() *cobra.Command {
	to := target{controlPlanes: unchanged, workers: unchanged}
	return group("upgrade", "Upgrade a cluster", a.changeCommand(&to, &cobra.Command{
		Use: "cluster NAME", Short: "Upgrade a cluster to another Kubernetes version, and wait until it is complete",
		Long: `Upgrade the control plane of a cluster, then its workers, and wait until all machines have the version.
An interrupted command can be repeated. The strategies of the objects decide how machines are replaced or updated.`,
	}, func(c *cobra.Command) {
		c.Flags().StringVar(&to.version, "kubernetes-version", "", "Kubernetes version")
		_ = c.MarkFlagRequired("kubernetes-version")
		a.completeVersionFlag(c)
		c.PreRunE = func(*cobra.Command, []string) (err error) { to.version, err = parseVersion(to.version); return err }
	}))
}

// checkControlPlanes checks the number of control plane machines of the command line. It can be unchanged.
func checkControlPlanes(n int) error {
	if n != unchanged && n%2 == 0 {
		return coded{fmt.Errorf("expected an odd number of control plane machines, found %d: etcd needs a majority", n), exitUsage}
	}
	return nil
}

// changeCommand completes a command that changes a cluster and waits.
func (a *app) changeCommand(to *target, c *cobra.Command, flags func(*cobra.Command)) *cobra.Command {
	var namespace string
	var wait bool
	var timeout time.Duration
	c.Args, c.ValidArgsFunction = cobra.ExactArgs(1), a.completeClusters(&namespace)
	c.RunE = func(c *cobra.Command, args []string) error {
		ctx, cancel := withTimeout(c.Context(), timeout)
		defer cancel()
		m, key, err := a.clusterOf(namespace, args[0])
		if err != nil {
			return err
		}
		return a.change(ctx, m, key, *to, wait)
	}
	c.Flags().StringVarP(&namespace, "namespace", "n", "", "namespace of the cluster (default: that of the context)")
	c.Flags().BoolVar(&wait, "wait", true, "wait until all machines are ready; an upgrade always waits for the control plane")
	c.Flags().DurationVar(&timeout, "timeout", 30*time.Minute, "time limit; 0 for none")
	flags(c)
	if c.Flags().Lookup(groupFlag) != nil {
		_ = c.RegisterFlagCompletionFunc(groupFlag, a.completeGroups(&namespace))
	}
	return c
}

func (a *app) change(ctx context.Context, m *management, key client.ObjectKey, to target, wait bool) error {
	if err := a.checkHosts(ctx, m, key, to); err != nil {
		return err
	}
	changed, err := m.write(ctx, key, to, parts.controlPlaneObjects)
	if err != nil {
		return err
	}
	progress := a.newProgress()
	defer progress.close()
	if to.version != "" && len(changed.workers) > 0 {
		// A kubelet must not be newer than the API server.
		if err := a.settle(ctx, m, key, progress, func(v view) []step { return controlPlaneSteps(v, to) }); err != nil {
			return err
		}
	}
	changed, err = m.write(ctx, key, to, func(p parts) []*unstructured.Unstructured { return p.workers })
	if err != nil || !wait {
		return err
	}
	to.workers = changed.totalWorkers()
	return a.settle(ctx, m, key, progress, func(v view) []step { return settledSteps(v, to) })
}

// checkHosts refuses a version that no host can run, and warns of new machines that the hosts have no memory for.
func (a *app) checkHosts(ctx context.Context, m *management, key client.ObjectKey, to target) error {
	hosts, err := m.hosts(ctx)
	if err != nil {
		return err
	}
	if to.version != "" {
		return (&clusterOptions{kubernetesVersion: to.version}).chooseVersion(hosts)
	}
	before, err := m.parts(ctx, key)
	if err != nil {
		return err
	}
	after, err := before.changed(to)
	if err == nil {
		// The limits of these machines are in templates that the user may not be allowed to read.
		a.warnOfMemory(slices.Repeat([]int64{smallestMachine}, max(after.machines()-before.machines(), 0)), true, hosts)
	}
	return err
}

// settle waits until all steps are done.
func (a *app) settle(ctx context.Context, m *management, key client.ObjectKey, p *progress, steps func(view) []step) error {
	var last []string
	err := m.follow(ctx, key, nil, func(v view) (bool, error) {
		if v.cluster == nil {
			return false, coded{fmt.Errorf("cluster %s was deleted in the meantime", key.Name), exitNotFound}
		}
		now := steps(v)
		p.show(now)
		last = blockers(v)
		return !slices.ContainsFunc(now, func(s step) bool { return !s.done }), nil
	})
	if !errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	p.close()
	a.blocked(last)
	return coded{fmt.Errorf("cluster %s is not complete: %w", key.Name, err), exitTimeout}
}

// parts fetches the objects with the sizes and versions of a cluster.
func (m *management) parts(ctx context.Context, key client.ObjectKey) (parts, error) {
	if _, err := m.getCluster(ctx, key); err != nil {
		return parts{}, err
	}
	p := parts{cluster: &unstructured.Unstructured{}}
	p.cluster.SetGroupVersionKind(clusterv1.GroupVersion.WithKind("Cluster"))
	if err := m.client.Get(ctx, key, p.cluster); err != nil || hasTopology(p.cluster) {
		return p, err
	}
	ref, _, _ := unstructured.NestedStringMap(p.cluster.Object, "spec", "controlPlaneRef")
	if ref["name"] != "" {
		mapping, err := m.client.RESTMapper().RESTMapping(schema.GroupKind{Group: ref["apiGroup"], Kind: ref["kind"]})
		if err != nil {
			return p, err
		}
		p.controlPlane = &unstructured.Unstructured{}
		p.controlPlane.SetGroupVersionKind(mapping.GroupVersionKind)
		if err := m.client.Get(ctx, client.ObjectKey{Namespace: key.Namespace, Name: ref["name"]}, p.controlPlane); err != nil {
			return p, err
		}
	}
	for _, kind := range []string{"MachineDeployment", "MachinePool"} {
		list := &unstructured.UnstructuredList{}
		list.SetGroupVersionKind(clusterv1.GroupVersion.WithKind(kind + "List"))
		if err := m.client.List(ctx, list, client.InNamespace(key.Namespace), client.MatchingLabels{clusterv1.ClusterNameLabel: key.Name}); err != nil {
			return p, err
		}
		for i := range list.Items {
			p.workers = append(p.workers, &list.Items[i])
		}
	}
	return p, nil
}

func hasTopology(cluster *unstructured.Unstructured) bool {
	_, found, _ := unstructured.NestedMap(cluster.Object, "spec", "topology")
	return found
}

// controlPlaneObjects are the objects that are changed before the workers.
func (p parts) controlPlaneObjects() []*unstructured.Unstructured {
	if p.controlPlane == nil {
		return []*unstructured.Unstructured{p.cluster}
	}
	return []*unstructured.Unstructured{p.cluster, p.controlPlane}
}

// write changes the selected objects of a cluster, and returns all of them as they should be. It tries again after a
// conflict with another writer.
func (m *management) write(ctx context.Context, key client.ObjectKey, to target, selected func(parts) []*unstructured.Unstructured) (changed parts, err error) {
	try := func() error {
		p, err := m.parts(ctx, key)
		if err != nil {
			return err
		}
		if changed, err = p.changed(to); err != nil {
			return err
		}
		return m.patch(ctx, selected(p), selected(changed))
	}
	// RetryOnConflict returns no error if the time of the context ends.
	_ = retry.RetryOnConflict(retry.DefaultBackoff, func() error { err = try(); return err })
	return changed, err
}

// patch writes the differences between the objects.
func (m *management) patch(ctx context.Context, before, after []*unstructured.Unstructured) error {
	for i, o := range after {
		if equality.Semantic.DeepEqual(before[i].Object, o.Object) {
			continue
		}
		err := m.client.Patch(ctx, o.DeepCopy(), client.MergeFromWithOptions(before[i], client.MergeFromWithOptimisticLock{}), client.FieldOwner("capstan-cli"))
		if err != nil {
			return fmt.Errorf("cannot change %s %s: %w", o.GetKind(), o.GetName(), err)
		}
	}
	return nil
}

// changed returns copies of the objects with the target's sizes and version.
func (p parts) changed(to target) (parts, error) {
	out := parts{cluster: p.cluster.DeepCopy()}
	if p.controlPlane != nil {
		out.controlPlane = p.controlPlane.DeepCopy()
	}
	for _, w := range p.workers {
		out.workers = append(out.workers, w.DeepCopy())
	}
	if hasTopology(p.cluster) {
		return out, changeTopology(out.cluster.Object, to)
	}
	if out.controlPlane == nil && (to.controlPlanes != unchanged || to.version != "") {
		return out, fmt.Errorf("expected a Cluster with a controlPlaneRef or a topology, found neither in Cluster %s", p.cluster.GetName())
	}
	if to.controlPlanes != unchanged {
		set64(out.controlPlane.Object, to.controlPlanes, "spec", "replicas")
	}
	if to.version != "" {
		setString(out.controlPlane.Object, to.version, "spec", "version")
		for _, w := range out.workers {
			setString(w.Object, to.version, "spec", "template", "spec", "version")
		}
	}
	if to.workers == unchanged {
		return out, nil
	}
	return out, scaleGroup(out.groups(), to)
}

// groups returns the groups of workers. Their maps are parts of the objects.
func (p parts) groups() []workerGroup {
	groups := topologyGroups(p.cluster.Object)
	for _, w := range p.workers {
		groups = append(groups, workerGroup{name: w.GetName(), object: w.Object, path: []string{"spec", "replicas"}})
	}
	return groups
}

// workerGroup is a number of workers in an object.
type workerGroup struct {
	name   string
	object map[string]any
	path   []string
}

// scaleGroup sets the size of the group that the command line names, or of the only one.
func scaleGroup(groups []workerGroup, to target) error {
	var names []string
	for _, g := range groups {
		names = append(names, g.name)
	}
	i := slices.Index(names, to.group)
	if to.group == "" && len(groups) == 1 {
		i = 0
	}
	if i < 0 {
		wanted := "the group of the workers in --group"
		if to.group != "" {
			wanted = "a group of workers " + to.group
		}
		return coded{fmt.Errorf("expected %s, found the groups %s", wanted, cmp.Or(strings.Join(names, ", "), "none")), exitUsage}
	}
	set64(groups[i].object, to.workers, groups[i].path...)
	return nil
}

// changeTopology changes the topology of a Cluster. Cluster API changes the other objects in the right order.
func changeTopology(cluster map[string]any, to target) error {
	if to.version != "" {
		setString(cluster, to.version, "spec", "topology", "version")
	}
	if to.controlPlanes != unchanged {
		set64(cluster, to.controlPlanes, "spec", "topology", "controlPlane", "replicas")
	}
	if to.workers == unchanged {
		return nil
	}
	return scaleGroup(topologyGroups(cluster), to)
}

// topologyGroups returns the groups of workers of a topology. Their maps are parts of the Cluster.
func topologyGroups(cluster map[string]any) []workerGroup {
	workers, _, _ := unstructured.NestedFieldNoCopy(cluster, "spec", "topology", "workers")
	byKind, _ := workers.(map[string]any)
	var groups []workerGroup
	for _, kind := range []string{"machineDeployments", "machinePools"} {
		list, _ := byKind[kind].([]any)
		for _, item := range list {
			if g, ok := item.(map[string]any); ok {
				name, _ := g["name"].(string)
				groups = append(groups, workerGroup{name: name, object: g, path: []string{"replicas"}})
			}
		}
	}
	return groups
}

// totalWorkers is the number of workers in all groups; unchanged if a group has no number, as with an autoscaler.
func (p parts) totalWorkers() int {
	total := 0
	for _, g := range p.groups() {
		n, found, _ := unstructured.NestedInt64(g.object, g.path...)
		if !found {
			return unchanged
		}
		total += int(n)
	}
	return total
}

// machines is the number of machines of the cluster. Groups without a number do not count.
func (p parts) machines() int {
	total := max(p.totalWorkers(), 0)
	for _, o := range p.controlPlaneObjects() {
		for _, path := range [][]string{{"spec", "replicas"}, {"spec", "topology", "controlPlane", "replicas"}} {
			n, _, _ := unstructured.NestedInt64(o.Object, path...)
			total += int(n)
		}
	}
	return total
}

func set64(object map[string]any, n int, path ...string) {
	_ = unstructured.SetNestedField(object, int64(n), path...)
}

func setString(object map[string]any, text string, path ...string) {
	_ = unstructured.SetNestedField(object, text, path...)
}

// controlPlaneSteps are the steps until all control plane machines have their target. The Node of a machine reports its
// version, so updates in place count as well.
func controlPlaneSteps(v view, to target) []step {
	want := to.controlPlanes
	if want == unchanged {
		want = specReplicas(v, func(kind string) bool { return strings.HasSuffix(kind, "ControlPlane") })
	}
	return []step{machineStep("control plane machines", machinesOf(v, true), want, to.version)}
}

// settledSteps are the steps until all machines have their target and the Cluster is available.
func settledSteps(v view, to target) []step {
	want := to.workers
	if want == unchanged {
		want = specReplicas(v, func(kind string) bool { return kind == "MachineDeployment" || kind == "MachinePool" })
	}
	return append(controlPlaneSteps(v, to), machineStep("workers", machinesOf(v, false), want, to.version),
		step{name: "cluster available", done: diagnosis.Status(v.cluster, "Available") == "True"})
}

func specReplicas(v view, is func(kind string) bool) int {
	total := int64(0)
	for _, o := range v.objects {
		if is(o.GetKind()) {
			n, _, _ := unstructured.NestedInt64(o.Object, "spec", "replicas")
			total += n
		}
	}
	return int(total)
}

func machinesOf(v view, controlPlane bool) (out []*unstructured.Unstructured) {
	for _, o := range v.objects {
		_, is := o.GetLabels()[clusterv1.MachineControlPlaneLabel]
		if o.GetKind() == "Machine" && is == controlPlane {
			out = append(out, o)
		}
	}
	return out
}

// machineStep is done when exactly the wanted number of machines exists, and all are ready and have the version.
func machineStep(name string, machines []*unstructured.Unstructured, want int, version string) step {
	ready := 0
	for _, m := range machines {
		has, _, _ := unstructured.NestedString(m.Object, "status", "nodeInfo", "kubeletVersion")
		if m.GetDeletionTimestamp() == nil && diagnosis.Status(m, "Ready") == "True" && (version == "" || has == version) {
			ready++
		}
	}
	s := step{name: name, done: ready == want && len(machines) == want, note: fmt.Sprintf("%d of %d ready", ready, want)}
	if version != "" {
		s.note += " with " + version
	}
	if extra := len(machines) - ready; !s.done && extra > 0 {
		s.note += fmt.Sprintf(", %d others", extra)
	}
	return s
}
