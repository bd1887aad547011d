package update

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/machineapi"
	"capstan.dev/capstan/internal/node/cloudconfig"
	"capstan.dev/capstan/internal/node/nodeconfig"
	"capstan.dev/capstan/internal/testenv/expect"
)

// Commands that do not end are a failure of their step, so that the machine goes back before capstand gives it up. Nothing of them runs
// then.
func TestCommandsThatDoNotEnd(t *testing.T) {
	if commandsTimeout+killDelay >= machineapi.UpdateStalled {
		t.Errorf("commands have %s, and capstand gives up the update after %s", commandsTimeout, machineapi.UpdateStalled)
	}
	dir := t.TempDir()
	wire := filepath.Join(dir, "wire")
	expect.NoError(t, syscall.Mkfifo(wire, 0o600))
	commands := []cloudconfig.Command{
		{Shell: "sleep 1000 > " + wire + "; true"},
		{Args: []string{"touch", filepath.Join(dir, "next")}},
	}
	reader, err := os.OpenFile(wire, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	expect.NoError(t, err)
	defer func() { _ = reader.Close() }()
	err = runAll(t.Context(), commands, 300*time.Millisecond)
	if err == nil || !strings.Contains(err.Error(), "command 0: expected the commands to end within 300ms") {
		t.Errorf("%v", err)
	}
	expect.NoError(t, reader.SetReadDeadline(time.Now().Add(expect.Patience)))
	if _, err := reader.Read(make([]byte, 1)); err == nil || os.IsTimeout(err) {
		t.Errorf("a process of the command still runs: %v", err)
	}
	if _, err := os.Stat(filepath.Join(dir, "next")); err == nil {
		t.Error("the next command ran")
	}
}

// Services start again also if files could not be restored.
func TestRestoreReachesServices(t *testing.T) {
	u := &updater{snapshot: snapshot{dir: filepath.Join(t.TempDir(), "missing")}}
	err := u.restore(t.Context())
	for _, path := range []string{u.snapshot.manifestPath(), nodeconfig.Path} { // This box is no machine and has neither.
		if err == nil || !strings.Contains(err.Error(), path) {
			t.Errorf("%s was not read: %v", path, err)
		}
	}
}

// A command of several lines fails with the first line that fails.
func TestCommandOfSeveralLines(t *testing.T) {
	next := filepath.Join(t.TempDir(), "next")
	err := runAll(t.Context(), []cloudconfig.Command{{Shell: "true"}, {Shell: "false\ntouch " + next}}, time.Minute)
	if err == nil || !strings.Contains(err.Error(), "command 1: exit status 1") {
		t.Errorf("%v", err)
	}
	if _, err := os.Stat(next); err == nil {
		t.Error("the line after one that failed ran")
	}
}

// TestGrace: a program that a command has started has time for its end, for example a package manager for its database.
func TestGrace(t *testing.T) {
	dir := t.TempDir()
	begun, ended := filepath.Join(dir, "begun"), filepath.Join(dir, "ended")
	script := "(trap 'sleep 0.5; touch " + ended + "; exit' TERM; touch " + begun + "; sleep 1000 & wait) & sleep 1000"
	ctx, cancel := context.WithCancel(t.Context())
	result := make(chan error, 1)
	go func() { result <- runAll(ctx, []cloudconfig.Command{{Shell: script}}, time.Hour) }()
	expect.True(t, "the program runs", func() bool { return atomicfile.Exists(begun) })
	cancel()
	if err := <-result; err == nil {
		t.Error("the commands have not failed")
	}
	if !atomicfile.Exists(ended) {
		t.Error("the program was killed before its end")
	}
}

// capstand can write the data of the next update as soon as the result of this one is visible, so its end does not erase them. An update whose
// data was erased, because capstand has given it up, fails in its first step: without settings, it would succeed without an effect.
func TestDataOfOtherUpdate(t *testing.T) {
	path := filepath.Join(t.TempDir(), "update-data")
	u := &updater{dataPath: path, snapshot: snapshot{dir: filepath.Join(t.TempDir(), "copies")}}
	if _, err := u.data(); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("without data: %v", err)
	}
	expect.NoError(t, os.WriteFile(path, nil, 0o600))
	if config, err := u.data(); err != nil || len(config.Files) != 0 {
		t.Errorf("a change of the version: %+v, %v", config, err)
	}
	expect.NoError(t, u.plan().forget())
	if _, err := os.Stat(path); err != nil {
		t.Errorf("the end of an update has erased the data of the next one: %v", err)
	}
}
