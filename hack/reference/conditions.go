package main

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"capstan.dev/capstan/internal/manpages"
)

// constant is a string constant of an API package.
type constant struct {
	name, value, doc string
}

// block is a declaration of constants with its comment.
type block struct {
	doc       string
	constants []constant
}

// conditionsPage returns the page of conditions, annotations and labels.
func conditionsPage() ([]byte, error) {
	var b bytes.Buffer
	b.WriteString(generated + "# Conditions and reasons\n\n" +
		"The conditions of each kind, followed by the reasons that they can have. Every kind also has the conditions `Ready` and `Paused` of\n" +
		"Cluster API. [Troubleshooting](../troubleshooting.md) describes what to do, and `capstan describe NAME` names the section.\n")
	blocks := map[string][]block{}
	for _, g := range groups {
		found, err := readConstants(filepath.Join("api", g.name, version))
		if err != nil {
			return nil, err
		}
		blocks[g.name] = found
		fmt.Fprintf(&b, "\n## Group %s.capstan.dev\n", g.name)
		for _, block := range found {
			writeConditions(&b, block)
		}
	}
	b.WriteString("\n## Annotations and labels\n\nUsers set those whose meaning is a request. Controllers set the others.\n\n")
	b.WriteString("| name | what it is | meaning |\n| --- | --- | --- |\n")
	for _, g := range groups {
		for _, block := range blocks[g.name] {
			writeKeys(&b, block)
		}
	}
	return b.Bytes(), nil
}

// writeKeys writes a row for each annotation, label and finalizer of a block.
func writeKeys(b *bytes.Buffer, block block) {
	for _, c := range block.constants {
		for _, is := range []string{"Annotation", "Label", "Finalizer"} {
			if strings.HasSuffix(c.name, is) {
				fmt.Fprintf(b, "| %s | %s | %s |\n", manpages.Code(c.value), strings.ToLower(is), manpages.Cell(c.doc))
			}
		}
	}
}

// writeConditions writes a table with the conditions and reasons of a block, or nothing if it has none.
func writeConditions(b *bytes.Buffer, block block) {
	rows := 0
	for _, c := range block.constants {
		condition := strings.HasSuffix(c.name, "Condition")
		if !condition && !strings.HasSuffix(c.name, "Reason") {
			continue
		}
		if rows++; rows == 1 {
			writeTitle(b, block.doc)
		}
		if condition {
			fmt.Fprintf(b, "| **%s** | | %s |\n", c.value, manpages.Cell(c.doc))
		} else {
			fmt.Fprintf(b, "| | %s | %s |\n", manpages.Code(c.value), manpages.Cell(c.doc))
		}
	}
}

// writeTitle writes the comment of a block: its first words as a heading, and the rest as a paragraph.
func writeTitle(b *bytes.Buffer, doc string) {
	title, rest := doc, ""
	if i := strings.IndexAny(doc, ".:"); i >= 0 {
		title, rest = doc[:i], strings.TrimSpace(doc[i+1:])
	}
	fmt.Fprintf(b, "\n### %s\n\n", title)
	if rest != "" {
		fmt.Fprintf(b, "%s\n\n", doc)
	}
	b.WriteString("| condition | reason | meaning |\n| --- | --- | --- |\n")
}

// readConstants reads the string constants of a package, in the order of its files and declarations.
func readConstants(folder string) ([]block, error) {
	names, err := filepath.Glob(filepath.Join(folder, "*.go"))
	if err != nil {
		return nil, err
	}
	if len(names) == 0 {
		return nil, fmt.Errorf("%s has no Go files: run this command in the root of the repository", folder)
	}
	values := map[string]string{}
	var files []*ast.File
	for _, name := range names {
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.ParseComments)
		if err != nil {
			return nil, err
		}
		files = append(files, file)
	}
	// A constant can have the value of a constant of a later file.
	for range 2 {
		for _, file := range files {
			if err := evaluate(file, values, imports(file)); err != nil {
				return nil, err
			}
		}
	}
	var out []block
	for _, file := range files {
		for _, decl := range file.Decls {
			if d, ok := decl.(*ast.GenDecl); ok && d.Tok == token.CONST {
				out = append(out, blockOf(d, values))
			}
		}
	}
	return out, nil
}

// imports returns the import paths of a file by their names.
func imports(file *ast.File) map[string]string {
	out := map[string]string{}
	for _, spec := range file.Imports {
		if spec.Name != nil {
			out[spec.Name.Name], _ = strconv.Unquote(spec.Path.Value)
		}
	}
	return out
}

