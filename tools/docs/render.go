package main

import (
	"bytes"
	"fmt"
	"html/template"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"

	"github.com/yuin/goldmark"
	"github.com/yuin/goldmark/ast"
	"github.com/yuin/goldmark/extension"
	extensionast "github.com/yuin/goldmark/extension/ast"
	"github.com/yuin/goldmark/parser"
	"github.com/yuin/goldmark/text"
)

var (
	// notInAnchor matches what Git hosting services remove from a heading for its anchor.
	notInAnchor = regexp.MustCompile(`[^a-z0-9 _-]`)
	comment     = regexp.MustCompile(`^<!--.*-->\n`)
)

// anchors gives the headings of a page their anchors, as Git hosting services do.
type anchors struct{ used map[string]bool }

func (a *anchors) Generate(value []byte, _ ast.NodeKind) []byte {
	id := strings.ReplaceAll(notInAnchor.ReplaceAllString(strings.ToLower(string(value)), ""), " ", "-")
	unique := id
	for i := 1; a.used[unique]; i++ {
		unique = id + "-" + strconv.Itoa(i)
	}
	a.used[unique] = true
	return []byte(unique)
}

func (a *anchors) Put(value []byte) { a.used[string(value)] = true }

// render renders all pages, the navigation and the index of the search.
func (s *site) render() error {
	md := goldmark.New(goldmark.WithExtensions(extension.GFM), goldmark.WithParserOptions(parser.WithAutoHeadingID()))
	for _, p := range s.sorted() {
		p.markdown = comment.ReplaceAll(p.markdown, nil)
		ids := &anchors{used: map[string]bool{}}
		document := md.Parser().Parse(text.NewReader(p.markdown), parser.WithContext(parser.NewContext(parser.WithIDs(ids))))
		p.ids = ids.used
		if err := s.links(p, document); err != nil {
			return err
		}
		s.index(p, document)
		var b bytes.Buffer
		if err := md.Renderer().Render(&b, p.markdown, document); err != nil {
			return fmt.Errorf("%s: %w", p.source, err)
		}
		if strings.Contains(b.String(), "<!-- raw HTML omitted -->") {
			return fmt.Errorf("%s contains HTML, which the site does not show: write &lt; instead of <", p.source)
		}
		p.Body = template.HTML(accessible.Replace(b.String())) //nolint:gosec // goldmark escapes the text, and HTML is refused
	}
	return s.navigation()
}

// accessible completes the HTML: tables and code that are wider than the screen scroll with the keyboard, and the cells of a
// table's first row are headings of columns.
var accessible = strings.NewReplacer(
	"<table>", `<div class="scroll" tabindex="0" role="region" aria-label="Table"><table>`, "</table>", "</table></div>",
	"<th>", `<th scope="col">`,
	"<pre>", `<pre tabindex="0">`,
)

// links replaces the targets of links and images to documents and files of the repository by addresses in the site.
func (s *site) links(p *page, document ast.Node) error {
	return ast.Walk(document, func(n ast.Node, entering bool) (ast.WalkStatus, error) {
		destination := destinationOf(n)
		if destination == nil || !entering {
			return ast.WalkContinue, nil
		}
		target := string(*destination)
		if strings.Contains(target, "://") || strings.HasPrefix(target, "mailto:") {
			return ast.WalkContinue, nil
		}
		url, err := s.resolve(p, target)
		if err != nil {
			return ast.WalkStop, fmt.Errorf("%s: %w", p.source, err)
		}
		p.links = append(p.links, url)
		*destination = []byte(relative(p.URL, url))
		return ast.WalkContinue, nil
	})
}

// destinationOf returns the target of a link or an image, or nil.
func destinationOf(n ast.Node) *[]byte {
	switch n := n.(type) {
	case *ast.Link:
		return &n.Destination
	case *ast.Image:
		return &n.Destination
	}
	return nil
}

// resolve returns the address in the site of a link's target.
func (s *site) resolve(p *page, target string) (string, error) {
	file, id, _ := strings.Cut(target, "#")
	if id != "" {
		id = "#" + id
	}
	if file == "" {
		return p.URL + id, nil
	}
	source := path.Join(path.Dir(p.source), file)
	if found := s.pages[source]; found != nil {
		return found.URL + id, nil
	}
	info, err := os.Stat(filepath.Join(s.repository, source))
	if err != nil {
		return "", fmt.Errorf("it links to %s: %w", target, err)
	}
	if info.IsDir() {
		return "", fmt.Errorf("it links to the folder %s: link to a file, or write the path as code", target)
	}
	s.files[source] = true
	return fileAddress(source), nil
}

// relative returns the path from a page to an address of the site.
func relative(from, to string) string {
	url, id, found := strings.Cut(to, "#")
	if url == from && found {
		return "#" + id
	}
	up := strings.Repeat("../", strings.Count(from, "/"))
	return up + to
}

// plain returns the text of a node without formatting.
func plain(n ast.Node, source []byte) string {
	var b strings.Builder
	_ = ast.Walk(n, func(n ast.Node, entering bool) (ast.WalkStatus, error) {
		switch n := n.(type) {
		case *ast.Text:
			if entering {
				b.Write(n.Value(source))
				if n.SoftLineBreak() || n.HardLineBreak() {
					b.WriteByte(' ')
				}
			}
		case *ast.String:
			if entering {
				b.Write(n.Value)
			}
		case *ast.FencedCodeBlock, *ast.CodeBlock:
			if entering {
				b.Write(n.Lines().Value(source))
			}
		case *extensionast.TableCell, *ast.Paragraph, *ast.ListItem:
			if !entering {
				b.WriteByte(' ')
			}
		}
		return ast.WalkContinue, nil
	})
	return strings.Join(strings.Fields(b.String()), " ")
}
