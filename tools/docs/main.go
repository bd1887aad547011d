// Command docs builds the web site of the documentation from the Markdown files of the repository.
//
//	docs REPOSITORY FOLDER
//
// FOLDER is replaced. It contains plain files: any web server can serve them, and a browser can open them without one. The pages
// load nothing from other sites. The same repository gives the same site.
package main

import (
	"fmt"
	"os"
	"path/filepath"
)

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: docs REPOSITORY FOLDER")
		os.Exit(2)
	}
	s, err := build(os.Args[1], os.Args[2])
	if err != nil {
		fmt.Fprintln(os.Stderr, "docs:", err)
		os.Exit(1)
	}
	fmt.Printf("%s: %d pages, %d entries in the search\n", filepath.Join(os.Args[2], "index.html"), len(s.pages), len(s.entries))
}

// build writes the site into a new folder beside the target, checks its links, and then exchanges the folders. A failed build
// leaves the previous site.
func build(repository, folder string) (*site, error) {
	s, err := load(repository)
	if err != nil {
		return nil, err
	}
	if err := s.render(); err != nil {
		return nil, err
	}
	if err := s.checkLinks(); err != nil {
		return nil, err
	}
	next := filepath.Clean(folder) + ".new"
	if err := os.RemoveAll(next); err != nil {
		return nil, err
	}
	if err := s.write(next); err != nil {
		return nil, err
	}
	if err := os.RemoveAll(folder); err != nil {
		return nil, err
	}
	return s, os.Rename(next, folder)
}
