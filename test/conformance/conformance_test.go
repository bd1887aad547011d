package conformance

import (
	"strings"
	"testing"
)

const report = `[{"SpecReports": [
	{"LeafNodeType": "It", "ContainerHierarchyTexts": ["[sig-apps] Job"], "LeafNodeText": "runs [Conformance]", "State": "passed", "RunTime": 1000},
	{"LeafNodeType": "It", "ContainerHierarchyTexts": ["[sig-node] Pods"], "LeafNodeText": "stop", "State": "failed", "Failure": {"Message": "no pod\nmore"}},
	{"LeafNodeType": "It", "ContainerHierarchyTexts": ["[sig-node] Pods"], "LeafNodeText": "on Windows", "State": "skipped", "Failure": {"Message": "needs Windows"}},
	{"LeafNodeType": "It", "LeafNodeText": "not in the focus", "State": "skipped"},
	{"LeafNodeType": "ReportBeforeSuite", "State": "passed"}]}]`

func TestParse(t *testing.T) {
	specs, err := parse([]byte(report))
	if err != nil {
		t.Fatal(err)
	}
	want := "failed: [sig-node] Pods stop: failed: no pod\nexcluded: [sig-node] Pods on Windows: skipped: needs Windows\n1 passed, 1 failed, 1 excluded"
	if got := Summary(specs); got != want {
		t.Errorf("the summary is\n%s\nexpected\n%s", got, want)
	}
	if _, err := parse([]byte("{")); err == nil {
		t.Error("half a report: no error")
	}
}

func TestFailures(t *testing.T) {
	for name, tc := range map[string]struct {
		specs []Spec
		want  string // part of the error; empty for none
	}{
		"passed":            {[]Spec{{Name: "a", State: "passed"}}, ""},
		"passed, excluded":  {[]Spec{{Name: "a", State: "passed"}, {Name: "b", State: "skipped", Message: "why"}}, ""},
		"no spec matches":   {nil, "found none among 0"},
		"all are excluded":  {[]Spec{{Name: "a", State: "skipped", Message: "why"}}, "found none among 1"},
		"failed":            {[]Spec{{Name: "a", State: "passed"}, {Name: "b", State: "failed", Message: "why"}}, "b: failed: why"},
		"timed out":         {[]Spec{{Name: "a", State: "passed"}, {Name: "b", State: "timedout"}}, "b: timedout"},
		"panicked":          {[]Spec{{Name: "a", State: "passed"}, {Name: "b", State: "panicked"}}, "b: panicked"},
		"before all specs":  {[]Spec{{Name: "SynchronizedBeforeSuite", State: "failed", Message: "no Node"}}, "no Node"},
		"a state of future": {[]Spec{{Name: "a", State: "passed"}, {Name: "b", State: "exploded"}}, "b: exploded"},
	} {
		expect(t, name, Failures(tc.specs), tc.want)
	}
}

func TestMissing(t *testing.T) {
	specs := []Spec{{Name: "a", State: "passed"}, {Name: "b", State: "skipped"}}
	expect(t, "all", Missing(specs[:1], []string{"a"}), "")
	expect(t, "renamed", Missing(specs[:1], []string{"c"}), `"c"`)
	expect(t, "excluded", Missing(specs, []string{"a", "b"}), `"b"`)
	expect(t, "too many", Missing(specs, []string{"a"}), "expected 1 specs, found 2")
}

func expect(t *testing.T, name string, err error, want string) {
	t.Helper()
	if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
		t.Errorf("%s: the error is %v, expected one with %q", name, err, want)
	}
}
