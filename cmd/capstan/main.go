// Command capstan creates and manages Kubernetes clusters on Linux hosts.
//
// Layer: main. Allowed imports: api, library, contract, reconciler, manager, host, node, tool.
package main

import (
	"os"

	"capstan.dev/capstan/internal/cli"
)

func main() { os.Exit(cli.Main()) }
