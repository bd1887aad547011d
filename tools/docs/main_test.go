package main

import (
	"bytes"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/dop251/goja"
	"golang.org/x/net/html"
)

// built builds the site of this repository.
func built(t *testing.T) (*site, string) {
	t.Helper()
	folder := filepath.Join(t.TempDir(), "site")
	s, err := build("../..", folder)
	if err != nil {
		t.Fatal(err)
	}
	return s, folder
}

// document is a page of the site.
type document struct {
	t    *testing.T
	url  string
	root *html.Node
}

// all returns the elements of a name.
func (d document) all(name string) (found []*html.Node) {
	for n := range d.root.Descendants() {
		if n.Type == html.ElementNode && n.Data == name {
			found = append(found, n)
		}
	}
	return found
}

// one returns the only element of a name.
func (d document) one(name string) *html.Node {
	d.t.Helper()
	found := d.all(name)
	if len(found) != 1 {
		d.t.Fatalf("%s has %d elements %s, want 1", d.url, len(found), name)
	}
	return found[0]
}

// attribute returns the value of an attribute, or "".
func attribute(n *html.Node, name string) string {
	for _, a := range n.Attr {
		if a.Key == name {
			return a.Val
		}
	}
	return ""
}

// content returns the text of an element.
func content(n *html.Node) string {
	var b strings.Builder
	for c := range n.Descendants() {
		if c.Type == html.TextNode {
			b.WriteString(c.Data)
		}
	}
	return strings.TrimSpace(b.String())
}

