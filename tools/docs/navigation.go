package main

import (
	"errors"
	"fmt"
	"path"
	"regexp"
	"strings"
)

var (
	sectionTitle = regexp.MustCompile(`^## (.+)$`)
	documentLink = regexp.MustCompile(`\]\(([^)#\s]+\.md)(?:#[^)]*)?\)`)
)

// navigation reads the sections of the index docs/README.md. A page is in the first section that links to it. Decisions and the
// pages of the reference are reached from their first pages.
func (s *site) navigation() error {
	const index = "docs/README.md"
	seen := map[string]bool{index: true}
	for line := range strings.Lines(string(s.pages[index].markdown)) {
		if title := sectionTitle.FindStringSubmatch(strings.TrimSpace(line)); title != nil {
			s.sections = append(s.sections, section{Title: title[1]})
		}
		for _, link := range documentLink.FindAllStringSubmatch(line, -1) {
			source := path.Join(path.Dir(index), link[1])
			if seen[source] || len(s.sections) == 0 {
				continue
			}
			seen[source] = true
			last := &s.sections[len(s.sections)-1]
			last.Pages = append(last.Pages, s.pages[source])
		}
	}
	var errs []error
	for _, p := range s.sorted() {
		folder := path.Dir(p.source)
		if !seen[p.source] && (folder == "docs" || path.Base(p.source) == "README.md") {
			errs = append(errs, fmt.Errorf("%s links nowhere to %s", index, p.source))
		}
	}
	return errors.Join(errs...)
}
