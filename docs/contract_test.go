// Package docs checks that the documents say only what is true.
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
)

// TestContract: every file and every test that docs/contract.md names exists, and no row is missing.
func TestContract(t *testing.T) {
	document, err := os.ReadFile("contract.md")
	if err != nil {
		t.Fatal(err)
	}
	rows := map[string]bool{}
	for line := range strings.Lines(string(document)) {
		id := row.FindStringSubmatch(line)
		if id == nil {
			continue
		}
		if rows[id[1]] {
			t.Errorf("%s stands twice", id[1])
		}
		rows[id[1]] = true
		for _, found := range path.FindAllStringSubmatch(line, -1) {
			if _, err := os.Stat(filepath.Join("..", found[1])); err != nil {
				t.Errorf("%s names %s: %v", id[1], found[1], err)
			}
		}
		for _, found := range test.FindAllStringSubmatch(line, -1) {
			if !defined(t, filepath.Join("..", found[2]), found[1]) {
				t.Errorf("%s names %s, which is not in %s", id[1], found[1], found[2])
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

// defined says whether a folder's test files define a function.
func defined(t *testing.T, dir, name string) bool {
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
		if strings.Contains(string(data), "func "+name+"(") {
			return true
		}
	}
	return false
}
