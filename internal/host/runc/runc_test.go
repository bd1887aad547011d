package runc_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"capstan.dev/capstan/internal/host/runc"
	"capstan.dev/capstan/internal/testenv/expect"
)

// script returns a Runc whose binary is a shell script. It stands for a program that the machine's users replaced.
func script(t *testing.T, text string) runc.Runc {
	t.Helper()
	path := filepath.Join(t.TempDir(), "runc")
	if err := os.WriteFile(path, []byte("#!/bin/sh\n"+text), 0o700); err != nil {
		t.Fatal(err)
	}
	return runc.Runc{Binary: path, Root: t.TempDir()}
}

func TestExecReturnsOutput(t *testing.T) {
	stdin, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = stdin.Close() }()
	out, err := script(t, `echo "$3 $4 $5"; echo ignored >&2`).Exec(t.Context(), "id", stdin, "program")
	if err != nil || string(out) != "exec id program\n" {
		t.Errorf("got %q, %v", out, err)
	}
}

func TestExecRefusesLongOutput(t *testing.T) {
	_, err := script(t, `head -c 1000000 /dev/zero`).Exec(t.Context(), "id", nil, "program")
	if err == nil || !strings.Contains(err.Error(), "longer than 262144 bytes") {
		t.Errorf("got %v", err)
	}
}

func TestExecErrorIsShortPrintableLine(t *testing.T) {
	_, err := script(t, `head -c 10000 /dev/zero | tr '\0' x >&2; printf 'a\033[2J\nb' >&2; exit 3`).Exec(t.Context(), "id", nil, "program")
	if err == nil || len(err.Error()) > 3000 || !strings.Contains(err.Error(), "exit status 3") || strings.ContainsAny(err.Error(), "\x1b\n") {
		t.Errorf("got %.200q", err)
	}
}

// A program of the machine keeps the output open after runc is killed.
func TestExecEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	r := script(t, `sleep 600 & echo $! >"$0.new"; mv "$0.new" "$0.pid"; exec sleep 600`)
	r.PipeTimeout = 100 * time.Millisecond
	ended := make(chan error, 1)
	go func() {
		_, err := r.Exec(ctx, "id", nil, "program")
		ended <- err
	}()
	var holder int
	expect.True(t, "the program starts", func() bool {
		data, _ := os.ReadFile(r.Binary + ".pid")
		holder, _ = strconv.Atoi(strings.TrimSpace(string(data)))
		return holder != 0
	})
	defer func() { _ = syscall.Kill(holder, syscall.SIGKILL) }()
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	if err := syscall.Kill(holder, 0); err != nil {
		t.Errorf("the call has waited for the program that holds the output: %v", err)
	}
}

// TestStateWithoutContainer checks that a folder without a stored state is no container, and that a failure of runc is an
// error for a container that exists.
func TestStateWithoutContainer(t *testing.T) {
	r := runc.Runc{Binary: "/bin/false", Root: t.TempDir()}
	for name, tc := range map[string]struct {
		folder, state, wantErr bool
	}{
		"no folder":           {},
		"a folder of a crash": {folder: true},
		"a container":         {folder: true, state: true, wantErr: true},
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(r.Root, "c")
			if err := os.RemoveAll(dir); err != nil {
				t.Fatal(err)
			}
			if tc.folder {
				if err := os.Mkdir(dir, 0o700); err != nil {
					t.Fatal(err)
				}
			}
			if tc.state {
				if err := os.WriteFile(filepath.Join(dir, "state.json"), []byte("{}"), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			if state, err := r.State(t.Context(), "c"); (err != nil) != tc.wantErr || state.Status != "" {
				t.Errorf("state %+v, error %v, want an error: %v", state, err, tc.wantErr)
			}
		})
	}
}

// The end of the context reaches the program as SIGTERM, so that it can clean up.
func TestExecEndsProgramInOrder(t *testing.T) {
	dir := t.TempDir()
	cleaned, started := filepath.Join(dir, "cleaned"), filepath.Join(dir, "started")
	if err := syscall.Mkfifo(started, 0o600); err != nil {
		t.Fatal(err)
	}
	// Open for both directions, so that the call returns before the program opens its end.
	fifo, err := os.OpenFile(started, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = fifo.Close() }()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	go func() {
		defer cancel()
		_, _ = fifo.Read(make([]byte, 1)) // the program writes after it has set its trap
	}()
	_, err = script(t, `trap 'touch `+cleaned+`; exit 1' TERM; echo >`+started+`; while :; do sleep 0.01; done`).Exec(ctx, "id", nil, "program")
	if !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	if _, err := os.Stat(cleaned); err != nil {
		t.Error("the program could not clean up")
	}
}

// TestMain also is a capstand that is killed during a start.
func TestMain(m *testing.M) {
	if bundle := os.Getenv("START_BUNDLE"); bundle != "" {
		r := runc.Runc{Binary: os.Getenv("START_BINARY"), Root: bundle}
		fmt.Println(r.Start(context.Background(), "id", bundle, os.Stderr))
		return
	}
	os.Exit(m.Run())
}

// The runc of a killed capstand continues. The next capstand waits for its end, and no later program holds the lock.
func TestSettleWaitsForRuncOfKilledCapstand(t *testing.T) {
	r := script(t, `touch "$0.runs"; while [ ! -e "$0.go" ]; do sleep 0.02; done`)
	bundle := t.TempDir()
	capstand := exec.Command(os.Args[0])
	capstand.Env = append(os.Environ(), "START_BUNDLE="+bundle, "START_BINARY="+r.Binary)
	if err := capstand.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.WriteFile(r.Binary+".go", nil, 0o600) })
	expect.True(t, "runc runs", func() bool { _, err := os.Stat(r.Binary + ".runs"); return err == nil })
	if err := capstand.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = capstand.Wait()

	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if err := r.Settle(ctx, bundle); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("the runc still runs: %v", err)
	}
	if err := os.WriteFile(r.Binary+".go", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := r.Settle(t.Context(), bundle); err != nil {
		t.Error(err)
	}
	if err := r.Settle(t.Context(), filepath.Join(bundle, "missing")); err != nil {
		t.Errorf("a bundle that does not exist: %v", err)
	}
}
