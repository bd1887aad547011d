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

		// An update in place restarts the member of a Machine.
		{"a:vU b:v c:v", "b", "update in place of Machine a"},
		{"a:vP b:v c:v", "b", "update in place of Machine a"},
		{"a:vU b:? c:v", "b", "update in place of Machine a"},
		{"a:vU b:v c:v stray-x:v", "stray-x", ""},
		{"a:vU b:v stray-x:v", "stray-x", "update in place of Machine a"},
		{"a:vU b:v", "b", "update in place of Machine a"},
		{"a:vU b:v c:v", "a", ""},
		{"a:uU b:v c:v", "b", "of the 2 other voting members 1 are healthy"},
		{"a:vU b:v c:v d:v e:v", "b", ""},
		{"a:vU b:v c:v d:v e:u", "b", "update in place of Machine a"},
		{"a:vdU b:v c:v", "b", "update in place of Machine a"},
		// These cost no vote, and a repair does not wait.
		{"a:vU b:u c:v", "b", ""},
		{"a:vU b:v c:v d:u e:u", "d", ""},
		{"a:vU b:l", "b", ""},
		{"a:vU b:n c:v", "b", ""},
		// These updates restart nothing soon.
		{"a:vM b:v c:v", "b", ""},
		{"a:vC b:v c:v", "b", ""},
		{"a:vF b:v c:v", "b", ""},
		{"a:vB b:v c:v", "b", ""},
		{"a:vD b:v c:v", "b", ""},
		{"a:vUL b:v c:v", "b", ""},
	} {
		got := build(c.machines).CannotRemove(c.leaves)
		if (got == "") != (c.want == "") || !strings.Contains(got, c.want) {
			t.Errorf("%s leaves %s: got %q, want %q", c.leaves, c.machines, got, c.want)
		}
	}
}
