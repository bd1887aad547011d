// Package embedded runs the embedded management plane: etcd, an API server, Cluster API and Capstan's manager, as processes
// of this box under one daemon. It needs no other software.
//
// `capstan up` decides about ports and hosts, stores the decisions, and starts the daemon `capstan plane`. The daemon creates
// certificates, starts the components and applies the objects that they need. It repeats all steps at each start. A completed
// step changes nothing.
//
// Layer: tool. Allowed imports: api, library, contract, host, node.
package embedded

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/backoff"
	"capstan.dev/capstan/internal/pki"
	"capstan.dev/capstan/internal/version"
)

const (
	// renewalInterval is the interval between checks of certificates. They are valid for months.
	renewalInterval = 12 * time.Hour
	// logInterval is the interval between checks of the logs. logLimit is the maximum size of a log at that time, in bytes.
	logInterval = 5 * time.Minute
	logLimit    = 32 << 20
	// firstStartPause and lastStartPause bound the pauses before another attempt to start: no event reports the end of a cause such as a
	// full disk.
	firstStartPause = time.Second
	lastStartPause  = time.Minute
)

// plane is the running daemon.
type plane struct {
	layout  Layout
	state   State
	owner   user
	spawner *spawner
	board   *board
	logging []string // flags of Capstan's components

	start     func(context.Context) error // starts all components; can be repeated
	parts     *parts                      // nil before all of them can be made
	processes []*process                  // in the order of their start
}

// parts are the processes of a plane by their tasks.
type parts struct {
	database, api, controllers, core, ours *process
	hosts                                  []*process
}

// Run is the daemon. It returns when ctx ends, after it has stopped all components. If another daemon runs for the same root
// folder, it returns at once, except as a systemd unit, which takes over the plane. Machines and load balancers keep running.
func Run(ctx context.Context, l Layout, supervisor Supervisor) error {
	lock, unlock, err := supervisor.lock(ctx, l)
	if err != nil {
		return err
	}
	defer unlock()
	defer lock.Close()
	if err := endRestore(l); err != nil {
		return err
	}
	state, err := LoadState(l)
	if err != nil {
		return fmt.Errorf("expected an installation in %s: %w; create one with `capstan up`", l.Root, err)
	}
	if supervisor.Unit != "" {
		if err := becomeBuild(state.Assets); err != nil {
			return err
		}
	}
	if err := state.checkWriter(l); err != nil {
		return err
	}
	if err := state.begun(l); err != nil {
		slog.Warn("Cannot record the start of the plane", "error", err) // for example while the disk is full
	}
	release, err := ensurePorts(ctx, l, &state)
	if err != nil {
		return err
	}
	defer release()
	p := newPlane(l, state, supervisor)
	server, err := p.board.serve(l.StatusSocket())
	if err != nil {
		return err
	}
	defer func() { _ = server.Close() }()
	unlock()
	if err := supervisor.notify(); err != nil {
		return err
	}

	p.work(ctx)
	p.stop()
	return nil
}

// work starts the plane and maintains it until ctx ends. No maintenance waits for the start: a start waits without a limit for each
// component, and the log of a component that ends again and again grows.
func (p *plane) work(ctx context.Context) {
	var tasks sync.WaitGroup
	for _, task := range []func(context.Context){p.launch, p.renew, p.trim, p.backUp, p.care} {
		tasks.Go(func() { task(ctx) })
	}
	tasks.Wait()
}

// ensurePorts claims the ports of the plane until release is called. If others use them, it chooses new ports and records them.
func ensurePorts(ctx context.Context, l Layout, state *State) (release func(), err error) {
	base, release, err := takePorts(ctx, state.PortBase, claimPorts, componentPortFree)
	if err != nil || state.PortBase == base {
		return release, err
	}
	state.PortBase = base
	if err := state.save(l); err != nil {
		release()
		return nil, err
	}
	return release, nil
}

// newPlane returns a plane whose components do not run.
func newPlane(l Layout, state State, supervisor Supervisor) *plane {
	p := &plane{layout: l, state: state, spawner: newSpawner(), logging: supervisor.Logging}
	p.board = newBoard(Status{
		PID: os.Getpid(), Unit: supervisor.Unit, Root: l.Root, Assets: state.Assets, Build: buildOf(state), Version: version.Version,
		Settings: state.Settings, Server: loopback("https", state.port(portAPIServer)),
	})
	p.start = p.startComponents
	return p
}

// launch starts the plane. After an error, the status has the cause, components that run continue, and another attempt follows.
func (p *plane) launch(ctx context.Context) {
	for failures := 0; ; failures++ {
		err := p.start(ctx)
		switch {
		case ctx.Err() != nil:
			return
		case err == nil:
			p.board.update(func(s *Status) { s.Ready, s.Error = true, "" })
			return
		}
		pause := backoff.After(failures, firstStartPause, lastStartPause)
		slog.Error("The management plane does not start; trying again", "error", err, "pause", pause)
		p.board.update(func(s *Status) { s.Error = fmt.Sprintf("%v (next attempt in %s)", err, pause) })
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
		p.board.update(func(s *Status) { s.Error = fmt.Sprintf("%v (another attempt is in progress)", err) })
	}
}

