// Package selection implements the selectors of Capstan's kinds.
//
// Layer: library. Allowed imports: api.
package selection

import (
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
)

// Labels reports whether a selector selects a set of labels. A missing selector selects everything, an invalid one
// nothing.
func Labels(selector *metav1.LabelSelector, set map[string]string) bool {
	return All(selector)(set)
}

// All returns whether every one of the selectors selects a set of labels, as Labels does. It parses them once, for many sets.
func All(selectors ...*metav1.LabelSelector) func(set map[string]string) bool {
	var parsed []labels.Selector
	for _, selector := range selectors {
		if selector == nil {
			continue
		}
		s, err := metav1.LabelSelectorAsSelector(selector)
		if err != nil {
			s = labels.Nothing()
		}
		parsed = append(parsed, s)
	}
	return func(set map[string]string) bool {
		return !slices.ContainsFunc(parsed, func(s labels.Selector) bool { return !s.Matches(labels.Set(set)) })
	}
}

// Namespace reports whether a namespace is in the list of names, or its labels are selected (ALL-18). Here a missing
// selector selects nothing.
func Namespace(names []string, selector *metav1.LabelSelector, namespace string, namespaceLabels map[string]string) bool {
	return slices.Contains(names, namespace) || selector != nil && Labels(selector, namespaceLabels)
}

// NamespaceChanged passes the updates of a Namespace that can change the result of Namespace. Creations are dropped,
// because the objects in a Namespace are newer than the Namespace.
func NamespaceChanged() predicate.Predicate {
	return predicate.And(predicate.LabelChangedPredicate{}, predicate.Funcs{
		CreateFunc:  func(event.CreateEvent) bool { return false },
		DeleteFunc:  func(event.DeleteEvent) bool { return false },
		GenericFunc: func(event.GenericEvent) bool { return false },
	})
}
