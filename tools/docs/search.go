package main

import (
	"strings"

	"github.com/yuin/goldmark/ast"
)

// entry is a section of a page in the index of the search.
type entry struct {
	// Page is the title of the page, Heading that of the section; it is empty for the start of a page.
	Page    string `json:"page"`
	Heading string `json:"heading,omitempty"`
	URL     string `json:"url"`
	Text    string `json:"text"`
}

// index adds the sections of a page to the index, and its headings to the page.
func (s *site) index(p *page, document ast.Node) {
	current := entry{Page: p.Title, URL: p.URL}
	var texts []string
	flush := func() {
		current.Text = strings.Join(texts, " ")
		s.entries = append(s.entries, current)
		texts = nil
	}
	for n := document.FirstChild(); n != nil; n = n.NextSibling() {
		h, ok := n.(*ast.Heading)
		if !ok {
			texts = append(texts, plain(n, p.markdown))
			continue
		}
		if h.Level == 1 {
			continue
		}
		flush()
		value, _ := h.AttributeString("id")
		id := string(value.([]byte))
		current = entry{Page: p.Title, Heading: plain(h, p.markdown), URL: p.URL + "#" + id}
		if h.Level == 2 {
			p.Contents = append(p.Contents, heading{id, current.Heading})
		}
	}
	flush()
}
