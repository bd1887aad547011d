// Package selection says what the selectors of our kinds select.
//
// Layer: library.
package selection

import (
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
)

// Labels says whether a selector selects a set of labels. No selector selects everything, an invalid
// one nothing.
func Labels(selector *metav1.LabelSelector, set map[string]string) bool {
	if selector == nil {
		return true
	}
	s, err := metav1.LabelSelectorAsSelector(selector)
	return err == nil && s.Matches(labels.Set(set))
}

// Namespace says whether a namespace is among the names, or its labels are selected (ALL-18). Here no selector
// selects nothing.
func Namespace(names []string, selector *metav1.LabelSelector, namespace string, namespaceLabels map[string]string) bool {
	return slices.Contains(names, namespace) || selector != nil && Labels(selector, namespaceLabels)
}

// NamespaceChanged passes the updates of a Namespace that Namespace may answer otherwise: what waits for a host or a
// pool comes after its Namespace, so that the others say nothing.
func NamespaceChanged() predicate.Predicate {
	return predicate.And(predicate.LabelChangedPredicate{}, predicate.Funcs{
		CreateFunc:  func(event.CreateEvent) bool { return false },
		DeleteFunc:  func(event.DeleteEvent) bool { return false },
		GenericFunc: func(event.GenericEvent) bool { return false },
	})
}
