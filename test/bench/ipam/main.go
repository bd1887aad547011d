// Command ipam measures Capstan's IPAM provider on a real API server: claims per second, the time from the creation of a
// claim to its addressRef, API writes per claim, and the manager's memory. In the same run it measures the floor: a
// plain client that does the same writes with the same concurrency. Then it measures both in a complete management plane.
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
	ctrl "sigs.k8s.io/controller-runtime"
)

func main() {
	manager := flag.String("manager", "", "run as the manager, with this kubeconfig (internal)")
	namespace := flag.String("namespace", "", "namespace of the manager (internal)")
	claims := flag.String("claims", "100,1000,10000,50000", "numbers of claims to measure, separated by commas")
	planeClaims := flag.String("plane-claims", "3000", "numbers of claims to measure in a complete management plane, separated by commas")
	bin := flag.String("bin", "bin", "folder of the built binaries, for the management plane")
	workers := flag.Int("workers", 32, "concurrency of the manager, the creator of claims, and the floor")
	pprof := flag.String("pprof", "", "address at which the manager serves its profiles, for example 127.0.0.1:6060")
	flag.Parse()
	ctrl.SetLogger(logr.Discard())
	ctx := ctrl.SetupSignalHandler()
	var err error
	if *manager != "" {
		err = runManager(ctx, *manager, *namespace, *pprof, *workers)
	} else {
		s := settings{workers: *workers, pprof: *pprof}
		if err = run(ctx, *claims, s); err == nil {
			err = runPlanes(ctx, *planeClaims, *bin, s)
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench-ipam:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, claims string, s settings) error {
	sizes, err := numbers(claims)
	if err != nil || len(sizes) == 0 {
		return err
	}
	printHeader()
	for _, n := range sizes {
		r, err := measureClaims(ctx, s, n)
		if err != nil {
			return fmt.Errorf("%d claims: %w", n, err)
		}
		r.print()
	}
	return nil
}

// numbers returns the numbers of a list with commas. An empty list has none.
func numbers(list string) (all []int, err error) {
	if list == "" {
		return nil, nil
	}
	for _, size := range strings.Split(list, ",") {
		n, err := strconv.Atoi(strings.TrimSpace(size))
		if err != nil || n < 1 {
			return nil, fmt.Errorf("want numbers of claims above zero, separated by commas, got %q", list)
		}
		all = append(all, n)
	}
	return all, nil
}

type result struct {
	claims      int
	perSecond   float64
	p50, p99    time.Duration
	lone        time.Duration
	claimWrites float64
	recordCount int
	// maximum memory of the manager and the API server, in bytes
	memory, serverMemory uint64
	floor                float64
	// processor time per claim: of all processes during the floor and during the claims, and of the manager
	floorCPU, cpu, managerCPU time.Duration
	restart, restartCPU       time.Duration
	restartWrites             int
}

func printHeader() {
	fmt.Printf("%8s %9s %9s %6s %9s %9s %9s %8s %8s %8s %9s %9s %6s %9s %9s %9s %9s %9s %8s\n",
		"claims", "claims/s", "floor/s", "ratio", "cpu/claim", "floor cpu", "manager", "p50", "p99", "lone p50",
		"writes", "batches", "wr/b", "memory", "server", "restart", "its cpu", "rewrites", "cpu ratio")
}

func (r result) print() {
	perBatch := 0.0
	if r.recordCount > 0 {
		perBatch = float64(r.claims) / float64(r.recordCount)
	}
	fmt.Printf("%8d %9.1f %9.1f %6.2f %9s %9s %9s %8s %8s %8s %9.2f %9d %6.1f %8dM %8dM %9s %9s %9d %8.2f\n",
		r.claims, r.perSecond, r.floor, r.perSecond/r.floor, milliseconds(r.cpu), milliseconds(r.floorCPU), milliseconds(r.managerCPU),
		r.p50.Round(time.Millisecond), r.p99.Round(time.Millisecond), r.lone.Round(100*time.Microsecond),
		r.claimWrites, r.recordCount, perBatch, r.memory>>20, r.serverMemory>>20, r.restart.Round(10*time.Millisecond), milliseconds(r.restartCPU), r.restartWrites,
		r.floorCPU.Seconds()/r.cpu.Seconds())
}

func milliseconds(d time.Duration) string { return fmt.Sprintf("%.2fms", d.Seconds()*1000) }
