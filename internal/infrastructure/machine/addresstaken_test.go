package machine

import (
	"errors"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/refusal"
)

// Only the reason and the subject of a refusal decide whether a machine gets another address, never its message.
func TestAddressTaken(t *testing.T) {
	const address, message = "10.1.0.10", "address 10.1.0.10 belongs to machine default/two"
	for name, test := range map[string]struct {
		err   error
		pools int
		want  bool
	}{
		"its address":              {refusal.About(hostpb.Refusal_ADDRESS_IN_USE, address, "any text"), 0, true},
		"another address":          {refusal.About(hostpb.Refusal_ADDRESS_IN_USE, "fd00:1::a", message), 0, false},
		"another reason":           {refusal.About(hostpb.Refusal_ID_IN_USE, address, message), 0, false},
		"an address of an IP pool": {refusal.About(hostpb.Refusal_ADDRESS_IN_USE, address, message), 1, false},
		"a message without reason": {status.Error(codes.AlreadyExists, message), 0, false},
		"no status":                {errors.New(message), 0, false},
		"success":                  {nil, 0, false},
	} {
		m := &infrav1.CapstanMachine{}
		m.Spec.Network.Addresses = []infrav1.InterfaceAddress{{Address: address}}
		m.Spec.Network.AddressesFromPools = make([]infrav1.IPPoolReference, test.pools)
		if got := addressTaken(test.err, m); got != test.want {
			t.Errorf("%s: got %v, want %v", name, got, test.want)
		}
	}
}
