package selection

import (
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TestAll: a set passes if every selector selects it. A missing selector selects everything, an invalid one nothing.
func TestAll(t *testing.T) {
	red := &metav1.LabelSelector{MatchLabels: map[string]string{"color": "red"}}
	big := &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: "big", Operator: metav1.LabelSelectorOpExists}}}
	invalid := &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: "big", Operator: "Sometimes"}}}
	set := map[string]string{"color": "red"}
	for name, tc := range map[string]struct {
		selectors []*metav1.LabelSelector
		want      bool
	}{
		"none":               {nil, true},
		"missing":            {[]*metav1.LabelSelector{nil, nil}, true},
		"empty":              {[]*metav1.LabelSelector{{}}, true},
		"one":                {[]*metav1.LabelSelector{red}, true},
		"one and a missing":  {[]*metav1.LabelSelector{nil, red}, true},
		"one of two":         {[]*metav1.LabelSelector{red, big}, false},
		"one and an invalid": {[]*metav1.LabelSelector{red, invalid}, false},
	} {
		if got := All(tc.selectors...)(set); got != tc.want {
			t.Errorf("%s: got %t, want %t", name, got, tc.want)
		}
	}
}
