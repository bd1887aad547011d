package logging_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"
	logsv1 "k8s.io/component-base/logs/api/v1"
	"k8s.io/klog/v2"

	"capstan.dev/capstan/internal/logging"
)

// parsed returns the flags of a command line.
func parsed(t *testing.T, args ...string) *logging.Flags {
	t.Helper()
	f, fs := logging.New(), pflag.NewFlagSet("program", pflag.ContinueOnError)
	f.Add(fs)
	if err := fs.Parse(args); err != nil {
		t.Fatal(err)
	}
	return f
}

// output returns the lines of a program that logs with slog and with klog.
func output(t *testing.T, args ...string) []string {
	t.Helper()
	t.Cleanup(func() { _ = logsv1.ResetForTest(nil) })
	var out bytes.Buffer
	log, err := parsed(t, args...).Apply(&out)
	if err != nil {
		t.Fatal(err)
	}
	log.Info("Machine runs", "machine", "a", "restarts", 2)
	log.Error("Cannot start", "error", errors.New("no disk"))
	slog.Debug("Call served", "method", "Info")
	klog.Background().V(2).Info("Level 2")
	if err := logsv1.ResetForTest(nil); err != nil {
		t.Fatal(err)
	}
	return strings.Split(strings.TrimSpace(out.String()), "\n")
}

func TestJSON(t *testing.T) {
	lines := output(t, "--logging-format=json", "--v=4")
	var messages []string
	for _, line := range lines {
		var entry map[string]any
		if err := json.Unmarshal([]byte(line), &entry); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		for _, key := range []string{"ts", "caller", "msg"} {
			if entry[key] == nil {
				t.Errorf("%s has no %q", line, key)
			}
		}
		messages = append(messages, entry["msg"].(string))
		if entry["msg"] == "Machine runs" && (entry["machine"] != "a" || entry["restarts"] != 2.0) {
			t.Errorf("values: %s", line)
		}
		if entry["msg"] == "Cannot start" && entry["error"] != "no disk" {
			t.Errorf("error: %s", line)
		}
	}
	if want := []string{"Machine runs", "Cannot start", "Call served", "Level 2"}; !slices.Equal(messages, want) {
		t.Errorf("messages %q, expected %q", messages, want)
	}
}

func TestTextAndLevels(t *testing.T) {
	for v, want := range map[string]int{"0": 2, "1": 2, "2": 3, "3": 3, "4": 4} {
		if lines := output(t, "-v", v); len(lines) != want || !strings.Contains(lines[0], `"Machine runs" machine="a" restarts=2`) {
			t.Errorf("-v %s: expected %d lines of text, found:\n%s", v, want, strings.Join(lines, "\n"))
		}
	}
}

func TestCheck(t *testing.T) {
	for name, test := range map[string]struct {
		args, passed []string
		want         string
	}{
		"defaults":       {nil, nil, ""},
		"explicit text":  {[]string{"--logging-format=text", "--v=0"}, nil, ""},
		"json":           {[]string{"--logging-format=json", "--v=10"}, []string{"--logging-format=json", "--v=10"}, ""},
		"unknown format": {[]string{"--logging-format=xml"}, []string{"--logging-format=xml"}, `--logging-format: expected text or json, found "xml"`},
		"too high":       {[]string{"--v=11"}, []string{"--v=11"}, "--v: expected a number from 0 to 10, found 11"},
	} {
		t.Run(name, func(t *testing.T) {
			f := parsed(t, test.args...)
			if got := f.Args(); !slices.Equal(got, test.passed) {
				t.Errorf("Args: %q, expected %q", got, test.passed)
			}
			err := f.Check()
			if err == nil != (test.want == "") || err != nil && err.Error() != test.want {
				t.Errorf("%v, expected %q", err, test.want)
			}
			if _, applied := f.Apply(&bytes.Buffer{}); (applied == nil) != (err == nil) {
				t.Errorf("Apply: %v", applied)
			}
			if err := logsv1.ResetForTest(nil); err != nil {
				t.Fatal(err)
			}
		})
	}
}
