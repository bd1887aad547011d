package model

import (
	"errors"
	"strings"
	"testing"
	"time"

	etcdv1 "capstan.dev/capstan/api/etcd/v1beta2"
)

// TestUnknown: old reports, and reports of a cluster that cannot be read, have the state Unknown.
func TestUnknown(t *testing.T) {
	now := time.Unix(1000, 0)
	some := map[string]etcdv1.EtcdMember{"a": {}}
	care := func(ago time.Duration) Renewal { return Renewal{At: now.Add(-ago), Changed: true} }
	for _, c := range []struct {
		what    string
		w       Workload
		outside bool
		want    string
	}{
		{"fresh", Workload{Members: some, Care: care(40 * time.Second)}, false, ""},
		{"old", Workload{Members: some, Care: care(41 * time.Second)}, false, "no agent has managed the etcd membership since"},
		{"not seen yet", Workload{Members: some, Care: Renewal{At: now.Add(-40 * time.Second)}}, false, "it is not known yet"},
		{"never seen", Workload{Members: some, Care: Renewal{At: now.Add(-41 * time.Second)}}, false, "no agent has managed the etcd membership since"},
		{"nobody yet", Workload{Members: some}, false, "no agent manages the etcd membership yet"},
		{"no kind", Workload{Missing: true}, false, "do not report"},
		{"no members", Workload{Care: care(0)}, false, "do not report"},
		{"no connection", Workload{Err: errors.New("there is none")}, false, "cannot read the state"},
		{"external etcd", Workload{}, true, ""},
		{"external etcd, no connection", Workload{Err: errors.New("there is none")}, true, "cannot read the state"},
	} {
		if got := c.w.unknown(!c.outside, now); (got == "") != (c.want == "") || !strings.Contains(got, c.want) {
			t.Errorf("%s: got %q, want %q", c.what, got, c.want)
		}
	}
}

// TestStale: the next check is at the time when the oldest report becomes invalid.
func TestStale(t *testing.T) {
	now := time.Unix(1000, 0)
	for _, c := range []struct {
		care time.Duration
		apis []time.Duration
		want time.Duration
	}{
		{0, nil, 41 * time.Second}, {10 * time.Second, nil, 31 * time.Second}, {0, []time.Duration{0, 25 * time.Second}, 16 * time.Second},
		{0, []time.Duration{time.Hour}, 41 * time.Second}, {50 * time.Second, nil, 0},
	} {
		w := Workload{Care: Renewal{now.Add(-c.care), true}, APIServers: map[string]Renewal{"new to us": {At: now.Add(-30 * time.Second)}}}
		for n, age := range c.apis {
			w.APIServers[string(rune('a'+n))] = Renewal{now.Add(-age), true}
		}
		if got := w.Stale(now); got != c.want {
			t.Errorf("%v: got %s", c, got)
		}
	}
}

// TestLookAgain: a joining Machine is checked often while it is new.
func TestLookAgain(t *testing.T) {
	for _, c := range []struct {
		machines string
		at       time.Duration
		stale    time.Duration
		want     time.Duration
	}{
		{"a:v b:v", time.Second, 30 * time.Second, 30 * time.Second},
		{"a:v b:va", time.Second, 30 * time.Second, JoiningRetry},
		{"a:v b:va", time.Hour, 30 * time.Second, 30 * time.Second},
		{"a:v b:vad", time.Second, 30 * time.Second, 30 * time.Second},
		{"a:v", time.Hour, 0, UnhealthyRetry},
		{"a:v b:vA", time.Hour, 30 * time.Second, FirstRetry},
		{"a:v b:vAd", time.Hour, 30 * time.Second, 30 * time.Second},
	} {
		if got := build(c.machines).LookAgain(c.stale, time.Unix(1, 0).Add(c.at)); got != c.want {
			t.Errorf("%s after %s: %s", c.machines, c.at, got)
		}
	}
}
