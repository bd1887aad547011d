// Package owner keeps apart what belongs to different objects of one id. Ids are no secrets, for they are in the
// providerIDs of Nodes, and a copy of an object in another namespace, whoever made it, has the id
// of what it was copied from. So everything on a host belongs to a namespace and name as well.
//
// Layer: contract.
package owner

import (
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Object is what something on a host belongs to: a message of hostpb, or the Kubernetes object itself.
type Object interface {
	GetNamespace() string
	GetName() string
}

// Same says whether both are the same object.
func Same(a, b Object) bool {
	return a.GetNamespace() == b.GetNamespace() && a.GetName() == b.GetName()
}

// Given refuses a request that does not say whose the thing is.
func Given(what, id string, req Object) error {
	if req.GetNamespace() != "" && req.GetName() != "" {
		return nil
	}
	return status.Errorf(codes.InvalidArgument, "%s %s: wanted the namespace and name that it belongs to, got %q and %q; a client that does not send them is older than this host: upgrade it",
		what, id, req.GetNamespace(), req.GetName())
}

// Ensure refuses to make or change what another object has under the id.
func Ensure(what, id string, have, want Object) error {
	if Same(have, want) {
		return nil
	}
	return status.Errorf(codes.AlreadyExists, "%s %s belongs to %s/%s on this host, not to %s/%s, which must be a copy of that: delete the copy, and make it again without an id",
		what, id, have.GetNamespace(), have.GetName(), want.GetNamespace(), want.GetName())
}

// Delete refuses to remove what another object has under the id.
func Delete(what, id string, have, want Object) error {
	if Same(have, want) {
		return nil
	}
	return status.Errorf(codes.PermissionDenied, "%s %s belongs to %s/%s on this host, not to %s/%s, and stays",
		what, id, have.GetNamespace(), have.GetName(), want.GetNamespace(), want.GetName())
}
