package main

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
)

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
