//go:build e2e

package main

import (
	"errors"
	"testing"
	"time"
)

func TestChoose(t *testing.T) {
	if _, err := choose(nil, 3); !errors.Is(err, errNoVictim) {
		t.Errorf("choice without victims: %v", err)
	}
	// The same number selects the same victim, independent of the order of the list.
	for _, all := range [][]victim{{{name: "a"}, {name: "b"}, {name: "c"}}, {{name: "c"}, {name: "a"}, {name: "b"}}} {
		for pick, want := range map[int]string{0: "a", 1: "b", 2: "c", 3: "a", 64: "b"} {
			if got, err := choose(all, pick); err != nil || got.name != want {
				t.Errorf("number %d of %v: got %v, %v; want %s", pick, all, got, err, want)
			}
		}
	}
}

func TestMayKill(t *testing.T) {
	now := time.Now()
	ago := func(all ...time.Duration) (out []time.Time) {
		for _, d := range all {
			out = append(out, now.Add(-d))
		}
		return out
	}
	for name, test := range map[string]struct {
		deaths []time.Time
		want   bool
	}{
		"no death":                            {nil, true},
		"three deaths":                        {ago(1, 2, 3), true},
		"four deaths":                         {ago(1, 2, 3, 4), false},
		"four deaths, one long ago":           {ago(1, 2, 3, killWindow), true},
		"many deaths, all long ago":           {ago(killWindow, killWindow, killWindow, killWindow, 2*killWindow), true},
		"five deaths, one long ago":           {ago(1, 2, 3, 4, killWindow), false},
		"four deaths, just within the window": {ago(1, 2, 3, killWindow-1), false},
	} {
		t.Run(name, func(t *testing.T) {
			if got := mayKill(test.deaths, now); got != test.want {
				t.Errorf("got %v, want %v", got, test.want)
			}
		})
	}
}
