package docs

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

var (
	row  = regexp.MustCompile(`^\| ((?:ALL|IC|IM|MP|CP|IPAM|CTL|BC)-[0-9]{2}) \|`)
	path = regexp.MustCompile("`((?:api|internal|cmd|config|templates|docs|test)/[^`]*)`")
	test = regexp.MustCompile("`((?:Test|Fuzz)[A-Za-z0-9_]+)` \\(([^)]+)\\)")
	// namedTest also matches a test without its package.
	namedTest = regexp.MustCompile("`(?:Test|Fuzz)[A-Za-z0-9_]+`")
)

// TestContract checks that every row of docs/contract.md exists once, that the files and tests in it exist, and that each of
// these tests names the row.
func TestContract(t *testing.T) {
	rows := map[string]bool{}
	for _, line := range lines(t, "contract.md") {
		id := row.FindStringSubmatch(line)
		if id == nil {
			continue
		}
		if rows[id[1]] {
			t.Errorf("%s exists twice", id[1])
		}
		rows[id[1]] = true
		checkReferences(t, id[1], line)
		if named := len(namedTest.FindAllString(line, -1)); named != len(test.FindAllString(line, -1)) {
			t.Errorf("%s names a test without its package", id[1])
		}
		for _, found := range test.FindAllStringSubmatch(line, -1) {
			if text := source(t, filepath.Join("..", found[2]), found[1]); text != "" && !names(text, id[1]) {
				t.Errorf("%s in %s proves %s: name the row in its comment or body", found[1], found[2], id[1])
			}
		}
	}
	for prefix, last := range map[string]int{"ALL": 18, "IC": 14, "IM": 10, "MP": 12, "CP": 25, "IPAM": 8, "CTL": 18, "BC": 6} {
		for n := 1; n <= last; n++ {
			if id := prefix + "-" + string(rune('0'+n/10)) + string(rune('0'+n%10)); !rows[id] {
				t.Errorf("%s is missing", id)
			}
		}
	}
}

// TestSecurityRules checks that every rule of docs/security.md names code and a test, and that both exist.
func TestSecurityRules(t *testing.T) {
	rules, inTable := 0, false
	for _, line := range lines(t, "security.md") {
		switch {
		case strings.HasPrefix(line, "| rule | enforced in | proved by |"):
			inTable = true
		case !strings.HasPrefix(line, "|"):
			inTable = false
		case inTable && !strings.HasPrefix(line, "| --- |"):
			rules++
			rule, _, _ := strings.Cut(strings.TrimPrefix(line, "| "), " |")
			if path.FindString(line) == "" || test.FindString(line) == "" {
				t.Errorf("%q does not name code and a test", rule)
			}
			checkReferences(t, rule, line)
		}
	}
	if rules < 10 {
		t.Errorf("found %d rules, want the table of at least 10", rules)
	}
}

func lines(t *testing.T, document string) []string {
	t.Helper()
	data, err := os.ReadFile(document)
	if err != nil {
		t.Fatal(err)
	}
	return strings.Split(string(data), "\n")
}

// checkReferences checks that the files and tests that a line names exist.
func checkReferences(t *testing.T, id, line string) {
	t.Helper()
	for _, found := range path.FindAllStringSubmatch(line, -1) {
		if _, err := os.Stat(filepath.Join("..", found[1])); err != nil {
			t.Errorf("%s names %s: %v", id, found[1], err)
		}
	}
	for _, found := range test.FindAllStringSubmatch(line, -1) {
		if !defined(t, filepath.Join("..", found[2]), found[1]) {
			t.Errorf("%s names %s, which is not in %s", id, found[1], found[2])
		}
	}
}

// defined reports whether a test file in the folder defines the function.
func defined(t *testing.T, dir, name string) bool {
	t.Helper()
	return source(t, dir, name) != ""
}

// source returns a test function with its comment, or "".
func source(t *testing.T, dir, name string) string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*_test.go"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		text := string(data)
		start := strings.Index(text, "\nfunc "+name+"(")
		if start < 0 {
			continue
		}
		end := strings.Index(text[start+1:], "\n}\n")
		comment := max(strings.LastIndex(text[:start], "\n\n"), 0)
		return text[comment : start+1+end]
	}
	return ""
}

// names reports whether a test contains a row's id: IPAM-05 in its comment or body, or IPAM05 in its name.
func names(test, id string) bool {
	return strings.Contains(test, id) || strings.Contains(test, strings.ReplaceAll(id, "-", ""))
}
