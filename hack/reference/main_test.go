package main

import (
	"bytes"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/utils/ptr"
)

func TestRules(t *testing.T) {
	for want, s := range map[string]apiextensionsv1.JSONSchemaProps{
		"": {Type: "string"},
		"default `3`; 1 to 7; matches `^a\\|b$`": {
			Default: &apiextensionsv1.JSON{Raw: []byte("3")}, Minimum: ptr.To(1.0), Maximum: ptr.To(7.0), Pattern: "^a|b$",
		},
		"one of `A`, `\"\"`":         {Enum: []apiextensionsv1.JSON{{Raw: []byte(`"A"`)}, {Raw: []byte(`""`)}}},
		"at least 1 entries; unique": {MinItems: ptr.To[int64](1), XListType: ptr.To("set")},
		"at most 5 characters":       {MaxLength: ptr.To[int64](5)},
		"not empty":                  {MinProperties: ptr.To[int64](1)},
		"unique by `a, b`":           {XListMapKeys: []string{"a", "b"}},
		"the message; `self.a`":      {XValidations: apiextensionsv1.ValidationRules{{Rule: "x", Message: "the message"}, {Rule: "self.a"}}},
		"at least 0.5; can be null":  {Minimum: ptr.To(0.5), Nullable: true},
		"1 to 2 fields":              {MinProperties: ptr.To[int64](1), MaxProperties: ptr.To[int64](2)},
	} {
		if got := strings.Join(rules(s), "; "); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

func TestTypeOf(t *testing.T) {
	text := apiextensionsv1.JSONSchemaProps{Type: "string"}
	list := apiextensionsv1.JSONSchemaProps{Type: "array", Items: &apiextensionsv1.JSONSchemaPropsOrArray{Schema: &text}}
	for want, s := range map[string]apiextensionsv1.JSONSchemaProps{
		"string": text, "list of strings": list, "any": {}, "integer or string": {XIntOrString: true}, "time": {Type: "string", Format: "date-time"},
		"map of list of strings": {Type: "object", AdditionalProperties: &apiextensionsv1.JSONSchemaPropsOrBool{Schema: &list}},
	} {
		if got := typeOf(s); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

// TestConstants reads the constants of a package: values of other constants, of other packages and of sums, and comments.
func TestConstants(t *testing.T) {
	folder := t.TempDir()
	source := `package p

import v1 "k8s.io/api/core/v1"

// Conditions of a Thing. More text.
const (
	// AlphaCondition is true if all is well. See BetaReason.
	AlphaCondition = "Alpha"
	// BetaReason: beta is missing.
	BetaReason = prefix + "Beta"
	// GammaReason: spec.gamma is missing.
	GammaReason = v1.LabelHostname
	number = 1
)

const prefix = "The"
`
	if err := os.WriteFile(filepath.Join(folder, "a.go"), []byte(source), 0o600); err != nil {
		t.Fatal(err)
	}
	blocks, err := readConstants(folder)
	if err != nil {
		t.Fatal(err)
	}
	want := []constant{
		{"AlphaCondition", "Alpha", "`Alpha` is true if all is well. See `TheBeta`."},
		{"BetaReason", "TheBeta", "Beta is missing."},
		{"GammaReason", "kubernetes.io/hostname", "spec.gamma is missing."},
	}
	if len(blocks) != 2 || blocks[0].doc != "Conditions of a Thing. More text." || len(blocks[0].constants) != len(want) {
		t.Fatalf("got %+v", blocks)
	}
	for i, c := range blocks[0].constants {
		if c != want[i] {
			t.Errorf("got %+v, want %+v", c, want[i])
		}
	}
}

// TestWrite writes the pages of this repository twice: they are equal, and contain a field, a condition and an annotation of each
// kind of source.
func TestWrite(t *testing.T) {
	t.Chdir("../..")
	first, second := t.TempDir(), t.TempDir()
	for _, folder := range []string{first, second} {
		if err := write(folder); err != nil {
			t.Fatal(err)
		}
	}
	for page, texts := range map[string][]string{
		"README.md":             {"[CapstanMachine](api-infrastructure.md#capstanmachine)", "[EtcdMember](api-etcd.md#etcdmember)"},
		"api-bootstrap.md":      {"| `spec.registries[].mirrors` | list of strings |", "Its fields are those of the spec of [CapstanConfig](api-bootstrap.md#capstanconfig)."},
		"api-controlplane.md":   {"| `spec.config` | object |", "| `spec.version` | string | required;"},
		"api-infrastructure.md": {"| `spec.memory` | integer or string |", "| short names | capm |"},
		"metrics.md":            {"| `capstan_host_disk_bytes` | gauge | `host`, `state` | Disk space of the host", "| `capstan_balancer_connections` | gauge | `namespace`, `cluster` |", "| `capstand_machine_start_seconds` | histogram |", "| `capstan_ipam_record_total` | counter | `kind`, `namespace`, `pool`, `outcome` |"},
		"conditions.md":         {"| **HostAssigned** |", "| | `NoHost` |", "`infrastructure.capstan.dev/abandoned` | annotation |", "| **Updating** |"},
	} {
		data, err := os.ReadFile(filepath.Join(first, page))
		if err != nil {
			t.Fatal(err)
		}
		again, err := os.ReadFile(filepath.Join(second, page))
		if err != nil || !bytes.Equal(again, data) {
			t.Errorf("%s differs at the second time, %v", page, err)
		}
		for _, text := range texts {
			if !strings.Contains(string(data), text) {
				t.Errorf("%s does not contain %s", page, text)
			}
		}
	}
}

// TestReadMetrics reads the metrics of a package in all forms that are used.
func TestReadMetrics(t *testing.T) {
	folder := t.TempDir()
	source := `package p

const name, help = "capstan_b", "B."

var of = []string{"x", "y"}

var (
	a = prometheus.NewCounterVec(prometheus.CounterOpts{Name: "capstan_a_total", Help: "A."}, append(of[:2:2], "z"))
	b = prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: name, Help: help}, of)
	c = prometheus.NewDesc("capstan_c", "C.", []string{"k"}, nil)
	d = desc("capstand_d_total", "D.", "k", "l")
	e = prometheus.NewHistogram(prometheus.HistogramOpts{Name: "capstand_e_seconds", Help: "E.", Buckets: []float64{1}})
	f = gauge("capstan_balancer_f", "F.", func() float64 { return 1 })
	other = prometheus.NewGauge(prometheus.GaugeOpts{Name: "other", Help: "No."})
	text = Sprintf("capstan_g %s", name)
)
`
	for file, content := range map[string]string{"a.go": source, "a_test.go": strings.ReplaceAll(source, "capstan_", "capstan_test_")} {
		if err := os.WriteFile(filepath.Join(folder, file), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	found, err := readMetrics(folder)
	want := []metric{
		{"capstan_a_total", "counter", "A.", []string{"x", "y", "z"}}, {"capstan_b", "gauge", "B.", []string{"x", "y"}},
		{"capstan_balancer_f", "gauge", "F.", []string{"namespace", "cluster"}}, {"capstan_c", "gauge", "C.", []string{"k"}},
		{"capstand_d_total", "counter", "D.", []string{"k", "l"}}, {"capstand_e_seconds", "histogram", "E.", nil},
	}
	if err != nil || !reflect.DeepEqual(found, want) {
		t.Errorf("found %+v, %v; want %+v", found, err, want)
	}
}
