// Command manager runs Capstan's Cluster API providers.
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/spf13/cobra"
	ctrl "sigs.k8s.io/controller-runtime"

	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
	"capstan.dev/capstan/internal/bootstrap"
	"capstan.dev/capstan/internal/controlplane"
	"capstan.dev/capstan/internal/infrastructure"
	"capstan.dev/capstan/internal/ipam"
	"capstan.dev/capstan/internal/manager"
)

func main() {
	if err := command().ExecuteContext(ctrl.SetupSignalHandler()); err != nil {
		fmt.Fprintln(os.Stderr, "Error:", err)
		os.Exit(1)
	}
}

func command() *cobra.Command {
	return manager.Command(infrastructure.Provider(), controlplane.Provider, bootstrap.Provider, ipamProvider())
}

func ipamProvider() manager.Provider {
	return manager.Provider{
		Name:        "ipam",
		Kinds:       []string{"IPAddressClaim", "CapstanIPPool"},
		AddToScheme: ipamv1.AddToScheme,
		Setup: func(ctx context.Context, mgr ctrl.Manager, opts manager.Options) error {
			return ipam.SetupWithManager(ctx, mgr, ipam.Options{
				WatchNamespace:  opts.WatchNamespace,
				WatchFilter:     opts.WatchFilter,
				Concurrency:     opts.For("IPAddressClaim").MaxConcurrentReconciles,
				PoolConcurrency: opts.For("CapstanIPPool").MaxConcurrentReconciles,
			})
		},
		SetupWebhooks: func(mgr ctrl.Manager, _ manager.Options) error { return ipam.SetupWebhooksWithManager(mgr) },
	}
}
