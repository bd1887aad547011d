// Package logging contains the flags of the logs of all programs, and sets the logs up. The logs are those of Cluster API and
// Kubernetes: text or JSON, with levels of verbosity. Code logs with klog, logr or log/slog; slog.LevelDebug is level 4.
//
// Layer: library. Allowed imports: api.
package logging

import (
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strconv"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	logsv1 "k8s.io/component-base/logs/api/v1"

	// The format json.
	_ "k8s.io/component-base/logs/json/register"
)

// MaxVerbosity is the highest level that a log of Kubernetes has.
const MaxVerbosity = 10

var formats = []string{logsv1.DefaultLogFormat, logsv1.JSONLogFormat}

// formatFlag is the name of the flag, also that of Kubernetes.
const formatFlag = "logging-format"

// Flags describe the logs of a process.
type Flags struct{ config *logsv1.LoggingConfiguration }

// New returns the flags with their defaults.
func New() *Flags {
	f := &Flags{config: logsv1.NewLoggingConfiguration()}
	f.config.FlushFrequency.Duration.Duration = time.Hour // Nothing is buffered without the flags of AddAll.
	return f
}

// Add adds the flags of every program.
func (f *Flags) Add(fs *pflag.FlagSet) {
	fs.StringVar(&f.config.Format, formatFlag, f.config.Format, "format of the logs: text or json")
	fs.VarP(logsv1.VerbosityLevelPflag(&f.config.Verbosity), "v", "v", fmt.Sprintf("verbosity of the logs, from 0 to %d", MaxVerbosity))
}

// AddAll adds all flags of Cluster API's managers (ALL-07).
func (f *Flags) AddAll(fs *pflag.FlagSet) {
	logsv1.SetRecommendedLoggingConfiguration(f.config)
	f.config.FlushFrequency.Duration.Duration = logsv1.LogFlushFreqDefault
	logsv1.AddFlags(f.config, fs)
}

// Check returns an error if a flag has an invalid value.
func (f *Flags) Check() error {
	if !slices.Contains(formats, f.config.Format) {
		return fmt.Errorf("--logging-format: expected text or json, found %q", f.config.Format)
	}
	if f.config.Verbosity > MaxVerbosity {
		return fmt.Errorf("--v: expected a number from 0 to %d, found %d", MaxVerbosity, f.config.Verbosity)
	}
	return nil
}

// Apply sets up the logs of the process, which go to w. It can be called once.
func (f *Flags) Apply(w io.Writer) (*slog.Logger, error) {
	if err := f.Check(); err != nil {
		return nil, err
	}
	if err := logsv1.ValidateAndApplyWithOptions(f.config, &logsv1.LoggingOptions{ErrorStream: w, InfoStream: w}, nil); err != nil {
		return nil, err
	}
	return slog.Default(), nil
}

// LastError logs the error with which a process ends, in the format of the command that failed. The logs need not be set up: an
// invalid command line fails before.
func LastError(c *cobra.Command, w io.Writer, message string, err error) {
	f := New()
	if flag := c.Flag(formatFlag); flag != nil {
		f.config.Format = flag.Value.String()
	}
	_, _ = f.Apply(w) // fails if the logs are set up already, or with an unknown format, for which the default format remains
	slog.Error(message, "error", err)
}

// Args returns the flags of a process with the same logs; none for the defaults.
func (f *Flags) Args() (args []string) {
	if f.config.Format != logsv1.DefaultLogFormat {
		args = append(args, "--logging-format="+f.config.Format)
	}
	if f.config.Verbosity != 0 {
		args = append(args, "--v="+strconv.Itoa(int(f.config.Verbosity)))
	}
	return args
}
