// Package multicall runs one of several programs that share one binary, chosen
// by the name it was called with, as busybox does.
//
// A symlink (or a copy) named after a command runs that command. Under any other
// name the first argument chooses:
//
//	kubelet --config x               argv[0] is a symlink to the binary
//	capstan-kube kubelet --config x  the same
//
// It does not depend on Kubernetes or etcd, so that the module of each of them can use it.
package multicall

import (
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Commands are the programs by name. A program finds its arguments in os.Args,
// exactly as if it had been started as a binary of its own, and its return
// value is the exit code (most of them never return).
type Commands map[string]func() int

// Names returns the sorted command names.
func (c Commands) Names() []string {
	return slices.Sorted(maps.Keys(c))
}

// Select returns the name of the command that args (argv) ask for and the
// arguments, name first, that this command is to see.
func (c Commands) Select(args []string) (string, []string, error) {
	if len(args) == 0 {
		return "", nil, fmt.Errorf("no command given; have: %s", strings.Join(c.Names(), ", "))
	}
	self := filepath.Base(args[0])
	if _, ok := c[self]; ok {
		return self, args, nil
	}
	if len(args) < 2 {
		return "", nil, fmt.Errorf("%s: no command given; have: %s", self, strings.Join(c.Names(), ", "))
	}
	name := args[1]
	if _, ok := c[name]; !ok {
		return "", nil, fmt.Errorf("%s: unknown command %q; have: %s", self, name, strings.Join(c.Names(), ", "))
	}
	return name, args[1:], nil
}

// Run selects, sets os.Args, runs and returns the exit code. "--list" prints the command names, one per line, for the
// script that creates the symlinks.
func (c Commands) Run(stdout, stderr io.Writer) int {
	name, args, err := c.Select(os.Args)
	if err != nil {
		if len(os.Args) == 2 && os.Args[1] == "--list" {
			fmt.Fprintln(stdout, strings.Join(c.Names(), "\n"))
			return 0
		}
		fmt.Fprintln(stderr, err)
		return 2
	}
	os.Args = args
	return c[name]()
}
