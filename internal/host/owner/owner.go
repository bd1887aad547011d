// Package owner compares the owners of objects with one id. Ids are public, because the providerIDs of Nodes contain
// them, and a copy of an object in another namespace has the id of the original. Every object on a host therefore
// also belongs to a namespace and name. The package imports hostpb and refusal only.
//
// Layer: contract. Allowed imports: api, library.
package owner

import (
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/refusal"
)

// Object has the namespace and name of an owner: a message of hostpb, or the Kubernetes object itself.
type Object interface {
	GetNamespace() string
	GetName() string
}

// Same returns whether both have the same namespace and name.
func Same(a, b Object) bool {
	return a.GetNamespace() == b.GetNamespace() && a.GetName() == b.GetName()
}

// Given refuses a request without the owner's namespace or name (INVALID).
func Given(what, id string, req Object) error {
	if req.GetNamespace() != "" && req.GetName() != "" {
		return nil
	}
	return refusal.Errorf(hostpb.Refusal_INVALID, "%s %s: expected the namespace and name of its owner, found %q and %q; a client that does not send them is older than this host: upgrade it",
		what, id, req.GetNamespace(), req.GetName())
}

// Ensure refuses to create or change an object whose id belongs to another owner (ID_IN_USE).
func Ensure(what, id string, have, want Object) error {
	if Same(have, want) {
		return nil
	}
	return refusal.Errorf(hostpb.Refusal_ID_IN_USE, "%s %s belongs to %s/%s on this host, not to %s/%s, which is a copy of it: delete the copy and create it again without an id",
		what, id, have.GetNamespace(), have.GetName(), want.GetNamespace(), want.GetName())
}

// Delete refuses to delete an object of another owner (NOT_OWNER).
func Delete(what, id string, have, want Object) error {
	if Same(have, want) {
		return nil
	}
	return refusal.Errorf(hostpb.Refusal_NOT_OWNER, "%s %s belongs to %s/%s on this host, not to %s/%s, and is not deleted",
		what, id, have.GetNamespace(), have.GetName(), want.GetNamespace(), want.GetName())
}
