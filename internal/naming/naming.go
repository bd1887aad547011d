// Package naming renders the name templates that tenants write. A template of text/template is a program: it can loop
// for ever and allocate without bounds, at admission already. So a template here is text and fields, and nothing is
// executed.
//
// Layer: library. Allowed imports: api.
package naming

import (
	"fmt"
	"slices"
	"strings"
	"text/template/parse"
)

// MaxLength of a template in bytes.
const MaxLength = 256

// Template is a name template that was checked.
type Template struct{ parts []part }

// part is a text, or a field like `.cluster.name`.
type part struct{ text, field string }

// Parse accepts text, comments and the given fields in double braces: `{{ .random }}`. It takes time in proportion to
// the length of the template. The error names all other content.
func Parse(text string, fields ...string) (Template, error) {
	if len(text) > MaxLength {
		return Template{}, fmt.Errorf("it has %d bytes, at most %d are allowed", len(text), MaxLength)
	}
	trees, err := parse.Parse("template", text, "", "")
	if err != nil {
		return Template{}, err
	}
	tree := trees["template"]
	if len(trees) != 1 || tree == nil {
		return Template{}, fmt.Errorf("only text and %s are allowed, found a definition", list(fields))
	}
	var out Template
	for _, node := range tree.Root.Nodes {
		p, ok := partOf(node, fields)
		if !ok {
			return Template{}, fmt.Errorf("only text and %s are allowed, found %s", list(fields), node)
		}
		out.parts = append(out.parts, p)
	}
	return out, nil
}

func partOf(node parse.Node, fields []string) (part, bool) {
	switch node := node.(type) {
	case *parse.TextNode:
		return part{text: string(node.Text)}, true
	case *parse.ActionNode:
		if len(node.Pipe.Decl) > 0 || len(node.Pipe.Cmds) != 1 || len(node.Pipe.Cmds[0].Args) != 1 {
			return part{}, false
		}
		field, ok := node.Pipe.Cmds[0].Args[0].(*parse.FieldNode)
		if !ok || !slices.Contains(fields, field.String()) {
			return part{}, false
		}
		return part{field: field.String()}, true
	}
	return part{}, false
}

func list(fields []string) string {
	out := make([]string, 0, len(fields))
	for _, f := range fields {
		out = append(out, "{{ "+f+" }}")
	}
	return strings.Join(out, ", ")
}

// Uses reports whether a field is in the template.
func (t Template) Uses(field string) bool {
	return slices.Contains(t.parts, part{field: field})
}

// Render fills in the values of the fields.
func (t Template) Render(values map[string]string) string {
	var out strings.Builder
	for _, p := range t.parts {
		out.WriteString(p.text)
		out.WriteString(values[p.field])
	}
	return out.String()
}
