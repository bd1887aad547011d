// Command capstan creates and manages Kubernetes clusters on Linux hosts.
//
// Layer: main.
package main

import (
	"os"

	"capstan.dev/capstan/internal/cli"
)

func main() { os.Exit(cli.Main()) }
