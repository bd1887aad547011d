package config_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/yaml"

	"capstan.dev/capstan/internal/testenv/testcrds"
)

// labelPaths are the labels that kube-state-metrics takes from fields, by their names.
type labelPaths struct{ LabelsFromPath map[string][]string }

// stateMetric is one metric in the configuration of kube-state-metrics.
type stateMetric struct {
	Name, Help string
	ErrorLogV  int
	Each       struct {
		Type                  string
		Gauge, Info, StateSet *struct {
			labelPaths              `json:",inline"`
			Path, ValueFrom, List   []string
			LabelName, LabelFromKey string
			NilIsZero               bool
		}
	}
}

// stateMetrics is the configuration of kube-state-metrics, as far as config/prometheus uses it.
type stateMetrics struct {
	Kind string
	Spec struct {
		Resources []struct {
			labelPaths       `json:",inline"`
			GroupVersionKind metav1.GroupVersionKind
			MetricNamePrefix string
			Metrics          []stateMetric
		}
	}
}

type schemaProps = apiextensionsv1.JSONSchemaProps

// metadata returns the schema of the metadata that the configuration uses. A CRD does not contain it.
func metadata(scope apiextensionsv1.ResourceScope) schemaProps {
	text := schemaProps{Type: "string"}
	owner := schemaProps{Properties: map[string]schemaProps{"controller": text, "kind": text, "name": text, "uid": text}}
	m := schemaProps{Properties: map[string]schemaProps{
		"name": text, "uid": text, "creationTimestamp": text,
		"labels":          {AdditionalProperties: &apiextensionsv1.JSONSchemaPropsOrBool{Schema: &text}},
		"ownerReferences": {Items: &apiextensionsv1.JSONSchemaPropsOrArray{Schema: &owner}},
	}}
	if scope == apiextensionsv1.NamespaceScoped {
		m.Properties["namespace"] = text
	}
	return m
}

// field returns the schema of the field at a path, or nil.
func field(s *schemaProps, path []string) *schemaProps {
	for _, name := range path {
		if next, ok := s.Properties[name]; ok {
			s = &next
		} else if s.AdditionalProperties != nil {
			s = s.AdditionalProperties.Schema
		} else {
			return nil
		}
	}
	return s
}

// definitions returns the CRDs by group and kind.
func definitions(t *testing.T) map[schema.GroupKind]*apiextensionsv1.CustomResourceDefinition {
	t.Helper()
	crds := map[schema.GroupKind]*apiextensionsv1.CustomResourceDefinition{}
	for _, crd := range testcrds.All(t) {
		crds[schema.GroupKind{Group: crd.Spec.Group, Kind: crd.Spec.Names.Kind}] = crd
	}
	return crds
}

// TestKubeStateMetrics: the configuration of kube-state-metrics covers each kind with conditions, each path is a field of the kind, the
// role contains the kinds, and docs/metrics.md lists the metrics.
func TestKubeStateMetrics(t *testing.T) {
	var config stateMetrics
	var role rbacv1.ClusterRole
	for name, into := range map[string]any{"kube-state-metrics.yaml": &config, "kube-state-metrics-role.yaml": &role} {
		if err := yaml.UnmarshalStrict([]byte(readText(t, "config", "prometheus", name)), into); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
	}
	crds := definitions(t)
	page := readText(t, "docs", "metrics.md")
	for _, r := range config.Spec.Resources {
		kind := schema.GroupKind{Group: r.GroupVersionKind.Group, Kind: r.GroupVersionKind.Kind}
		crd := crds[kind]
		if crd == nil {
			t.Errorf("%s: no such kind, or twice", kind)
			continue
		}
		delete(crds, kind)
		if !slices.ContainsFunc(role.Rules, func(rule rbacv1.PolicyRule) bool {
			return slices.Contains(rule.APIGroups, kind.Group) && slices.Contains(rule.Resources, crd.Spec.Names.Plural)
		}) {
			t.Errorf("the role does not contain %s", kind)
		}
		if want := "capi_" + strings.ToLower(kind.Kind); r.MetricNamePrefix != want || !strings.Contains(page, "`"+want+"`") {
			t.Errorf("%s: the prefix is %s, want %s, also in docs/metrics.md", kind, r.MetricNamePrefix, want)
		}
		version := slices.IndexFunc(crd.Spec.Versions, func(v apiextensionsv1.CustomResourceDefinitionVersion) bool {
			return v.Name == r.GroupVersionKind.Version
		})
		if version < 0 {
			t.Errorf("%s: no version %s", kind, r.GroupVersionKind.Version)
			continue
		}
		object := crd.Spec.Versions[version].Schema.OpenAPIV3Schema.DeepCopy()
		object.Properties["metadata"] = metadata(crd.Spec.Scope)
		for _, problem := range r.missing(object) {
			t.Errorf("%s: labelsFromPath: %s", kind, problem)
		}
		for _, m := range r.Metrics {
			for _, problem := range m.problems(object) {
				t.Errorf("%s: %s: %s", kind, m.Name, problem)
			}
			if !strings.Contains(page, "`"+m.Name+"`") {
				t.Errorf("docs/metrics.md does not list %s", m.Name)
			}
		}
	}
	for kind, crd := range crds {
		if v := crd.Spec.Versions[0].Schema.OpenAPIV3Schema; field(v, []string{"status", "conditions"}) != nil {
			t.Errorf("no metrics of %s", kind)
		}
	}
}

// missing returns the labels whose paths are not in the schema.
func (l labelPaths) missing(s *schemaProps) (problems []string) {
	for _, label := range slices.Sorted(maps.Keys(l.LabelsFromPath)) {
		if path := l.LabelsFromPath[label]; field(s, path) == nil {
			problems = append(problems, fmt.Sprintf("%s: the field %v does not exist", label, path))
		}
	}
	return problems
}

// problems compares a metric with the schema of its objects, and returns each difference.
func (m stateMetric) problems(object *schemaProps) (problems []string) {
	each := m.Each.Gauge
	switch m.Each.Type {
	case "Info":
		each = m.Each.Info
	case "StateSet":
		each = m.Each.StateSet
	}
	if each == nil || m.Help == "" {
		return []string{"want a help text and the part for the type " + m.Each.Type}
	}
	value := field(object, each.Path)
	if value == nil {
		return []string{fmt.Sprintf("the field %v does not exist", each.Path)}
	}
	if value.Items != nil { // One series for each item.
		value = value.Items.Schema
	}
	if each.LabelFromKey != "" { // One series for each key.
		if len(value.Properties) == 0 && value.AdditionalProperties == nil {
			problems = append(problems, fmt.Sprintf("%v has no keys", each.Path))
		}
		return problems
	}
	problems = append(problems, each.missing(value)...)
	value = field(value, each.ValueFrom)
	if value == nil {
		return append(problems, fmt.Sprintf("valueFrom: the field %v does not exist", each.ValueFrom))
	}
	switch {
	case m.Each.Type == "Gauge" && (value.Type == "object" || value.Type == "array"):
		problems = append(problems, fmt.Sprintf("valueFrom: %v is no number", each.ValueFrom))
	case m.Each.Type == "StateSet":
		var states []string
		for _, state := range value.Enum {
			states = append(states, strings.Trim(string(state.Raw), `"`))
		}
		if slices.Sort(states); !slices.Equal(states, slices.Sorted(slices.Values(each.List))) {
			problems = append(problems, fmt.Sprintf("the list is %v, the field has the values %v", each.List, states))
		}
	}
	return problems
}
