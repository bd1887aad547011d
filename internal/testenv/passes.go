package testenv

import (
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
)

// Passes reports whether a predicate passes an update of an object. change makes the new object from a copy of the former one with the next
// resource version. The former one has the resource version 1.
func Passes[T client.Object](p predicate.Predicate, before T, change func(T)) bool {
	before.SetResourceVersion("1")
	after := before.DeepCopyObject().(T)
	after.SetResourceVersion("2")
	change(after)
	return p.Update(event.UpdateEvent{ObjectOld: before, ObjectNew: after})
}
