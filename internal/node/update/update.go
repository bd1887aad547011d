package update

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"sigs.k8s.io/yaml"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/changes"
	"capstan.dev/capstan/internal/machineapi"
	"capstan.dev/capstan/internal/node/bootstrap"
	"capstan.dev/capstan/internal/node/cloudconfig"
	"capstan.dev/capstan/internal/node/initapi"
	"capstan.dev/capstan/internal/node/machine"
	"capstan.dev/capstan/internal/node/nodeconfig"
	"capstan.dev/capstan/internal/node/provision"
	"capstan.dev/capstan/internal/pki/certfiles"
)

const (
	// Dir contains the journal and the copies of files.
	Dir         = "/var/lib/capstan/update"
	journalPath = Dir + "/journal.json"
)

// Run carries out the update that capstand requests, or continues it. It does nothing without a request, and after the update
// has ended.
func Run(ctx context.Context, log *slog.Logger) error {
	if err := os.MkdirAll(Dir, 0o700); err != nil {
		return err
	}
	unlock, err := lock(filepath.Join(Dir, "lock"))
	if err != nil {
		return err
	}
	defer unlock()
	var request machineapi.UpdateRequest
	if err := atomicfile.ReadJSON(machine.UpdateRequestPath, &request); err != nil {
		return fmt.Errorf("capstand requests no update: %w", err)
	}
	u := &updater{
		log: log, previous: request.Previous, snapshot: copiesBeside(journalPath), dataPath: machine.UpdateDataPath,
	}
	return (&engine{path: journalPath, plan: u.plan(), log: log}).run(ctx, request.ID)
}

// lock makes this process the only engine of the machine.
func lock(path string) (unlock func(), err error) {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, errors.Join(fmt.Errorf("another process updates this machine: %w", err), file.Close())
	}
	return func() { _ = file.Close() }, nil
}

// updater contains the steps of an update.
type updater struct {
	log *slog.Logger
	// previous is the size of the machine before the update.
	previous machineapi.Size
	snapshot snapshot
	dataPath string
}

// plan returns the steps in their order.
func (u *updater) plan() plan {
	steps := []step{
		{"check", u.check},
		{"save", u.save},
		{"files", u.writeFiles},
		{"first commands", func(ctx context.Context) error {
			return u.commands(ctx, func(before, _ []cloudconfig.Command) []cloudconfig.Command { return before })
		}},
		{"configuration", u.configure},
	}
	for _, name := range provision.UpdateServices() {
		steps = append(steps, step{name, func(ctx context.Context) error { return u.restart(ctx, name) }})
	}
	return plan{
		steps: append(steps,
			step{"last commands", func(ctx context.Context) error {
				return u.commands(ctx, func(_, after []cloudconfig.Command) []cloudconfig.Command { return after })
			}},
			step{"verify", u.verify},
			// The last step: nothing that follows can fail, so a rollback does not need to undo it.
			step{"node", u.updateNode}),
		changes: "files",
		undo: []step{
			{"previous limits", func(ctx context.Context) error { u.awaitLimits(ctx, limitsTimeout); return nil }},
			{"restore files and services", u.restore},
			{"verify the previous version", u.verify},
		},
		forget:  u.forget,
		running: initRuns,
	}
}

// statusTimeout bounds the answer of PID 1, which answers at once unless the host is very busy.
const statusTimeout = 30 * time.Second

// initRuns returns an error if PID 1 does not answer.
func initRuns(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	_, err := initapi.NewClient(initapi.Socket).Status(ctx)
	return err
}

// data returns the cloud-config of the update, which is empty if only the version or the size changes. capstand writes it before the request,
// and erases it when it has given up the update.
func (u *updater) data() (*cloudconfig.Config, error) {
	data, err := os.ReadFile(u.dataPath)
	if err != nil {
		return nil, fmt.Errorf("reading the data of the update, which capstand erases when it gives the update up: %w", err)
	}
	if len(data) == 0 {
		return &cloudconfig.Config{}, nil
	}
	metadata, err := machine.Load(machine.MetadataPath)
	if err != nil {
		return nil, err
	}
	config, err := cloudconfig.Parse(data, metadata.TemplateVariables())
	clear(data)
	if err != nil {
		return nil, fmt.Errorf("the data of the update cannot be used: %w", err)
	}
	return config, repeatable(config)
}

