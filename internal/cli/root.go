// Package cli is the `capstan` command.
//
// Layer: tool. Allowed imports: api, library, contract, host, node.
package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/term"
	"k8s.io/klog/v2"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/yaml"

	"capstan.dev/capstan/internal/logging"
	"capstan.dev/capstan/internal/manpages"
	"capstan.dev/capstan/internal/searchpath"
	"capstan.dev/capstan/internal/version"
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
	// exitUnfit: the box cannot run clusters: `capstan doctor` found a problem, or `capstan quickstart` too little memory.
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
	// progressFormat is the value of --progress.
	progressFormat string
	// start is the time at which the command began.
	start time.Time
	// program is the name under which this program was called: capstan, or kubectl capstan.
	program string
	// rootGiven: the command line contains --root.
	rootGiven bool
	// kubeconfig and context of the management cluster, from the command line.
	kubeconfig, context string
	// socket of a capstand that belongs to a remote management plane.
	socket string
	logs   *logging.Flags
}

// The values of --output.
const (
	outputJSON = "json"
	outputYAML = "yaml"
)

// structured reports whether programs read the output.
func (a *app) structured() bool { return a.output != "" }

// Main runs the command and returns its exit code.
func Main() int {
	searchpath.Complete()
	// The first signal ends the wait and the command in order. The second signal kills the process.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop)
	program, args := invocation(os.Args)
	a := &app{out: forTerminal(os.Stdout), errOut: forTerminal(os.Stderr), program: program, live: term.IsTerminal(int(os.Stdout.Fd()))}
	return a.run(ctx, args)
}

// run runs the command with its arguments, reports its error, and returns its exit code.
func (a *app) run(ctx context.Context, args []string) int {
	command := a.command()
	command.SetArgs(args)
	if failed, err := command.ExecuteContextC(ctx); err != nil {
		if code := exited(0); errors.As(err, &code) {
			return int(code)
		}
		if failed.Annotations[daemon] != "" {
			logging.LastError(failed, a.errOut, "capstan ends", err)
			return exitCode(err)
		}
		a.report(event{State: eventFailed, Message: err.Error()}, fmt.Sprintln("error:", err))
		return exitCode(err)
	}
	return exitOK
}

// pluginName is the name by which users call this program as a plugin of kubectl.
const pluginName = "kubectl capstan"

// invocation returns the name of the program for users, and its arguments. kubectl runs kubectl-capstan for
// `kubectl capstan`, and kubectl_complete-capstan to complete its arguments.
func invocation(args []string) (program string, rest []string) {
	switch strings.TrimSuffix(filepath.Base(args[0]), ".exe") {
	case "kubectl-capstan":
		return pluginName, args[1:]
	case "kubectl_complete-capstan":
		return pluginName, append([]string{cobra.ShellCompRequestCmd}, args[1:]...)
	}
	return args[0], args[1:]
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

// missingFile gives the error of a file that does not exist its exit code.
func missingFile(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return coded{err, exitNotFound}
	}
	return err
}

const longHelp = `Capstan runs Kubernetes clusters on plain Linux hosts, with Cluster API.

  capstan quickstart          create a management plane and a first cluster
  capstan up                  start the management plane of this box
  capstan create cluster a    create a cluster
  capstan get kubeconfig a    print the kubeconfig of a cluster
  capstan down                remove the management plane and all clusters of this box

Exit codes: 0 success · 1 failure · 2 invalid usage · 3 timeout · 4 not found ·
5 doctor found a problem that must be fixed, or quickstart too little memory.`

