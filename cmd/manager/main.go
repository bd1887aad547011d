// Command manager runs Capstan's Cluster API providers.
//
// Layer: main. Allowed imports: api, library, contract, reconciler, manager, host, node, tool.
package main

import (
	"os"

	"github.com/spf13/cobra"
	ctrl "sigs.k8s.io/controller-runtime"

	"capstan.dev/capstan/internal/bootstrap"
	"capstan.dev/capstan/internal/controlplane"
	"capstan.dev/capstan/internal/infrastructure"
	"capstan.dev/capstan/internal/ipam"
	"capstan.dev/capstan/internal/logging"
	"capstan.dev/capstan/internal/manager"
	"capstan.dev/capstan/internal/manpages"
)

func main() {
	root := command()
	root.AddCommand(manpages.Command("8"))
	if failed, err := root.ExecuteContextC(ctrl.SetupSignalHandler()); err != nil {
		logging.LastError(failed, os.Stderr, "The manager ends", err)
		os.Exit(1)
	}
}

func command() *cobra.Command {
	return manager.Command(infrastructure.Provider(), controlplane.Provider, bootstrap.Provider, ipam.Provider)
}
