package docs

import (
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"

	"capstan.dev/capstan/internal/testenv/testcrds"
)

var (
	mark  = regexp.MustCompile(`\((1\+2|[12])(?:, [MSO])?\)`)
	field = regexp.MustCompile("`([^`]+)`")
	rowID = regexp.MustCompile(`(?:ALL|IC|IM|MP|CP|IPAM|CTL|BC)-[0-9]{2}`)
)

// TestContractFields checks in the CRDs that each version serves the fields that the rows of docs/contract.md require of it, and
// that each row with a rule for one version lists its fields of that version.
func TestContractFields(t *testing.T) {
	crds, listed := crds(t), map[string][]string{}
	for _, line := range section(t, "contract.md", "### Fields") {
		cells := cells(line)
		if len(cells) != 4 || !rowID.MatchString(cells[1]) {
			continue
		}
		for i, version := range []string{"v1beta1", "v1beta2"} {
			for _, found := range field.FindAllStringSubmatch(cells[2+i], -1) {
				listed[cells[1]] = append(listed[cells[1]], version)
				for kind := range strings.SplitSeq(cells[0], ", ") {
					if !serves(crds[kind], version, found[1]) {
						t.Errorf("%s is not proved for %s: the CRD %s does not serve %s in this version", cells[1], version, kind, found[1])
					}
				}
			}
		}
	}
	for id, rule := range rules(t) {
		for _, version := range versionsOf(rule) {
			if mark.MatchString(rule) && !slices.Contains(withoutFields, id) && !slices.Contains(listed[id], version) {
				t.Errorf("%s has a rule for %s but lists no field of that version", id, version)
			}
		}
	}
}

// withoutFields are rows with a mark whose rule requires behaviour and no field of Capstan's kinds.
var withoutFields = []string{"ALL-17", "IC-14", "CP-17", "CP-21", "CTL-18"}

// TestContractState checks the numbers of docs/contract.md: rows of each version, with and without a gap. A row without a gap
// names a test.
func TestContractState(t *testing.T) {
	var gaps []string
	for _, line := range section(t, "contract.md", "## Known gaps") {
		if c := cells(line); len(c) == 2 {
			gaps = append(gaps, rowID.FindAllString(c[1], -1)...)
		}
	}
	proofs := map[string]bool{}
	for _, line := range lines(t, "contract.md") {
		if id := row.FindStringSubmatch(line); id != nil && test.MatchString(line) {
			proofs[id[1]] = true
		}
	}
	want := map[string][3]int{}
	for id, rule := range rules(t) {
		if !slices.Contains(gaps, id) && !proofs[id] {
			t.Errorf("%s names no test and is not a known gap", id)
		}
		for _, version := range versionsOf(rule) {
			counts := want[version]
			counts[0]++
			if slices.Contains(gaps, id) {
				counts[2]++
			} else {
				counts[1]++
			}
			want[version] = counts
		}
	}
	for _, line := range section(t, "contract.md", "## State of each version") {
		if c := cells(line); len(c) == 4 && want[c[0]] != [3]int{} {
			if wanted := want[c[0]]; c[1] != strconv.Itoa(wanted[0]) || c[2] != strconv.Itoa(wanted[1]) || c[3] != strconv.Itoa(wanted[2]) {
				t.Errorf("%s: the document has %v, want %v", c[0], c[1:], wanted)
			}
			delete(want, c[0])
		}
	}
	for version := range want {
		t.Errorf("the state of %s is missing", version)
	}
}

// versionsOf returns the versions of the contract that a rule holds for: both, unless all its marks are for one of them.
func versionsOf(rule string) []string {
	marks := map[string]bool{}
	for _, found := range mark.FindAllStringSubmatch(rule, -1) {
		marks[found[1]] = true
	}
	switch {
	case len(marks) == 1 && marks["1"]:
		return []string{"v1beta1"}
	case len(marks) == 1 && marks["2"]:
		return []string{"v1beta2"}
	}
	return []string{"v1beta1", "v1beta2"}
}