// repeatable refuses data that would have another effect the second time.
func repeatable(c *cloudconfig.Config) error {
	for _, file := range c.Files {
		if file.Append {
			return fmt.Errorf("the data of the update appends to %s, which cannot be repeated", file.Path)
		}
	}
	if len(c.BootCommands) > 0 || len(c.Users) > 0 || c.HostnameToSet() != "" {
		return errors.New("the data of the update has boot commands, users or a host name: only files and commands can change in place")
	}
	return nil
}

// wanted returns the node's configuration after the update. Without data only the version changes, to that of the metadata.
func (u *updater) wanted(c *cloudconfig.Config) (*nodeconfig.NodeConfiguration, error) {
	metadata, err := machine.Load(machine.MetadataPath)
	if err != nil {
		return nil, err
	}
	for _, file := range c.Files {
		if file.Path != nodeconfig.Path {
			continue
		}
		config, err := nodeconfig.Parse(file.Content)
		if err == nil && config.KubernetesVersion != metadata.KubernetesVersion {
			err = fmt.Errorf("the data is for Kubernetes %s, the machine is to have %s", config.KubernetesVersion, metadata.KubernetesVersion)
		}
		return config, err
	}
	config, err := nodeconfig.Load(nodeconfig.Path)
	if err != nil {
		return nil, err
	}
	config.KubernetesVersion = metadata.KubernetesVersion
	return config, nil
}

// check finds the problems of the update before anything changes.
func (u *updater) check(ctx context.Context) error {
	data, err := u.data()
	if err != nil {
		return err
	}
	config, err := u.wanted(data)
	if err != nil {
		return err
	}
	have, err := nodeconfig.Load(nodeconfig.Path)
	if err != nil {
		return err
	}
	if err := errors.Join(provision.SameRole(have, config), provision.CheckNode(have, config)); err != nil {
		return err
	}
	target, err := provision.NewUpdate(config, u.log)
	if err != nil {
		return err
	}
	return target.CheckPrograms(ctx)
}

// save copies all files that the update can change.
func (u *updater) save(context.Context) error {
	data, err := u.data()
	if err != nil {
		return err
	}
	paths := provision.UpdatedPaths()
	for _, file := range data.Files {
		paths = append(paths, file.Path)
	}
	slices.Sort(paths)
	return u.snapshot.take(slices.Compact(paths))
}

// writeFiles writes the files of the data, and the node's configuration if the data has none.
func (u *updater) writeFiles(context.Context) error {
	data, err := u.data()
	if err != nil {
		return err
	}
	config, err := u.wanted(data)
	if err != nil {
		return err
	}
	own := false
	for _, file := range data.Files {
		own = own || file.Path == nodeconfig.Path
		if err := bootstrap.WriteFile(u.snapshot.root, file); err != nil {
			return fmt.Errorf("%s: %w", file.Path, err)
		}
	}
	if own {
		return nil
	}
	text, err := yaml.Marshal(config)
	if err != nil {
		return err
	}
	return certfiles.WriteFile(nodeconfig.Path, text)
}

// onTarget calls f with the provisioning of the configuration that the machine has now. Each step reads it again, because an
// earlier step, or a rollback, may have replaced it.
func (u *updater) onTarget(f func(*provision.Update) error) error {
	config, err := nodeconfig.Load(nodeconfig.Path)
	if err != nil {
		return err
	}
	target, err := provision.NewUpdate(config, u.log)
	if err != nil {
		return err
	}
	return f(target)
}

func (u *updater) configure(context.Context) error {
	return u.onTarget(func(target *provision.Update) error { return target.WriteFiles() })
}

func (u *updater) restart(ctx context.Context, service string) error {
	return u.onTarget(func(target *provision.Update) error { return target.UpdateService(ctx, service) })
}

func (u *updater) verify(ctx context.Context) error {
	return u.onTarget(func(target *provision.Update) error { return target.Verify(ctx) })
}

// updateNode changes the labels and taints of the Node.
func (u *updater) updateNode(ctx context.Context) error {
	data, err := u.snapshot.read(nodeconfig.Path)
	if err != nil {
		return err
	}
	before, err := nodeconfig.Parse(data)
	if err != nil {
		return err
	}
	return u.onTarget(func(target *provision.Update) error { return target.UpdateNode(ctx, before) })
}

