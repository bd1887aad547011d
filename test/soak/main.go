//go:build e2e

// Command soak starts its own management plane. It creates, scales, rolls out and deletes clusters, machine pools and IP
// claims. Meanwhile it kills and stops processes, cuts machines off, and removes links and firewall rules. It checks
// invariants all the time and fails on the first violation. It needs root and the built binaries.
//
// A seed stands for one sequence of decisions: the operations, the faults and their times, and the numbers of the
// victims. The processes and machines of these numbers depend on the state of the run.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/cluster-api/util/kubeconfig"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"capstan.dev/capstan/internal/embedded"
	"capstan.dev/capstan/internal/host/network"
	"capstan.dev/capstan/test/e2e/harness"
)

// host is the only host of the plane.
const host = "local"

func main() {
	duration := flag.Duration("duration", 10*time.Minute, "duration in which new operations start")
	bound := flag.Duration("bound", 5*time.Minute, "time limit for the recovery after the faults of a step")
	seed := flag.Uint64("seed", rand.Uint64(), "seed of the decisions")
	logs := flag.String("logs", filepath.Join(os.TempDir(), "capstan-soak"), "folder for the logs of a failed run")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, *seed, *duration, *bound, *logs); err != nil {
		fmt.Fprintln(os.Stderr, "FAIL:", err)
		os.Exit(1)
	}
	fmt.Println("PASS")
}

func run(ctx context.Context, seed uint64, duration, bound time.Duration, logs string) error {
	fmt.Printf("seed %d; the same decisions again: go run -tags e2e ./test/soak -seed %d -duration %v\n", seed, seed, duration)
	plane, err := harness.Start()
	if plane == nil {
		return err
	}
	s := &soak{
		plane: plane, layout: embedded.Layout{Root: plane.Root}, bound: bound, schedule: newSchedule(seed), report: newReport(seed),
		machines: map[string]bool{}, networks: map[string]string{}, deaths: map[string][]time.Time{}, writers: map[string]*writer{},
	}
	if err == nil {
		err = s.soak(ctx, duration)
	}
	s.report.print(os.Stdout)
	if err != nil {
		err = fmt.Errorf("%w\nthe last faults:\n  %s\nlogs: %s", err, strings.Join(s.report.lastFaults(), "\n  "), s.keepLogs(logs, seed))
	}
	return errors.Join(err, s.cleanUp())
}

// soak is one run.
type soak struct {
	plane    *harness.Plane
	layout   embedded.Layout
	bound    time.Duration
	schedule *schedule
	report   *report
	hostID   string

	undoing sync.WaitGroup

	mu       sync.Mutex
	machines map[string]bool   // ids of all current and former machines
	networks map[string]string // cluster names of all current and former networks
	deaths   map[string][]time.Time
	writers  map[string]*writer // by cluster
	undone   []error
}

func (s *soak) hostRoot() string { return s.layout.HostRoot(host) }

func (s *soak) box() network.Box { return network.Box{Dir: network.DefaultRunDir} }

// soak runs steps until the time is over, removes all objects, and checks that no trace is left.
func (s *soak) soak(ctx context.Context, duration time.Duration) error {
	if err := s.prepare(ctx); err != nil {
		return err
	}
	ctx, fail := context.WithCancelCause(ctx)
	var watching sync.WaitGroup
	defer watching.Wait()
	defer fail(nil)
	watching.Go(func() { s.watch(ctx, fail) })
	for end := time.Now().Add(duration); time.Now().Before(end); {
		if err := s.step(ctx, s.schedule.next()); err != nil {
			return errors.Join(err, causeOf(ctx))
		}
	}
	return errors.Join(s.removeAll(ctx), causeOf(ctx))
}

func causeOf(ctx context.Context) error {
	if ctx.Err() == nil {
		return nil
	}
	return context.Cause(ctx)
}

