// Command capstan-runc runs runc for containerd. Before runc creates a container, it shows the size of the machine in /proc of the
// container, and keeps the container from leaving the limits of its local volumes. It is a program of its own, because containerd runs
// it for each probe of a pod: it must start as fast as runc.
//
// Layer: main. Allowed imports: api, library, contract, reconciler, manager, host, node, tool.
package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"

	"capstan.dev/capstan/internal/node/bundle"
	"capstan.dev/capstan/internal/node/podseccomp"
	"capstan.dev/capstan/internal/node/podview"
	"capstan.dev/capstan/internal/projectquota"
)

func main() {
	if dir := bundle.Dir(os.Args[1:]); dir != "" {
		// An error that says nothing, for example because the box has no free file, must not let a container leave its limits.
		limited := !errors.Is(projectquota.Own("/", "/"), projectquota.ErrNone)
		err := bundle.Change(dir, changes(limited))
		if err != nil && limited {
			fail("keeping the container in the limits of its local volumes", err)
		}
		if err != nil { // A container with the /proc of the kernel is better than none.
			fmt.Fprintln(os.Stderr, "capstan-runc: the container sees the memory of the host:", err)
		}
	}
	self, err := os.Executable()
	if err == nil {
		runc := filepath.Join(filepath.Dir(self), "runc")
		//nolint:gosec // It has no more rights than containerd, which chooses the arguments.
		err = syscall.Exec(runc, append([]string{runc}, os.Args[1:]...), os.Environ())
	}
	fail("starting runc", err)
}

// changes returns the changes of the specification of a container. limited is true if local volumes have limits.
func changes(limited bool) func(spec []byte) ([]byte, error) {
	return func(spec []byte) ([]byte, error) {
		spec, err := podview.Add(spec, podview.Views())
		if err != nil || !limited {
			return spec, err
		}
		return podseccomp.Restrict(spec)
	}
}

func fail(step string, err error) {
	fmt.Fprintf(os.Stderr, "capstan-runc: %s: %v\n", step, err)
	os.Exit(1)
}
