package placement_test

import (
	"errors"
	"testing"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/infrastructure/placement"
)

// TestReasons: each requirement that a host does not meet has its reason, and no reason is unused.
func TestReasons(t *testing.T) {
	missing := map[placement.Reason]bool{}
	for _, reason := range placement.Reasons {
		missing[reason] = true
	}
	one := func(options ...option) []placement.Host { return []placement.Host{host("a", options...)} }
	for want, tc := range map[placement.Reason]struct {
		hosts []placement.Host
		req   placement.Request
	}{
		placement.NotAdmitted:  {},
		placement.Domain:       {hosts: one(), req: placement.Request{FailureDomain: "b"}},
		placement.Network:      {hosts: one(), req: placement.Request{Overlay: true, Tunnel: "198.18.0.1"}},
		placement.LANAccess:    {hosts: one(), req: placement.Request{LAN: placement.LAN{Name: "lab"}}},
		placement.Unavailable:  {hosts: one(unavailable("is unschedulable"))},
		placement.Taint:        {hosts: one(tainted("gpu:NoSchedule"))},
		placement.Version:      {hosts: one(), req: placement.Request{Version: "v1.0.0"}},
		placement.Image:        {hosts: one(), req: placement.Request{Image: "debian"}},
		placement.ControlPlane: {hosts: one(workersOnly), req: placement.Request{ControlPlane: true}},
		placement.HostAccess:   {hosts: one(), req: placement.Request{Mounts: []infrav1.HostMount{{Source: "/srv"}}}},
		placement.CPUs:         {hosts: one(), req: placement.Request{CPUs: 5}},
		placement.Memory:       {hosts: one(), req: placement.Request{Memory: 9 * gib}},
		placement.Disk:         {hosts: one(disk(gib)), req: placement.Request{Disk: 2 * gib}},
		placement.Volume:       {hosts: one(), req: placement.Request{Host: "b", Volume: "v"}},
	} {
		_, err := placement.Choose(tc.hosts, tc.req)
		var refused *placement.Refused
		if !errors.As(err, &refused) || len(refused.Reasons) != 1 || refused.Reasons[0] != want {
			t.Errorf("want %s, found %v, %v", want, refused, err)
		}
		delete(missing, want)
	}
	for reason := range missing {
		t.Errorf("no case for %s", reason)
	}
}
