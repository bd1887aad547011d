// Package cli is the `capstan` command.
//
// Layer: tool.
package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"capstan.dev/capstan/internal/embedded"
)

// Exit codes, for scripts. `capstan help` lists them.
const (
	exitOK = 0
	// exitFailed: the command failed. The message contains the cause.
	exitFailed = 1
	// exitUsage: the command line is invalid.
	exitUsage = 2
	// exitTimeout: the command did not complete within --timeout.
	exitTimeout = 3
	// exitNotFound: the named object does not exist.
	exitNotFound = 4
	// exitUnfit: `capstan doctor` found a problem that must be fixed.
	exitUnfit = 5
)

// coded is an error with its own exit code.
type coded struct {
	error
	code int
}

func (c coded) Unwrap() error { return c.error }

// app contains the options that all commands share.
type app struct {
	out, errOut io.Writer
	// live: the output is a terminal, so progress can rewrite lines.
	live   bool
	root   string
	assets string
	output string
	// kubeconfig of a management plane; empty for the plane of this box.
	kubeconfig string
	// socket of a capstand that belongs to a remote management plane.
	socket string
}

func (a *app) layout() embedded.Layout { return embedded.Layout{Root: a.root} }

// self returns the command line that runs this program for this installation.
func (a *app) self() string {
	self := os.Args[0]
	if a.root != embedded.DefaultRoot {
		self += " --root " + a.root
	}
	return self
}

func (a *app) json() bool { return a.output == "json" }

// Main runs the command and returns its exit code.
func Main() int {
	// The first signal ends the wait and the command in order. The second signal kills the process.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop)
	a := &app{out: os.Stdout, errOut: os.Stderr, live: term.IsTerminal(int(os.Stdout.Fd()))}
	command := a.command()
	if err := command.ExecuteContext(ctx); err != nil {
		fmt.Fprintln(a.errOut, "error:", err)
		return exitCode(err)
	}
	return exitOK
}

func exitCode(err error) int {
	var c coded
	switch {
	case errors.As(err, &c):
		return c.code
	case errors.Is(err, context.DeadlineExceeded):
		return exitTimeout
	}
	return exitFailed
}

const longHelp = `Capstan runs Kubernetes clusters on plain Linux hosts, with Cluster API.

  capstan quickstart          create a management plane and a first cluster
  capstan up                  start the management plane of this box
  capstan create cluster a    create a cluster
  capstan get kubeconfig a    print the kubeconfig of a cluster
  capstan down                remove the management plane and all clusters of this box

Exit codes: 0 success · 1 failure · 2 invalid usage · 3 timeout · 4 not found ·
5 doctor found a problem that must be fixed.`

func (a *app) command() *cobra.Command {
	c := group("capstan", "Kubernetes clusters on plain Linux hosts")
	c.Long, c.SilenceUsage, c.SilenceErrors = longHelp, true, true
	c.PersistentPreRunE = func(*cobra.Command, []string) error { return errors.Join(a.checkOutput(), a.completePaths()) }
	c.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
		return coded{fmt.Errorf("%w; see `%s --help`", err, c.CommandPath()), exitUsage}
	})
	c.PersistentFlags().StringVar(&a.root, "root", embedded.DefaultRoot, "folder with the state of the installation; each folder is a separate installation")
	c.PersistentFlags().StringVar(&a.assets, "assets", "", "folder with the binaries (default: the folder of this program)")
	c.PersistentFlags().StringVarP(&a.output, "output", "o", "", "output format: json, or empty for text")
	c.PersistentFlags().StringVar(&a.kubeconfig, "kubeconfig", "", "kubeconfig of the management plane (default: the plane of this box)")
	c.AddCommand(a.createCommand(), a.deleteCommand(), a.getCommand())
	c.AddCommand(a.upCommand(), a.downCommand(), a.planeCommand(), a.statusCommand(), a.backupCommand(), a.restoreCommand(), a.doctorCommand(), a.versionCommand(), a.logsCommand(), a.loadCommand(), a.shellCommand(), a.quickstartCommand(), a.hostCommand())
	return c
}

func (a *app) checkOutput() error {
	if a.output != "" && a.output != "json" {
		return coded{fmt.Errorf("wanted -o json or no -o, found -o %s", a.output), exitUsage}
	}
	return nil
}

// completePaths makes paths absolute, because the processes that a command starts run in another folder.
func (a *app) completePaths() error {
	for _, path := range []*string{&a.root, &a.assets, &a.socket} {
		if *path == "" && path != &a.root {
			continue
		}
		absolute, err := filepath.Abs(*path)
		if err != nil {
			return err
		}
		*path = absolute
	}
	return nil
}

// group is a command that consists of subcommands.
func group(use, short string, commands ...*cobra.Command) *cobra.Command {
	c := &cobra.Command{
		Use: use, Short: short, Args: cobra.ArbitraryArgs,
		RunE: func(c *cobra.Command, args []string) error {
			if len(args) == 0 {
				return c.Help()
			}
			err := fmt.Errorf("unknown command %q; see `%s --help`", args[0], c.CommandPath())
			if similar := c.SuggestionsFor(args[0]); len(similar) > 0 {
				err = fmt.Errorf("%w; similar: %v", err, similar)
			}
			return coded{err, exitUsage}
		},
	}
	c.AddCommand(commands...)
	return c
}
