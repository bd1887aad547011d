//go:build e2e

package main

import (
	"context"
	"fmt"
	"os"
	"runtime"
	"slices"
)

// stage has the role of testing.T in a test: it owns folders and clean-ups, and ends the demonstration after a failure.
type stage struct {
	folder   string
	cleanups []func()
	err      error
}

func (*stage) Helper() {}

func (s *stage) Cleanup(f func()) { s.cleanups = append(s.cleanups, f) }

// TempDir returns a new folder.
func (s *stage) TempDir() string {
	dir, err := os.MkdirTemp(s.folder, "")
	if err != nil {
		s.Fatalf("%v", err)
	}
	return dir
}

// Fatalf records the failure and ends the goroutine.
func (s *stage) Fatalf(format string, args ...any) {
	if s.err == nil {
		s.err = fmt.Errorf(format, args...)
	}
	runtime.Goexit()
}

// play runs a function in a goroutine and waits for its end.
func (s *stage) play(f func()) {
	ended := make(chan struct{})
	go func() { defer close(ended); f() }()
	<-ended
}

// perform runs a demonstration and then its clean-ups, the last one first. All run after failures.
func perform(ctx context.Context, demonstrate func(ctx context.Context, s *stage)) error {
	folder, err := os.MkdirTemp("", "rack")
	if err != nil {
		return err
	}
	s := &stage{folder: folder}
	s.play(func() { demonstrate(ctx, s) })
	if ctx.Err() != nil {
		s.err = context.Cause(ctx)
	}
	for _, f := range slices.Backward(s.cleanups) {
		s.play(f)
	}
	if err := os.RemoveAll(folder); err != nil && s.err == nil {
		s.err = err
	}
	return s.err
}
