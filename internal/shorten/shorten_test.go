package shorten

import (
	"strings"
	"testing"
)

func TestShorten(t *testing.T) {
	for _, c := range []struct{ name, text, to, marked string }{
		{"empty", "", "", ""},
		{"shorter", "four", "four", "four"},
		{"exactly the limit", "fiver", "fiver", "fiver"},
		{"longer", "longer", "longe", "longe…"},
		{"a character across the limit", "1234ä", "1234", "1234…"},
		{"a character that ends at the limit", "123ä5", "123ä", "123ä…"},
		{"an invalid byte", "12\xff34", "1234", "1234"},
		{"an invalid byte in a longer text", "12\xff3456", "1234", "1234…"},
	} {
		if got := To(c.text, 5); got != c.to {
			t.Errorf("%s: To returns %q, want %q", c.name, got, c.to)
		}
		if got := Marked(c.text, 5); got != c.marked {
			t.Errorf("%s: Marked returns %q, want %q", c.name, got, c.marked)
		}
	}
}

func TestConditionMessage(t *testing.T) {
	limit := strings.Repeat("ä", conditionMessage)
	for name, c := range map[string]struct{ message, want string }{
		"exactly the limit": {limit, limit},
		"longer":            {limit + "ä", strings.Repeat("ä", conditionMessage-1) + "…"},
	} {
		if got := ConditionMessage(c.message); got != c.want {
			t.Errorf("%s: a message of %d bytes, want %d", name, len(got), len(c.want))
		}
	}
}
