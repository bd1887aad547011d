package connections

import (
	"errors"
	"fmt"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/refusal"
	"capstan.dev/capstan/internal/shorten"
)

// errTooMuch is the state of a host whose objects do not fit into the mirror.
var errTooMuch = fmt.Errorf("expected at most %d MiB of machines and load balancers, found more: restart capstand of this host, or remove the host", maxMirrorBytes>>20)

// ErrConnecting is the state of a host that has not answered yet.
var ErrConnecting = errors.New("connecting")

// IncompatibleError is the state of a host whose capstand this manager cannot use.
type IncompatibleError struct{ message string }

func (e IncompatibleError) Error() string { return e.message }

// incompatible returns an IncompatibleError if the versions of a host's capstand and of this manager do not work together.
func incompatible(info *hostpb.HostInfo) error {
	if why := hostpb.Incompatible(info.GetProtocolVersion(), info.GetMinimumManagerVersion(), info.GetCapstandVersion()); why != "" {
		return IncompatibleError{why + ". The machines of the host continue unchanged"}
	}
	return nil
}

// bounded returns an error of a host with its code, its details and a text of at most maxText bytes.
func bounded(err error) error {
	s, ok := status.FromError(err)
	if !ok || len(s.Message()) <= maxText {
		return err
	}
	short := s.Proto()
	short.Message = shorten.Marked(short.GetMessage(), maxText)
	return status.ErrorProto(short)
}

// Message returns the error text of a host without gRPC's prefix, bounded.
func Message(err error) string {
	err = bounded(err)
	if s, ok := status.FromError(err); ok {
		return s.Message()
	}
	return err.Error()
}

// PublicMessage is Message for conditions and events, which the users of a namespace read. Hosts name the owner of an id, which can be in
// another namespace: this text is only in the log of the manager.
func PublicMessage(err error) string {
	switch refusal.Of(err).GetReason() {
	case hostpb.Refusal_ID_IN_USE, hostpb.Refusal_NOT_OWNER:
		return "an id in the request belongs to an object with another namespace or name there, so this object or its cluster is a copy: delete the copy and create it again without an id"
	}
	return Message(err)
}

// Code of an error that a host returned.
func Code(err error) codes.Code { return status.Code(err) }
