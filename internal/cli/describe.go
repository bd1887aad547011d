package cli

import (
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
	"sigs.k8s.io/controller-runtime/pkg/client"
)

const (
	infraGroup = "infrastructure.capstan.dev"
	ipamGroup  = "ipam.capstan.dev"
)

// described are the kinds that users name, with the kinds of the API that each can mean.
var described = map[string][]schema.GroupKind{
	"cluster": {{Group: clusterv1.GroupVersion.Group, Kind: "Cluster"}},
	"machine": {{Group: clusterv1.GroupVersion.Group, Kind: "Machine"}},
	"host":    {{Group: infraGroup, Kind: "CapstanHost"}},
	"pool":    {{Group: ipamGroup, Kind: "CapstanIPPool"}, {Group: ipamGroup, Kind: "GlobalCapstanIPPool"}, {Group: clusterv1.GroupVersion.Group, Kind: "MachinePool"}},
}

// describedOrder is the order in which a name without a kind is searched.
var describedOrder = []string{"cluster", "machine", "host", "pool"}

func (a *app) describeCommand() *cobra.Command {
	var namespace string
	c := &cobra.Command{
		Use: "describe [cluster|machine|host|pool] NAME", Short: "Show what an object waits for, since when, and what to do",
		Long: `Show the state of a cluster, a machine, a host or a pool: what it and its parts wait for, since when, what to do, and their
last events. Without a kind, all objects of this name are shown.`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 1 || len(args) == 2 && described[args[0]] != nil {
				return nil
			}
			return coded{fmt.Errorf("wanted one of %s, and a name, found %q", strings.Join(describedOrder, ", "), args), exitUsage}
		},
		RunE: func(c *cobra.Command, args []string) error {
			m, key, err := a.clusterOf(namespace, args[len(args)-1])
			if err != nil {
				return err
			}
			kinds := describedOrder
			if len(args) == 2 {
				kinds = args[:1]
			}
			return a.describe(c.Context(), m, kinds, key)
		},
		ValidArgsFunction: a.completeClusters(&namespace),
	}
	c.Flags().StringVarP(&namespace, "namespace", "n", "", "namespace (default: that of the context)")
	return c
}

func (a *app) describe(ctx context.Context, m *management, kinds []string, key client.ObjectKey) error {
	roots, err := m.find(ctx, kinds, key)
	if err != nil {
		return err
	}
	if len(roots) == 0 {
		return coded{fmt.Errorf("there is no %s %s in namespace %s, or you cannot read it", strings.Join(kinds, ", "), key.Name, key.Namespace), exitNotFound}
	}
	reports := []report{}
	for _, root := range roots {
		parts, err := m.partsOf(ctx, root)
		if err != nil {
			return err
		}
		events, err := m.events(ctx, root.GetNamespace())
		if err != nil {
			return err
		}
		reports = append(reports, diagnose(root, parts, events))
	}
	if a.json() {
		return a.printJSON(reports)
	}
	for i, r := range reports {
		if i > 0 {
			fmt.Fprintln(a.out)
		}
		if err := r.print(a.out, time.Now()); err != nil {
			return err
		}
	}
	return nil
}

// find returns the objects of the name. Kinds that the user cannot read, or that are not installed, have none.
func (m *management) find(ctx context.Context, kinds []string, key client.ObjectKey) (found []*unstructured.Unstructured, err error) {
	for _, name := range kinds {
		for _, gk := range described[name] {
			mapping, err := m.client.RESTMapper().RESTMapping(gk)
			if apimeta.IsNoMatchError(err) {
				continue
			}
			if err != nil {
				return nil, err
			}
			own := key
			if mapping.Scope.Name() == apimeta.RESTScopeNameRoot {
				own.Namespace = ""
			}
			o := &unstructured.Unstructured{}
			o.SetGroupVersionKind(mapping.GroupVersionKind)
			switch err := m.client.Get(ctx, own, o); {
			case err == nil:
				found = append(found, o)
			case !apierrors.IsNotFound(err) && !apierrors.IsForbidden(err):
				return nil, err
			}
		}
	}
	return found, nil
}

