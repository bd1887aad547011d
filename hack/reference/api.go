package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"sigs.k8s.io/yaml"

	"capstan.dev/capstan/internal/manpages"
)

// version is the API version that the reference describes.
const version = "v1beta2"

// kind is a CRD.
type kind struct {
	crd *apiextensionsv1.CustomResourceDefinition
}

func (k kind) name() string { return k.crd.Spec.Names.Kind }

// schema returns the schema of the version that the reference describes.
func (k kind) schema() *apiextensionsv1.JSONSchemaProps {
	for _, v := range k.crd.Spec.Versions {
		if v.Name == version {
			return v.Schema.OpenAPIV3Schema
		}
	}
	return nil
}

// readKinds reads the CRDs of a pattern, sorted by kind.
func readKinds(pattern string) ([]kind, error) {
	files, err := filepath.Glob(pattern)
	if err != nil {
		return nil, err
	}
	if len(files) == 0 {
		return nil, fmt.Errorf("%s matches no file: run this command in the root of the repository", pattern)
	}
	var out []kind
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		k := kind{crd: &apiextensionsv1.CustomResourceDefinition{}}
		if err := yaml.UnmarshalStrict(data, k.crd); err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		if k.schema() == nil {
			return nil, fmt.Errorf("%s has no version %s", file, version)
		}
		out = append(out, k)
	}
	slices.SortFunc(out, func(a, b kind) int { return strings.Compare(a.name(), b.name()) })
	return out, nil
}

// sharedSpecs contains the specs of the kinds by their fields, as links. A field with the same fields is described there only.
type sharedSpecs map[string]string

func (s sharedSpecs) add(k kind, page string) {
	spec, ok := k.schema().Properties["spec"]
	// A template repeats the kind whose name it extends.
	if ok && !strings.HasSuffix(k.name(), "Template") {
		s[fields(spec)] = fmt.Sprintf("[%s](%s#%s)", k.name(), page, strings.ToLower(k.name()))
	}
}

// fields identifies the fields of an object.
func fields(s apiextensionsv1.JSONSchemaProps) string {
	data, err := json.Marshal(s.Properties)
	if err != nil {
		panic(err) // cannot fail: the schema was read from JSON
	}
	return string(data)
}

// apiPage returns the page of a group.
func apiPage(g group, kinds []kind, shared sharedSpecs) []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, "%s# %s.capstan.dev/%s\n\nKinds: %s.\n\n", generated, g.name, version, g.content)
	b.WriteString("`[]` marks the entries of a list, and `*` the values of a map. Required fields are required if the object that contains them is set.\n\n")
	for _, k := range kinds {
		writeKind(&b, k, shared)
	}
	return append(bytes.TrimRight(b.Bytes(), "\n"), '\n')
}

func writeKind(b *bytes.Buffer, k kind, shared sharedSpecs) {
	s := k.schema()
	fmt.Fprintf(b, "## %s\n\n%s\n\n", k.name(), s.Description)
	names := k.crd.Spec.Names
	var versions []string
	for _, v := range k.crd.Spec.Versions {
		text := v.Name
		if v.Storage {
			text += " (stored)"
		}
		if v.Deprecated {
			text += " (deprecated)"
		}
		versions = append(versions, text)
	}
	rows := [][2]string{
		{"scope", string(k.crd.Spec.Scope)},
		{"resource", manpages.Code(names.Plural)},
		{"short names", strings.Join(names.ShortNames, ", ")},
		{"versions", strings.Join(versions, ", ")},
	}
	b.WriteString("| property | value |\n| --- | --- |\n")
	for _, row := range rows {
		if row[1] != "" {
			fmt.Fprintf(b, "| %s | %s |\n", row[0], row[1])
		}
	}
	w := fieldWriter{b: b, shared: shared, own: k.name()}
	for _, part := range []string{"spec", "status"} {
		if field, ok := s.Properties[part]; ok {
			fmt.Fprintf(b, "\n### %s of %s\n\n", part, k.name())
			w.table(part, field)
		}
	}
	b.WriteString("\n")
}

// fieldWriter writes the fields of a kind.
type fieldWriter struct {
	b      *bytes.Buffer
	shared sharedSpecs
	own    string
}

func (w fieldWriter) table(path string, s apiextensionsv1.JSONSchemaProps) {
	if rules := validations(s); len(rules) > 0 {
		fmt.Fprintf(w.b, "Rules: %s.\n\n", strings.Join(rules, "; "))
	}
	w.b.WriteString("| field | type | rules | description |\n| --- | --- | --- | --- |\n")
	w.properties(path, s)
}

