package main

import (
	"os"
	"strings"
	"testing"

	"capstan.dev/capstan/internal/testenv/testlogs"
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
		testlogs.EndsInJSON(t, testlogs.Failed(t, asCapstand, append([]string{"--logging-format=json"}, args...)...), "capstand ends")
	}
}

func TestWrongLogFormat(t *testing.T) {
	c := command()
	c.SetArgs([]string{"--logging-format=xml"})
	if err := c.Execute(); err == nil || !strings.Contains(err.Error(), `expected text or json, found "xml"`) {
		t.Errorf("found %v", err)
	}
}
