package cli

import (
	"fmt"
	"math"

	"github.com/spf13/cobra"

	"capstan.dev/capstan/internal/cli/dashboard"
)

func (a *app) dashboardCommand() *cobra.Command {
	var o dashboard.Options
	c := &cobra.Command{
		Use: "dashboard", Short: "Serve a web page with hosts, clusters, addresses, waits and events", Args: cobra.NoArgs,
		Long: `Serve a web page on this box that shows hosts with their machines, clusters with their topology, pools of addresses, waits
with their causes, and events. The page changes with the objects.

The page only reads, with the rights of your kubeconfig. Only this box can reach it, at the address that the command prints. The
address contains a secret: do not publish it. The page ends with the command.`,
		PreRunE: func(*cobra.Command, []string) error {
			if o.Port > math.MaxUint16 {
				return coded{fmt.Errorf("expected --port up to %d, found %d", math.MaxUint16, o.Port), exitUsage}
			}
			return nil
		},
		RunE: func(c *cobra.Command, _ []string) error {
			m, err := a.management()
			if err != nil {
				return err
			}
			if o.Fallback, err = a.namespace(""); err != nil {
				return err
			}
			o.Config, o.Mapper = m.config, m.client.RESTMapper()
			o.Ready = func(url string) error {
				if a.structured() {
					return a.print(map[string]string{"url": url})
				}
				_, err := fmt.Fprintf(a.out, "%s\nOpen this address in a browser on this box. Ctrl+C ends the page.\n", url)
				return err
			}
			return dashboard.Run(c.Context(), o)
		},
	}
	c.Flags().IntVar(&o.Port, "port", 0, "port on loopback (default: a free one)")
	c.Flags().StringVarP(&o.Namespace, "namespace", "n", "", "namespace (default: all; that of the context for kinds that you cannot list in all)")
	return c
}
