package cli

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/labels/format"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

const (
	infraGroup = "infrastructure.capstan.dev"
	ipamGroup  = "ipam.capstan.dev"
)

// described are the kinds that users name, with the kinds of the API that each can mean.
var described = map[string][]schema.GroupKind{
	"cluster":     {{Group: clusterv1.GroupVersion.Group, Kind: "Cluster"}},
	"machine":     {{Group: clusterv1.GroupVersion.Group, Kind: "Machine"}},
	"host":        {{Group: infraGroup, Kind: "CapstanHost"}},
	"pool":        {{Group: ipamGroup, Kind: "CapstanIPPool"}, {Group: ipamGroup, Kind: "GlobalCapstanIPPool"}},
	"machinepool": {{Group: clusterv1.GroupVersion.Group, Kind: "MachinePool"}, {Group: infraGroup, Kind: "CapstanMachinePool"}},
}

// describedOrder is the order in which a name without a kind is searched.
var describedOrder = []string{"cluster", "machine", "host", "pool", "machinepool"}

func (a *app) describeCommand() *cobra.Command {
	var namespace string
	c := &cobra.Command{
		Use: "describe [cluster|machine|host|pool|machinepool] NAME", Short: "Show why an object waits, since when, and the remedy",
		Long: `Show the state of a cluster, a machine, a host, a pool of addresses or a machine pool: why it and its parts wait, since when, the remedy, and the
last events. Without a kind, all objects of this name are shown.`,
		Args: func(_ *cobra.Command, args []string) error { _, _, err := parseDescribed(args); return err },
		RunE: func(c *cobra.Command, args []string) error {
			kinds, name, err := parseDescribed(args)
			if err != nil {
				return err
			}
			m, key, err := a.clusterOf(namespace, name)
			if err != nil {
				return err
			}
			return a.describe(c.Context(), m, kinds, key)
		},
		ValidArgsFunction: a.completeDescribed(&namespace),
	}
	c.Flags().StringVarP(&namespace, "namespace", "n", "", "namespace (default: that of the context)")
	return c
}

// parseDescribed returns the kinds and the name of the arguments KIND NAME, KIND/NAME, as kubectl writes it, or NAME.
func parseDescribed(args []string) (kinds []string, name string, err error) {
	if len(args) == 1 {
		if kind, name, found := strings.Cut(args[0], "/"); found {
			args = []string{kind, name}
		}
	}
	switch kind := singular(slices.Concat(args, []string{""})[0]); {
	case len(args) == 2 && described[kind] != nil && args[1] != "":
		return []string{kind}, args[1], nil
	case len(args) == 1 && described[kind] == nil:
		return describedOrder, args[0], nil
	}
	return nil, "", coded{fmt.Errorf("expected a name, or one of %s and a name, found %q", strings.Join(describedOrder, ", "), args), exitUsage}
}

// singular is the name of a kind. Commands accept the plural as well.
func singular(kind string) string { return strings.TrimSuffix(kind, "s") }

func (a *app) describe(ctx context.Context, m *management, kinds []string, key client.ObjectKey) error {
	roots, err := m.find(ctx, kinds, key)
	if err != nil {
		return err
	}
	if len(roots) == 0 {
		return m.missing(kinds, key)
	}
	reports := []report{}
	for _, root := range roots {
		parts, err := m.partsOf(ctx, root)
		if err != nil {
			return err
		}
		// Events of objects without a namespace are in the namespace default.
		events, err := m.events(ctx, cmp.Or(root.GetNamespace(), corev1.NamespaceDefault))
		if err != nil {
			return err
		}
		reports = append(reports, diagnose(root, parts, events))
	}
	if a.structured() {
		for i := range reports {
			reports[i].Unreadable = m.gaps
		}
		return a.print(reports)
	}
	for i, r := range reports {
		if i > 0 {
			fmt.Fprintln(a.out)
		}
		if err := r.print(a.out, time.Now()); err != nil {
			return err
		}
	}
	printGaps(a.out, m.gaps)
	return nil
}

// missing is the error for a name that was not found. A user who cannot read all of the kinds does not learn whether it exists.
func (m *management) missing(kinds []string, key client.ObjectKey) error {
	err := fmt.Errorf("there is no %s %s in namespace %s", strings.Join(kinds, ", "), key.Name, key.Namespace)
	if len(m.gaps) == 0 {
		return coded{fmt.Errorf("%w; `capstan top` lists all, and --namespace names another namespace", err), exitNotFound}
	}
	var gaps strings.Builder
	printGaps(&gaps, m.gaps)
	return coded{fmt.Errorf("%w that you can read\n%s", err, strings.TrimSuffix(gaps.String(), "\n")), exitFailed}
}

// find returns the objects of the name. Kinds that are not installed have none.
func (m *management) find(ctx context.Context, kinds []string, key client.ObjectKey) (found []*unstructured.Unstructured, err error) {
	for _, name := range kinds {
		for _, gk := range described[name] {
			o, err := m.get(ctx, gk, key)
			if err != nil {
				return nil, err
			}
			if o != nil {
				found = append(found, o)
			}
		}
	}
	return found, nil
}

