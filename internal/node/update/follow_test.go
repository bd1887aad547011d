package update

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/machineapi"
	"capstan.dev/capstan/internal/node/process/processtest"
	"capstan.dev/capstan/internal/testenv/expect"
)

// follower returns a Follower whose engine is a shell script with the journal's path as $1.
func follower(dir, script string) *Follower {
	f := &Follower{
		Starter: processtest.Starter{}, Log: slog.New(slog.DiscardHandler),
		Request: filepath.Join(dir, "update.json"), Journal: filepath.Join(dir, "journal", "journal.json"), Output: filepath.Join(dir, "log"),
	}
	f.Engine = []string{"/bin/sh", "-c", script, "sh", f.Journal}
	return f
}

// PID 1 starts the engine again until the update has a result, reports it, and starts nothing for an update that has ended.
func TestFollow(t *testing.T) {
	dir := t.TempDir()
	script := `echo start >> ` + dir + `/starts
cd ` + dir + `; j=$1
case $(wc -l < starts) in
1) kill -9 $$;;
2) printf '{"id":"u","phase":"Running","step":"etcd"}' > j && mv j $j; exit 1;;
*) printf '{"id":"u","phase":"Succeeded"}' > j && mv j $j;;
esac`
	follow := func(until func(*machineapi.Update) bool) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		done := false
		follower(dir, script).Run(ctx, func(u *machineapi.Update) {
			if until(u) {
				done = true
				cancel()
			}
		})
		if !done {
			t.Fatal("the result was not reported")
		}
	}
	expect.NoError(t, atomicfile.WriteJSON(filepath.Join(dir, "update.json"), machineapi.UpdateRequest{ID: "u"}, 0o600))
	succeeded := func(u *machineapi.Update) bool { return u.ID == "u" && u.Phase == machineapi.UpdateSucceeded }
	follow(succeeded)
	follow(succeeded) // the next PID 1
	if got := lines(t, filepath.Join(dir, "starts")); got != 3 {
		t.Errorf("the engine was started %d times, want 3", got)
	}
}

// The commands of an engine that was killed end before the next engine repeats them.
func TestCommandsOfKilledEngine(t *testing.T) {
	dir := t.TempDir()
	wire := filepath.Join(dir, "wire")
	expect.NoError(t, syscall.Mkfifo(wire, 0o600))
	reader, err := os.OpenFile(wire, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	expect.NoError(t, err)
	defer func() { _ = reader.Close() }()
	f := follower(dir, `if [ ! -e `+dir+`/runs ]; then
	(touch `+dir+`/runs; exec sleep 1000) > `+wire+` &
	while [ ! -e `+dir+`/runs ]; do :; done
	kill -9 $$
fi
printf '{"id":"u","phase":"Succeeded"}' > $1.new && mv $1.new $1`)
	expect.NoError(t, atomicfile.WriteJSON(f.Request, machineapi.UpdateRequest{ID: "u"}, 0o600))
	ctx, cancel := context.WithTimeout(t.Context(), expect.Patience)
	defer cancel()
	f.Run(ctx, func(*machineapi.Update) { cancel() })
	expect.NoError(t, reader.SetReadDeadline(time.Now().Add(time.Second)))
	if _, err := reader.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("the command still runs: %v", err)
	}
}

// An engine that is killed after the result of the update leaves copies of files, which PID 1 removes. Those of an update without a
// result stay: a rollback needs them.
func TestFollowRemovesCopies(t *testing.T) {
	for phase, left := range map[machineapi.UpdatePhase]bool{
		machineapi.UpdateRunning: true, machineapi.UpdateSucceeded: false, machineapi.UpdateRolledBack: false, machineapi.UpdateFailed: false,
	} {
		dir := t.TempDir()
		f := follower(dir, `printf '{"id":"u","phase":"`+string(phase)+`"}' > $1.new && mv $1.new $1; rm `+dir+`/update.json; kill -9 $$`)
		copies := copiesBeside(f.Journal)
		expect.NoError(t, os.MkdirAll(copies.dir, 0o700))
		expect.NoError(t, atomicfile.WriteJSON(copies.manifestPath(), manifest{}, 0o600))
		expect.NoError(t, atomicfile.WriteJSON(f.Request, machineapi.UpdateRequest{ID: "u"}, 0o600))
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		f.Run(ctx, func(u *machineapi.Update) {
			if u.Phase == phase {
				cancel()
			}
		})
		cancel()
		if _, err := os.Stat(copies.manifestPath()); (err == nil) != left {
			t.Errorf("%s: the copies are left: %v, want %v", phase, err == nil, left)
		}
	}
}

func lines(t *testing.T, path string) int {
	t.Helper()
	data, err := os.ReadFile(path)
	expect.NoError(t, err)
	return bytes.Count(data, []byte("\n"))
}
