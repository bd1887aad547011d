package fencing

import (
	"strings"
	"testing"
	"time"

	"capstan.dev/capstan/internal/host/hostpb"
)

const (
	tunnel = "192.0.2.1"
	need   = 60*time.Second + margin
)

// contacts are those of a host that answered the lost one at a time ago.
func contacts(age time.Duration, changes ...func(*hostpb.Contact)) *hostpb.ListContactsResponse {
	c := &hostpb.Contact{
		Host: tunnel, AgeMilliseconds: age.Milliseconds(), Peer: true, Fencing: []*hostpb.Fencing{{ManagementCluster: "plane", StopAfterSeconds: 60}},
	}
	for _, change := range changes {
		change(c)
	}
	return &hostpb.ListContactsResponse{RecordedMilliseconds: time.Hour.Milliseconds(), Contacts: []*hostpb.Contact{c}}
}

func TestDecide(t *testing.T) {
	lost := Lost{Tunnel: tunnel, ManagementCluster: "plane", Wanted: 60, Acknowledged: 60, Away: need}
	silent := Other{Name: "b", Member: true, Connected: true, Contacts: contacts(need)}
	with := func(change func(*Lost)) Lost { l := lost; change(&l); return l }
	for name, tc := range map[string]struct {
		lost      Lost
		others    []Other
		unchanged time.Duration
		why       string // empty: fenced
		again     bool
	}{
		"all are silent":        {lost: lost, others: []Other{silent}},
		"no fencing":            {lost: with(func(l *Lost) { l.Wanted = 0 }), others: []Other{silent}, why: "not set"},
		"not acknowledged":      {lost: with(func(l *Lost) { l.Acknowledged = 0 }), others: []Other{silent}, why: "not acknowledged"},
		"another value":         {lost: with(func(l *Lost) { l.Acknowledged = 30 }), others: []Other{silent}, why: "not acknowledged"},
		"lost just now":         {lost: with(func(l *Lost) { l.Away = time.Minute }), others: []Other{silent}, why: "stays cut off", again: true},
		"the only host":         {lost: lost, why: "no connected host", again: true},
		"an old record":         {lost: lost, others: []Other{{Name: "b", Member: true, Connected: true, Contacts: contacts(need, func(c *hostpb.Contact) { c.Peer = false })}}, why: "no connected host", again: true},
		"another manager":       {lost: lost, others: []Other{{Name: "b", Member: true, Connected: true, Contacts: contacts(need, func(c *hostpb.Contact) { c.Fencing[0].ManagementCluster = "other" })}}, why: "no connected host", again: true},
		"a record of no member": {lost: lost, others: []Other{{Name: "b", Connected: true, Contacts: contacts(need)}}, why: "no connected host", again: true},
		"answered":              {lost: lost, others: []Other{silent, {Name: "c", Connected: true, Contacts: contacts(need - 2*time.Second)}}, why: "host c answered it 1m38s ago", again: true},
		"answered as no peer":   {lost: lost, others: []Other{silent, {Name: "c", Connected: true, Contacts: contacts(time.Second, func(c *hostpb.Contact) { c.Peer = false })}}, why: "host c answered", again: true},
		"a longer time": {lost: lost, others: []Other{silent, {Name: "c", Connected: true, Contacts: contacts(need, func(c *hostpb.Contact) { c.Fencing[0].StopAfterSeconds = 600 })}},
			why: "answered", again: true},
		"only capstand is dead": {lost: lost, others: []Other{{Name: "b", Member: true, Connected: true, Contacts: contacts(need, func(c *hostpb.Contact) { c.Reachable = true })}}, why: "reaches it", again: true},
		"a short record": {lost: lost, others: []Other{silent, {Name: "c", Connected: true, Contacts: &hostpb.ListContactsResponse{RecordedMilliseconds: 1000}}},
			why: "short time", again: true},
		"a new host of the cluster":     {lost: lost, others: []Other{silent, {Name: "c", Member: true, Connected: true, Contacts: &hostpb.ListContactsResponse{RecordedMilliseconds: need.Milliseconds()}}}},
		"two hosts of the cluster":      {lost: lost, others: []Other{silent, {Name: "c", Member: true, Away: 10 * need}}, why: "not connected either", again: true},
		"another host was lost":         {lost: lost, others: []Other{silent, {Name: "c", Away: time.Minute}}, why: "recently", again: true},
		"another host was lost long":    {lost: lost, others: []Other{silent, {Name: "c", Away: need}}},
		"the other host is abandoned":   {lost: lost, others: []Other{silent, {Name: "c", Member: true, Abandoned: true}}},
		"an older capstand":             {lost: lost, others: []Other{silent, {Name: "c", Member: true, Connected: true}}},
		"the box is reached":            {lost: lost, others: []Other{silent, {Name: "c", Connected: true, SameBox: true}}, why: "same box", again: true},
		"a CapstanHost was deleted now": {lost: lost, others: []Other{silent}, unchanged: time.Minute, why: "stays cut off", again: true},
	} {
		unchanged := tc.unchanged
		if unchanged == 0 {
			unchanged = need
		}
		d := Decide(tc.lost, tc.others, unchanged)
		if d.Fenced != (tc.why == "") || !strings.Contains(d.Why, tc.why) || (d.Again > 0) != tc.again {
			t.Errorf("%s: %+v", name, d)
		}
	}
}

// Without contacts, only states that no contacts can change lead to a decision: hosts are asked in all others.
func TestEarly(t *testing.T) {
	lost := Lost{Tunnel: tunnel, ManagementCluster: "plane", Wanted: 60, Acknowledged: 60, Away: need}
	asked := Other{Name: "b", Member: true, Connected: true}
	for name, tc := range map[string]struct {
		change func(*Lost)
		others []Other
		why    string
		again  time.Duration
	}{
		"contacts are needed":      {others: []Other{asked}},
		"another host was lost":    {others: []Other{asked, {Name: "c", Away: time.Minute}}},
		"not acknowledged":         {change: func(l *Lost) { l.Acknowledged = 30 }, others: []Other{asked}, why: "not acknowledged"},
		"lost just now":            {change: func(l *Lost) { l.Away = need - time.Second }, others: []Other{asked}, why: "stays cut off", again: 2 * time.Second},
		"two hosts of the cluster": {others: []Other{asked, {Name: "c", Member: true, Away: 10 * need}}, why: "not connected either", again: askAgain},
	} {
		l := lost
		if tc.change != nil {
			tc.change(&l)
		}
		if d := Early(l, tc.others); d.Fenced || (d.Why == "") != (tc.why == "") || !strings.Contains(d.Why, tc.why) || d.Again != tc.again {
			t.Errorf("%s: %+v", name, d)
		}
	}
}
