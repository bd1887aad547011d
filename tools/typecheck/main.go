// Command typecheck checks the types of packages and of their tests, and those of the packages of the same module that they import. It
// compiles nothing: it reads the declarations of all other packages. The environment selects the system, for example with GOOS.
package main

import (
	"fmt"
	"os"

	"golang.org/x/tools/go/packages"
)

func main() {
	if err := run("", os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "typecheck:", err)
		os.Exit(1)
	}
}

// run checks packages of the module in a folder; an empty one is the current folder.
func run(folder string, patterns []string) error {
	own, err := imported(folder, patterns)
	if err != nil {
		return err
	}
	for _, load := range []struct {
		tests    bool
		patterns []string
	}{{true, patterns}, {false, own}} {
		// With the syntax of all packages, the types of imports come from their sources and not from compiled packages.
		loaded, err := packages.Load(&packages.Config{Mode: packages.LoadAllSyntax, Dir: folder, Tests: load.tests}, load.patterns...)
		if err != nil {
			return err
		}
		if n := packages.PrintErrors(loaded); n > 0 {
			return fmt.Errorf("found %d errors for GOOS=%s", n, os.Getenv("GOOS"))
		}
	}
	return nil
}

// imported returns the packages of the module that packages import.
func imported(folder string, patterns []string) (paths []string, err error) {
	const mode = packages.NeedName | packages.NeedImports | packages.NeedDeps | packages.NeedModule
	roots, err := packages.Load(&packages.Config{Mode: mode, Dir: folder}, patterns...)
	if err != nil {
		return nil, err
	}
	packages.Visit(roots, nil, func(p *packages.Package) {
		if p.Module != nil && p.Module.Main {
			paths = append(paths, p.PkgPath)
		}
	})
	return paths, nil
}
