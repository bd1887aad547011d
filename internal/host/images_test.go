package host

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"capstan.dev/capstan/internal/machineapi"
)

// The users of a machine control its answers.
func TestImportedNames(t *testing.T) {
	many := slices.Repeat([]string{"a"}, maxImportedNames+1)
	answer := func(names ...string) string {
		data, err := json.Marshal(machineapi.ImportedImages{Names: names})
		if err != nil {
			t.Fatal(err)
		}
		return string(data)
	}
	for name, c := range map[string]struct {
		output, wrong string
		want          []string
	}{
		"names": {
			output: answer("docker.io/library/busybox:1.37", "localhost:5000/a_b/c-d@sha256:0123"),
			want:   []string{"docker.io/library/busybox:1.37", "localhost:5000/a_b/c-d@sha256:0123"},
		},
		"progress output":    {output: "registry.example.com/pause:v1\tsaved", wrong: "expected a JSON object"},
		"no output":          {wrong: "expected a JSON object"},
		"no names":           {output: answer(), wrong: "0 images"},
		"too many names":     {output: answer(many...), wrong: "257 images"},
		"too long":           {output: answer(strings.Repeat("a", maxImageName+1)), wrong: "not the name of an image"},
		"terminal sequence":  {output: answer("a\x1b[2J"), wrong: `not the name of an image`},
		"space":              {output: answer("a b"), wrong: "not the name of an image"},
		"second line":        {output: answer("a\nb"), wrong: "not the name of an image"},
		"first of two wrong": {output: answer("", "a"), wrong: "not the name of an image"},
	} {
		got, err := importedNames([]byte(c.output))
		if c.wrong == "" && (err != nil || !slices.Equal(got, c.want)) {
			t.Errorf("%s: got %q, %v", name, got, err)
		}
		if c.wrong != "" && (err == nil || !strings.Contains(err.Error(), c.wrong) || strings.ContainsRune(err.Error(), '\x1b')) {
			t.Errorf("%s: got %q, %v, want an error with %q", name, got, err, c.wrong)
		}
	}
}
