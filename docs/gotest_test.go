package docs

import (
	"cmp"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

var (
	goTest       = regexp.MustCompile("go test ([^`\n]+)")
	selection    = regexp.MustCompile(`-(?:run|bench) (?:'([^']*)'|(\S+))`)
	testPackage  = regexp.MustCompile(`(?:^|\s)\./(\S+)`)
	testName     = regexp.MustCompile(`\bTest[A-Z]\w+`)
	testFunction = regexp.MustCompile(`(?m)^func ((?:Test|Fuzz|Benchmark)\w+)\(`)
)

// TestSelectedTests checks that each pattern of a `go test` command in a document selects a test of the packages of the command.
func TestSelectedTests(t *testing.T) {
	checked := 0
	for _, document := range documents(t) {
		data, err := os.ReadFile(document)
		if err != nil {
			t.Fatal(err)
		}
		for _, command := range goTest.FindAllStringSubmatch(string(data), -1) {
			functions := functionsOf(t, command[1])
			for _, pattern := range patterns(command[1]) {
				if checked++; !slices.ContainsFunc(functions, regexp.MustCompile(pattern).MatchString) {
					t.Errorf("%s: %s: no test matches %s", document, command[0], pattern)
				}
			}
		}
	}
	if checked < 150 {
		t.Errorf("found only %d patterns", checked)
	}
}

// TestNamesOfTests checks that a test with each name in a document exists.
func TestNamesOfTests(t *testing.T) {
	functions := functionsOf(t, "./...")
	for _, document := range documents(t) {
		data, err := os.ReadFile(document)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range testName.FindAllString(string(data), -1) {
			if !slices.ContainsFunc(functions, func(function string) bool { return strings.Contains(function, name) }) {
				t.Errorf("%s: no test has the name %s", document, name)
			}
		}
	}
}

// patterns returns the patterns of the test functions that a command selects, without the names of subtests. The pattern "-" selects none.
func patterns(command string) (all []string) {
	for _, found := range selection.FindAllStringSubmatch(command, -1) {
		value := strings.ReplaceAll(cmp.Or(found[1], found[2]), `\|`, "|") // a table escapes the separator of its cells
		for rest := value; rest != ""; {
			var alternative string
			alternative, rest = cutTopLevel(rest, '|')
			if function, _ := cutTopLevel(alternative, '/'); function != "-" {
				all = append(all, function)
			}
		}
	}
	return all
}

// cutTopLevel cuts a pattern at the first such separator outside of parentheses.
func cutTopLevel(pattern string, separator rune) (before, after string) {
	depth := 0
	for i, c := range pattern {
		switch {
		case c == '(':
			depth++
		case c == ')':
			depth--
		case c == separator && depth == 0:
			return pattern[:i], pattern[i+1:]
		}
	}
	return pattern, ""
}

// functionsOf returns the test functions of the packages of a command. A package like x/... includes those below x.
func functionsOf(t *testing.T, command string) (all []string) {
	t.Helper()
	for _, found := range testPackage.FindAllStringSubmatch(command, -1) {
		folder, below := strings.CutSuffix(found[1], "...")
		folder = filepath.Join("..", folder)
		err := filepath.WalkDir(folder, func(path string, entry fs.DirEntry, err error) error {
			if entry != nil && entry.IsDir() && path != folder && !below {
				return fs.SkipDir
			}
			if err != nil || !strings.HasSuffix(path, "_test.go") {
				return err
			}
			data, err := os.ReadFile(path)
			for _, function := range testFunction.FindAllSubmatch(data, -1) {
				all = append(all, string(function[1]))
			}
			return err
		})
		if err != nil {
			t.Fatalf("%s: %v", command, err)
		}
	}
	return all
}

func TestPatterns(t *testing.T) {
	for command, want := range map[string][]string{
		"./x":                          nil,
		"-run TestA ./x":               {"TestA"},
		"-run TestA/b ./x":             {"TestA"},
		`-run 'TestA\|TestB$' ./x`:     {"TestA", "TestB$"},
		`-run 'TestA/(b\|c)\|B/d' ./x`: {"TestA", "B"},
		"./x -run - -bench Lease":      {"Lease"},
	} {
		if got := patterns(command); !slices.Equal(got, want) {
			t.Errorf("%s: got %q, want %q", command, got, want)
		}
	}
}