// step runs an operation while faults are injected, and waits for the recovery.
func (s *soak) step(ctx context.Context, st step) error {
	s.say("step %d: %v", st.Number, st.Operation)
	if st.Operation.Kind == deleteCluster {
		s.forget(st.Operation.Cluster)
	}
	operated := make(chan error, 1)
	go func() {
		operated <- s.retry(ctx, st.Operation.String(), limited(s.act(st.Operation, st.Number)))
	}()
	for _, f := range st.Faults {
		pause(ctx, f.After)
		s.fault(ctx, f)
	}
	s.undoing.Wait()
	if err := errors.Join(append(s.takeUndone(), <-operated)...); err != nil {
		return fmt.Errorf("step %d: %w", st.Number, err)
	}
	s.report.operation(st.Operation)
	if err := s.rest(ctx); err != nil {
		return fmt.Errorf("step %d, %v: %w", st.Number, st.Operation, err)
	}
	return nil
}

// fault injects one fault. It counts a fault without a victim as such.
func (s *soak) fault(ctx context.Context, f fault) {
	name, err := s.inject(ctx, f)
	if err != nil {
		s.say("  %v: not injected: %v", f, err)
		s.report.skipped(f)
		return
	}
	s.say("  %v: %s", f, name)
	s.report.fault(f, name, time.Now())
}

// rest waits until the clusters have their desired state and no invariant is violated.
func (s *soak) rest(ctx context.Context) error {
	began := time.Now()
	err := s.retry(ctx, "the recovery of all clusters", limited(s.well))
	s.report.rested(time.Since(began))
	if err == nil {
		s.say("  recovered after %.1f s", time.Since(began).Seconds())
	}
	return err
}

func (s *soak) well(ctx context.Context) error {
	for _, c := range s.schedule.clusters {
		if err := s.settled(ctx, c); err != nil {
			return err
		}
	}
	found, err := s.look(ctx)
	if err != nil {
		return err
	}
	if violations := found.violations(); len(violations) > 0 {
		return errors.New(strings.Join(violations, "\n  "))
	}
	return s.readBack(ctx)
}

// readBack reads all values that the writers of all clusters have written.
func (s *soak) readBack(ctx context.Context) error {
	for _, c := range s.schedule.clusters {
		w, err := s.useCluster(ctx, c.Name)
		if err != nil {
			return err
		}
		lost, err := w.check(ctx)
		if err != nil {
			return fmt.Errorf("reading the values in cluster %s: %w", c.Name, err)
		}
		if len(lost) > 0 {
			return fmt.Errorf("cluster %s: %s", c.Name, strings.Join(lost, "\n  "))
		}
	}
	return nil
}

const watchEvery = 2 * time.Second

// watch checks the invariants that hold at all times, also during faults.
func (s *soak) watch(ctx context.Context, fail context.CancelCauseFunc) {
	for ctx.Err() == nil {
		var now snapshot
		err := limited(func(ctx context.Context) (err error) {
			now.Holders, err = s.holders(ctx)
			return err
		})(ctx)
		if err == nil {
			if found := now.duplicates(); len(found) > 0 {
				fail(errors.New(strings.Join(found, "\n")))
			}
			s.report.watched()
		}
		pause(ctx, watchEvery)
	}
}

// removeAll deletes all objects and waits until no trace is left.
func (s *soak) removeAll(ctx context.Context) error {
	s.say("the end: all objects are deleted")
	for _, c := range slices.Clone(s.schedule.clusters) {
		if err := s.remove(ctx, operation{Kind: deleteCluster, Cluster: c.Name}); err != nil {
			return err
		}
	}
	if n := len(s.schedule.claims); n > 0 {
		if err := s.remove(ctx, operation{Kind: deleteClaims, First: s.schedule.claims[0], Count: n}); err != nil {
			return err
		}
	}
	return s.rest(ctx)
}

func (s *soak) remove(ctx context.Context, op operation) error {
	s.forget(op.Cluster)
	s.schedule.apply(op)
	return s.retry(ctx, op.String(), limited(s.act(op, 0)))
}

// cleanUp takes the plane down. It returns an error if a trace of the plane is left on the host.
func (s *soak) cleanUp() error {
	for _, c := range s.schedule.clusters {
		s.forget(c.Name)
	}
	s.undoing.Wait()
	_, _ = s.cgroups() // Read the host's id before its file is removed.
	if err := s.plane.Down(); err != nil {
		return err
	}
	left, err := s.traces()
	if err != nil {
		return err
	}
	if len(left) > 0 {
		return fmt.Errorf("expected no trace on the host after `capstan down`, found: %v", left)
	}
	return nil
}

