// Package thread runs code that changes its operating system thread, for example its namespaces.
//
// Layer: library. Allowed imports: api.
package thread

import (
	"runtime"

	"golang.org/x/sys/unix"
)

// Throwaway runs f on a thread that ends afterwards, and returns when f returns. A locked goroutine alone is not sufficient: the
// main thread of a process does not end with its goroutine. It would keep the namespace of f, and /proc would show it as the
// namespace of the whole process.
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
