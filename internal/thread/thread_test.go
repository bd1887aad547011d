package thread

import (
	"os"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// Go gives the main thread to the main goroutine if an init function locks it.
func init() { runtime.LockOSThread() }

// fromMain is the thread that away chose when it was called on the main one.
var fromMain int

func TestMain(m *testing.M) {
	if unix.Gettid() != unix.Getpid() {
		panic("TestMain is not on the main thread")
	}
	away(func() { fromMain = unix.Gettid() })
	os.Exit(m.Run())
}

func TestNeverTheMainThread(t *testing.T) {
	if fromMain == 0 || fromMain == unix.Getpid() {
		t.Errorf("ran on thread %d of process %d", fromMain, unix.Getpid())
	}
}

func TestThreadEnds(t *testing.T) {
	for range 50 {
		Throwaway(func() {
			if err := unix.Unshare(unix.CLONE_NEWUTS); err != nil {
				t.Error(err)
			}
		})
	}
	want := uts(t)
	for range 50 { // a thread that was given back would be met again here
		done := make(chan struct{})
		go func() {
			defer close(done)
			if got := uts(t); got != want {
				t.Errorf("a thread came back in another namespace: %s and not %s", got, want)
			}
		}()
		<-done
	}
}

func uts(t *testing.T) string {
	link, err := os.Readlink("/proc/thread-self/ns/uts")
	if err != nil {
		t.Error(err)
	}
	return link
}

func TestKeptThread(t *testing.T) {
	kept := NewKept()
	var before, after int
	kept.Run(func() { before = unix.Gettid() })
	Throwaway(func() { kept.Run(func() { after = unix.Gettid() }) })
	if before != after || before == unix.Getpid() {
		t.Errorf("ran on the threads %d and %d of process %d", before, after, unix.Getpid())
	}
}

func TestReserve(t *testing.T) {
	const n = 40
	Reserve(n)
	if threads, err := os.ReadDir("/proc/self/task"); err != nil || len(threads) < n {
		t.Errorf("%d threads, want at least %d: %v", len(threads), n, err)
	}
}
