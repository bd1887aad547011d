// Package bootstrap applies the bootstrap data of a machine, once (IM-08).
//
// Each step is recorded on the machine's disk. A machine that stops before the end continues at the first missing step
// when it gets its data again. Commands that succeeded are not repeated. Writing a file twice does no harm. The record
// contains the names of steps and no content of the data.
//
// Layer: node. Allowed imports: api, library, contract.
package bootstrap

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/node/cloudconfig"
	"capstan.dev/capstan/internal/node/initapi"
	"capstan.dev/capstan/internal/node/machine"
	"capstan.dev/capstan/internal/node/nodeconfig"
	"capstan.dev/capstan/internal/node/process"
)

// RecordPath is on the machine's disk.
const RecordPath = "/var/lib/capstan/bootstrap.json"

// Runner applies bootstrap data. All paths are fields, so that tests can set them.
type Runner struct {
	Starter  process.Starter
	Log      *slog.Logger
	Metadata machine.Metadata
	// Root is the prefix of the paths of files; empty on a machine.
	Root       string
	DataPath   string
	RecordPath string
	Sentinel   string
	LogPath    string
	// SetHostname sets the host name of the running machine.
	SetHostname func(string) error

	record record
}

// record is the content of RecordPath.
type record struct {
	// Machine is the id of the machine whose data was applied.
	Machine string `json:"machine"`
	// Done are the finished steps.
	Done []string `json:"done"`
	// Appended is the length of a file before the step that appends to it, by step.
	Appended map[string]int64 `json:"appended,omitempty"`
	// Accounts are those that the bootstrap has begun to make. Others belong to the image.
	Accounts []string `json:"accounts,omitempty"`
	// Sentinel is true if the sentinel existed after a step. The file itself does not outlive PID 1.
	Sentinel bool              `json:"sentinel,omitempty"`
	Result   initapi.Bootstrap `json:"result"`
	Message  string            `json:"message,omitempty"`
}

// New returns the Runner of a machine.
func New(starter process.Starter, log *slog.Logger, metadata machine.Metadata, setHostname func(string) error) *Runner {
	return &Runner{
		Starter: starter, Log: log, Metadata: metadata, SetHostname: setHostname,
		DataPath: machine.BootstrapDataPath, RecordPath: RecordPath, Sentinel: nodeconfig.SentinelPath,
		LogPath: filepath.Join(machine.LogDir, "bootstrap.log"),
	}
}

// Run waits for the data, applies it and reports each change. It returns when the bootstrap has succeeded or failed, or
// when ctx ends. It erases data unread if the machine was bootstrapped before.
func (r *Runner) Run(ctx context.Context, report func(initapi.Bootstrap, string)) {
	if err := r.load(); err != nil {
		report(initapi.Failed, err.Error())
		return
	}
	if r.record.Result == initapi.Succeeded {
		if err := Erase(r.DataPath); err != nil {
			r.Log.Error("cannot erase the bootstrap data", "error", err)
		}
		report(initapi.Succeeded, "")
		return
	}
	// A failed machine reports the failure until it gets its data again.
	if _, err := os.Stat(r.DataPath); err != nil && r.record.Result == initapi.Failed {
		report(initapi.Failed, r.record.Message)
	} else {
		report(initapi.Waiting, "")
	}
	if err := waitForFile(ctx, r.DataPath); err != nil {
		if ctx.Err() == nil {
			report(initapi.Failed, err.Error())
		}
		return
	}
	report(initapi.Started, "")
	err := r.apply(ctx)
	if ctx.Err() != nil {
		return
	}
	r.finish(err, report)
}

// finish erases the data, records the result and reports it, in this order.
func (r *Runner) finish(err error, report func(initapi.Bootstrap, string)) {
	err = errors.Join(err, Erase(r.DataPath))
	r.record.Result, r.record.Message = initapi.Succeeded, ""
	if err != nil {
		r.record.Result, r.record.Message = initapi.Failed, err.Error()
	}
	if err := r.save(); err != nil {
		r.Log.Error("cannot record the bootstrap", "error", err)
	}
	report(r.record.Result, r.record.Message)
}

// apply does all steps that are not in the record.
func (r *Runner) apply(ctx context.Context) error {
	if err := os.MkdirAll(filepath.Dir(r.LogPath), 0o750); err != nil {
		return err
	}
	data, err := os.ReadFile(r.DataPath)
	if err != nil {
		return fmt.Errorf("reading the bootstrap data: %w", err)
	}
	config, err := cloudconfig.Parse(data, r.Metadata.TemplateVariables())
	clear(data)
	if err != nil {
		return fmt.Errorf("the bootstrap data cannot be used, nothing was done: %w", err)
	}
	r.record.Result, r.record.Message = initapi.Started, ""
	if err := r.save(); err != nil {
		return err
	}
	did, err := r.doSteps(ctx, r.steps(config))
	if err != nil {
		return err
	}
	return r.awaitSentinel(ctx, did)
}

