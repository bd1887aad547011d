// Package thread runs code that changes its operating system thread, for example its namespaces.
//
// Layer: library. Allowed imports: api.
package thread

import (
	"runtime"
	"sync"

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

// Kept is a thread for functions that change it. It stays for the next function.
type Kept struct{ functions chan func() }

// NewKept returns a thread that stays as long as the process.
func NewKept() Kept {
	k := Kept{make(chan func())}
	go Throwaway(func() {
		for f := range k.functions {
			f()
		}
	})
	return k
}

// Run runs f on the thread, and returns when f returns.
func (k Kept) Run(f func()) {
	done := make(chan struct{})
	k.functions <- func() {
		defer close(done)
		f()
	}
	<-done
}

// Reserve makes the process have n threads, which the runtime uses before it creates others. The runtime ends a process for which the kernel
// creates no thread.
func Reserve(n int) {
	var locked, ended sync.WaitGroup
	end := make(chan struct{})
	locked.Add(n)
	for range n {
		ended.Go(func() {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread() // The thread stays.
			locked.Done()
			<-end
		})
	}
	locked.Wait()
	close(end)
	ended.Wait()
}
