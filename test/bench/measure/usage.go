package measure

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"capstan.dev/capstan/test/plane"
)

// Cost is the use of the manager of a plane and of the writers of its API server since their start.
type Cost struct {
	// Writes to the objects of Cluster API and Capstan, and those of them to the objects of Capstan's infrastructure provider.
	Writes, Ours int64
	// CPU is the processor time of the manager, RSS its memory in bytes.
	CPU time.Duration
	RSS int64
}

// Since returns the use since an earlier measurement. The memory stays that of now.
func (c Cost) Since(before Cost) Cost {
	return Cost{Writes: c.Writes - before.Writes, Ours: c.Ours - before.Ours, CPU: c.CPU - before.CPU, RSS: c.RSS}
}

// Meter measures one plane.
type Meter struct {
	// API is a client of the plane's API server. It reads /metrics.
	API rest.Interface
	// Root is the root folder of the plane. The manager has it as an argument.
	Root string
}

// NewMeter returns the meter of a plane.
func NewMeter(p *plane.Plane) (Meter, error) {
	c, err := kubernetes.NewForConfig(p.Config)
	if err != nil {
		return Meter{}, err
	}
	return Meter{API: c.Discovery().RESTClient(), Root: p.Root}, nil
}

// Read measures now.
func (m Meter) Read(ctx context.Context) (Cost, error) {
	metrics, err := m.API.Get().AbsPath("/metrics").DoRaw(ctx)
	if err != nil {
		return Cost{}, err
	}
	var c Cost
	lines := bufio.NewScanner(bytes.NewReader(metrics))
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		labels, value, ok := strings.Cut(strings.TrimPrefix(lines.Text(), "apiserver_request_total{"), "} ")
		if !ok || !strings.HasPrefix(lines.Text(), "apiserver_request_total{") || !isWrite(labels) {
			continue
		}
		n, err := strconv.ParseFloat(value, 64)
		if err != nil {
			return c, err
		}
		switch {
		case strings.Contains(labels, `group="infrastructure.capstan.dev"`):
			c.Ours += int64(n)
			c.Writes += int64(n)
		case strings.Contains(labels, `group="cluster.x-k8s.io"`), strings.Contains(labels, `group="bootstrap.capstan.dev"`):
			c.Writes += int64(n)
		}
	}
	c.CPU, c.RSS, err = m.manager()
	return c, err
}

// Step is the time and the cost of an operation.
type Step struct {
	Cost
	// Seconds of the operation, and those in which its cost was measured.
	Seconds, Measured float64
}

// Timed measures an operation.
func (m Meter) Timed(ctx context.Context, run func(context.Context) error) (Step, error) {
	return m.timed(ctx, run, m.Read)
}

// TimedUntilSettled measures an operation. Its cost includes the writes that follow it: the shorter an operation, the larger is their share.
func (m Meter) TimedUntilSettled(ctx context.Context, run func(context.Context) error) (Step, error) {
	return m.timed(ctx, run, func(ctx context.Context) (Cost, error) {
		_, cost, err := m.settle(ctx)
		return cost, err
	})
}

func (m Meter) timed(ctx context.Context, run func(context.Context) error, end func(context.Context) (Cost, error)) (Step, error) {
	before, err := m.Read(ctx)
	if err != nil {
		return Step{}, err
	}
	start := time.Now()
	if err := run(ctx); err != nil {
		return Step{}, err
	}
	took := time.Since(start).Seconds()
	after, err := end(ctx)
	return Step{after.Since(before), took, time.Since(start).Seconds()}, err
}

func isWrite(labels string) bool {
	for _, verb := range []string{"POST", "PUT", "PATCH", "APPLY", "DELETE"} {
		if strings.Contains(labels, `verb="`+verb+`"`) {
			return true
		}
	}
	return false
}

// Programs returns the running programs of a plane, whose arguments contain its root folder: their names by their folders in /proc.
func Programs(root string) map[string]string {
	found := map[string]string{}
	dirs, _ := filepath.Glob("/proc/[0-9]*") // It fails only for a malformed pattern.
	for _, dir := range dirs {
		command, err := os.ReadFile(filepath.Join(dir, "cmdline"))
		if err != nil || !bytes.Contains(command, []byte(root)) {
			continue // It has ended, or is not of this plane.
		}
		program, _, _ := strings.Cut(string(command), "\x00")
		found[dir] = filepath.Base(program)
	}
	return found
}

// manager reads the resources that the manager of the plane has used.
func (m Meter) manager() (cpu time.Duration, rss int64, err error) {
	for dir, name := range Programs(m.Root) {
		if name != "manager" {
			continue
		}
		p, err := ReadStat(dir)
		return p.CPU, p.RSS, err
	}
	return 0, 0, fmt.Errorf("no manager with --root %s", m.Root)
}

// Rest is the activity after the last operation.
type Rest struct {
	// Settled is the time until the last write, Quiet the time after it in which Cost was measured.
	Settled, Quiet time.Duration
	Cost           Cost
}

// AtRest waits until the writes to the objects of Cluster API and Capstan end, and measures the time after that.
func (m Meter) AtRest(ctx context.Context) (r Rest, err error) {
	r.Quiet = 30 * time.Second
	settled, before, err := m.settle(ctx)
	if err == nil {
		err = Sleep(ctx, r.Quiet)
	}
	if err != nil {
		return r, err
	}
	after, err := m.Read(ctx)
	r.Settled, r.Cost = settled, after.Since(before)
	return r, err
}

// settle waits until no object of Cluster API and Capstan was written for some seconds, and measures then. Core continues for some time after
// the last machine, because it reconciles each object again. after is the time until the last write.
func (m Meter) settle(ctx context.Context) (after time.Duration, last Cost, err error) {
	const still, patience = 10 * time.Second, 5 * time.Minute
	start := time.Now()
	last, err = m.Read(ctx)
	for since := start; err == nil && time.Since(since) < still && time.Since(start) < patience; {
		if err = Sleep(ctx, time.Second); err != nil {
			break
		}
		var now Cost
		if now, err = m.Read(ctx); now.Writes != last.Writes {
			since = time.Now()
			after = since.Sub(start)
		}
		last = now
	}
	return after, last, err
}

// Sleep waits for some time, or returns the error of a context that ends before.
func Sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}