// TestPages checks the structure of each page: language, title, landmarks, headings, unique ids, labels, tables and links. A page
// must load nothing from other sites.
func TestPages(t *testing.T) {
	_, folder := built(t)
	pages := map[string]document{}
	err := filepath.WalkDir(folder, func(file string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || path.Ext(file) != ".html" {
			return err
		}
		data, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		root, err := html.Parse(bytes.NewReader(data))
		url, _ := filepath.Rel(folder, file)
		pages[url] = document{t, url, root}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(pages) < 60 || pages["index.html"].root == nil || pages["reference/index.html"].root == nil {
		t.Fatalf("found %d pages", len(pages))
	}
	for _, d := range pages {
		d.checkFrame()
		d.checkHeadings()
		d.checkElements()
		d.checkTargets(folder, pages)
	}
}

func (d document) checkFrame() {
	if lang := attribute(d.one("html"), "lang"); lang != "en" {
		d.t.Errorf("%s has the language %q", d.url, lang)
	}
	if title := content(d.one("title")); len(title) < len("x · Capstan") {
		d.t.Errorf("%s has the title %q", d.url, title)
	}
	var viewport, policy string
	for _, meta := range d.all("meta") {
		switch {
		case attribute(meta, "name") == "viewport":
			viewport = attribute(meta, "content")
		case attribute(meta, "http-equiv") == "Content-Security-Policy":
			policy = attribute(meta, "content")
		}
	}
	if !strings.Contains(viewport, "width=device-width") || strings.Contains(viewport, "maximum-scale") {
		d.t.Errorf("%s has the viewport %q", d.url, viewport)
	}
	if !strings.HasPrefix(policy, "default-src 'none'; style-src 'self'; script-src 'self'") || strings.Contains(policy, "unsafe") {
		d.t.Errorf("%s has the policy %q", d.url, policy)
	}
	main := d.one("main")
	d.one("header")
	if links := d.all("a"); attribute(links[0], "href") != "#"+attribute(main, "id") {
		d.t.Errorf("%s does not start with a link to its content", d.url)
	}
	if attribute(d.one("nav"), "aria-label") == "" {
		d.t.Errorf("%s has a navigation without a name", d.url)
	}
	if attribute(d.one("label"), "for") != attribute(d.one("input"), "id") {
		d.t.Errorf("%s has a search without a label", d.url)
	}
}

// checkHeadings checks that the content has one heading of the first level, and that no level is missing.
func (d document) checkHeadings() {
	last := 0
	for n := range d.one("main").Descendants() {
		if n.Type != html.ElementNode || len(n.Data) != 2 || n.Data[0] != 'h' || n.Data[1] < '1' || n.Data[1] > '6' {
			continue
		}
		level := int(n.Data[1] - '0')
		if level > last+1 || (level == 1) != (last == 0) {
			d.t.Errorf("%s: the heading %q has level %d after level %d", d.url, content(n), level, last)
		}
		if last = level; content(n) == "" {
			d.t.Errorf("%s has an empty heading", d.url)
		}
	}
	if last == 0 {
		d.t.Errorf("%s has no heading", d.url)
	}
}

func (d document) checkElements() {
	ids := map[string]bool{}
	for n := range d.root.Descendants() {
		if n.Type != html.ElementNode {
			continue
		}
		if id := attribute(n, "id"); id != "" && ids[id] {
			d.t.Errorf("%s has the id %q twice", d.url, id)
		} else if id != "" {
			ids[id] = true
		}
		switch n.Data {
		case "th":
			if attribute(n, "scope") == "" {
				d.t.Errorf("%s has a heading of a column without scope: %q", d.url, content(n))
			}
		case "table":
			if attribute(n.Parent, "tabindex") != "0" {
				d.t.Errorf("%s has a table that does not scroll with the keyboard", d.url)
			}
		case "img":
			if attribute(n, "alt") == "" {
				d.t.Errorf("%s has an image without a text", d.url)
			}
		case "style", "iframe", "object", "embed":
			d.t.Errorf("%s has the element %s", d.url, n.Data)
		}
		for _, a := range n.Attr {
			if strings.HasPrefix(a.Key, "on") || a.Key == "style" {
				d.t.Errorf("%s has the attribute %s, which its policy forbids", d.url, a.Key)
			}
		}
	}
}

// checkTargets checks the targets of all links, scripts and styles.
func (d document) checkTargets(folder string, pages map[string]document) {
	for n := range d.root.Descendants() {
		target := attribute(n, "href") + attribute(n, "src")
		if n.Type != html.ElementNode || target == "" {
			continue
		}
		if strings.Contains(target, "://") || strings.HasPrefix(target, "//") || strings.HasPrefix(target, "mailto:") {
			if n.Data != "a" {
				d.t.Errorf("%s loads %s", d.url, target)
			}
			continue
		}
		file, id, _ := strings.Cut(target, "#")
		url := d.url
		if file != "" {
			url = path.Join(path.Dir(d.url), file)
		}
		if _, err := os.Stat(filepath.Join(folder, url)); err != nil {
			d.t.Errorf("%s links to %s: %v", d.url, target, err)
		}
		if id != "" && !pages[url].hasID(id) {
			d.t.Errorf("%s links to %s, which has no element %q", d.url, target, id)
		}
	}
}

func (d document) hasID(id string) bool {
	for n := range d.root.Descendants() {
		if attribute(n, "id") == id {
			return true
		}
	}
	return false
}

// TestSearch runs the search script with the index of the site.
func TestSearch(t *testing.T) {
	_, folder := built(t)
	vm := goja.New()
	for _, file := range []string{"search.js", "search-index.js"} {
		data, err := os.ReadFile(filepath.Join(folder, file))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := vm.RunScript(file, "var window = globalThis;"+string(data)); err != nil {
			t.Fatal(err)
		}
	}
	find := func(query string) (urls []string) {
		t.Helper()
		if err := vm.Set("query", query); err != nil {
			t.Fatal(err)
		}
		found, err := vm.RunString(`find(window.searchIndex, query, 20).map((entry) => entry.url)`)
		if err != nil {
			t.Fatal(err)
		}
		if err := vm.ExportTo(found, &urls); err != nil {
			t.Fatal(err)
		}
		return urls
	}
	for query, want := range map[string]string{
		"virtual address":         "clusters-across-hosts.html#virtual-addresses",
		"Tutorial":                "tutorial.html",
		"capstan create cluster":  "reference/capstan.html#capstan-create-cluster",
		"capstanippool":           "reference/api-ipam.html#capstanippool",
		"etcd quorum":             "troubleshooting.html#etcd-has-no-quorum",
		"restoring a cluster":     "backup.html#restoring-a-cluster",
		"spec.certificates":       "reference/api-controlplane.html#spec-of-capstancontrolplane",
		"CAPSTAN_WORKER_MEMORY":   "clusterctl.html#variables-of-the-templates",
		"registries and mirrors ": "registries.html#registries-and-mirrors",
	} {
		if got := find(query); len(got) == 0 || !strings.Contains(strings.Join(got[:min(3, len(got))], " "), want) {
			t.Errorf("%q: found %v, want %s among the first three", query, got, want)
		}
	}
	for _, query := range []string{"", " ", "xyzzyx", "tutorial xyzzyx"} {
		if got := find(query); len(got) != 0 {
			t.Errorf("%q: found %v", query, got)
		}
	}
	text, err := vm.RunString(`excerpt("a ".repeat(100) + "needle" + " b".repeat(100), "needle")`)
	if err != nil || !regexp.MustCompile(`^… (a )+needle( b)+ …$`).MatchString(text.String()) {
		t.Errorf("the excerpt is %q, %v", text, err)
	}
}

// TestRefusals checks that a site with a wrong link or with HTML is not built, and that the previous one stays.
func TestRefusals(t *testing.T) {
	for name, test := range map[string]struct{ text, want string }{
		"file":    {"[x](missing.md)", "missing.md"},
		"heading": {"[x](other.md#missing)", `has no heading "missing"`},
		"own":     {"[x](#missing)", `has no heading "missing"`},
		"folder":  {"[x](decisions)", "links to the folder"},
		"html":    {"<b>x</b>", "contains HTML"},
	} {
		repository := repository(t, test.text)
		folder := filepath.Join(t.TempDir(), "site")
		if err := os.Mkdir(folder, 0o755); err != nil {
			t.Fatal(err)
		}
		if _, err := build(repository, folder); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: got %v, want %q", name, err, test.want)
		}
		if _, err := os.Stat(folder); err != nil {
			t.Errorf("%s: the previous site is gone: %v", name, err)
		}
	}
	folder := filepath.Join(t.TempDir(), "site")
	if _, err := build(repository(t, "[x](other.md#a-title) [y](../LICENSE)"), folder); err != nil {
		t.Error(err)
	}
}

// repository returns a small repository with one page of a text.
func repository(t *testing.T, text string) string {
	t.Helper()
	folder := t.TempDir()
	for file, content := range map[string]string{
		"README.md": "# A", "CONTRIBUTING.md": "# B", "SECURITY.md": "# C", "CHANGELOG.md": "# D", "LICENSE": "E",
		"docs/README.md":           "# Index\n\n## All\n\n[a](page.md), [b](other.md), [c](decisions/README.md), [d](reference/README.md), [e](../README.md)\n",
		"docs/page.md":             "# Page\n\n" + text + "\n",
		"docs/other.md":            "# Other\n\n## A `title`\n",
		"docs/decisions/README.md": "# Decisions", "docs/reference/README.md": "# Reference",
	} {
		if err := put(folder, file, []byte(content)); err != nil {
			t.Fatal(err)
		}
	}
	return folder
}

func TestAddress(t *testing.T) {
	for source, want := range map[string]string{
		"docs/README.md": "index.html", "docs/hosts.md": "hosts.html", "README.md": "project/readme.html",
		"docs/reference/README.md": "reference/index.html", "CHANGELOG.md": "project/changelog.html",
	} {
		if got := address(source); got != want {
			t.Errorf("%s: %s, want %s", source, got, want)
		}
	}
}
