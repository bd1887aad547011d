package capstanhost

import (
	"errors"
	"testing"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/infrastructure/connections"
)

func TestCounts_ALL18(t *testing.T) {
	failed := errors.New("cannot read the Namespace")
	for name, tc := range map[string]struct {
		disconnected, has, admitted bool
		err                         error
		want                        bool
	}{
		"nothing of a namespace that is not admitted":   {},
		"something of a namespace that is not admitted": {has: true, want: true},
		"nothing yet of an admitted namespace":          {admitted: true, want: true},
		"something of an admitted namespace":            {admitted: true, has: true, want: true},
		"unknown, because the host is not connected":    {disconnected: true, want: true},
		"an error of the API":                           {err: failed},
		"an error does not matter for what is there":    {has: true, err: failed, want: true},
	} {
		t.Run(name, func(t *testing.T) {
			r := residents{conn: &connections.Host{}, admits: func(string) (bool, error) { return tc.admitted, tc.err }}
			if tc.disconnected {
				r.conn = nil
			}
			got, err := r.counts(&infrav1.CapstanMachine{}, func() bool { return tc.has })
			if got != tc.want || (err != nil) != (tc.err != nil && !tc.want) {
				t.Errorf("%v, %v; want %v", got, err, tc.want)
			}
		})
	}
}