// partsOf returns the objects that belong to an object: those of a cluster; those that a machine refers to; the machines of
// a host; the claims of a pool.
func (m *management) partsOf(ctx context.Context, root *unstructured.Unstructured) ([]*unstructured.Unstructured, error) {
	switch root.GetKind() {
	case "Cluster":
		return m.clusterObjects(ctx, root)
	case "Machine":
		return m.referenced(ctx, root)
	case "CapstanHost":
		return m.listed(ctx, schema.GroupKind{Group: infraGroup, Kind: "CapstanMachine"}, "", func(o *unstructured.Unstructured) bool {
			return field(o, "spec.hostName") == root.GetName()
		})
	}
	return m.listed(ctx, schema.GroupKind{Group: "ipam.cluster.x-k8s.io", Kind: "IPAddressClaim"}, root.GetNamespace(), func(o *unstructured.Unstructured) bool {
		return field(o, "spec.poolRef.kind") == root.GetKind() && field(o, "spec.poolRef.name") == root.GetName()
	})
}

func (m *management) clusterObjects(ctx context.Context, cluster *unstructured.Unstructured) (out []*unstructured.Unstructured, err error) {
	kinds, err := m.clusterKinds()
	if err != nil {
		return nil, err
	}
	for _, kind := range kinds {
		list := &unstructured.UnstructuredList{}
		gvk, err := m.client.RESTMapper().KindFor(kind)
		if err != nil {
			return nil, err
		}
		list.SetGroupVersionKind(gvk)
		err = m.client.List(ctx, list, client.InNamespace(cluster.GetNamespace()), client.MatchingLabels{clusterv1.ClusterNameLabel: cluster.GetName()})
		if err != nil && !apierrors.IsForbidden(err) {
			return nil, err
		}
		for i := range list.Items {
			out = append(out, &list.Items[i])
		}
	}
	return out, nil
}

// referenced returns the objects that a Machine names, and its host.
func (m *management) referenced(ctx context.Context, machine *unstructured.Unstructured) (out []*unstructured.Unstructured, err error) {
	for _, path := range []string{"spec.infrastructureRef", "spec.bootstrap.configRef"} {
		gk := schema.GroupKind{Group: field(machine, path+".apiGroup"), Kind: field(machine, path+".kind")}
		own, err := m.listed(ctx, gk, machine.GetNamespace(), func(o *unstructured.Unstructured) bool { return o.GetName() == field(machine, path+".name") })
		if err != nil {
			return nil, err
		}
		out = append(out, own...)
	}
	for _, o := range slices.Clone(out) {
		host := field(o, "spec.hostName")
		if host == "" {
			continue
		}
		hosts, err := m.find(ctx, []string{"host"}, client.ObjectKey{Name: host})
		if err != nil {
			return nil, err
		}
		out = append(out, hosts...)
	}
	return out, nil
}

// listed returns the objects of a kind that match. A kind that is not installed, or that the user cannot list, has none.
func (m *management) listed(ctx context.Context, gk schema.GroupKind, namespace string, match func(*unstructured.Unstructured) bool) (out []*unstructured.Unstructured, err error) {
	mapping, err := m.client.RESTMapper().RESTMapping(gk)
	if apimeta.IsNoMatchError(err) || gk.Kind == "" {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	list := &unstructured.UnstructuredList{}
	list.SetGroupVersionKind(mapping.GroupVersionKind)
	if err := m.client.List(ctx, list, client.InNamespace(namespace)); err != nil && !apierrors.IsForbidden(err) {
		return nil, err
	}
	for i := range list.Items {
		if match(&list.Items[i]) {
			out = append(out, &list.Items[i])
		}
	}
	return out, nil
}

func everything(*unstructured.Unstructured) bool { return true }

// events returns the events of a namespace. Those of objects without a namespace are in the namespace default.
func (m *management) events(ctx context.Context, namespace string) ([]corev1.Event, error) {
	if namespace == "" {
		namespace = corev1.NamespaceDefault
	}
	list := &corev1.EventList{}
	err := m.client.List(ctx, list, client.InNamespace(namespace))
	if apierrors.IsForbidden(err) {
		return nil, nil
	}
	return list.Items, err
}
