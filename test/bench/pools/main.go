// Command pools measures machine pools on a separate management plane. It measures real machines, next to one machine
// alone, and a rolling update. Then it measures hundreds and thousands of hollow machines, with the processor time and
// memory of the manager and the API server.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"capstan.dev/capstan/test/bench/measure"
	"capstan.dev/capstan/test/versions"
)

type options struct {
	bin     string
	root    string
	version string
	real    int
	rolling int
	hollow  string
}

func main() {
	var o options
	flag.StringVar(&o.bin, "bin", "bin", "folder of the built binaries")
	flag.StringVar(&o.root, "root", "", "state folder of the management plane; a temporary one when empty")
	flag.StringVar(&o.version, "version", versions.Default, "Kubernetes version")
	flag.IntVar(&o.real, "real", 10, "machines of the real pool; 0 omits this part")
	flag.IntVar(&o.rolling, "rolling", 5, "machines of the rolling update; 0 omits this part")
	flag.StringVar(&o.hollow, "hollow", "100,1000", "sizes of the hollow pool, separated by commas; empty omits this part")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, o); err != nil {
		fmt.Fprintln(os.Stderr, "bench-pools:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, o options) (err error) {
	if o.bin, err = filepath.Abs(o.bin); err != nil {
		return err
	}
	capstan, err := measure.Up(ctx, o.bin, o.root)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, capstan.Down(ctx)) }()
	o.root = capstan.Root
	if _, err := capstan.Capstan(ctx, "create", "cluster", "pools", "--flavor", "machinepool", "--workers", "0", "--kubernetes-version", o.version); err != nil {
		return fmt.Errorf("create cluster: %w", err)
	}
	b, err := newBench(capstan, o)
	if err != nil {
		return err
	}
	if err := b.realPool(ctx); err != nil {
		return fmt.Errorf("real pool: %w", err)
	}
	if err := b.hollowPool(ctx); err != nil {
		return fmt.Errorf("hollow pool: %w", err)
	}
	return nil
}

// realPool prints the times for one machine alone, for n machines together, and for a rolling update.
func (b *bench) realPool(ctx context.Context) error {
	if b.o.real == 0 && b.o.rolling == 0 {
		return nil
	}
	p, err := b.addPool(ctx, "real", notHollow)
	if err != nil {
		return err
	}
	fmt.Printf("%-34s %10s %12s\n", "real machines", "seconds", "per machine")
	one, err := b.timed(ctx, p, 1)
	if err != nil {
		return err
	}
	fmt.Printf("%-34s %10.1f\n", "0 -> 1, one alone", one.Seconds)
	steps := []int{0}
	if b.o.real > 0 {
		steps = append(steps, b.o.real, 0)
	}
	from := 1
	for _, n := range steps {
		m, err := b.timed(ctx, p, n)
		if err != nil {
			return err
		}
		fmt.Printf("%-34s %10.1f %12.2f\n", fmt.Sprintf("%d -> %d", from, n), m.Seconds, m.Seconds/float64(max(from, n)))
		from = n
	}
	if b.o.rolling > 0 {
		if _, err := b.timed(ctx, p, b.o.rolling); err != nil {
			return err
		}
		took, err := b.roll(ctx, p)
		if err != nil {
			return err
		}
		fmt.Printf("%-34s %10.1f %12.2f\n", fmt.Sprintf("rolling update of %d, maxSurge 1", b.o.rolling), took.Seconds(), took.Seconds()/float64(b.o.rolling))
	}
	return b.remove(ctx, p)
}

// hollowPool prints the cost of machines for growing numbers of them.
func (b *bench) hollowPool(ctx context.Context) error {
	var sizes []int
	for _, s := range strings.FieldsFunc(b.o.hollow, func(r rune) bool { return r == ',' }) {
		n, err := strconv.Atoi(s)
		if err != nil {
			return fmt.Errorf("--hollow: %w", err)
		}
		sizes = append(sizes, n)
	}
	if len(sizes) == 0 {
		return nil
	}
	stop, err := b.startHollow(ctx)
	if err != nil {
		return err
	}
	defer stop()
	fmt.Printf("\n%-20s %8s %12s %16s %14s %14s %12s\n", "hollow machines", "seconds", "machines/s", "writes/machine", "ours/machine", "CPU ms/machine", "manager MiB")
	var first float64
	for _, n := range sizes {
		p, err := b.addPool(ctx, fmt.Sprintf("hollow-%d", n), onlyHollow)
		if err != nil {
			return err
		}
		up, err := b.timed(ctx, p, n)
		if err != nil {
			return err
		}
		printStep(fmt.Sprintf("0 -> %d", n), up, n)
		r, err := b.meter.AtRest(ctx)
		if err != nil {
			return err
		}
		fmt.Printf("%-20s at rest %.0f s later; then in %.0f s %d writes, %d of them to our objects\n", fmt.Sprintf("%d, nothing to do", n),
			r.Settled.Seconds(), r.Quiet.Seconds(), r.Cost.Writes, r.Cost.Ours)
		down, err := b.timed(ctx, p, 0)
		if err != nil {
			return err
		}
		printStep(fmt.Sprintf("%d -> 0", n), down, n)
		cost := (up.CPU + down.CPU).Seconds() / float64(n)
		if first == 0 {
			first = cost
		}
		fmt.Printf("%-20s manager's CPU per machine, up and down: %.1f ms, %.2f x the first\n", "", cost*1000, cost/first)
		if err := b.remove(ctx, p); err != nil {
			return err
		}
	}
	return nil
}