func (a *app) command() *cobra.Command {
	c := group("capstan", "Kubernetes clusters on plain Linux hosts")
	a.start = time.Now()
	c.Long, c.SilenceUsage, c.SilenceErrors = longHelp, true, true
	c.Version = version.Version
	c.SetVersionTemplate("capstan {{.Version}}\n")
	c.Flags().Bool("version", false, "print the version of Capstan")
	if a.program == pluginName {
		c.Annotations = map[string]string{cobra.CommandDisplayNameAnnotation: pluginName}
	}
	c.PersistentPreRunE = func(c *cobra.Command, _ []string) error {
		a.rootGiven = c.Flags().Changed("root")
		return errors.Join(checkFlags(c), a.checkOutput(), a.setUpLogs(c), withoutLinks(&a.root), absolute(&a.assets), absolute(&a.socket))
	}
	c.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
		return coded{fmt.Errorf("%w; see `%s --help`", err, c.CommandPath()), exitUsage}
	})
	a.boxFlags(c.PersistentFlags())
	c.PersistentFlags().StringVarP(&a.output, "output", "o", "", "output format: json, yaml, or empty for text")
	c.PersistentFlags().StringVar(&a.progressFormat, "progress", "auto", "progress of commands that wait: auto, plain, json (standard error has one event per line, the error included) or none")
	c.PersistentFlags().StringVar(&a.kubeconfig, "kubeconfig", "", "kubeconfig of the management cluster (default: $KUBECONFIG, else the plane of this box, else ~/.kube/config)")
	c.PersistentFlags().StringVar(&a.context, "context", "", "context of the kubeconfig (default: the current one)")
	a.logs = logging.New()
	a.logs.Add(c.PersistentFlags())
	c.AddCommand(a.createCommand(), a.scaleCommand(), a.upgradeCommand(), a.deleteCommand(), a.getCommand(), a.describeCommand(), a.topCommand(), a.statusCommand(), a.dashboardCommand(),
		a.supportBundleCommand(), a.logsCommand(), a.shellCommand(), a.loadCommand())
	c.AddCommand(a.boxCommands()...)
	c.AddCommand(a.hostCommand(), a.versionCommand(), manpages.Command("1"))
	a.completeFlags(c)
	strictDefaults(c)
	nameArguments(c)
	return c
}

// strictDefaults adds the commands help and completion of cobra, which would succeed for the name of an unknown command or shell.
func strictDefaults(c *cobra.Command) {
	c.InitDefaultHelpCmd()
	c.InitDefaultCompletionCmd()
	for _, sub := range c.Commands() {
		switch sub.Name() {
		case "help":
			sub.Run, sub.RunE = nil, help
		case "completion":
			sub.Args, sub.RunE = cobra.ArbitraryArgs, runGroup
		}
	}
}

// help shows the help of the command that the arguments name.
func help(c *cobra.Command, args []string) error {
	about, rest, err := c.Root().Find(args)
	if err != nil || len(rest) > 0 {
		return errors.Join(err, unknownCommand(about, rest[0]))
	}
	return about.Help()
}

// setUpLogs sets up the logs of libraries. Without a flag for them, only the daemon writes them: elsewhere client-go's warnings
// would mix with the progress, and its errors are returned.
func (a *app) setUpLogs(c *cobra.Command) error {
	if c.Annotations[daemon] == "" && !c.Flags().Changed("logging-format") && !c.Flags().Changed("v") {
		klog.SetSlogLogger(slog.New(slog.DiscardHandler))
	} else if _, err := a.logs.Apply(a.errOut); err != nil {
		return coded{err, exitUsage}
	}
	// Without a logger, controller-runtime prints a stack at a warning of the API server, 30 seconds after the start of the process.
	ctrllog.SetLogger(klog.Background())
	return nil
}

// daemon is the annotation of a command that writes logs.
const daemon = "daemon"

// checkFlags checks the values of flags, and which must or must not be set together. cobra would check that later, and with the exit
// code of a failure.
func checkFlags(c *cobra.Command) error {
	err := errors.Join(c.ValidateRequiredFlags(), c.ValidateFlagGroups())
	c.Flags().Visit(func(f *pflag.Flag) { err = errors.Join(err, checkValue(f)) })
	if err != nil {
		return coded{fmt.Errorf("%w; see `%s --help`", err, c.CommandPath()), exitUsage}
	}
	return nil
}

