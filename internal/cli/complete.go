package cli

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
)

// completionPatience limits the time that a user waits for the completion of a name.
const completionPatience = 3 * time.Second

type completion = func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective)

// completing returns a completion without files. A shell shows no errors, so without a management cluster there are no names.
func (a *app) completing(names func(ctx context.Context, args []string) []string) completion {
	return func(c *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		a.rootGiven = c.Flags().Changed("root")
		ctx, cancel := context.WithTimeout(c.Context(), completionPatience)
		defer cancel()
		return names(ctx, args), cobra.ShellCompDirectiveNoFileComp
	}
}

// completeNames completes the first argument with names of objects. namespace points to the value of the flag.
func (a *app) completeNames(namespace *string, kinds ...schema.GroupKind) completion {
	return a.completing(func(ctx context.Context, args []string) []string {
		if len(args) > 0 {
			return nil
		}
		return a.names(ctx, *namespace, kinds)
	})
}

func (a *app) completeClusters(namespace *string) completion {
	return a.completeNames(namespace, described["cluster"]...)
}

// completeMachines completes a machine, and then one of its services if the command takes one.
func (a *app) completeMachines(namespace *string, services bool) completion {
	return a.completing(func(ctx context.Context, args []string) []string {
		switch {
		case len(args) == 1 && services:
			return machineServices
		case len(args) > 0:
			return nil
		case a.onThisBox():
			return a.machineNamesHere(ctx, *namespace)
		}
		return a.names(ctx, *namespace, []schema.GroupKind{{Group: infraGroup, Kind: "CapstanMachine"}})
	})
}

// completeTokens completes the name of a token of hosts.
func (a *app) completeTokens() completion {
	return func(c *cobra.Command, args []string, word string) ([]string, cobra.ShellCompDirective) {
		return a.completing(func(ctx context.Context, args []string) []string {
			if len(args) > 0 {
				return nil
			}
			namespace, _ := c.Flags().GetString(namespaceFlag)
			return a.names(ctx, namespace, []schema.GroupKind{{Kind: "Secret"}}, client.HasLabels{infrav1.HostTokenLabel})
		})(c, args, word)
	}
}

// completeGroups completes a group of workers of the cluster in the first argument.
func (a *app) completeGroups(namespace *string) completion {
	return a.completing(func(ctx context.Context, args []string) (names []string) {
		if len(args) == 0 {
			return nil
		}
		m, key, err := a.clusterOf(*namespace, args[0])
		if err != nil {
			return nil
		}
		p, _ := m.parts(ctx, key) // has the groups that the user can read
		if p.cluster == nil {
			return nil
		}
		for _, g := range p.groups() {
			names = append(names, g.name)
		}
		return names
	})
}

// completeDescribed completes a kind or a name, and then a name of the kind.
func (a *app) completeDescribed(namespace *string) completion {
	return a.completing(func(ctx context.Context, args []string) []string {
		switch {
		case len(args) == 0:
			return append(slices.Clone(describedOrder), a.names(ctx, *namespace, slices.Concat(slices.Collect(maps.Values(described))...))...)
		case len(args) == 1:
			return a.names(ctx, *namespace, described[singular(args[0])])
		}
		return nil
	})
}

// completeVersionFlag completes the Kubernetes version of a cluster with those of the hosts, the newest first.
func (a *app) completeVersionFlag(c *cobra.Command) {
	_ = c.RegisterFlagCompletionFunc("kubernetes-version", a.completing(func(ctx context.Context, _ []string) []string {
		m, err := a.management()
		if err != nil {
			return nil
		}
		hosts, _ := m.hosts(ctx) // Completion shows no errors.
		versions, _ := versionsOf(hosts)
		slices.Reverse(versions)
		return versions
	}))
}

// completeFlags completes the values of --namespace of all commands, and those of the flags of all commands.
func (a *app) completeFlags(c *cobra.Command) {
	fixed := func(values ...string) completion {
		return cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp)
	}
	complete := map[string]completion{
		"namespace": a.completing(a.namespaces), namespaceFlag: a.completing(a.namespaces), "context": a.completing(a.contexts),
		"output": fixed(outputJSON, outputYAML), "progress": fixed(progressFormats...), "logging-format": fixed("text", "json"),
	}
	for name, values := range complete {
		if c.Flags().Lookup(name) != nil || c.PersistentFlags().Lookup(name) != nil {
			_ = c.RegisterFlagCompletionFunc(name, values)
		}
	}
	for _, sub := range c.Commands() {
		a.completeFlags(sub)
	}
}

// contexts returns those of the kubeconfig.
func (a *app) contexts(context.Context, []string) []string {
	loader, _, err := a.clientConfig()
	if err != nil {
		return nil
	}
	config, err := loader.RawConfig()
	if err != nil {
		return nil
	}
	return slices.Sorted(maps.Keys(config.Contexts))
}

// namespaces returns those that the user can list, else that of the context.
func (a *app) namespaces(ctx context.Context, _ []string) []string {
	m, err := a.management()
	if err != nil {
		return nil
	}
	names := m.names(ctx, "", schema.GroupKind{Kind: "Namespace"})
	if len(names) == 0 && m.namespace != "" {
		return []string{m.namespace}
	}
	return names
}

// names returns the names of objects that the user can list in a namespace, by default that of the context.
func (a *app) names(ctx context.Context, namespace string, kinds []schema.GroupKind, options ...client.ListOption) (names []string) {
	namespace, err := a.namespace(namespace)
	if err != nil {
		return nil
	}
	m, err := a.management()
	if err != nil {
		return nil
	}
	// One kind that answers late does not delay the others.
	found := make([][]string, len(kinds))
	var group sync.WaitGroup
	for i, gk := range kinds {
		group.Go(func() { found[i] = m.names(ctx, namespace, gk, options...) })
	}
	group.Wait()
	names = slices.Concat(found...)
	slices.Sort(names)
	return slices.Compact(names)
}

// names returns the names of objects in a namespace; none if the user cannot list them.
func (m *management) names(ctx context.Context, namespace string, gk schema.GroupKind, options ...client.ListOption) (names []string) {
	mapping, err := m.client.RESTMapper().RESTMapping(gk)
	if err != nil {
		return nil
	}
	list := &metav1.PartialObjectMetadataList{}
	list.SetGroupVersionKind(mapping.GroupVersionKind)
	if m.client.List(ctx, list, append(slices.Clone(options), client.InNamespace(namespace))...) != nil {
		return nil
	}
	for i := range list.Items {
		names = append(names, list.Items[i].Name)
	}
	return names
}
