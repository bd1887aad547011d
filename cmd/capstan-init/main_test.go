package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"capstan.dev/capstan/internal/testenv/testlogs"
)

// asInit makes this test program capstan-init.
const asInit = "CAPSTAN_TEST_AS_INIT"

func TestMain(m *testing.M) {
	if os.Getenv(asInit) != "" {
		main()
		return
	}
	os.Exit(m.Run())
}

// The last line of PID 1 and of the services of a machine is JSON too, also for an invalid command line. Other commands print text.
func TestLastErrorIsJSON(t *testing.T) {
	for _, test := range []struct {
		args []string
		json bool
	}{
		{[]string{"--logging-format=json", "--nonsense"}, true},
		{[]string{"--logging-format=json", "node", "agent", "--nonsense"}, true},
		{[]string{"--logging-format=json", "node", "up", "nonsense"}, true},
		{[]string{"--logging-format=json", "service", "start"}, false},
	} {
		out := testlogs.Failed(t, asInit, test.args...)
		if test.json {
			testlogs.EndsInJSON(t, out, "capstan-init ends")
		} else if !strings.HasPrefix(out, "capstan-init: ") {
			t.Errorf("%q ended with:\n%s", test.args, out)
		}
	}
}

// PID 1 and the node agent have the logs of capstand. Wrong metadata does not end them.
func TestInheritedLogs(t *testing.T) {
	for metadata, want := range map[string][]string{
		"":   nil,
		"{}": nil,
		`{"logging":["--logging-format=json","--v=3"]}`: {"--logging-format=json", "--v=3"},
		`{"logging":["--logging-format=xml"]}`:          nil,
		`{"logging":["--of-a-later-version"]}`:          nil,
		`{"logging":["--v=11"]}`:                        nil,
		`{`:                                             nil,
	} {
		path := filepath.Join(t.TempDir(), "metadata.json")
		if metadata != "" {
			if err := os.WriteFile(path, []byte(metadata), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if got := inherited(path).Args(); !slices.Equal(got, want) {
			t.Errorf("%s: %q, expected %q", metadata, got, want)
		}
	}
}
