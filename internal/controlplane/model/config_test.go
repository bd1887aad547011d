package model

import (
	"strings"
	"testing"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
)

// TestChooseConfig: an attempt that was interrupted goes on with its CapstanConfig. Those that do not fit are removed.
func TestChooseConfig(t *testing.T) {
	for _, c := range []struct {
		what       string
		unfinished string // Names; a config whose name ends with "!" has another spec.
		name       string
		reserved   bool
		uses       bool
		want       string // the name
		remove     string
	}{
		{what: "none", name: "new", want: "new"},
		{what: "an interrupted attempt", unfinished: "a", name: "new", uses: true, want: "a"},
		{what: "of an older spec", unfinished: "a!", name: "new", want: "new", remove: "a!"},
		{what: "the first that fits", unfinished: "a! b c", name: "new", uses: true, want: "b", remove: "a! c"},
		{what: "no name needed", unfinished: "a b", uses: true, want: "a", remove: "b"},
		{what: "no name, none fits", unfinished: "a!", remove: "a!"},
		{what: "reserved, none", name: "first", reserved: true, want: "first"},
		{what: "reserved", unfinished: "a first", name: "first", reserved: true, uses: true, want: "first", remove: "a"},
		{what: "another name than the reserved one", unfinished: "a", name: "first", reserved: true, want: "first", remove: "a"},
		{what: "reserved, of an older spec", unfinished: "a first!", name: "first!", reserved: true, want: "first!", remove: "a first!"},
	} {
		var unfinished []*bootstrapv1.CapstanConfig
		for _, name := range strings.Fields(c.unfinished) {
			config := &bootstrapv1.CapstanConfig{Spec: bootstrapv1.CapstanConfigSpec{Role: bootstrapv1.RoleControlPlane, PreCommands: []string{}}}
			if config.Name = name; strings.HasSuffix(name, "!") {
				config.Spec.Role = bootstrapv1.RoleInit
			}
			unfinished = append(unfinished, config)
		}
		plan := ChooseConfig(unfinished, bootstrapv1.CapstanConfigSpec{Role: bootstrapv1.RoleControlPlane}, c.name, c.reserved)
		var remove []string
		for _, config := range plan.Remove {
			remove = append(remove, config.Name)
		}
		if (plan.Use != nil) != c.uses || c.uses && plan.Use.Name != c.want || plan.Name != c.want || strings.Join(remove, " ") != c.remove {
			t.Errorf("%s: got %+v, removes %v", c.what, plan, remove)
		}
	}
}
