// Package thread runs code that leaves its thread changed, such as in a namespace of its own.
//
// Layer: library.
package thread

import (
	"runtime"

	"golang.org/x/sys/unix"
)

// Throwaway runs f on a thread that ends with it, and returns when f has. Locking alone does not do that:
// the main thread of a process does not end when its goroutine does, it waits for ever as it is, keeps the
// namespace alive that f went to, and shows it as that of the whole process in /proc.
func Throwaway(f func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread()
		away(f)
	}()
	<-done
}

// away runs f here, where the thread is locked and ends with the caller, or elsewhere if this is the main
// thread, which is then given back.
func away(f func()) {
	if unix.Gettid() == unix.Getpid() {
		Throwaway(f) // on another one: this one is taken
		runtime.UnlockOSThread()
		return
	}
	f()
}