// properties writes a row for each property, in the order of their names, and the rows of its properties below it.
func (w fieldWriter) properties(path string, s apiextensionsv1.JSONSchemaProps) {
	for _, name := range slices.Sorted(maps.Keys(s.Properties)) {
		w.field(path+"."+name, s.Properties[name], slices.Contains(s.Required, name))
	}
}

func (w fieldWriter) field(path string, s apiextensionsv1.JSONSchemaProps, required bool) {
	description := s.Description
	element, suffix := s, ""
	switch {
	case s.Items != nil && s.Items.Schema != nil:
		element, suffix = *s.Items.Schema, "[]"
	case s.AdditionalProperties != nil && s.AdditionalProperties.Schema != nil:
		element, suffix = *s.AdditionalProperties.Schema, ".*"
	}
	link := w.shared[fields(element)]
	if len(element.Properties) == 0 || strings.HasPrefix(link, "["+w.own+"]") {
		link = ""
	}
	if link != "" {
		description += " Its fields are those of the spec of " + link + "."
	}
	rules := rules(s)
	if suffix != "" {
		rules = append(rules, entries(element)...)
	}
	if required {
		rules = append([]string{"required"}, rules...)
	}
	fmt.Fprintf(w.b, "| %s | %s | %s | %s |\n", manpages.Code(path), typeOf(s), strings.Join(rules, "; "), manpages.Cell(description))
	if link == "" {
		w.properties(path+suffix, element)
	}
}

// entries returns the rules of the entries of a list or map.
func entries(s apiextensionsv1.JSONSchemaProps) []string {
	out := rules(s)
	if len(out) == 0 {
		return nil
	}
	return []string{"each entry: " + strings.Join(out, ", ")}
}

func typeOf(s apiextensionsv1.JSONSchemaProps) string {
	switch {
	case s.XIntOrString:
		return "integer or string"
	case s.Items != nil && s.Items.Schema != nil:
		return "list of " + plural(typeOf(*s.Items.Schema))
	case s.AdditionalProperties != nil && s.AdditionalProperties.Schema != nil:
		return "map of " + plural(typeOf(*s.AdditionalProperties.Schema))
	case s.Format == "date-time":
		return "time"
	case s.Type == "":
		return "any"
	}
	return s.Type
}

func plural(name string) string {
	if strings.Contains(name, " ") || name == "any" {
		return name
	}
	return name + "s"
}

// rules returns the default and the validation of a field.
func rules(s apiextensionsv1.JSONSchemaProps) (out []string) {
	add := func(format string, arguments ...any) { out = append(out, fmt.Sprintf(format, arguments...)) }
	if s.Default != nil {
		add("default %s", manpages.Code(string(s.Default.Raw)))
	}
	if len(s.Enum) > 0 {
		var values []string
		for _, v := range s.Enum {
			text := string(v.Raw)
			if unquoted, err := strconv.Unquote(text); err == nil && unquoted != "" {
				text = unquoted
			}
			values = append(values, manpages.Code(text))
		}
		add("one of %s", strings.Join(values, ", "))
	}
	out = append(out, limits("", s.Minimum, s.Maximum)...)
	out = append(out, limits(" characters", s.MinLength, s.MaxLength)...)
	out = append(out, limits(" entries", s.MinItems, s.MaxItems)...)
	if s.MinProperties != nil && *s.MinProperties == 1 && s.MaxProperties == nil {
		add("not empty")
	} else {
		out = append(out, limits(" fields", s.MinProperties, s.MaxProperties)...)
	}
	if s.Pattern != "" {
		add("matches %s", manpages.Code(s.Pattern))
	}
	if len(s.XListMapKeys) > 0 {
		add("unique by %s", manpages.Code(strings.Join(s.XListMapKeys, ", ")))
	}
	if s.XListType != nil && *s.XListType == "set" {
		add("unique")
	}
	if s.Nullable {
		add("can be null")
	}
	return append(out, validations(s)...)
}

// limits returns a rule for a lower and an upper limit.
func limits[N int64 | float64](unit string, lowest, highest *N) []string {
	number := func(n *N) string { return strconv.FormatFloat(float64(*n), 'f', -1, 64) }
	switch {
	case lowest != nil && highest != nil:
		return []string{number(lowest) + " to " + number(highest) + unit}
	case lowest != nil:
		return []string{"at least " + number(lowest) + unit}
	case highest != nil:
		return []string{"at most " + number(highest) + unit}
	}
	return nil
}

// validations returns the messages of CEL rules.
func validations(s apiextensionsv1.JSONSchemaProps) (out []string) {
	for _, v := range s.XValidations {
		if v.Message != "" {
			out = append(out, manpages.Cell(v.Message))
		} else {
			out = append(out, manpages.Code(v.Rule))
		}
	}
	return out
}
