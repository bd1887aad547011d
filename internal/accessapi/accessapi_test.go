package accessapi

import (
	"net/url"
	"slices"
	"strings"
	"testing"
)

// The manager and the hosts check the same limits of a command.
func TestCheckCommand(t *testing.T) {
	for name, test := range map[string]struct {
		words []string
		term  string
		wrong string
	}{
		"a shell":            {nil, "xterm-256color", ""},
		"a program":          {[]string{"df", "-h", ""}, "", ""},
		"many words":         {slices.Repeat([]string{"a"}, maxWords), "", ""},
		"too many words":     {slices.Repeat([]string{"a"}, maxWords+1), "", "at most 256 words, found 257"},
		"a long word":        {[]string{"echo", strings.Repeat("a", maxWord+1)}, "", "at most 16384 bytes"},
		"a zero byte":        {[]string{"echo", "a\x00b"}, "", "zero byte"},
		"no program":         {[]string{"", "a"}, "", "name of a program"},
		"an option of runc":  {[]string{"--tty"}, "", "name of a program"},
		"a strange terminal": {nil, "a=b c", "type of terminal"},
	} {
		t.Run(name, func(t *testing.T) {
			err := CheckCommand(test.words, test.term)
			if (err == nil) != (test.wrong == "") || err != nil && !strings.Contains(err.Error(), test.wrong) {
				t.Errorf("%v, want %q", err, test.wrong)
			}
			parsed := ExecOptions{Command: test.words, Term: test.term}
			if _, err := ParseExecOptions(parsed.Query()); (err == nil) != (test.wrong == "") {
				t.Errorf("ParseExecOptions: %v, want %q", err, test.wrong)
			}
		})
	}
	if _, err := ParseExecOptions(url.Values{"host": {"a"}}); err == nil {
		t.Error("accepted an unknown parameter")
	}
}
