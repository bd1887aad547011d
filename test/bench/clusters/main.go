// Command clusters measures the time in which Capstan creates clusters, next to the floor of the same run: one cluster
// alone, then several at once. It also measures the memory of their machines. With -spans, it prints where the time of the last cluster
// went that was created alone; all processes send traces then, which takes time itself.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"capstan.dev/capstan/internal/testenv/otlpreceiver"
	"capstan.dev/capstan/test/bench/floor"
	"capstan.dev/capstan/test/bench/measure"
	"capstan.dev/capstan/test/plane"
	"capstan.dev/capstan/test/versions"
)

const version = versions.Default

type options struct {
	bin     string
	root    string
	workers int
	atOnce  int
	rounds  int
	spans   bool
}

func main() {
	var o options
	flag.StringVar(&o.bin, "bin", "bin", "folder of the built binaries")
	flag.StringVar(&o.root, "root", "", "state folder of the management plane; a temporary one when empty")
	flag.IntVar(&o.workers, "workers", 2, "workers of each cluster")
	flag.IntVar(&o.atOnce, "at-once", 5, "number of clusters that are created at once in the second part")
	flag.IntVar(&o.rounds, "rounds", 3, "number of measurements of the floor and of the single cluster")
	flag.BoolVar(&o.spans, "spans", false, "trace the creation, and print where its time goes")
	flag.Parse()

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, o); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, o options) error {
	bin, err := filepath.Abs(o.bin)
	if err != nil {
		return err
	}
	var floors []time.Duration
	for range o.rounds {
		f, err := floor.Measure(ctx, filepath.Join(bin, "kubernetes", version))
		if err != nil {
			return fmt.Errorf("floor: %w", err)
		}
		floors = append(floors, f)
	}
	base := median(floors)
	fmt.Printf("floor: etcd and API server from empty folders to /readyz: median %.2f s of %v\n\n", base.Seconds(), floors)

	if !o.spans {
		_, err := measured(ctx, o, bin, base)
		return err
	}
	receiver, stop, err := otlpreceiver.Serve()
	if err != nil {
		return err
	}
	defer stop()
	alone, err := measured(ctx, o, bin, base, "--tracing-endpoint", receiver.Endpoint, "--tracing-insecure")
	if err != nil {
		return err
	}
	fmt.Printf("\nspans of %s until all Machines run:\n", alone.Cluster)
	measure.PrintCosts(os.Stdout, measure.Costs(measure.SpansOf(receiver.Spans()), alone.Began, alone.Began.Add(alone.Running)))
	return nil
}

// measured measures the clusters in a management plane with these flags, and takes the plane down: its processes send their last spans
// when they end.
func measured(ctx context.Context, o options, bin string, base time.Duration, flags ...string) (measure.Timeline, error) {
	start := time.Now()
	capstan, err := measure.Up(ctx, bin, o.root, flags...)
	if err != nil {
		return measure.Timeline{}, err
	}
	fmt.Printf("management plane up: %.2f s\n\n", time.Since(start).Seconds())
	alone, err := clusters(ctx, o, capstan, base)
	return alone, errors.Join(err, capstan.Down(ctx))
}

// clusters creates and deletes clusters. It returns the times of the last cluster that was created alone.
func clusters(ctx context.Context, o options, capstan *plane.Plane, base time.Duration) (alone measure.Timeline, err error) {
	creator := &measure.Creator{Plane: capstan, Flags: []string{"--kubernetes-version", version, "--workers", fmt.Sprint(o.workers)}}
	printHeader()
	for round := range o.rounds {
		created, err := create(ctx, creator, []string{fmt.Sprintf("one-%d", round+1)}, base)
		if err != nil {
			return alone, err
		}
		alone = created[0]
		if round == o.rounds-1 {
			if err := printMemory(ctx, creator, created); err != nil {
				return alone, err
			}
		}
		if err := creator.Delete(ctx, created); err != nil {
			return alone, err
		}
	}
	if o.atOnce == 0 {
		return alone, nil
	}
	var names []string
	for i := range o.atOnce {
		names = append(names, fmt.Sprintf("many-%d", i+1))
	}
	printHeader()
	created, err := create(ctx, creator, names, base)
	if err != nil {
		return alone, err
	}
	return alone, creator.Delete(ctx, created)
}

// create creates clusters at once, and prints their times. Busy processors limit them, and idle ones wait for a timer, a disk or an answer.
func create(ctx context.Context, creator *measure.Creator, names []string, base time.Duration) ([]measure.Timeline, error) {
	before, err := measure.ReadProcessors()
	if err != nil {
		return nil, err
	}
	created, err := creator.Create(ctx, names)
	if err != nil {
		return nil, err
	}
	after, err := measure.ReadProcessors()
	if err != nil {
		return nil, err
	}
	printTimelines(created, base)
	fmt.Printf("processors of the box busy until the last Machine ran: %.0f %%\n", 100*after.BusySince(before))
	return created, nil
}

func printHeader() {
	fmt.Printf("%-8s %22s %22s %22s %22s\n", "cluster", "initialized", "first node Ready", "all nodes Ready", "Machines Running")
}

func printTimelines(timelines []measure.Timeline, base time.Duration) {
	cell := func(d time.Duration) string {
		return fmt.Sprintf("%.2f s (%.2f x floor)", d.Seconds(), d.Seconds()/base.Seconds())
	}
	for _, t := range timelines {
		fmt.Printf("%-8s %22s %22s %22s %22s\n", t.Cluster, cell(t.Initialized), cell(t.FirstNode), cell(t.AllNodes), cell(t.Running))
	}
}

func printMemory(ctx context.Context, creator *measure.Creator, timelines []measure.Timeline) error {
	usage, err := creator.Memory(ctx, timelines)
	if err != nil {
		return err
	}
	fmt.Println("\nresident memory (proportional set size) of the machines:")
	measure.PrintUsage(usage)
	fmt.Println()
	return nil
}

func median(ds []time.Duration) time.Duration {
	sorted := slices.Sorted(slices.Values(ds))
	return sorted[len(sorted)/2]
}