// up starts the plane again after its daemon was killed.
func (s *soak) up(ctx context.Context) error {
	_, err := s.plane.Capstan(ctx, "up")
	return err
}

// later reverts a fault after its time, or when the run ends before.
func (s *soak) later(after time.Duration, undo func(context.Context) error) {
	s.undoing.Go(func() {
		time.Sleep(after)
		if err := undo(context.Background()); err != nil {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.undone = append(s.undone, err)
		}
	})
}

func (s *soak) takeUndone() []error {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := s.undone
	s.undone = nil
	return out
}

// wants returns the desired state of a cluster. It is empty for a cluster that is being deleted.
func (s *soak) wants(cluster string) wantedCluster {
	for _, c := range s.schedule.clusters {
		if c.Name == cluster {
			return c
		}
	}
	return wantedCluster{}
}

// writerOf returns the writer of a cluster, or nil.
func (s *soak) writerOf(cluster string) *writer {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.writers[cluster]
}

// useCluster returns the writer of a cluster. The first call starts it.
func (s *soak) useCluster(ctx context.Context, cluster string) (*writer, error) {
	if w := s.writerOf(cluster); w != nil {
		return w, nil
	}
	secret, err := kubeconfig.FromSecret(ctx, s.plane.Client, client.ObjectKey{Namespace: namespace, Name: cluster})
	if err != nil {
		return nil, err
	}
	config, err := clientcmd.RESTConfigFromKubeConfig(secret)
	if err != nil {
		return nil, err
	}
	w, err := startWriter(context.WithoutCancel(ctx), config)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.writers[cluster] = w
	return w, nil
}

// forget stops the writer of a cluster before the cluster is deleted.
func (s *soak) forget(cluster string) {
	w := s.writerOf(cluster)
	if w == nil {
		return
	}
	w.end()
	s.report.written(w.count())
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.writers, cluster)
}

// seen stores the ids of a machine and of a network, if they are not empty.
func (s *soak) seen(machine, network, cluster string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if machine != "" {
		s.machines[machine] = true
	}
	if network != "" {
		s.networks[network] = cluster
	}
}

func (s *soak) seenMachines() map[string]bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := map[string]bool{}
	for id := range s.machines {
		out[id] = true
	}
	return out
}

func (s *soak) seenNetworks() map[string]string {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := map[string]string{}
	for id, cluster := range s.networks {
		out[id] = cluster
	}
	return out
}

// idIn returns the stored id that a name contains, or "".
func (s *soak) idIn(name string) string {
	for id := range s.seenMachines() {
		if strings.Contains(name, id) {
			return id
		}
	}
	for id := range s.seenNetworks() {
		if strings.Contains(name, id) {
			return id
		}
	}
	return ""
}

// alive reports whether the operations require a cluster.
func (s *soak) alive(cluster string) bool { return s.wants(cluster).Name != "" }

func (s *soak) noteDeath(machine string, at time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.deaths[machine] = append(s.deaths[machine], at)
}

func (s *soak) deathsOf(machine string) []time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.deaths[machine])
}

// keepLogs copies the logs of a failed run before they are removed. It returns their folder.
func (s *soak) keepLogs(parent string, seed uint64) string {
	dir := filepath.Join(parent, fmt.Sprintf("seed-%d", seed))
	script := `mkdir -p "$2" && cp -r "$1"/logs "$2"/ && cd "$1" && find hosts -name '*.log' -size -64M -exec cp --parents {} "$2"/ \;`
	if out, err := exec.Command("sh", "-c", script, "sh", s.layout.Root, dir).CombinedOutput(); err != nil {
		return fmt.Sprintf("%s (not all: %v: %s)", dir, err, out)
	}
	return dir
}

func (s *soak) say(format string, args ...any) {
	fmt.Printf("%s %s\n", time.Now().UTC().Format("15:04:05.000"), fmt.Sprintf(format, args...))
}
