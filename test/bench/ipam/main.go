// Command ipam measures Capstan's IPAM provider on a real API server: claims per
// second, the time from a claim's creation to its addressRef, API writes per
// claim and the manager's memory, next to the floor: a plain client that does
// the same writes with the same concurrency in the same run.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/runtime"
	ctrl "sigs.k8s.io/controller-runtime"

	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
	"capstan.dev/capstan/internal/testenv"
)

func main() {
	manager := flag.String("manager", "", "run as the manager, with this kubeconfig (internal)")
	namespace := flag.String("namespace", "", "namespace that the manager looks at (internal)")
	claims := flag.String("claims", "100,1000,10000", "numbers of claims to measure, separated by commas")
	large := flag.Bool("large", false, "measure 50 000 claims too")
	floor := flag.Int("floor", 0, "measure the floor with so many claims at most; 0: with as many as the manager")
	workers := flag.Int("workers", 32, "concurrency of the manager, the creator of claims, and the floor")
	pprof := flag.String("pprof", "", "address at which the manager serves its profiles, for example 127.0.0.1:6060")
	flag.Parse()
	ctrl.SetLogger(logr.Discard())
	ctx := ctrl.SetupSignalHandler()
	var err error
	if *manager != "" {
		err = runManager(ctx, *manager, *namespace, *pprof, *workers)
	} else {
		if *large {
			*claims += ",50000"
		}
		err = run(ctx, *claims, *floor, *workers, *pprof)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench-ipam:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, claims string, floor, workers int, pprof string) error {
	var sizes []int
	for _, s := range strings.Split(claims, ",") {
		n, err := strconv.Atoi(strings.TrimSpace(s))
		if err != nil || n < 1 {
			return fmt.Errorf("-claims: wanted numbers separated by commas, found %q", claims)
		}
		sizes = append(sizes, n)
	}
	env, err := testenv.Start(testenv.Options{AddToScheme: []func(*runtime.Scheme) error{ipamv1.AddToScheme}})
	if err != nil {
		return err
	}
	defer func() { _ = env.Stop() }()
	b, err := newBench(env, floor, workers, pprof)
	if err != nil {
		return err
	}
	defer b.close()
	printHeader()
	for _, n := range sizes {
		r, err := b.measure(ctx, n)
		if err != nil {
			return fmt.Errorf("%d claims: %w", n, err)
		}
		r.print()
	}
	return nil
}

type result struct {
	claims      int
	perSecond   float64
	p50, p99    time.Duration
	lone        time.Duration
	claimWrites float64
	recordCount int
	memory      uint64
	floor       float64
	// Processor time per claim: of all processes while the floor and while the
	// claims were measured, and of the manager.
	floorCPU, cpu, managerCPU time.Duration
	restart, restartCPU       time.Duration
	restartWrites             int
}

func printHeader() {
	fmt.Printf("%8s %9s %9s %6s %9s %9s %9s %8s %8s %8s %9s %9s %6s %9s %9s %9s %9s %8s\n",
		"claims", "claims/s", "floor/s", "ratio", "cpu/claim", "floor cpu", "manager", "p50", "p99", "lone p50",
		"writes", "batches", "wr/b", "memory", "restart", "its cpu", "rewrites", "cpu ratio")
}

func (r result) print() {
	perBatch := 0.0
	if r.recordCount > 0 {
		perBatch = float64(r.claims) / float64(r.recordCount)
	}
	ms := func(d time.Duration) string { return fmt.Sprintf("%.2fms", d.Seconds()*1000) }
	fmt.Printf("%8d %9.1f %9.1f %6.2f %9s %9s %9s %8s %8s %8s %9.2f %9d %6.1f %8dM %9s %9s %9d %8.2f\n",
		r.claims, r.perSecond, r.floor, r.perSecond/r.floor, ms(r.cpu), ms(r.floorCPU), ms(r.managerCPU),
		r.p50.Round(time.Millisecond), r.p99.Round(time.Millisecond), r.lone.Round(100*time.Microsecond),
		r.claimWrites, r.recordCount, perBatch, r.memory>>20, r.restart.Round(10*time.Millisecond), ms(r.restartCPU), r.restartWrites,
		r.floorCPU.Seconds()/r.cpu.Seconds())
}
