// Command typecheck checks the types of packages, of their tests, and of all packages that these import. It compiles nothing. The
// environment selects the system, for example with GOOS.
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
	// With the syntax of all packages, the types of imports come from their sources and not from compiled packages.
	loaded, err := packages.Load(&packages.Config{Mode: packages.LoadAllSyntax, Dir: folder, Tests: true}, patterns...)
	if err != nil {
		return err
	}
	if n := packages.PrintErrors(loaded); n > 0 {
		return fmt.Errorf("found %d errors for GOOS=%s", n, os.Getenv("GOOS"))
	}
	return nil
}
