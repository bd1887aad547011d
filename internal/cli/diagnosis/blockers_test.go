package diagnosis

import "testing"

// TestBlocking uses the conditions of real objects while a cluster is created.
func TestBlocking(t *testing.T) {
	notExpiring := Condition{Type: "CertificatesExpiring", Status: "False", Reason: "CertificatesNotExpiring"}
	notRotating := Condition{Type: "CertificateAuthorityRotating", Status: "False", Reason: "NotRotating"}
	noHost := Condition{Type: "HostAssigned", Status: "False", Reason: "NoHost", Message: "no host has 2Gi free"}
	notReady := Condition{Type: "Ready", Status: "False", Reason: "NotReady"}
	paused := Condition{Type: "Paused", Status: "True", Reason: "Paused"}
	noToken := Condition{Type: "BootstrapTokenAvailable", Status: "False", Reason: "WaitingForConnection"}
	for name, test := range map[string]struct {
		all  []Condition
		want string // type of the blocking condition; "" for none
	}{
		"no conditions":                   {},
		"healthy object":                  {all: []Condition{{Type: "Ready", Status: "True"}, {Type: "Paused", Status: "False"}}},
		"unknown conditions do not block": {all: []Condition{{Type: "EtcdClusterHealthy", Status: "Unknown"}}},
		"valid certificates":              {all: []Condition{notExpiring}},
		"no rotation":                     {all: []Condition{notRotating}},
		"unused token":                    {all: []Condition{{Type: "BootstrapTokenAvailable", Status: "False", Reason: "NoLongerNeeded"}}},
		"token in use":                    {all: []Condition{noToken}, want: "BootstrapTokenAvailable"},
		"cause after healthy conditions":  {all: []Condition{notExpiring, notRotating, noHost}, want: "HostAssigned"},
		"cause after a summary":           {all: []Condition{notReady, notExpiring, noHost}, want: "HostAssigned"},
		"summary without a cause":         {all: []Condition{notReady, notExpiring}, want: "Ready"},
		"paused":                          {all: []Condition{notReady, paused}, want: "Paused"},
	} {
		t.Run(name, func(t *testing.T) {
			got, found := blocking(test.all)
			if got.Type != test.want || found != (test.want != "") {
				t.Errorf("blocked by %q (%v), want %q", got.Type, found, test.want)
			}
		})
	}
}
