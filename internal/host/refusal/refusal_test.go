package refusal

import (
	"errors"
	"fmt"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"capstan.dev/capstan/internal/host/hostpb"
)

// Every reason has a code. The client receives the reason, also from a wrapped error.
func TestEveryReason(t *testing.T) {
	for number, name := range hostpb.Refusal_Reason_name {
		reason := hostpb.Refusal_Reason(number)
		if reason == hostpb.Refusal_REASON_UNSPECIFIED {
			continue
		}
		err := About(reason, "10.0.0.1", "refused: %d", 7)
		if code := status.Code(err); code == codes.OK || code == codes.Unknown {
			t.Errorf("%s: code %s", name, code)
		}
		got := Of(fmt.Errorf("machine: %w", err))
		if got.Reason != reason || got.Subject != "10.0.0.1" || status.Convert(err).Message() != "refused: 7" {
			t.Errorf("%s: got %v of %v", name, got, err)
		}
	}
}

func TestOfOtherErrors(t *testing.T) {
	for name, err := range map[string]error{
		"nil": nil, "no status": errors.New("address 10.0.0.1 is in use"), "no details": status.Error(codes.AlreadyExists, "address 10.0.0.1 is in use"),
	} {
		if got := Of(err); got.Reason != hostpb.Refusal_REASON_UNSPECIFIED || got.Subject != "" {
			t.Errorf("%s: %v", name, got)
		}
	}
}
