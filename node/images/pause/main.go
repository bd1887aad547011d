// pause holds a pod's namespaces open. It does nothing until it is told to
// leave, except that as PID 1 of a shared pid namespace it must reap.
//
// Only syscall, os and os/signal are imported: every pod has one of these.
package main

import (
	"os"
	"os/signal"
	"syscall"
)

func main() {
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, syscall.SIGCHLD, syscall.SIGTERM, syscall.SIGINT)
	run(signals)
}

// run returns when it is asked to stop.
func run(signals <-chan os.Signal) {
	for s := range signals {
		if s != syscall.SIGCHLD {
			return
		}
		reap()
	}
}

// reap collects every child that has died: signals of one kind are merged while
// they wait, so one SIGCHLD may stand for many.
func reap() {
	for {
		pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil)
		if err == syscall.EINTR {
			continue
		}
		if pid <= 0 || err != nil {
			return
		}
	}
}
