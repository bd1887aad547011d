package main

import (
	"testing"

	"github.com/coredns/caddy"
	"github.com/coredns/coredns/core/dnsserver"
)

// A directive without its package fails only when a Corefile names it, and a
// package without its directive never runs.
func TestPluginsAreBuiltIn(t *testing.T) {
	kept := directives(dnsserver.Directives)
	if len(kept) != len(plugins) {
		t.Errorf("upstream knows %d of our %d plugins: %q", len(kept), len(plugins), kept)
	}
	for _, d := range kept {
		if _, err := caddy.DirectiveAction("dns", d); err != nil {
			t.Errorf("%s: %v", d, err)
		}
	}
}
