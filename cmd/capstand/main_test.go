package main

import (
	"encoding/json"
	"os"
	"os/exec"
	"strings"
	"testing"
)

// asCapstand makes this test program run capstand.
const asCapstand = "CAPSTAN_TEST_RUN_CAPSTAND"

func TestMain(m *testing.M) {
	if os.Getenv(asCapstand) != "" {
		main()
		return
	}
	os.Exit(m.Run())
}

// Each line of capstand and its subcommands is JSON, including the last one, with the cause of the end.
func TestLogsAreJSON(t *testing.T) {
	for _, args := range [][]string{
		{"hollow", "--versions=1.36.3", "--root=" + t.TempDir()},
		{"--reserve-memory=much", "--root=" + t.TempDir()},
		{"--nonsense"},
		{"hollow", "nonsense"},
	} {
		cmd := exec.CommandContext(t.Context(), os.Args[0], append([]string{"--logging-format=json"}, args...)...)
		cmd.Env = append(os.Environ(), asCapstand+"=1")
		out, err := cmd.CombinedOutput()
		if err == nil {
			t.Fatalf("%q succeeded:\n%s", args, out)
		}
		var last struct{ Msg, Error string }
		for line := range strings.Lines(string(out)) {
			if err := json.Unmarshal([]byte(line), &last); err != nil {
				t.Errorf("%q: %q: %v", args, line, err)
			}
		}
		if last.Msg != "capstand ends" || last.Error == "" {
			t.Errorf("%q ended with:\n%s", args, out)
		}
	}
}

func TestWrongLogFormat(t *testing.T) {
	c := command()
	c.SetArgs([]string{"--logging-format=xml"})
	if err := c.Execute(); err == nil || !strings.Contains(err.Error(), `expected text or json, found "xml"`) {
		t.Errorf("found %v", err)
	}
}