// checkValue refuses values that no flag has: negative numbers and times, and the empty text of an unset variable of the shell if
// the flag is required or has a default.
func checkValue(f *pflag.Flag) error {
	_, required := f.Annotations[cobra.BashCompOneRequiredFlag]
	switch value := f.Value.String(); {
	case value == "" && (required || f.DefValue != ""):
		return fmt.Errorf("expected a value for --%s, found an empty one", f.Name)
	case strings.HasPrefix(value, "-") && slices.Contains([]string{"int", "int32", "duration"}, f.Value.Type()):
		return fmt.Errorf("expected at least 0 for --%s, found %s", f.Name, value)
	}
	return nil
}

func (a *app) checkOutput() error {
	if !slices.Contains([]string{"", outputJSON, outputYAML}, a.output) {
		return coded{fmt.Errorf("expected -o json, -o yaml or no -o, found -o %s", a.output), exitUsage}
	}
	if !slices.Contains(progressFormats, a.progressFormat) {
		return coded{fmt.Errorf("expected --progress auto, plain, json or none, found --progress %s", a.progressFormat), exitUsage}
	}
	return nil
}

// group is a command that consists of subcommands.
func group(use, short string, commands ...*cobra.Command) *cobra.Command {
	c := &cobra.Command{Use: use, Short: short, Args: cobra.ArbitraryArgs, RunE: runGroup}
	c.AddCommand(commands...)
	return c
}

// runGroup runs a group without a subcommand that exists.
func runGroup(c *cobra.Command, args []string) error {
	if len(args) == 0 {
		return c.Help()
	}
	return unknownCommand(c, args[0])
}

// unknownCommand is the error for a subcommand that does not exist.
func unknownCommand(c *cobra.Command, name string) error {
	err := fmt.Errorf("unknown command %q; see `%s --help`", name, c.CommandPath())
	if similar := c.SuggestionsFor(name); len(similar) > 0 {
		err = fmt.Errorf("%w; similar: %v", err, similar)
	}
	return coded{err, exitUsage}
}

func (a *app) versionCommand() *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "Show the version of Capstan, and the Kubernetes versions on this box", Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			kubernetes, err := a.localVersions()
			if err != nil {
				return err
			}
			if a.structured() {
				return a.print(map[string]any{"capstan": version.Version, "kubernetes": kubernetes})
			}
			fmt.Fprintf(a.out, "capstan %s\n", version.Version)
			if kubernetes != nil {
				fmt.Fprintf(a.out, "Kubernetes %v\n", kubernetes)
			}
			return nil
		},
	}
}

// print writes a document in the format of --output.
func (a *app) print(v any) error {
	data, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return err
	}
	data = append(data, '\n')
	if a.output == outputYAML {
		if data, err = yaml.JSONToYAML(data); err != nil {
			return err
		}
	}
	_, err = a.out.Write(data)
	return err
}

// nameArguments makes commands refuse a wrong number of arguments, and empty ones, with their usage, which names the arguments, and with
// the exit code of an invalid command line.
func nameArguments(c *cobra.Command) {
	if check := c.Args; check != nil {
		c.Args = func(c *cobra.Command, args []string) error {
			found, err := fmt.Sprintf("%d arguments", len(args)), check(c, args)
			if errors.As(err, &coded{}) {
				return err
			}
			if err == nil {
				if !slices.Contains(ownArguments(c, args), "") {
					return nil
				}
				found = "an empty argument"
			}
			_, expected, _ := strings.Cut(c.Use, " ")
			return coded{fmt.Errorf("expected `%s`, found %s; see `%s --help`",
				strings.TrimSpace(c.CommandPath()+" "+expected), found, c.CommandPath()), exitUsage}
		}
	}
	for _, sub := range c.Commands() {
		nameArguments(sub)
	}
}

// ownArguments are the arguments without those after --, which are of a command in a machine and can be empty.
func ownArguments(c *cobra.Command, args []string) []string {
	if n := c.ArgsLenAtDash(); n >= 0 {
		return args[:n]
	}
	return args
}

func withTimeout(ctx context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	if d <= 0 {
		return context.WithCancel(ctx)
	}
	return context.WithTimeoutCause(ctx, d, fmt.Errorf("not complete after %s: %w", d, context.DeadlineExceeded))
}
