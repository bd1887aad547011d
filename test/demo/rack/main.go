//go:build e2e

// Command rack shows the loss of a host: it starts three hosts on this box, creates a cluster with three control plane machines
// and three workers on them, and cuts off the host with the cluster's endpoint while a client writes. It prints where the
// machines are, how long no write succeeded, and how many writes failed. It needs root and the built binaries.
//
// Everything runs in network, mount and process namespaces of its own, so other clusters on this box do not notice it.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
)

// inside is the argument of the process in the namespaces.
const inside = "inside"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	err := enter(ctx)
	if len(os.Args) == 2 && os.Args[1] == inside {
		err = show(endOfInput(ctx))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "demo-rack:", err)
		os.Exit(1)
	}
}

// namespaces prepares the namespaces, and runs the arguments as a child: the shell, as their PID 1, reaps processes.
const namespaces = `mount --make-rprivate /
mount -t tmpfs -o mode=755 tmpfs /run
ip link set lo up
"$@"
exit $?`

// enter runs this program in namespaces of its own. The end of its standard input, when ctx or this process ends, makes it clean up.
func enter(ctx context.Context) error {
	if len(os.Args) > 1 {
		if os.Args[1] == inside {
			return nil
		}
		return fmt.Errorf("expected no arguments, found %q", os.Args[1:])
	}
	if os.Geteuid() != 0 {
		return errors.New("expected to run as root, because hosts create networks and containers: use sudo")
	}
	program, err := os.Executable()
	if err != nil {
		return err
	}
	cmd := exec.Command("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--",
		"/bin/sh", "-euc", namespaces, "sh", program, inside)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl-C must not reach the hosts.
	input, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	context.AfterFunc(ctx, func() { _ = input.Close() })
	if err := cmd.Run(); err != nil {
		os.Exit(1) // The process in the namespaces has printed the cause.
	}
	return nil
}

// endOfInput returns a context that ends with the standard input.
func endOfInput(ctx context.Context) context.Context {
	ctx, cancel := context.WithCancelCause(ctx)
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel(errors.New("interrupted"))
	}()
	return ctx
}