// rules returns the rule of each row.
func rules(t *testing.T) map[string]string {
	t.Helper()
	all := map[string]string{}
	for _, line := range lines(t, "contract.md") {
		if id := row.FindStringSubmatch(line); len(id) > 1 && all[id[1]] == "" {
			all[id[1]] = cells(line)[1]
		}
	}
	return all
}

// section returns the lines of a document below a heading, up to the next heading.
func section(t *testing.T, document, heading string) []string {
	t.Helper()
	all := lines(t, document)
	start := slices.Index(all, heading)
	if start < 0 {
		t.Fatalf("%s has no heading %q", document, heading)
	}
	end := slices.IndexFunc(all[start+1:], func(line string) bool { return strings.HasPrefix(line, "#") })
	if end < 0 {
		return all[start+1:]
	}
	return all[start+1 : start+1+end]
}

// cells returns the cells of a line of a table, or nothing.
func cells(line string) (out []string) {
	if !strings.HasPrefix(line, "| ") {
		return nil
	}
	for cell := range strings.SplitSeq(strings.TrimSuffix(strings.TrimPrefix(line, "|"), "|"), "|") {
		out = append(out, strings.TrimSpace(cell))
	}
	return out
}

// crds returns the CRDs of Capstan by the plural of their kinds.
func crds(t *testing.T) map[string]*apiextensionsv1.CustomResourceDefinition {
	t.Helper()
	all := map[string]*apiextensionsv1.CustomResourceDefinition{}
	for _, crd := range testcrds.All(t) {
		all[crd.Spec.Names.Plural] = crd
	}
	return all
}

// serves reports whether a version of a CRD serves a field.
func serves(crd *apiextensionsv1.CustomResourceDefinition, version, path string) bool {
	return crd != nil && slices.ContainsFunc(crd.Spec.Versions, func(v apiextensionsv1.CustomResourceDefinitionVersion) bool {
		return v.Name == version && v.Served && hasField(v.Schema.OpenAPIV3Schema, path)
	})
}

// hasField reports whether a schema has a field. "[]" stands for the items of a list, "{}" for the values of a map.
func hasField(schema *apiextensionsv1.JSONSchemaProps, path string) bool {
	for name := range strings.SplitSeq(path, ".") {
		property, ok := schema.Properties[strings.TrimRight(name, "[]{}")]
		if !ok {
			return false
		}
		schema = &property
		switch {
		case strings.HasSuffix(name, "[]"):
			if property.Items == nil {
				return false
			}
			schema = property.Items.Schema
		case strings.HasSuffix(name, "{}"):
			if property.AdditionalProperties == nil {
				return false
			}
			schema = property.AdditionalProperties.Schema
		}
	}
	return true
}

// TestBothVersionsAreTested checks that the tests of a row with fields of v1beta1 use this version: a test of v1beta2 alone does not
// prove them.
func TestBothVersionsAreTested(t *testing.T) {
	needed := map[string]bool{}
	for _, line := range section(t, "contract.md", "### Fields") {
		if c := cells(line); len(c) == 4 && rowID.MatchString(c[1]) && field.MatchString(c[2]) {
			needed[c[1]] = true
		}
	}
	if len(needed) < 25 {
		t.Errorf("%d rows have fields of v1beta1, want the table of at least 25", len(needed))
	}
	for _, line := range lines(t, "contract.md") {
		id := row.FindStringSubmatch(line)
		if len(id) < 2 || !needed[id[1]] {
			continue
		}
		if !slices.ContainsFunc(test.FindAllStringSubmatch(line, -1), func(found []string) bool {
			return strings.Contains(strings.ToLower(source(t, filepath.Join("..", found[2]), found[1])), "v1beta1")
		}) {
			t.Errorf("%s has fields of v1beta1, but no test of the row uses this version", id[1])
		}
	}
}
