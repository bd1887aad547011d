package cluster

import (
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/refusal"
)

// The controller replaces only a network that it chose itself, that no machine uses, and that is the subject of the conflict.
func TestMayChooseAgain(t *testing.T) {
	const cidr, message = "10.200.8.0/21", "network 10.200.8.0/21 overlaps 10.0.0.0/8"
	for name, test := range map[string]struct {
		err     error
		chosen  bool
		running bool
		want    bool
	}{
		"its choice":               {refusal.About(hostpb.Refusal_NETWORK_CONFLICT, cidr, "any text"), true, false, true},
		"the user's network":       {refusal.About(hostpb.Refusal_NETWORK_CONFLICT, cidr, message), false, false, false},
		"machines use it":          {refusal.About(hostpb.Refusal_NETWORK_CONFLICT, cidr, message), true, true, false},
		"the IPv6 network":         {refusal.About(hostpb.Refusal_NETWORK_CONFLICT, "fd00::/64", message), true, false, false},
		"another reason":           {refusal.About(hostpb.Refusal_ID_IN_USE, cidr, message), true, false, false},
		"a message without reason": {status.Error(codes.FailedPrecondition, message), true, false, false},
	} {
		c := &infrav1.CapstanCluster{}
		c.Spec.Network.MachineCIDR = cidr
		if test.chosen {
			c.Annotations = map[string]string{infrav1.MachineCIDRFromPoolAnnotation: ""}
		}
		if test.running {
			c.Status.Conditions = []metav1.Condition{{Type: infrav1.BootAllowedCondition, Status: metav1.ConditionTrue}}
		}
		if got := mayChooseAgain(c, refusal.Of(test.err)); got != test.want {
			t.Errorf("%s: got %v, want %v", name, got, test.want)
		}
	}
}

// Only a host that has the network with another tunnel address gets the advice about it.
func TestRemedy(t *testing.T) {
	c := &infrav1.CapstanCluster{}
	c.Spec.Network.MachineCIDR, c.Spec.Network.Overlay.VNI = "10.1.0.0/21", 5000
	for subject, want := range map[string]string{"192.0.2.1": "set it back to 192.0.2.1", "2001:db8::1": "set it back to 2001:db8::1", "10.1.0.0/21": "", "5000": "", "": ""} {
		got := remedy(refusal.About(hostpb.Refusal_NETWORK_CONFLICT, subject, "any text"), c)
		if (got == "") != (want == "") || !strings.Contains(got, want) {
			t.Errorf("%q: %q", subject, got)
		}
	}
	if got := remedy(refusal.About(hostpb.Refusal_ADDRESS_IN_USE, "192.0.2.1", "any text"), c); got != "" {
		t.Errorf("another refusal: %q", got)
	}
}
