package naming

import (
	"strings"
	"testing"
	"text/template"
)

var fields = []string{".cluster.name", ".random"}

func TestParse(t *testing.T) {
	for text, want := range map[string]string{
		"{{ .cluster.name }}-{{ .random }}":         "demo-abcde",
		"{{- .cluster.name -}} - {{ .random }}":     "demo- abcde",
		"x{{/* {{ .cluster.name }} */}}{{.random}}": "xabcde",
		"":      "",
		"plain": "plain",
	} {
		got, err := Parse(text, fields...)
		if err != nil || got.Render(map[string]string{".cluster.name": "demo", ".random": "abcde"}) != want {
			t.Errorf("%q: %+v, %v", text, got, err)
		}
	}
	for text, want := range map[string]string{
		`{{ range 9000000000000000000 }}{{ end }}`:                      "found {{range",
		`{{ define "a" }}{{ template "a" }}{{ end }}{{ template "a" }}`: "found a definition",
		`{{ define "a" }}x{{ end }}`:                                    "found a definition",
		`{{ template "a" }}`:                                            "found {{template",
		`{{ block "a" . }}x{{ end }}`:                                   "found a definition",
		`{{ printf "%1000000000d" 1 }}`:                                 `function "printf" not defined`,
		`{{ .random | printf "%s" }}`:                                   `function "printf" not defined`,
		`{{ .random | .random }}`:                                       "found {{.random | .random",
		`{{ .random .random }}`:                                         "found {{.random .random",
		`{{ (.random) }}`:                                               "found {{(.random)",
		`{{ with .random }}{{ . }}{{ end }}`:                            "found {{with",
		`{{ if .random }}x{{ end }}`:                                    "found {{if",
		`{{ $x := .random }}`:                                           "found {{$x := .random",
		`{{ $.random }}`:                                                "found {{$.random",
		`{{ . }}`:                                                       "found {{.}}",
		`{{ .cluster }}`:                                                "found {{.cluster}}",
		`{{ .secret }}`:                                                 "found {{.secret}}",
		`{{ "text" }}`:                                                  `found {{"text"}}`,
		`{{ .random`:                                                    "unclosed action",
		`{{ break }}`:                                                   "outside",
		strings.Repeat("a", MaxLength+1):                                "at most 256",
	} {
		if _, err := Parse(text, fields...); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: got %v, want %q", text, err, want)
		}
	}
}

func TestUses(t *testing.T) {
	for text, want := range map[string]bool{"{{ .random }}": true, "{{/* .random */}}": false, ".random": false, "{{ .cluster.name }}": false} {
		if got, err := Parse(text, fields...); err != nil || got.Uses(".random") != want {
			t.Errorf("%q: %t, %v", text, got.Uses(".random"), err)
		}
	}
}

// FuzzParse: accepted templates are rendered as text/template does. The result is not longer than the text and the fields together.
func FuzzParse(f *testing.F) {
	for _, seed := range []string{"{{ .cluster.name }}-{{ .random }}", "{{- .random -}} x", "{{ range 9 }}{{ end }}", `{{ define "a" }}{{ end }}`, "{{/* c */}}", "{{ .random | len }}"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		parsed, err := Parse(text, fields...)
		if err != nil {
			return
		}
		got := parsed.Render(map[string]string{".cluster.name": "demo", ".random": "abcde"})
		if len(got) > len(text) {
			t.Fatalf("%q grew to %q", text, got)
		}
		var want strings.Builder
		data := map[string]any{"cluster": map[string]any{"name": "demo"}, "random": "abcde"}
		err = template.Must(template.New("").Parse(text)).Execute(&want, data)
		if strings.TrimSpace(got) == "" {
			return // text/template does not execute an empty template.
		}
		if err != nil || want.String() != got {
			t.Fatalf("%q: got %q, want %q, %v", text, got, want.String(), err)
		}
	})
}
