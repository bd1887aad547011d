package process_test

import (
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"capstan.dev/capstan/internal/node/process"
	"capstan.dev/capstan/internal/node/process/processtest"
)

func TestExit(t *testing.T) {
	for script, want := range map[string]process.Exit{
		"exit 0":     {},
		"exit 3":     {Code: 3},
		"kill -9 $$": {Code: 137, Signal: syscall.SIGKILL},
	} {
		exit, err := processtest.Starter{}.Start(exec.Command("/bin/sh", "-c", script))
		if err != nil {
			t.Fatal(err)
		}
		got := <-exit
		if got != want {
			t.Errorf("%s: %+v, want %+v", script, got, want)
		}
		if (got.Err() == nil) != (want.Code == 0) {
			t.Errorf("%s: error %v", script, got.Err())
		}
	}
	if err := (process.Exit{Code: 137, Signal: syscall.SIGKILL}).Err(); !strings.Contains(err.Error(), "killed by signal 9") {
		t.Error(err)
	}
}
