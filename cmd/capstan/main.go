// Command capstan makes a Linux box into Kubernetes clusters, and looks after them.
//
// Layer: main.
package main

import (
	"os"

	"capstan.dev/capstan/internal/cli"
)

func main() { os.Exit(cli.Main()) }