// restore restores the files. The services start with those that it could restore, also after an error.
func (u *updater) restore(ctx context.Context) error {
	err := u.snapshot.restore()
	return errors.Join(err, u.onTarget(func(target *provision.Update) error { return target.ReloadAll(ctx) }))
}

// commands runs the commands that choose returns from those before and after nodeconfig.UpdateCommand. The data declares that they can be
// repeated. The shell reads them from a pipe, so they are neither arguments nor a file.
func (u *updater) commands(ctx context.Context, choose func(before, after []cloudconfig.Command) []cloudconfig.Command) error {
	data, err := u.data()
	if err != nil {
		return err
	}
	before, after := data.RunCommands, []cloudconfig.Command(nil)
	own := slices.IndexFunc(data.RunCommands, func(c cloudconfig.Command) bool {
		return c.Shell == nodeconfig.UpdateCommand || slices.Equal(c.Args, strings.Fields(nodeconfig.UpdateCommand))
	})
	if own >= 0 {
		before, after = data.RunCommands[:own], data.RunCommands[own+1:]
	}
	return runAll(ctx, choose(before, after), commandsTimeout)
}

// commandsTimeout bounds the commands of a step. Later, capstand would give up a machine without progress, which then could not go back.
const commandsTimeout = 25 * time.Minute

func runAll(ctx context.Context, commands []cloudconfig.Command, within time.Duration) error {
	ctx, cancel := context.WithTimeoutCause(ctx, within, fmt.Errorf("expected the commands to end within %s", within))
	defer cancel()
	for i, command := range commands {
		if err := shell(ctx, command.String()); err != nil {
			if ctx.Err() != nil {
				err = context.Cause(ctx)
			}
			return fmt.Errorf("command %d: %w; see /var/log/capstan/update.log", i, err)
		}
	}
	return nil
}

// killDelay is the time between SIGTERM and SIGKILL for the processes of a command.
const killDelay = 5 * time.Second

// shell runs a command, which fails with the first of its lines that fails. When ctx ends, all processes of the command end that have not
// left its process group.
func shell(ctx context.Context, script string) error {
	out, in, err := os.Pipe()
	if err != nil {
		return err
	}
	defer func() { _ = out.Close() }()
	go func() {
		_, _ = in.WriteString("exec 3<&-\n" + nodeconfig.EndOnFailure + "\n" + script + "\n")
		_ = in.Close()
	}()
	cmd := exec.CommandContext(ctx, "/bin/sh", "/dev/fd/3")
	cmd.Dir, cmd.Stdout, cmd.Stderr = "/", os.Stdout, os.Stderr
	cmd.ExtraFiles = []*os.File{out}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM) }
	cmd.WaitDelay = killDelay
	err = cmd.Run()
	if ctx.Err() != nil && cmd.Process != nil {
		endGroup(cmd.Process.Pid)
	}
	return err
}

// endGroup kills a process group that got SIGTERM, after the time for its end. The kernel has no event for the end of a group.
func endGroup(group int) {
	for end := time.Now().Add(killDelay); syscall.Kill(-group, 0) == nil; time.Sleep(50 * time.Millisecond) {
		if time.Now().After(end) {
			_ = syscall.Kill(-group, syscall.SIGKILL)
			return
		}
	}
}

// limitsTimeout bounds the wait for capstand in a rollback. A capstand that does not run must not prevent the rollback.
const limitsTimeout = time.Minute

// awaitLimits waits until capstand has restored the size of the machine.
func (u *updater) awaitLimits(ctx context.Context, timeout time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	for changed := changes.Of(ctx, machine.MetadataPath); ; {
		m, err := machine.Load(machine.MetadataPath)
		if err == nil && m.Size() == u.previous {
			return
		}
		select {
		case <-ctx.Done():
			u.log.Warn("capstand has not restored the size of the machine; the kubelet reports it after its next start", "want", u.previous, "found", m.Size(), "error", err)
			return
		case <-changed:
		}
	}
}

// forget removes the copies of an update that has ended. capstand erases its data, because it can replace them by those of the next update
// as soon as the result is visible.
func (u *updater) forget() error { return u.snapshot.remove() }
