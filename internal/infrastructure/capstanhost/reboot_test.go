package capstanhost

import (
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
)

func TestNextReboot(t *testing.T) {
	at := func(minute int) metav1.Time { return metav1.Date(2026, 1, 1, 0, minute, 0, 0, time.UTC) }
	recorded := infrav1.HostReboot{RequestedAt: at(10), BootID: "first"}
	complete := recorded
	complete.CompletedAt = at(15)
	booted := func(id string, minute int) *boot { return &boot{id, at(minute).Time} }
	for name, tc := range map[string]struct {
		wanted metav1.Time
		status infrav1.HostReboot
		now    *boot
		want   rebootStep
	}{
		"no request":                        {now: booted("first", 0), want: rebootNone},
		"a request that was withdrawn":      {status: recorded, now: booted("first", 0), want: rebootNone},
		"a request":                         {wanted: at(10), now: booted("first", 0), want: rebootPrepare},
		"not connected":                     {wanted: at(10), want: rebootWait},
		"an old capstand":                   {wanted: at(10), now: booted("", 0), want: rebootUnsupported},
		"recorded":                          {wanted: at(10), status: recorded, now: booted("first", 0), want: rebootSend},
		"away":                              {wanted: at(10), status: recorded, want: rebootWait},
		"back":                              {wanted: at(10), status: recorded, now: booted("second", 12), want: rebootComplete},
		"back with a clock that is behind":  {wanted: at(10), status: recorded, now: booted("second", 2), want: rebootComplete},
		"recorded, with a clock ahead":      {wanted: at(10), status: recorded, now: booted("first", 30), want: rebootSend},
		"complete":                          {wanted: at(10), status: complete, now: booted("second", 12), want: rebootNone},
		"complete, and another boot":        {wanted: at(10), status: complete, now: booted("third", 60), want: rebootNone},
		"a later request":                   {wanted: at(20), status: complete, now: booted("second", 12), want: rebootPrepare},
		"a later request during the reboot": {wanted: at(20), status: recorded, now: booted("first", 0), want: rebootPrepare},
		"booted since, and no record":       {wanted: at(10), now: booted("second", 12), want: rebootComplete},
	} {
		t.Run(name, func(t *testing.T) {
			host := &infrav1.CapstanHost{}
			host.Spec.RebootRequestedAt, host.Status.Reboot = tc.wanted, tc.status
			if got := nextReboot(host, tc.now); got != tc.want {
				t.Errorf("step %d, want %d", got, tc.want)
			}
		})
	}
}

func TestSharesBox(t *testing.T) {
	host := func(name, box string, machines int32) *infrav1.CapstanHost {
		h := &infrav1.CapstanHost{ObjectMeta: metav1.ObjectMeta{Name: name}}
		h.Status.BoxID, h.Status.Machines = box, ptr.To(machines)
		return h
	}
	for name, tc := range map[string]struct {
		one, other *infrav1.CapstanHost
		want       bool
	}{
		"itself":      {host("a", "box", 1), host("a", "box", 1), false},
		"another box": {host("a", "box", 0), host("b", "other", 1), false},
		"no machines": {host("a", "box", 0), host("b", "box", 0), false},
		"no box":      {host("a", "", 0), host("b", "", 1), false},
		"machines":    {host("a", "box", 0), host("b", "box", 1), true},
	} {
		if got := sharesBox(tc.one, tc.other); got != tc.want {
			t.Errorf("%s: %t", name, got)
		}
	}
}