// evaluate adds the string constants of a file to values.
func evaluate(file *ast.File, values, imports map[string]string) error {
	for _, decl := range file.Decls {
		d, ok := decl.(*ast.GenDecl)
		if !ok || d.Tok != token.CONST {
			continue
		}
		for _, s := range d.Specs {
			spec := s.(*ast.ValueSpec)
			if len(spec.Values) != 1 {
				continue
			}
			value, known, err := text(spec.Values[0], values, imports)
			if err != nil {
				return err
			}
			if known {
				values[spec.Names[0].Name] = value
			}
		}
	}
	return nil
}

// text returns the value of a constant expression, if it is a string and its parts are known.
func text(e ast.Expr, values, imports map[string]string) (value string, known bool, err error) {
	switch e := e.(type) {
	case *ast.BasicLit:
		if e.Kind != token.STRING {
			return "", false, nil
		}
		value, err = strconv.Unquote(e.Value)
		return value, true, err
	case *ast.Ident:
		value, known = values[e.Name]
		return value, known, nil
	case *ast.BinaryExpr:
		left, known, err := text(e.X, values, imports)
		if err != nil || !known {
			return "", false, err
		}
		right, known, err := text(e.Y, values, imports)
		return left + right, known, err
	case *ast.SelectorExpr:
		pkg, ok := e.X.(*ast.Ident)
		if !ok || imports[pkg.Name] == "" {
			return "", false, nil
		}
		foreign, err := constantsOf(imports[pkg.Name])
		if err != nil {
			return "", false, err
		}
		value, known = foreign[e.Sel.Name]
		return value, known, nil
	}
	return "", false, nil
}

// foreign contains the constants of imported packages.
var foreign = map[string]map[string]string{}

// constantsOf returns the string constants of a package by its import path.
func constantsOf(path string) (map[string]string, error) {
	if known, ok := foreign[path]; ok {
		return known, nil
	}
	out, err := exec.Command("go", "list", "-f", "{{.Dir}}", path).Output()
	if err != nil {
		return nil, fmt.Errorf("go list %s: %w", path, err)
	}
	blocks, err := readConstants(strings.TrimSpace(string(out)))
	if err != nil {
		return nil, err
	}
	values := map[string]string{}
	for _, b := range blocks {
		for _, c := range b.constants {
			values[c.name] = c.value
		}
	}
	foreign[path] = values
	return values, nil
}

// blockOf returns the constants of a declaration whose values are known.
func blockOf(d *ast.GenDecl, values map[string]string) block {
	out := block{doc: oneLine(d.Doc.Text())}
	for _, s := range d.Specs {
		spec := s.(*ast.ValueSpec)
		name := spec.Names[0].Name
		value, ok := values[name]
		if !ok {
			continue
		}
		doc := spec.Doc.Text()
		if doc == "" {
			doc = spec.Comment.Text()
		}
		if doc == "" && !d.Lparen.IsValid() {
			doc = d.Doc.Text()
		}
		if doc == "" {
			doc = mention(d, name)
		}
		out.constants = append(out.constants, constant{name, value, readable(oneLine(doc), name, values)})
	}
	return out
}

// mention returns the comment of another constant of the declaration that describes this one as well.
func mention(d *ast.GenDecl, name string) string {
	i := slices.IndexFunc(d.Specs, func(s ast.Spec) bool { return strings.Contains(s.(*ast.ValueSpec).Doc.Text(), name) })
	if i < 0 {
		return ""
	}
	return d.Specs[i].(*ast.ValueSpec).Doc.Text()
}

var identifier = regexp.MustCompile(`\b[A-Z][A-Za-z0-9]*(Condition|Reason|Annotation|Label|Finalizer)\b`)

// readable replaces the names of constants in a comment by their values. A comment that starts with its own name and a colon
// starts with the text after it.
func readable(doc, name string, values map[string]string) string {
	if rest, ok := strings.CutPrefix(doc, name+": "); ok {
		doc = sentence(rest)
	}
	return identifier.ReplaceAllStringFunc(doc, func(found string) string {
		if value, ok := values[found]; ok {
			return "`" + value + "`"
		}
		return found
	})
}

// sentence returns a text with a capital letter at its start, unless it starts with the name of a field or program.
func sentence(text string) string {
	first, _, _ := strings.Cut(text, " ")
	if strings.ToLower(first) != first || strings.HasPrefix(first, "capstan") || strings.Contains(first, ".") {
		return text
	}
	return strings.ToUpper(text[:1]) + text[1:]
}

func oneLine(text string) string { return strings.Join(strings.Fields(text), " ") }
