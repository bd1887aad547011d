package main

import (
	"bytes"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"html/template"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

//go:embed assets
var assets embed.FS

// sources are the patterns of the documents, relative to the repository.
var sources = []string{"README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "docs/*.md", "docs/decisions/*.md", "docs/reference/*.md"}

// site is the documentation.
type site struct {
	repository string
	// pages by the path of their Markdown file in the repository.
	pages map[string]*page
	// files are other files of the repository that pages link to.
	files map[string]bool
	// sections is the navigation.
	sections []section
	// entries is the index of the search.
	entries []entry
}

// page is one document.
type page struct {
	// source is the path of the Markdown file in the repository, URL that of the page in the site.
	source, URL string
	Title       string
	markdown    []byte
	// Body is the rendered document.
	Body template.HTML
	// Contents are the headings of the second level.
	Contents []heading
	// ids are the anchors of the page.
	ids map[string]bool
	// links are the targets of the page's links, as addresses in the site.
	links []string
}

// heading is a heading with its anchor.
type heading struct{ ID, Text string }

// section is a group of pages in the navigation.
type section struct {
	Title string
	Pages []*page
}

var firstHeading = regexp.MustCompile(`(?m)^# (.+)$`)

// load reads the documents.
func load(repository string) (*site, error) {
	s := &site{repository: repository, pages: map[string]*page{}, files: map[string]bool{}}
	for _, pattern := range sources {
		found, err := filepath.Glob(filepath.Join(repository, pattern))
		if err != nil {
			return nil, err
		}
		if len(found) == 0 {
			return nil, fmt.Errorf("%s has no file %s", repository, pattern)
		}
		for _, file := range found {
			source, err := filepath.Rel(repository, file)
			if err != nil {
				return nil, err
			}
			if err := s.add(filepath.ToSlash(source)); err != nil {
				return nil, err
			}
		}
	}
	return s, nil
}

func (s *site) add(source string) error {
	data, err := os.ReadFile(filepath.Join(s.repository, source))
	if err != nil {
		return err
	}
	title := firstHeading.FindSubmatch(data)
	if title == nil {
		return fmt.Errorf("%s has no heading of the first level", source)
	}
	s.pages[source] = &page{source: source, URL: address(source), Title: strings.ReplaceAll(string(title[1]), "`", ""), markdown: data}
	return nil
}

// address returns the path of a document in the site.
func address(source string) string {
	url, inDocs := strings.CutPrefix(source, "docs/")
	if !inDocs {
		url = "project/" + source
	}
	url = strings.ToLower(strings.TrimSuffix(url, ".md"))
	if inDocs && path.Base(url) == "readme" {
		url = path.Join(path.Dir(url), "index")
	}
	return url + ".html"
}

// sorted returns the pages by their addresses.
func (s *site) sorted() []*page {
	all := make([]*page, 0, len(s.pages))
	for _, p := range s.pages {
		all = append(all, p)
	}
	slices.SortFunc(all, func(a, b *page) int { return strings.Compare(a.URL, b.URL) })
	return all
}

// layout is the input of the template of a page.
type layout struct {
	*page
	// Root is the relative path from the page to the first page.
	Root     string
	Sections []section
}

// write writes the site into a new folder.
func (s *site) write(folder string) error {
	source, err := assets.ReadFile("assets/page.html")
	if err != nil {
		return err
	}
	t, err := template.New("page").Parse(string(source))
	if err != nil {
		return err
	}
	for _, p := range s.sorted() {
		var b bytes.Buffer
		if err := t.Execute(&b, layout{p, strings.Repeat("../", strings.Count(p.URL, "/")), s.sections}); err != nil {
			return err
		}
		if err := put(folder, p.URL, b.Bytes()); err != nil {
			return err
		}
	}
	for _, name := range []string{"site.css", "search.js"} {
		data, err := assets.ReadFile("assets/" + name)
		if err != nil {
			return err
		}
		if err := put(folder, name, data); err != nil {
			return err
		}
	}
	for file := range s.files {
		data, err := os.ReadFile(filepath.Join(s.repository, file))
		if err != nil {
			return err
		}
		if err := put(folder, fileAddress(file), data); err != nil {
			return err
		}
	}
	index, err := json.Marshal(s.entries)
	if err != nil {
		return err
	}
	// A script and not JSON: browsers do not let a page that was opened from a folder read other files.
	return put(folder, "search-index.js", slices.Concat([]byte("window.searchIndex = "), index, []byte(";\n")))
}

// fileAddress returns the path of another file of the repository in the site. It is plain text there, unless it is a picture.
func fileAddress(file string) string {
	if path.Ext(file) == ".png" {
		return "files/" + file
	}
	return "files/" + file + ".txt"
}

func put(folder, name string, data []byte) error {
	file := filepath.Join(folder, name)
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		return err
	}
	return os.WriteFile(file, data, 0o644)
}

// checkLinks checks that each link inside of the site has its target.
func (s *site) checkLinks() error {
	byURL := map[string]*page{}
	for _, p := range s.pages {
		byURL[p.URL] = p
	}
	var errs []error
	for _, p := range s.sorted() {
		for _, link := range p.links {
			url, id, _ := strings.Cut(link, "#")
			target := byURL[url]
			switch {
			case strings.HasPrefix(url, "files/"): // it was found in the repository
			case target == nil:
				errs = append(errs, fmt.Errorf("%s links to %s, which does not exist", p.source, link))
			case id != "" && !target.ids[id]:
				errs = append(errs, fmt.Errorf("%s links to %s, which has no heading %q", p.source, target.source, id))
			}
		}
	}
	return errors.Join(errs...)
}
