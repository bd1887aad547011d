//go:build e2e

package main

import (
	"strings"
	"testing"
)

// healthy returns a snapshot without violations.
func healthy() snapshot {
	return snapshot{
		Wanted:   []string{"a"},
		Size:     1,
		Clusters: []string{"a"},
		Machines: map[string]string{"m1": "a-cp"},
		Running:  map[string]string{"m1": "a-cp"},
		Networks: map[string]string{"n1": "a"},
		Holders: []holder{
			{"n1", "10.0.0.2", "a-cp"}, {"n1", "10.0.0.3", "a-md"},
			{"n2", "10.0.0.2", "b-cp"}, // an address of another network
		},
		Traces:  []trace{{"link", "cpm1", "m1"}, {"bridge", "cap1", "n1"}},
		Secrets: []secret{{"a-ca", "a"}},
		Members: map[string]membership{"a": {[]string{"a-cp"}, []string{"a-cp"}}},
		Claims: claims{
			Wanted: []string{"c1", "c2"}, Found: []string{"c2", "c1"}, Addresses: map[string]string{"c1": "10.1.0.1", "c2": "10.1.0.2"}, Used: 2,
		},
	}
}

func TestViolations(t *testing.T) {
	for name, test := range map[string]struct {
		change func(*snapshot)
		want   string
	}{
		"healthy": {func(*snapshot) {}, ""},
		"two holders of one address": {
			func(s *snapshot) { s.Holders = append(s.Holders, holder{"n1", "10.0.0.2", "a-md-2"}) },
			"address 10.0.0.2 of n1, found a-cp and a-md-2",
		},
		"one holder seen twice": {func(s *snapshot) { s.Holders = append(s.Holders, s.Holders[0]) }, ""},
		"a cluster that is not removed": {
			func(s *snapshot) { s.Wanted = nil }, "Clusters [], found [a]",
		},
		"a network that is not removed": {
			func(s *snapshot) { s.Networks["n2"] = "b" }, "existing Clusters only, found b",
		},
		"too many machines": {
			func(s *snapshot) { s.Machines["m2"], s.Running["m2"] = "b-cp", "b-cp" }, "expected 1 CapstanMachines, found 2: [a-cp b-cp]",
		},
		"a machine without an object": {
			func(s *snapshot) { s.Running["m2"] = "a-old" }, "found none for a-old (id m2)",
		},
		"an object without a machine": {
			func(s *snapshot) { s.Machines["m2"] = "a-new" }, "found none for a-new",
		},
		"a link of a deleted machine": {
			func(s *snapshot) { s.Traces = append(s.Traces, trace{"link", "cpm2", "m2"}) }, `link cpm2 of id "m2"`,
		},
		"a bridge of a deleted cluster": {
			func(s *snapshot) { delete(s.Networks, "n1") }, `bridge cap1 of id "n1"`,
		},
		"a trace without an owner": {
			func(s *snapshot) { s.Traces = append(s.Traces, trace{"loop device", "/dev/loop1", ""}) }, "loop device /dev/loop1",
		},
		"a Secret of a deleted Cluster": {
			func(s *snapshot) { s.Secrets = append(s.Secrets, secret{"b-ca", "b"}) }, `b-ca of Cluster "b"`,
		},
		"a Secret without a Cluster": {
			func(s *snapshot) { s.Secrets = append(s.Secrets, secret{"stray", ""}) }, "stray of Cluster",
		},
		"an etcd member without a machine": {
			func(s *snapshot) { s.Members["a"] = membership{[]string{"a-cp", "gone"}, []string{"a-cp"}} }, "found [a-cp gone]",
		},
		"a machine that is not an etcd member": {
			func(s *snapshot) { s.Members["a"] = membership{nil, []string{"a-cp"}} }, "machines [a-cp], found []",
		},
		"a claim without an address": {
			func(s *snapshot) { delete(s.Claims.Addresses, "c2") }, "found those of [c1]",
		},
		"an address of a deleted claim": {
			func(s *snapshot) { s.Claims.Addresses["c0"] = "10.1.0.9" }, "found those of [c0 c1 c2]",
		},
		"a claim that is not removed": {
			func(s *snapshot) { s.Claims.Found = append(s.Claims.Found, "c0") }, "IPAddressClaims [c1 c2], found [c0 c1 c2]",
		},
		"a pool with a wrong count": {func(s *snapshot) { s.Claims.Used = 3 }, "count 2 used addresses, found 3"},
	} {
		t.Run(name, func(t *testing.T) {
			s := healthy()
			test.change(&s)
			got := strings.Join(s.violations(), "\n")
			if test.want == "" && got != "" || !strings.Contains(got, test.want) {
				t.Errorf("got the violations %q, want %q", got, test.want)
			}
		})
	}
}

func TestLostWrites(t *testing.T) {
	for name, test := range map[string]struct {
		written written
		found   stored
		want    string
	}{
		"acknowledged and stored":            {written{5, 100, 5}, stored{5, 100}, ""},
		"sent, not acknowledged, stored":     {written{5, 100, 6}, stored{6, 120}, ""},
		"sent, not acknowledged, not stored": {written{5, 100, 6}, stored{5, 100}, ""},
		"no write acknowledged":              {written{0, 0, 1}, stored{}, ""},
		"older value":                        {written{5, 100, 5}, stored{4, 90}, "an acknowledged write is lost"},
		"gone":                               {written{5, 100, 5}, stored{}, "an acknowledged write is lost"},
		"a value that was never sent":        {written{5, 100, 6}, stored{7, 130}, "at most 6"},
		"an older revision":                  {written{5, 100, 5}, stored{5, 90}, "returned to an earlier state"},
	} {
		t.Run(name, func(t *testing.T) {
			got := strings.Join(lostWrites(map[string]written{"key": test.written}, map[string]stored{"key": test.found}), "\n")
			if test.want == "" && got != "" || !strings.Contains(got, test.want) {
				t.Errorf("got the losses %q, want %q", got, test.want)
			}
		})
	}
}
