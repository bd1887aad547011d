// Command capstan-runc runs runc for containerd. Before runc creates a container, it shows the size of the machine in /proc of the
// container. It is a program of its own, because containerd runs it for each probe of a pod: it must start as fast as runc.
//
// Layer: main. Allowed imports: api, library, contract, reconciler, manager, host, node, tool.
package main

import (
	"fmt"
	"os"
	"path/filepath"
	"syscall"

	"capstan.dev/capstan/internal/node/podview"
)

func main() {
	if bundle := podview.Bundle(os.Args[1:]); bundle != "" {
		// A container with the /proc of the kernel is better than none.
		if err := podview.Update(bundle, podview.Views()); err != nil {
			fmt.Fprintln(os.Stderr, "capstan-runc: the container sees the memory of the host:", err)
		}
	}
	self, err := os.Executable()
	if err == nil {
		runc := filepath.Join(filepath.Dir(self), "runc")
		//nolint:gosec // It has no more rights than containerd, which chooses the arguments.
		err = syscall.Exec(runc, append([]string{runc}, os.Args[1:]...), os.Environ())
	}
	fmt.Fprintln(os.Stderr, "capstan-runc: starting runc:", err)
	os.Exit(1)
}
