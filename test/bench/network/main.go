// Command network measures TCP between machines and between pods: on one host, and across two hosts of a rack. In the same run, it
// measures the floor: the same load through one bare cable (a pair of veth). It needs root and nft.
//
// Hosts, machines and pods are network namespaces. The links, entries and rules of the networks are those of capstand.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"syscall"
	"time"

	"capstan.dev/capstan/internal/host/network/wireguard"
)

func main() {
	if len(os.Args) > 1 && os.Args[1] == "wireguard" { // A link starts its own program.
		if err := serveLink(os.Args[2:]); err != nil {
			fmt.Fprintln(os.Stderr, "bench:", err)
			os.Exit(1)
		}
		return
	}
	rounds := flag.Int("rounds", 5, "rounds: each measures all paths, one after another")
	period := flag.Duration("period", 2*time.Second, "time of each measurement")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, *rounds, *period)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// serveLink runs the process of a WireGuard device, as capstand does.
func serveLink(args []string) error {
	flags := flag.NewFlagSet("wireguard", flag.ExitOnError)
	key, uid := flags.String("key", "", "file with the private key"), flags.Int("uid", 0, "user of the process")
	_ = flags.Parse(args)
	return wireguard.Serve(*key, *uid, slog.Default())
}

// run prints a row for each path, with the medians of all rounds.
func run(ctx context.Context, rounds int, period time.Duration) (err error) {
	dir, err := os.MkdirTemp("", "capstan-bench-network-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	r, err := newRack(ctx, dir)
	if r != nil {
		defer func() { err = errors.Join(err, r.remove()) }()
	}
	if err != nil {
		return err
	}
	results := make([][]result, len(r.paths))
	for range rounds {
		for i, p := range r.paths {
			if err := ctx.Err(); err != nil {
				return err
			}
			one, err := p.measure(period)
			if err != nil {
				return fmt.Errorf("%s: %w", p.name, err)
			}
			results[i] = append(results[i], one)
		}
	}
	fmt.Printf("%d rounds, %s per measurement\n\n", rounds, period)
	fmt.Printf("%-38s %6s %12s %8s %14s %8s %10s %10s\n", "path", "MTU", "throughput", "floor", "round trips", "floor", "p50", "p99")
	for i, p := range r.paths {
		fmt.Println(row(p, results[i], results[0]))
	}
	return nil
}

// row returns the medians of a path, and their ratios to those of the floor in the same rounds.
func row(p path, own, floor []result) string {
	median := func(of func(result) float64) float64 {
		var all []float64
		for _, r := range own {
			all = append(all, of(r))
		}
		return middle(all)
	}
	ratio := func(of func(result) float64) string {
		var all []float64
		for i := range own {
			all = append(all, of(own[i])/of(floor[i]))
		}
		return strconv.FormatFloat(middle(all), 'f', 2, 64)
	}
	micros := func(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }
	return fmt.Sprintf("%-38s %6d %7.2f Gb/s %8s %12.0f/s %8s %7.0f µs %7.0f µs", p.name, p.mtu,
		median(gigabits), ratio(gigabits), median(trips), ratio(trips),
		median(func(r result) float64 { return micros(r.p50) }), median(func(r result) float64 { return micros(r.p99) }))
}

func gigabits(r result) float64 { return r.throughput * 8 / 1e9 }
func trips(r result) float64    { return r.trips }

// middle returns the median.
func middle[T cmp.Ordered](all []T) T {
	slices.Sort(all)
	return all[len(all)/2]
}