// startComponents starts all components. Independent ones start in parallel. In a repetition, those that run continue.
func (p *plane) startComponents(ctx context.Context) error {
	if err := p.makeComponents(ctx); err != nil {
		return err
	}
	c := p.parts
	p.run(append(slices.Clone(c.hosts), c.database, c.api)...)
	install, err := newInstallation(p.layout, p.state) // It reads files while the servers start.
	if err != nil {
		return err
	}
	if err := waitReady(ctx, c.database, c.api); err != nil {
		return err
	}
	if err := install.basics(ctx); err != nil {
		return err
	}
	if err := recordData(p.layout); err != nil {
		slog.Warn("Cannot record that the plane has data", "error", err) // for example while the disk is full
	}
	p.board.update(func(s *Status) { s.Installed = true })
	p.run(c.controllers, c.core, c.ours)
	if err := install.inventory(ctx); err != nil {
		return err
	}
	if err := waitReady(ctx, append(slices.Clone(c.hosts), c.controllers, c.core, c.ours)...); err != nil {
		return err
	}
	if err := install.hooks(ctx); err != nil {
		return err
	}
	return install.hosts(ctx)
}

// makeComponents prepares the files of the components, and then makes all components, once.
func (p *plane) makeComponents(ctx context.Context) (err error) {
	if p.parts != nil {
		return nil
	}
	if err := checkData(p.layout); err != nil {
		return err
	}
	if p.owner, err = ensureUser(); err != nil {
		return err
	}
	if err := removeTemporary(p.layout); err != nil {
		return err
	}
	var g errgroup.Group
	g.Go(func() error { return stage(p.layout, p.state) })
	g.Go(func() error { return ensurePKI(p.layout, p.state, p.owner, time.Now()) })
	if err := g.Wait(); err != nil {
		return err
	}
	memory, err := boxMemory()
	if err != nil {
		return err
	}
	for _, h := range p.state.Hosts {
		if err := os.MkdirAll(p.layout.HostRoot(h), 0o711); err != nil {
			return err
		}
	}
	p.parts = &parts{
		database:    p.add(etcdComponent(p.layout, p.state)),
		api:         p.add(apiServerComponent(p.layout, p.state)),
		controllers: p.add(controllerManagerComponent(p.layout, p.state)),
		core:        p.add(coreManagerComponent(p.layout, p.state)),
		ours:        p.add(managerComponent(p.layout, p.state).with(p.logging)),
	}
	for i, h := range p.state.Hosts {
		daemon := capstandComponent(p.layout, p.state, h, p.owner, memory).with(p.logging)
		p.parts.hosts = append(p.parts.hosts, p.add(daemon.with(metricsArgs(h, p.state.hostMetrics(ctx, i, loopbackFree)))))
	}
	return nil
}

func (p *plane) add(c component) *process {
	process := newProcess(c, p.layout.Log(c.name), p.owner, p.spawner, p.board.component)
	p.processes = append(p.processes, process)
	p.board.component(process.status)
	return process
}

func (p *plane) run(processes ...*process) {
	for _, process := range processes {
		process.begin()
	}
}

func waitReady(ctx context.Context, processes ...*process) error {
	for _, p := range processes {
		if err := p.waitReady(ctx); err != nil {
			return err
		}
	}
	return nil
}

// made waits until the start has made the components. It makes their certificates before. The result is false if ctx ends earlier.
func (p *plane) made(ctx context.Context) bool {
	return p.board.await(ctx, func(s Status) bool { return len(s.Components) > 0 })
}

// renew renews certificates until ctx ends.
func (p *plane) renew(ctx context.Context) {
	if !p.made(ctx) {
		return
	}
	if err := p.showExpiring(time.Now()); err != nil { // The box may be off before the first renewal.
		slog.Error("Cannot read the expiry of certificates", "error", err)
	}
	maintain(ctx, pki.CheckEvery(renewalInterval), func(now time.Time) error {
		return errors.Join(ensurePKI(p.layout, p.state, p.owner, now), p.showExpiring(now))
	})
}

// trim limits the size of logs until ctx ends.
func (p *plane) trim(ctx context.Context) {
	maintain(ctx, logInterval, func(time.Time) error { return trimLogs(p.layout.Logs(), logLimit) })
}

// maintain repeats a task until ctx ends.
func maintain(ctx context.Context, interval time.Duration, task func(now time.Time) error) {
	ticker := time.NewTicker(min(interval/10, time.Minute))
	defer ticker.Stop()
	maintainAt(ctx, ticker.C, interval, task)
}