// get returns an object; nil if it or its kind does not exist, or if the user has no right to read it.
func (m *management) get(ctx context.Context, gk schema.GroupKind, key client.ObjectKey) (*unstructured.Unstructured, error) {
	mapping, err := m.client.RESTMapper().RESTMapping(gk)
	if apimeta.IsNoMatchError(err) || gk.Kind == "" {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if mapping.Scope.Name() == apimeta.RESTScopeNameRoot {
		key.Namespace = ""
	}
	o := &unstructured.Unstructured{}
	o.SetGroupVersionKind(mapping.GroupVersionKind)
	err = m.client.Get(ctx, key, o)
	if apierrors.IsForbidden(err) {
		m.refused(newGap(mapping, key.Namespace, "", err))
		return nil, nil
	}
	m.readable = m.readable || client.IgnoreNotFound(err) == nil
	if err != nil {
		return nil, client.IgnoreNotFound(err)
	}
	return o, nil
}

// partsOf returns the objects that belong to an object: those of a cluster; those that a machine or a machine pool refers to, and
// the machines of the pool; the machines of a host; the claims of a pool.
func (m *management) partsOf(ctx context.Context, root *unstructured.Unstructured) ([]*unstructured.Unstructured, error) {
	switch root.GetKind() {
	case "Cluster":
		return m.clusterObjects(ctx, root)
	case "Machine":
		return m.referenced(ctx, root, "spec")
	case "MachinePool":
		return m.machinePoolObjects(ctx, root)
	case "CapstanMachinePool":
		return nil, nil // The MachinePool of the same name has the machines.
	case "CapstanHost":
		machines, err := m.listed(ctx, schema.GroupKind{Group: infraGroup, Kind: "CapstanMachine"}, "")
		return slices.DeleteFunc(machines, func(o *unstructured.Unstructured) bool { return field(o, "spec.hostName") != root.GetName() }), err
	}
	claims, err := m.listed(ctx, schema.GroupKind{Group: "ipam.cluster.x-k8s.io", Kind: "IPAddressClaim"}, root.GetNamespace())
	return slices.DeleteFunc(claims, func(o *unstructured.Unstructured) bool {
		return field(o, "spec.poolRef.kind") != root.GetKind() || field(o, "spec.poolRef.name") != root.GetName()
	}), err
}

func (m *management) clusterObjects(ctx context.Context, cluster *unstructured.Unstructured) (out []*unstructured.Unstructured, err error) {
	kinds, err := m.clusterKinds()
	if err != nil {
		return nil, err
	}
	for _, kind := range kinds {
		gvk, err := m.client.RESTMapper().KindFor(kind)
		if err != nil {
			return nil, err
		}
		objects, err := m.listed(ctx, gvk.GroupKind(), cluster.GetNamespace(), client.MatchingLabels{clusterv1.ClusterNameLabel: cluster.GetName()})
		if err != nil {
			return nil, err
		}
		out = append(out, objects...)
	}
	return out, nil
}

// machinePoolObjects returns the objects that a MachinePool names, and its machines.
func (m *management) machinePoolObjects(ctx context.Context, pool *unstructured.Unstructured) ([]*unstructured.Unstructured, error) {
	out, err := m.referenced(ctx, pool, "spec.template.spec")
	if err != nil {
		return nil, err
	}
	label := client.MatchingLabels{
		clusterv1.ClusterNameLabel: field(pool, "spec.clusterName"), clusterv1.MachinePoolNameLabel: format.MustFormatValue(pool.GetName()),
	}
	for _, gk := range []schema.GroupKind{described["machine"][0], {Group: infraGroup, Kind: "CapstanMachine"}} {
		machines, err := m.listed(ctx, gk, pool.GetNamespace(), label)
		if err != nil {
			return nil, err
		}
		out = append(out, machines...)
	}
	return out, nil
}

// referenced returns the objects that the spec of a machine names, and its host.
func (m *management) referenced(ctx context.Context, machine *unstructured.Unstructured, spec string) (out []*unstructured.Unstructured, err error) {
	add := func(gk schema.GroupKind, key client.ObjectKey) (err error) {
		o, err := m.get(ctx, gk, key)
		if o != nil {
			out = append(out, o)
		}
		return err
	}
	for _, path := range []string{spec + ".infrastructureRef", spec + ".bootstrap.configRef"} {
		gk := schema.GroupKind{Group: field(machine, path+".apiGroup"), Kind: field(machine, path+".kind")}
		if err := add(gk, client.ObjectKey{Namespace: machine.GetNamespace(), Name: field(machine, path+".name")}); err != nil {
			return nil, err
		}
	}
	for _, o := range slices.Clone(out) {
		if host := field(o, "spec.hostName"); host != "" {
			if err := add(described["host"][0], client.ObjectKey{Name: host}); err != nil {
				return nil, err
			}
		}
	}
	return out, nil
}

// events returns the events of a namespace, of all if it is empty.
func (m *management) events(ctx context.Context, namespace string) ([]corev1.Event, error) {
	mapping, err := m.client.RESTMapper().RESTMapping(schema.GroupKind{Kind: "Event"})
	if err != nil {
		return nil, err
	}
	list := &corev1.EventList{}
	err = m.read(ctx, mapping, list, namespace)
	return list.Items, err
}
