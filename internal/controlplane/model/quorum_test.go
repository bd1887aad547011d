package model

import (
	"strings"
	"testing"
)

// TestUnsafe: the quorum after the removal is computed, and members of unknown health count as unhealthy.
func TestUnsafe(t *testing.T) {
	for _, c := range []struct{ machines, leaves, want string }{
		{"a:v b:v c:v", "a", ""},
		{"a:v b:v c:u", "c", ""},
		{"a:v b:v c:u", "a", "of the 2 other voting members 1 are healthy"},
		{"a:v b:v c:?", "a", "of the 2 other voting members 1 are healthy"},
		{"a:v b:u c:u", "c", "no quorum: 1 of 3"},
		{"a:v b:v", "a", ""},
		{"a:v b:u", "b", "no quorum"},
		{"a:v", "a", "the last voting member"},
		{"a:v b:l", "a", "the last voting member"},
		{"a:v b:l", "b", ""},
		{"a:u b:n", "b", "no quorum"},
		{"a:v b:v c:v d:u e:v", "a", ""},
		{"a:v b:v c:v d:u e:u", "d", ""},
		{"a:v b:v c:v d:u e:u", "a", "are needed"},
		{"a:v b:v c:vb", "a", "c is leaving"},
		{"a:v b:v c:vb", "c", ""},
		{"a:u b:v c:vb", "a", ""},
		{"a:? b:v c:vb", "a", "c is leaving"},
		{"a:u b:v c:ub", "a", "c is leaving"},
		{"a:v b:v stray-x:u", "stray-x", ""},
		{"a:v b:v stray-x:u", "a", "of the 2 other"},
	} {
		got := build(c.machines).CannotRemove(c.leaves)
		if (got == "") != (c.want == "") || !strings.Contains(got, c.want) {
			t.Errorf("%s leaves %s: got %q, want %q", c.leaves, c.machines, got, c.want)
		}
	}
}
