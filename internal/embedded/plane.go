// Package embedded is the embedded management plane: an etcd, an API server, Cluster API and Capstan's own
// manager as processes of this box, supervised by one daemon, without anything else to install.
//
// `capstan up` decides (ports, hosts), writes that down, and starts the daemon, `capstan plane`.
// The daemon makes certificates, starts the components and applies what they need. Everything it
// does is done again at each start and changes nothing when it was done.
//
// Layer: tool.
package embedded

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"capstan.dev/capstan/internal/pki"
)

const (
	// renewalInterval is how often certificates are looked at. They live for months, and there is no
	// event for time.
	renewalInterval = 12 * time.Hour
	// logInterval is how often logs are looked at, and logLimit how many bytes one may have then.
	logInterval = 5 * time.Minute
	logLimit    = 32 << 20
)

// plane is the running daemon.
type plane struct {
	layout  Layout
	state   State
	owner   user
	spawner *spawner
	board   *board

	processes []*process // in the order of their start
}

// Run is the daemon: it returns when ctx ends and everything was stopped. When another one runs for the same root it
// returns at once; but a unit takes the plane over. Machines and load balancers are capstand's, and stay.
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
		return fmt.Errorf("wanted an installation in %s: %w; make one with `capstan up`", l.Root, err)
	}
	if supervisor.Unit != "" {
		if err := becomeBuild(state.Assets); err != nil {
			return err
		}
	}
	base, release, err := takePorts(ctx, state.PortBase, claimPorts, portFree)
	if err != nil {
		return err
	}
	defer release()
	if state.PortBase != base {
		state.PortBase = base
		if err := state.save(l); err != nil {
			return err
		}
	}
	p := &plane{layout: l, state: state, spawner: newSpawner()}
	p.board = newBoard(Status{
		PID: os.Getpid(), Root: l.Root, Assets: state.Assets, Build: buildOf(state), Version: Version,
		KubernetesVersion: state.KubernetesVersion, Hosts: state.Hosts, Unit: supervisor.Unit, Listen: state.Listen, CoreFeatureGates: state.CoreFeatureGates,
		Backup: state.Backup,
		Server: loopback("https", state.port(portAPIServer)),
	})
	server, err := p.board.serve(l.StatusSocket())
	if err != nil {
		return err
	}
	defer func() { _ = server.Close() }()
	unlock()
	if err := supervisor.notify(); err != nil {
		return err
	}

	if err := p.start(ctx); err != nil && ctx.Err() == nil {
		// Stay, so that the reason is seen; what runs goes on.
		fmt.Fprintln(os.Stderr, "error:", err)
		p.board.update(func(s *Status) { s.Error = err.Error() })
	}
	var helpers sync.WaitGroup
	helpers.Go(func() { p.backUp(ctx) })
	helpers.Go(func() { p.care(ctx) })
	p.keep(ctx)
	helpers.Wait()
	p.stop()
	return nil
}

// start brings everything up, in parallel where nothing depends on each other.
func (p *plane) start(ctx context.Context) (err error) {
	if p.owner, err = ensureUser(); err != nil {
		return err
	}
	var g errgroup.Group
	g.Go(func() error { return stage(p.layout, p.state) })
	g.Go(func() error { return ensurePKI(p.layout, p.state, p.owner, time.Now()) })
	if err := g.Wait(); err != nil {
		return err
	}
	database := p.add(etcdComponent(p.layout, p.state))
	api := p.add(apiServerComponent(p.layout, p.state))
	controllers := p.add(controllerManagerComponent(p.layout, p.state))
	core := p.add(coreManagerComponent(p.layout, p.state))
	ours := p.add(managerComponent(p.layout, p.state))
	memory, err := boxMemory()
	if err != nil {
		return err
	}
	var hosts []*process
	for _, h := range p.state.Hosts {
		if err := os.MkdirAll(p.layout.HostRoot(h), 0o711); err != nil {
			return err
		}
		hosts = append(hosts, p.add(capstandComponent(p.layout, p.state, h, p.owner, memory)))
	}

	p.run(append(hosts, database, api)...)
	install, err := newInstallation(p.layout, p.state) // reads while the servers start
	if err != nil {
		return err
	}
	if err := waitReady(ctx, database, api); err != nil {
		return err
	}
	if err := install.basics(ctx); err != nil {
		return err
	}
	p.board.update(func(s *Status) { s.Installed = true })
	p.run(controllers, core, ours)
	if err := install.inventory(ctx); err != nil {
		return err
	}
	if err := waitReady(ctx, append(hosts, controllers, core, ours)...); err != nil {
		return err
	}
	if err := install.hosts(ctx); err != nil {
		return err
	}
	p.board.update(func(s *Status) { s.Ready = true })
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

// keep keeps certificates valid and logs small until ctx ends.
func (p *plane) keep(ctx context.Context) {
	renewal, logs := time.NewTicker(pki.CheckEvery(renewalInterval)), time.NewTicker(logInterval)
	defer renewal.Stop()
	defer logs.Stop()
	for {
		var err error
		select {
		case <-ctx.Done():
			return
		case now := <-renewal.C:
			err = errors.Join(ensurePKI(p.layout, p.state, p.owner, now), p.showExpiring(now))
		case <-logs.C:
			err = trimLogs(p.layout.Logs(), logLimit)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, "error:", err)
		}
	}
}

// stop ends the components in the order in which they depend on each other: those that write first.
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

// staged are the programs that run as the system user, by their names in the installation.
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

// stage puts the programs where the system user can run them: a link costs nothing, a copy is made
// when the assets are on another file system.
func stage(l Layout, s State) error {
	if err := os.MkdirAll(l.Bin(), 0o711); err != nil {
		return err
	}
	for name, source := range staged(s) {
		if err := stageOne(source, filepath.Join(l.Bin(), name)); err != nil {
			return fmt.Errorf("wanted the program %s: %w; run `make build`, or point --assets at the folder that it filled", source, err)
		}
	}
	return nil
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
	if have, err := os.Stat(target); err == nil && (os.SameFile(have, wanted) || have.Size() == wanted.Size() && have.ModTime().Equal(wanted.ModTime())) {
		return nil
	}
	temporary := target + ".new"
	_ = os.Remove(temporary)
	if os.Link(source, temporary) != nil {
		if err := copyFile(source, temporary, wanted); err != nil {
			return err
		}
	}
	return os.Rename(temporary, target)
}

// buildOf tells builds apart, so that `capstan up` after `make build` runs what was built.
func buildOf(s State) string {
	var parts []string
	programs := staged(s)
	programs["capstand"] = Assets{s.Assets}.Capstand()
	programs["capstan"] = filepath.Join(s.Assets, "capstan")
	for name, path := range programs {
		if info, err := os.Stat(path); err == nil {
			parts = append(parts, fmt.Sprintf("%s:%d:%d", name, info.Size(), info.ModTime().UnixNano()))
		}
	}
	slices.Sort(parts)
	return hash(strings.Join(parts, "\n"))
}

// errRunning: another daemon has the root.
var errRunning = errors.New("a plane runs already")
