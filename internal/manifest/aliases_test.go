package manifest_test

import (
	"strings"
	"testing"

	"capstan.dev/capstan/internal/manifest"
)

// repeated names a value of a size many times.
func repeated(size, times int) string {
	return "a: &a \"" + strings.Repeat("x", size) + "\"\nb: [" + strings.TrimSuffix(strings.Repeat("*a, ", times), ", ") + "]\n"
}

// A small text whose aliases stand for a large one is refused, before a decoder replaces them.
func TestCheckAliases(t *testing.T) {
	for name, tc := range map[string]struct {
		text    string
		refused bool
	}{
		"no alias":              {text: "a: 1\n---\nb: [x, y]\n"},
		"an ampersand":          {text: "run: |\n  true && true\n"},
		"some aliases":          {text: "a: &a {x: 1}\nb: *a\nc:\n  <<: *a\n  y: 2\n"},
		"a large text":          {text: "a: \"" + strings.Repeat("x&", 3<<20) + "\"\n"},
		"many aliases":          {text: repeated(30_000, 1000), refused: true},
		"aliases of aliases":    {text: repeated(100, 100) + "c: &c [*a, *a]\nd: &d [" + strings.Repeat("*c, ", 300) + "]\ne: [" + strings.Repeat("*d, ", 300) + "]\n", refused: true},
		"an endless one":        {text: "a: &a [*a]\n", refused: true},
		"in the second":         {text: "a: 1\n---\n" + repeated(30_000, 1000), refused: true},
		"after an end":          {text: "a: &x 1\n...\n" + repeated(30_000, 1000), refused: true},
		"in several documents":  {text: strings.Repeat(repeated(30_000, 100)+"---\n", 10), refused: true},
		"not YAML":              {text: "a: &a [\n", refused: true},
		"JSON":                  {text: "{\"a\": \"x & y\"}\n"},
		"several JSON objects":  {text: "{\"a\": \"x & y\"}\n{\"a\": \"&x *x\"} {}"},
		"YAML in braces":        {text: "{a: &a [" + strings.Repeat("x, ", 10_000) + "], b: [" + strings.Repeat("*a, ", 1000) + "]}", refused: true},
		"below a JSON document": {text: "{\"a\": 1}\n" + repeated(30_000, 1000), refused: true},
	} {
		t.Run(name, func(t *testing.T) {
			if err := manifest.CheckAliases([]byte(tc.text)); (err != nil) != tc.refused {
				t.Errorf("found %v, expected an error: %v", err, tc.refused)
			}
		})
	}
	objects, err := manifest.Parse([]byte(strings.Repeat("{\"apiVersion\": \"v1\", \"kind\": \"A\", \"run\": \"true && true\"}\n", 3)))
	if err != nil || len(objects) != 3 {
		t.Errorf("found %d objects and %v in three JSON objects", len(objects), err)
	}
	if _, err := manifest.Parse([]byte("apiVersion: v1\nkind: ConfigMap\n" + repeated(30_000, 1000))); err == nil {
		t.Error("Parse replaces the aliases")
	}
}
