package inplace

import (
	"fmt"
	"testing"

	"k8s.io/utils/ptr"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
)

// TestFixed: the digests lead to the same decisions as the specs, for every case of TestFiles and for other fields.
func TestFixed(t *testing.T) {
	type spec = bootstrapv1.CapstanConfigSpec
	yes := ptr.To(true)
	file := func(content string, repeatable *bool) spec {
		return spec{Files: []bootstrapv1.File{{Path: "/etc/a", Content: content, Repeatable: repeatable}}}
	}
	args := spec{Kubelet: bootstrapv1.KubeletSpec{ExtraArgs: []bootstrapv1.Arg{{Name: "v", Value: "4"}}}}
	for name, test := range map[string]struct{ current, desired spec }{
		"equal":                  {spec{}, spec{}},
		"kubelet":                {spec{}, args},
		"commands":               {spec{}, spec{PreCommands: []string{"a"}}},
		"no commands":            {spec{PostCommands: []string{"a"}}, spec{}},
		"update commands":        {spec{}, spec{UpdateCommands: []string{"a"}}},
		"node name":              {spec{}, spec{Node: bootstrapv1.NodeSpec{Name: "a"}}},
		"default role":           {spec{}, spec{Role: bootstrapv1.RoleWorker}},
		"taints":                 {spec{}, spec{Node: bootstrapv1.NodeSpec{Taints: &[]bootstrapv1.Taint{}}}},
		"no resource metrics":    {spec{}, spec{Cluster: bootstrapv1.ClusterConfiguration{ResourceMetrics: bootstrapv1.ResourceMetricsNone}}},
		"file":                   {spec{}, file("a", nil)},
		"repeatable file":        {spec{}, file("a", yes)},
		"removed":                {file("a", yes), spec{}},
		"changed":                {file("a", nil), file("b", nil)},
		"changed, repeatable":    {file("a", yes), file("b", yes)},
		"changed and declared":   {file("a", nil), file("b", yes)},
		"changed and undeclared": {file("a", yes), file("b", nil)},
		"declared":               {file("a", nil), file("a", yes)},
		"undeclared":             {file("a", yes), file("a", nil)},
	} {
		want := describe(Blocking(Config(test.current, test.desired)))
		stored := ReadFixed(FixedParts(test.current).String())
		if has := describe(stored.Changes(FixedParts(test.desired))); has != want {
			t.Errorf("%s: %q by the digests, %q by the specs", name, has, want)
		}
	}
}

// TestFixedIsBounded: a CapstanConfig with 200 files leaves a short record.
func TestFixedIsBounded(t *testing.T) {
	var many bootstrapv1.CapstanConfigSpec
	for n := range 200 {
		many.Files = append(many.Files, bootstrapv1.File{Path: fmt.Sprintf("/etc/%0500d", n)})
	}
	stored := FixedParts(many)
	if len(stored.String()) > 1000 {
		t.Errorf("the record has %d bytes", len(stored.String()))
	}
	many.Files[7].Content = "changed"
	if has := describe(stored.Changes(FixedParts(many))); has != "files Replace" {
		t.Errorf("a change of one of 200 files: %q", has)
	}
}
