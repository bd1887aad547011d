package manager

import (
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	cliflag "k8s.io/component-base/cli/flag"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"

	"sigs.k8s.io/cluster-api/util/apiwarnings"

	"capstan.dev/capstan/internal/reconciling"
	"capstan.dev/capstan/internal/tracing"
	"capstan.dev/capstan/internal/version"
)

// Command returns the command `manager`, with a subcommand for each provider and one for all of them.
func Command(providers ...reconciling.Provider) *cobra.Command {
	root := &cobra.Command{
		Use:   "manager",
		Short: "Runs Capstan's Cluster API providers",
		Args:  cobra.NoArgs, SilenceUsage: true, SilenceErrors: true,
	}
	for _, p := range providers {
		root.AddCommand(command(p.Name, fmt.Sprintf("Runs the %s provider", p.Name), []reconciling.Provider{p}))
	}
	root.AddCommand(command("all", "Runs all providers in one process, with shared caches", providers))
	return root
}

func command(name, short string, providers []reconciling.Provider) *cobra.Command {
	cmd := &cobra.Command{Use: name, Short: short, Args: cobra.NoArgs}
	cmd.Flags().SetNormalizeFunc(cliflag.WordSepNormalizeFunc)
	flags := AddFlags(cmd.Flags(), providers)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if _, err := flags.Logs.Apply(os.Stderr); err != nil {
			return err
		}
		ctrl.SetLogger(klog.Background())
		restConfig, err := restConfig(flags)
		if err != nil {
			return fmt.Errorf("no management cluster: %w", err)
		}
		ctx := ctrl.LoggerInto(cmd.Context(), ctrl.Log)
		stopTracing, err := tracing.Start(ctx, flags.Tracing, "capstan-manager", version.Version, func(err error) { ctrl.Log.Info("Tracing", "problem", err.Error()) })
		if err != nil {
			return err
		}
		defer stopTracing()
		mgr, err := New(ctx, restConfig, flags, providers)
		if err != nil {
			return err
		}
		ctrl.Log.Info("Starting", "providers", names(providers))
		err = mgr.Start(ctx)
		if err != nil && ctx.Err() != nil {
			// The manager has ended on request, even if some parts have not stopped in time: controller-runtime's queue
			// can hang while it is shut down with items in it (kubernetes-sigs/controller-runtime#3538).
			ctrl.Log.Error(err, "Ended, but not in good order")
			return nil
		}
		return err
	}
	return cmd
}

func restConfig(flags *Flags) (*rest.Config, error) {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = flags.Kubeconfig
	c, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, nil).ClientConfig()
	if err != nil {
		return nil, err
	}
	c.QPS, c.Burst = flags.QPS, flags.Burst
	c.UserAgent = "capstan-manager"
	c.WarningHandler = apiwarnings.DefaultHandler(klog.Background().WithName("API server warning"))
	return c, nil
}

func names(providers []reconciling.Provider) string {
	out := make([]string, 0, len(providers))
	for _, p := range providers {
		out = append(out, p.Name)
	}
	return strings.Join(out, ", ")
}
