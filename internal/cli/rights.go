package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// The roles of config/infrastructure/rbac/viewer_roles.yaml.
const (
	viewerRole     = "capstan-infrastructure-viewer"
	hostViewerRole = "capstan-infrastructure-host-viewer"
)

// viewerGroups are the groups of the API with kinds in these roles.
var viewerGroups = []string{
	"", "cluster.x-k8s.io", "addons.cluster.x-k8s.io", "ipam.cluster.x-k8s.io", "clusterctl.cluster.x-k8s.io",
	infraGroup, "controlplane.capstan.dev", "bootstrap.capstan.dev", ipamGroup,
}

// gap is a kind that a user has no right to read.
type gap struct {
	// Resource as in a Role, with its group: capstanhosts.infrastructure.capstan.dev.
	Resource string `json:"resource"`
	// Scope is the part of the API in which it cannot be read: namespaces, or the cluster.
	Scope string `json:"scope"`
	// Reason is the answer of the API server.
	Reason string `json:"reason"`
	// Do is the step by which an administrator gives the right.
	Do string `json:"do"`
}

// newGap describes a refused request. shown is the only namespace that could be read instead of all; "" for none.
func newGap(mapping *apimeta.RESTMapping, namespace, shown string, refusal error) gap {
	g := gap{Resource: mapping.Resource.GroupResource().String(), Scope: "the cluster", Reason: refusal.Error()}
	namespaced := mapping.Scope.Name() == apimeta.RESTScopeNameNamespace
	binding, role := "clusterrolebinding NAME", hostViewerRole
	if namespaced {
		role, g.Scope = viewerRole, "all namespaces"
	}
	switch {
	case namespaced && namespace != "":
		g.Scope, binding = "namespace "+namespace, "rolebinding NAME -n "+namespace
	case shown != "":
		g.Scope = "all namespaces but " + shown
	}
	g.Do = "kubectl create " + binding + " --clusterrole " + role + " --user USER"
	switch {
	case g.Resource == "secrets":
		g.Do = "nothing: the bundle contains no Secrets. Without this right, it does not recognize their values in texts"
	case g.Resource == "pods" || !slices.Contains(viewerGroups, mapping.Resource.Group):
		g.Do = "bind a role with the verbs get, list and watch on " + g.Resource
	}
	return g
}

// printGaps prints the kinds that the user cannot read, and each role that gives the right once.
func printGaps(out io.Writer, gaps []gap) {
	if len(gaps) == 0 {
		return
	}
	fmt.Fprintln(out, "\nCannot be read:")
	for i, g := range gaps {
		fmt.Fprintf(out, "  %s (%s): %s\n", g.Resource, g.Scope, g.Reason)
		if !slices.ContainsFunc(gaps[i+1:], func(later gap) bool { return later.Do == g.Do }) {
			fmt.Fprintf(out, "    → %s\n", g.Do)
		}
	}
}

// noRights is the error of a command whose user can read nothing that it shows.
func (m *management) noRights() error {
	if m.readable || len(m.gaps) == 0 {
		return nil
	}
	return errors.New("expected the right to read at least one of these kinds, found none: an administrator gives it with the commands of the output")
}

// refused notes a kind that the user cannot read.
func (m *management) refused(g gap) {
	if !slices.Contains(m.gaps, g) {
		m.gaps = append(m.gaps, g)
	}
}

// read lists the objects of a kind in a namespace, or in all. A user who cannot list all gets those of the namespace of the
// context. A kind that the user has no right to read is noted in m.gaps, and is no error.
func (m *management) read(ctx context.Context, mapping *apimeta.RESTMapping, list client.ObjectList, namespace string, options ...client.ListOption) error {
	try := func(namespace string) error {
		return m.client.List(ctx, list, append(slices.Clone(options), client.InNamespace(namespace))...)
	}
	refusal := try(namespace)
	if !apierrors.IsForbidden(refusal) {
		m.readable = m.readable || refusal == nil
		return refusal
	}
	shown := ""
	if namespace == "" && m.namespace != "" && mapping.Scope.Name() == apimeta.RESTScopeNameNamespace {
		switch err := try(m.namespace); {
		case err == nil:
			shown, m.readable = m.namespace, true
		case !apierrors.IsForbidden(err):
			return err
		}
	}
	m.refused(newGap(mapping, namespace, shown, refusal))
	return nil
}

// listed returns the objects of a kind that the user can read. A kind that is not installed has none.
func (m *management) listed(ctx context.Context, gk schema.GroupKind, namespace string, options ...client.ListOption) (out []*unstructured.Unstructured, err error) {
	mapping, err := m.client.RESTMapper().RESTMapping(gk)
	if apimeta.IsNoMatchError(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	list := &unstructured.UnstructuredList{}
	list.SetGroupVersionKind(mapping.GroupVersionKind)
	if err := m.read(ctx, mapping, list, namespace, options...); err != nil {
		return nil, err
	}
	for i := range list.Items {
		out = append(out, &list.Items[i])
	}
	return out, nil
}