// maintainAt does the task at a tick if the interval has passed by the clock of the box since the last time. Timers stop while the box is
// paused, for example as a virtual machine, and certificates expire meanwhile. It also does the task if the clock was set back.
func maintainAt(ctx context.Context, ticks <-chan time.Time, interval time.Duration, task func(now time.Time) error) {
	last := time.Now().Round(0)
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-ticks:
			now = now.Round(0) // Without its monotonic reading, which stops like a timer.
			if passed := now.Sub(last); 0 <= passed && passed < interval {
				continue
			}
			last = now
			if err := task(now); err != nil {
				slog.Error("Cannot maintain the management plane", "error", err)
			}
		}
	}
}

// stop stops the components in the order of their dependencies: clients before the servers that they use.
func (p *plane) stop() {
	order := [][]string{{manager, coreManager, controllerManager}, {apiServer}, {etcd}, nil}
	left := slices.Clone(p.processes)
	for _, names := range order {
		var g errgroup.Group
		left = slices.DeleteFunc(left, func(process *process) bool {
			if names != nil && !slices.Contains(names, process.name) {
				return false
			}
			g.Go(func() error { process.Stop(); return nil })
			return true
		})
		_ = g.Wait()
	}
}

// staged maps the names in the installation to the programs that run as the system user.
func staged(s State) map[string]string {
	kube := filepath.Join(Assets{s.Assets}.Kubernetes(), s.KubernetesVersion)
	return map[string]string{
		"etcd":                    filepath.Join(kube, "etcd"),
		"kube-apiserver":          filepath.Join(kube, "kube-apiserver"),
		"kube-controller-manager": filepath.Join(kube, "kube-controller-manager"),
		"capi-core-manager":       Assets{s.Assets}.CoreManager(),
		"manager":                 Assets{s.Assets}.Manager(),
	}
}

// stage links the programs into a folder that the system user can enter. It copies them if the assets are on another file
// system.
func stage(l Layout, s State) error {
	if err := os.MkdirAll(l.Bin(), 0o711); err != nil {
		return err
	}
	if err := removeOtherBuild(l, s); err != nil {
		return err
	}
	for name, source := range staged(s) {
		if err := stageOne(source, filepath.Join(l.Bin(), name)); err != nil {
			return fmt.Errorf("expected the program %s: %w; %s", source, err, version.InstallPrograms)
		}
	}
	return nil
}

// removeOtherBuild removes the staged programs of another build, because programs of two builds can have the same size and time.
func removeOtherBuild(l Layout, s State) error {
	record, build := filepath.Join(l.Bin(), "build"), buildOf(s)
	if have, err := os.ReadFile(record); err == nil && string(have) == build {
		return nil
	}
	for name := range staged(s) {
		if err := atomicfile.Remove(filepath.Join(l.Bin(), name)); err != nil {
			return err
		}
	}
	return atomicfile.WriteFile(record, []byte(build), 0o600)
}

func stageOne(source, target string) error {
	source, err := filepath.EvalSymlinks(source)
	if err != nil {
		return err
	}
	wanted, err := os.Stat(source)
	if err != nil {
		return err
	}
	if have, err := os.Stat(target); err == nil && runnable(have) && (os.SameFile(have, wanted) || sameProgram(have, wanted)) {
		return nil
	}
	temporary := target + ".new"
	_ = os.Remove(temporary)
	if !runnable(wanted) || os.Link(source, temporary) != nil {
		if err := copyFile(source, temporary, wanted); err != nil {
			return err
		}
	}
	return os.Rename(temporary, target)
}

// runnable returns whether the system user can run a program. One that root has built with a strict umask is for root only.
func runnable(program os.FileInfo) bool { return program.Mode().Perm()&0o001 != 0 }

func sameProgram(have, wanted os.FileInfo) bool {
	return have.Size() == wanted.Size() && have.ModTime().Equal(wanted.ModTime())
}

// buildOf identifies a build, so that `capstan up` after `make build` or an upgrade starts the new programs. The archives of all releases
// give their files the same time, and programs of two releases can have the same size: only the version differs then.
func buildOf(s State) string {
	parts := []string{version.Version}
	programs := staged(s)
	programs["capstand"] = Assets{s.Assets}.Capstand()
	programs["capstan"] = filepath.Join(s.Assets, "capstan")
	for _, path := range programs {
		if info, err := os.Stat(path); err == nil {
			parts = append(parts, fmt.Sprintf("%s:%d:%d", path, info.Size(), info.ModTime().UnixNano()))
		}
	}
	slices.Sort(parts)
	return hash(strings.Join(parts, "\n"))
}

// errRunning: another daemon uses the root folder.
var errRunning = errors.New("a management plane already runs")
