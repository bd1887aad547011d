package docs

import (
	"os"
	"path/filepath"
	"regexp"
	"testing"
)

// pinned matches a row of the versions in docs/tested.md: part, version, module and file.
var pinned = regexp.MustCompile("(?m)^\\| ([^|]+) \\| (v[0-9.]+) \\| `([^`]+)` in `([^`]+)` \\|")

// TestVersions: docs/tested.md names the versions that are pinned now. After an update, repeat the tests, or name the former version in
// their rows.
func TestVersions(t *testing.T) {
	page, err := os.ReadFile("tested.md")
	if err != nil {
		t.Fatal(err)
	}
	rows := pinned.FindAllStringSubmatch(string(page), -1)
	if len(rows) < 20 {
		t.Errorf("found only %d rows", len(rows))
	}
	for _, row := range rows {
		part, version, module, file := row[1], row[2], row[3], row[4]
		pins, err := os.ReadFile(filepath.Join("..", file))
		if err != nil {
			t.Error(err)
			continue
		}
		if !regexp.MustCompile(`(?m)^(require|\t)\s*` + regexp.QuoteMeta(module+" "+version) + `( //.*)?$`).Match(pins) {
			t.Errorf("%s: %s does not pin %s %s", part, file, module, version)
		}
	}
}
