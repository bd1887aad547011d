// Package refusal creates and reads the errors of the gRPC service Host: a status whose details contain the reason
// (hostpb.Refusal), so that clients never search messages for text. It imports hostpb and gRPC only.
//
// Layer: contract. Allowed imports: api, library.
package refusal

import (
	"fmt"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"capstan.dev/capstan/internal/host/hostpb"
)

var codeOf = map[hostpb.Refusal_Reason]codes.Code{
	hostpb.Refusal_INVALID:          codes.InvalidArgument,
	hostpb.Refusal_SPEC_CHANGED:     codes.InvalidArgument,
	hostpb.Refusal_NOT_FOUND:        codes.NotFound,
	hostpb.Refusal_ID_IN_USE:        codes.AlreadyExists,
	hostpb.Refusal_NOT_OWNER:        codes.PermissionDenied,
	hostpb.Refusal_NAME_IN_USE:      codes.AlreadyExists,
	hostpb.Refusal_ADDRESS_IN_USE:   codes.AlreadyExists,
	hostpb.Refusal_PORT_IN_USE:      codes.AlreadyExists,
	hostpb.Refusal_NETWORK_CONFLICT: codes.FailedPrecondition,
	hostpb.Refusal_NETWORK_IN_USE:   codes.FailedPrecondition,
	hostpb.Refusal_DELETED:          codes.FailedPrecondition,
	hostpb.Refusal_DAMAGED:          codes.FailedPrecondition,
	hostpb.Refusal_NOT_PROVIDED:     codes.FailedPrecondition,
	hostpb.Refusal_UNSUPPORTED:      codes.FailedPrecondition,
	hostpb.Refusal_NOT_RUNNING:      codes.FailedPrecondition,
	hostpb.Refusal_OUT_OF_MEMORY:    codes.ResourceExhausted,
	hostpb.Refusal_NO_DISK_SPACE:    codes.FailedPrecondition,

	hostpb.Refusal_UPDATE_IN_PROGRESS: codes.FailedPrecondition,
	hostpb.Refusal_HOST_IN_USE:        codes.FailedPrecondition,
	hostpb.Refusal_VOLUME_IN_USE:      codes.FailedPrecondition,
}

// Errorf returns the error of a refused call. The reason determines the gRPC code.
func Errorf(reason hostpb.Refusal_Reason, format string, args ...any) error {
	return About(reason, "", format, args...)
}

// About is Errorf for a reason that has a subject: an IP address or a CIDR.
func About(reason hostpb.Refusal_Reason, subject, format string, args ...any) error {
	s := status.New(codeOf[reason], fmt.Sprintf(format, args...))
	if detailed, err := s.WithDetails(&hostpb.Refusal{Reason: reason, Subject: subject}); err == nil {
		s = detailed
	}
	return s.Err()
}

// Of returns the refusal in an error of a host. It is empty for other errors and for hosts that send no reasons.
func Of(err error) *hostpb.Refusal {
	s, ok := status.FromError(err)
	if !ok {
		return &hostpb.Refusal{}
	}
	for _, detail := range s.Details() {
		if r, ok := detail.(*hostpb.Refusal); ok {
			return r
		}
	}
	return &hostpb.Refusal{}
}
