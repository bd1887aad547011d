package docs

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

var (
	link    = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	heading = regexp.MustCompile(`(?m)^#+ (.+)$`)
	fence   = regexp.MustCompile("(?ms)^ *```.*?\n *```")
	span    = regexp.MustCompile("`[^`\n]+`")
	unsaid  = regexp.MustCompile("[^a-z0-9 _-]")
)

// documents returns the Markdown files that users read, relative to this folder.
func documents(t *testing.T) []string {
	t.Helper()
	var all []string
	for _, pattern := range []string{"../*.md", "*.md", "decisions/*.md", "reference/*.md"} {
		found, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, found...)
	}
	return all
}

// text returns a document without its code blocks.
func text(t *testing.T, document string) string {
	t.Helper()
	data, err := os.ReadFile(document)
	if err != nil {
		t.Fatal(err)
	}
	return fence.ReplaceAllString(string(data), "")
}

// TestLinks checks that relative links lead to existing files and headings.
func TestLinks(t *testing.T) {
	for _, document := range documents(t) {
		for _, found := range link.FindAllStringSubmatch(span.ReplaceAllString(text(t, document), ""), -1) {
			target, anchor, _ := strings.Cut(found[1], "#")
			if strings.Contains(target, "://") {
				continue
			}
			file := document
			if target != "" {
				file = filepath.Join(filepath.Dir(document), target)
			}
			if _, err := os.Stat(file); err != nil {
				t.Errorf("%s links to %s: %v", document, found[1], err)
			} else if anchor != "" && !anchors(t, file)[anchor] {
				t.Errorf("%s links to %s, which has no heading %q", document, target, anchor)
			}
		}
	}
}

// anchors returns the anchors of a document's headings, as Git hosting services create them.
func anchors(t *testing.T, document string) map[string]bool {
	t.Helper()
	all := map[string]bool{}
	for _, found := range heading.FindAllStringSubmatch(text(t, document), -1) {
		plain := unsaid.ReplaceAllString(strings.ToLower(found[1]), "")
		all[strings.ReplaceAll(plain, " ", "-")] = true
	}
	return all
}

// notPlain matches phrases that have a plain replacement.
var notPlain = regexp.MustCompile(`(?i)\b(is nobody's|as its last deed|of no use|backed up by who|who may use|whoever|what is known|than it is told|unless it is told|whatever|it was not to be|(provider|manager|agent|component|condition|host|capstand|machine|message|status|it) (tells|knows|says)\b)`)

// TestPlainEnglish refuses phrases that this project has replaced, and ids of contract rows where users do not expect them.
func TestPlainEnglish(t *testing.T) {
	for _, document := range documents(t) {
		for line := range strings.Lines(text(t, document)) {
			if found := notPlain.FindString(line); found != "" {
				t.Errorf("%s: %q is not plain English, in: %s", document, found, line)
			}
		}
	}
	crds, err := filepath.Glob("../config/*/crd/bases/*.yaml")
	if err != nil {
		t.Fatal(err)
	}
	more, err := filepath.Glob("../internal/node/provision/manifests/etcd.capstan.dev_*.yaml")
	if err != nil {
		t.Fatal(err)
	}
	crds = append(crds, more...)
	if len(crds) < 15 {
		t.Fatalf("found %d CRDs, want at least 15", len(crds))
	}
	for _, crd := range crds {
		data, err := os.ReadFile(crd)
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(data)) {
			if found := contractID.FindString(line); found != "" {
				t.Errorf("%s shows the id %s of a contract row to users: %s", crd, found, line)
			}
		}
	}
}

// contractID is the id of a row of docs/contract.md.
var contractID = regexp.MustCompile(`\b(ALL|IC|IM|MP|CP|IPAM|CTL|BC)-[0-9]{2}\b`)
