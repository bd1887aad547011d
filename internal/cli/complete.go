package cli

import (
	"context"
	"time"

	"github.com/spf13/cobra"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
)

// completionPatience limits the time that a user waits for the completion of a name.
const completionPatience = 3 * time.Second

type completion = func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective)

// completeClusters completes the name of a cluster. namespace points to the value of the flag.
func (a *app) completeClusters(namespace *string) completion {
	return a.completeNames(func(ctx context.Context, m *management) (names []string, err error) {
		in, err := a.namespace(*namespace)
		if err != nil {
			return nil, err
		}
		list := &clusterv1.ClusterList{}
		err = m.client.List(ctx, list, client.InNamespace(in))
		for i := range list.Items {
			names = append(names, list.Items[i].Name)
		}
		return names, err
	})
}

// completeHosts completes the name of a CapstanHost.
func (a *app) completeHosts() completion {
	return a.completeNames(func(ctx context.Context, m *management) (names []string, err error) {
		list := &infrav1.CapstanHostList{}
		err = m.client.List(ctx, list)
		for i := range list.Items {
			names = append(names, list.Items[i].Name)
		}
		return names, err
	})
}

// completeNames completes the first argument. A shell shows no errors, so without a plane there are no names.
func (a *app) completeNames(list func(context.Context, *management) ([]string, error)) completion {
	return func(c *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		a.rootGiven = c.Flags().Changed("root")
		ctx, cancel := context.WithTimeout(c.Context(), completionPatience)
		defer cancel()
		m, err := a.management()
		if err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		names, _ := list(ctx, m)
		return names, cobra.ShellCompDirectiveNoFileComp
	}
}
