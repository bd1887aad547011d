// Package testlogs checks in tests how programs log the error with which they end.
package testlogs

import (
	"encoding/json"
	"os"
	"os/exec"
	"strings"
	"testing"
)

// Failed runs this test program with the arguments and with the environment variable as, which makes it the program under test. It
// returns the output. The program must fail.
func Failed(t *testing.T, as string, args ...string) string {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), self, args...)
	cmd.Env = append(os.Environ(), as+"=1")
	out, err := cmd.CombinedOutput()
	if err == nil {
		t.Fatalf("%q succeeded:\n%s", args, out)
	}
	return string(out)
}

// EndsInJSON fails the test unless each line of the output is JSON, and the last one has the message and an error.
func EndsInJSON(t *testing.T, out, message string) {
	t.Helper()
	var last struct{ Msg, Error string }
	for line := range strings.Lines(out) {
		if err := json.Unmarshal([]byte(line), &last); err != nil {
			t.Errorf("%q is no JSON: %v", line, err)
		}
	}
	if last.Msg != message || last.Error == "" {
		t.Errorf("want the message %q and an error in the last line of:\n%s", message, out)
	}
}
