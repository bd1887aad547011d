package diagnosis

import (
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"capstan.dev/capstan/internal/polarity"
)

// Blockers describes the first blocking condition of each object, a cause before its consequences.
func Blockers(objects []*unstructured.Unstructured) []string {
	var out []string
	seen := map[string]bool{}
	for _, o := range causesFirst(objects) {
		c, found := blocking(ConditionsOf(o))
		if !found || seen[c.Message] {
			continue // The object only repeats the message of another one.
		}
		if c.Message != "" {
			seen[c.Message] = true
		}
		out = append(out, fmt.Sprintf("%s %s: %s", o.GetKind(), o.GetName(), c))
	}
	return out
}

// String describes the condition in one line.
func (c Condition) String() string {
	text := c.Type + " is " + c.Status
	if c.Reason != "" {
		text += " (" + c.Reason + ")"
	}
	if c.Message != "" {
		text += ": " + strings.ReplaceAll(strings.TrimPrefix(c.Message, "* "), "\n", " ")
	}
	return text
}

// blocking returns the first condition that describes a problem, if there is one. A summary comes last: it repeats other
// conditions. A condition that is False is no problem if it normally is False, or if its purpose is fulfilled.
func blocking(all []Condition) (Condition, bool) {
	var summary *Condition
	for _, c := range all {
		switch {
		case c.Type == "Paused" && c.Status == "True":
			return c, true
		case c.Status != "False" || polarity.FalseIsGood(c.Type, c.Reason):
		case slices.Contains(summaries, c.Type):
			summary = &c
		default:
			return c, true
		}
	}
	if summary != nil {
		return *summary, true
	}
	return Condition{}, false
}
