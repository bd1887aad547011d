package diagnosis

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// Waiting is a condition that is not as it should be, in the output of `capstan describe` and others, also for scripts.
type Waiting struct {
	Object    string    `json:"object"`
	Condition string    `json:"condition"`
	Reason    string    `json:"reason,omitempty"`
	Message   string    `json:"message,omitempty"`
	Since     time.Time `json:"since,omitzero"`
	// Do is the remedy of the user; empty if the condition only summarizes others.
	Do  string `json:"do,omitempty"`
	See string `json:"see,omitempty"`
	// ByItself: the wait ends without a user.
	ByItself bool `json:"byItself,omitempty"`
}

// WaitingFor lists the causes for which objects wait, a cause before its consequences. Objects that only repeat the message of
// another one are left out.
func WaitingFor(objects []*unstructured.Unstructured) []Waiting {
	out := []Waiting{}
	seen := map[string]bool{}
	for _, o := range causesFirst(objects) {
		for _, c := range Problems(ConditionsOf(o)) {
			key := cmp.Or(c.Message, o.GetKind()+o.GetName()+c.Type)
			if seen[key] {
				continue
			}
			seen[key] = true
			advice := adviceFor(c.Type, c.Reason)
			w := Waiting{
				Object: o.GetKind() + " " + o.GetName(), Condition: c.Type + "=" + c.Status, Reason: c.Reason, Message: OneLine(c.Message),
				Since: c.Since, Do: advice.do, ByItself: advice.do == none,
			}
			if advice.section != "" {
				w.See = troubleshooting + "#" + advice.section
			}
			out = append(out, w)
		}
	}
	return out
}

// OneLine joins the lines of a message, without the mark of a list.
func OneLine(text string) string {
	return strings.Join(strings.Fields(strings.TrimPrefix(strings.TrimSpace(text), "* ")), " ")
}

// causesFirst sorts objects. Objects that are closer to the machine come first, because their problems cause those of the others.
func causesFirst(objects []*unstructured.Unstructured) []*unstructured.Unstructured {
	objects = slices.Clone(objects)
	slices.SortStableFunc(objects, func(a, b *unstructured.Unstructured) int {
		return cmp.Or(cmp.Compare(distance(a), distance(b)), cmp.Compare(a.GetKind(), b.GetKind()), cmp.Compare(a.GetName(), b.GetName()))
	})
	return objects
}

// distance of an object's kind from the machine: lower is closer.
func distance(o *unstructured.Unstructured) int {
	group, _, _ := strings.Cut(o.GetAPIVersion(), "/")
	switch kind := o.GetKind(); {
	case strings.HasPrefix(group, "infrastructure.") || strings.HasPrefix(group, "ipam."):
		return 0
	case strings.HasPrefix(group, "bootstrap."):
		return 1
	case strings.HasPrefix(group, "controlplane."):
		return 2
	case kind == "Machine":
		return 3
	case kind == "Cluster":
		return 5
	}
	return 4
}
