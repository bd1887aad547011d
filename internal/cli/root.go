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
	// exitFailed: it did not work; the message says why.
	exitFailed = 1
	// exitUsage: the command line is wrong.
	exitUsage = 2
	// exitTimeout: it is not done yet, and the time given is over.
	exitTimeout = 3
	// exitNotFound: what was named does not exist.
	exitNotFound = 4
	// exitUnfit: `capstan doctor` found something that must be mended.
	exitUnfit = 5
)

// coded is an error with an exit code of its own.
type coded struct {
	error
	code int
}

func (c coded) Unwrap() error { return c.error }

// app is what the commands share.
type app struct {
	out, errOut io.Writer
	// live: progress may rewrite lines.
	live   bool
	root   string
	assets string
	output string
	// kubeconfig of another management plane than that of this box.
	kubeconfig string
	// socket of a capstand that belongs to a management plane elsewhere.
	socket string
}

func (a *app) layout() embedded.Layout { return embedded.Layout{Root: a.root} }

// self is how to run this command again, for this installation.
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
	// The first signal ends what is being waited for, in order; the second one ends the command.
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

const longHelp = `Capstan makes plain Linux hosts into real Kubernetes clusters, through Cluster API.

  capstan quickstart          a management plane and a first cluster, in one go
  capstan up                  start the management plane of this box
  capstan create cluster a    make a cluster
  capstan get kubeconfig a    the kubeconfig of a cluster
  capstan down                remove everything again

Exit codes: 0 it worked · 1 it failed · 2 wrong usage · 3 not done in time · 4 not found ·
5 doctor found something that must be mended.`

func (a *app) command() *cobra.Command {
	c := group("capstan", "Kubernetes clusters on plain Linux hosts")
	c.Long, c.SilenceUsage, c.SilenceErrors = longHelp, true, true
	c.PersistentPreRunE = func(*cobra.Command, []string) error { return errors.Join(a.checkOutput(), a.completePaths()) }
	c.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
		return coded{fmt.Errorf("%w; see `%s --help`", err, c.CommandPath()), exitUsage}
	})
	c.PersistentFlags().StringVar(&a.root, "root", embedded.DefaultRoot, "folder of the installation's state; each is an installation of its own")
	c.PersistentFlags().StringVar(&a.assets, "assets", "", "folder with the binaries (default: that of this program)")
	c.PersistentFlags().StringVarP(&a.output, "output", "o", "", "json for scripts; text when empty")
	c.PersistentFlags().StringVar(&a.kubeconfig, "kubeconfig", "", "kubeconfig of the management plane (default: that of this box)")
	c.AddCommand(a.createCommand(), a.deleteCommand(), a.getCommand())
	c.AddCommand(a.upCommand(), a.downCommand(), a.planeCommand(), a.statusCommand(), a.backupCommand(), a.restoreCommand(), a.doctorCommand(), a.versionCommand(), a.logsCommand(), a.loadCommand(), a.shellCommand(), a.quickstartCommand(), a.hostCommand())
	return c
}

func (a *app) checkOutput() error {
	if a.output != "" && a.output != "json" {
		return coded{fmt.Errorf("wanted -o json or nothing, found -o %s", a.output), exitUsage}
	}
	return nil
}

// completePaths makes paths independent of where the command was called: what it starts goes on elsewhere.
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

// group is a command that only has others below it.
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
