//go:build !windows

package cli

import (
	"os"
	"os/signal"
	"syscall"
)

// windowChanges reports changes of the size of the terminal.
func windowChanges() <-chan os.Signal {
	changed := make(chan os.Signal, 1)
	signal.Notify(changed, syscall.SIGWINCH)
	return changed
}
