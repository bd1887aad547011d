package host

import (
	"net"
	"strings"
	"testing"
)

// An endpoint on an address and port that another program has is refused with both, before anything is made. The load balancer's own
// address, and one that its bridge does not have yet, are accepted.
func TestPortsFree(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	inUse := taken.Addr().String()
	for name, tc := range map[string]struct {
		listen, served, have []string
		roaming              string
		want                 string // a part of the error; empty: free
	}{
		"free":                         {listen: []string{"127.0.0.1:0"}},
		"of another program":           {listen: []string{inUse}, want: inUse + ": bind: address already in use; free the port or choose another"},
		"the second one":               {listen: []string{"127.0.0.1:0", inUse}, want: inUse},
		"its own":                      {listen: []string{inUse}, have: []string{inUse}},
		"not on the bridge yet":        {listen: []string{"192.0.2.1:6443"}, served: []string{"192.0.2.1"}},
		"an address of another host":   {listen: []string{"192.0.2.1:6443"}, want: "192.0.2.1:6443 is an address of neither this host nor the cluster's machine network; choose another"},
		"a virtual address in a LAN":   {listen: []string{"192.0.2.1:6443"}, roaming: "192.0.2.1:6443"},
		"its port has another program": {listen: []string{inUse}, roaming: inUse, want: inUse},
		"served does not hide others":  {listen: []string{"192.0.2.1:6443", inUse}, served: []string{"192.0.2.1"}, want: inUse},
	} {
		t.Run(name, func(t *testing.T) {
			err := portsFree(tc.listen, tc.served, tc.have, tc.roaming)
			if (err == nil) != (tc.want == "") || err != nil && !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want %q", err, tc.want)
			}
		})
	}
}
