package diagnosis

import (
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"capstan.dev/capstan/internal/polarity"
)

// Condition is a condition in the form of the v1beta2 contract, which all providers use.
type Condition struct {
	Type, Status, Reason, Message string
	// Since is the time of the last change of the status.
	Since time.Time
}

// ConditionsOf returns the conditions of an object.
func ConditionsOf(o *unstructured.Unstructured) []Condition {
	list, _, _ := unstructured.NestedSlice(o.Object, "status", "conditions")
	var out []Condition
	for _, item := range list {
		fields, ok := item.(map[string]any)
		if !ok {
			continue
		}
		get := func(name string) string { s, _ := fields[name].(string); return s }
		since, _ := time.Parse(time.RFC3339, get("lastTransitionTime")) // zero without a time
		out = append(out, Condition{get("type"), get("status"), get("reason"), get("message"), since})
	}
	return out
}

// Status returns the status of the condition of a type; "" without the condition.
func Status(o *unstructured.Unstructured, kind string) string {
	for _, c := range ConditionsOf(o) {
		if c.Type == kind {
			return c.Status
		}
	}
	return ""
}

// summaries lists the conditions that summarize others.
var summaries = []string{"Ready", "Available"}

// Problems returns the conditions that are not as they should be. Summaries are left out if they have a cause in the same
// object.
func Problems(all []Condition) (out []Condition) {
	var summary []Condition
	for _, c := range all {
		switch {
		case polarity.FalseIsGood(c.Type, ""):
			if c.Status == "True" {
				out = append(out, c)
			}
		case c.Status == "True" || c.Status == "False" && polarity.FalseIsGood(c.Type, c.Reason):
		case slices.Contains(summaries, c.Type):
			summary = append(summary, c)
		default:
			out = append(out, c)
		}
	}
	if len(out) == 0 {
		return summary
	}
	return out
}
