package stored_test

import (
	"testing"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	"capstan.dev/capstan/internal/stored"
)

func TestEqual(t *testing.T) {
	type spec = bootstrapv1.CapstanConfigSpec
	for name, c := range map[string]struct {
		a, b any
		want bool
	}{
		"empty and missing lists": {spec{PreCommands: []string{}}, spec{}, true},
		"the same":                {spec{PreCommands: []string{"a"}}, spec{PreCommands: []string{"a"}}, true},
		"another value":           {spec{PreCommands: []string{"a"}}, spec{PreCommands: []string{"b"}}, false},
		"another order":           {spec{PreCommands: []string{"a", "b"}}, spec{PreCommands: []string{"b", "a"}}, false},
		"no object":               {func() {}, func() {}, false},
	} {
		if stored.Equal(c.a, c.b) != c.want {
			t.Errorf("%s: expected %v", name, c.want)
		}
	}
}