// doSteps does the steps that are not in the record, and reports whether there were any.
func (r *Runner) doSteps(ctx context.Context, steps []step) (did bool, err error) {
	missing := slices.DeleteFunc(slices.Clone(steps), func(s step) bool { return slices.Contains(r.record.Done, s.name) })
	for left := missing; len(left) > 0; {
		n := together(left)
		if err := r.doTogether(ctx, left[:n]); err != nil {
			return true, err
		}
		left = left[n:]
	}
	return len(missing) > 0, nil
}

// mostTogether bounds the files that are open at the same time.
const mostTogether = 64

// together is the number of steps at the begin of a list that need one record: files that depend on none of those before them.
func together(steps []step) int {
	n := 1
	for steps[0].file != nil && n < min(len(steps), mostTogether) && steps[n].file != nil && independent(steps[n].file) {
		n++
	}
	return n
}

// independent reports whether no file before this one can matter to it. An owner's name depends on /etc/passwd and /etc/group.
func independent(f *cloudconfig.File) bool {
	return !f.Append && slices.Contains([]string{"", "root", "root:root"}, f.Owner)
}

// doTogether does and records steps that together has selected.
func (r *Runner) doTogether(ctx context.Context, steps []step) error {
	if steps[0].file != nil {
		return r.writeFiles(steps)
	}
	r.announce(steps[0])
	if err := steps[0].do(ctx); err != nil {
		return fmt.Errorf("%s: %w", steps[0].name, err)
	}
	return r.done(steps[0].name)
}

// announce only writes a log entry, because each report wakes all watchers of the machine.
func (r *Runner) announce(s step) { r.Log.Info("bootstrap", "step", s.name) }

// awaitSentinel waits for the sentinel and records it before the data is erased. If this PID 1 started nothing that
// could write the sentinel, and it was not seen before, it will never exist.
func (r *Runner) awaitSentinel(ctx context.Context, did bool) error {
	switch {
	case r.record.Sentinel:
		return nil
	case !did && !r.sentinelThere():
		return fmt.Errorf("all steps are done, but the machine restarted before %s existed, and the process that would have written it has ended: "+
			"delete the machine, and write the file in the last command of runcmd", r.Sentinel)
	}
	r.Log.Info("bootstrap", "step", "waiting for "+r.Sentinel)
	if err := waitForFile(ctx, r.Sentinel); err != nil {
		return err
	}
	r.record.Sentinel = true
	return r.save()
}

func (r *Runner) sentinelThere() bool {
	_, err := os.Stat(r.Sentinel)
	return err == nil
}

type step struct {
	name string
	// do does the step, unless it writes a file.
	do   func(context.Context) error
	file *cloudconfig.File
}

// steps returns the steps in cloud-init's order: bootcmd, write_files, hostname, users, files with defer, runcmd's
// script. Files with defer precede runcmd, because its scripts use them.
func (r *Runner) steps(c *cloudconfig.Config) []step {
	var steps, deferred []step
	if len(c.BootCommands) > 0 {
		steps = append(steps, r.script("bootcmd", c.BootCommands))
	}
	for i, file := range c.Files {
		s := step{name: fmt.Sprintf("write_files[%d] %s", i, file.Path), file: &c.Files[i]}
		if file.Defer {
			deferred = append(deferred, s)
		} else {
			steps = append(steps, s)
		}
	}
	if hostname := c.HostnameToSet(); hostname != "" {
		steps = append(steps, step{name: "hostname", do: func(context.Context) error { return r.SetHostname(hostname) }})
	}
	for _, user := range c.Users {
		steps = append(steps, step{name: "users " + user.Name, do: func(ctx context.Context) error { return r.makeUser(ctx, user) }})
	}
	steps = append(steps, deferred...)
	if len(c.RunCommands) > 0 {
		steps = append(steps, r.script("runcmd", c.RunCommands))
	}
	return steps
}

// load reads the record. An unreadable record counts as an empty one, so all steps are done again. This happens only
// before the bootstrap has ended, because capstand passes the data only until then. The alternative is a machine that
// never starts.
func (r *Runner) load() error {
	r.record = record{}
	err := atomicfile.ReadJSON(r.RecordPath, &r.record)
	switch unreadable := (*fs.PathError)(nil); {
	case errors.Is(err, fs.ErrNotExist):
	case errors.As(err, &unreadable):
		return err
	case err != nil:
		r.Log.Error("cannot use the record of the bootstrap: all steps are done again", "error", err)
		r.record = record{}
	}
	if r.record.Machine != r.Metadata.ID {
		r.record = record{Machine: r.Metadata.ID}
	}
	if r.record.Appended == nil {
		r.record.Appended = map[string]int64{}
	}
	return nil
}

func (r *Runner) done(steps ...string) error {
	r.record.Done = append(r.record.Done, steps...)
	r.record.Sentinel = r.record.Sentinel || r.sentinelThere()
	return r.save()
}

func (r *Runner) save() error {
	if err := os.MkdirAll(filepath.Dir(r.RecordPath), 0o755); err != nil {
		return err
	}
	return atomicfile.WriteJSON(r.RecordPath, r.record, 0o600)
}
