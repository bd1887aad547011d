// Command inplace measures the upgrade of a cluster to the next minor version in place, and the same upgrade of an equal cluster by
// replacement in the same run: the time of each role and machine, the containers that did not survive, and what a client of the
// API server notices that writes all the time.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"time"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/test/bench/measure"
	"capstan.dev/capstan/test/versions"
	"capstan.dev/capstan/test/writeload"
)

const (
	version = versions.Default
	// patience bounds each step. A step that takes longer fails.
	patience = 20 * time.Minute
	// writePatience is the time for which an ordinary client repeats one write.
	writePatience = 15 * time.Second
)

// size is the number of machines of a cluster.
type size struct{ controlPlane, workers int }

func main() {
	bin := flag.String("bin", "bin", "folder of the built binaries")
	var machines size
	flag.IntVar(&machines.controlPlane, "control-plane-machines", 3, "control plane machines of each cluster")
	flag.IntVar(&machines.workers, "workers", 2, "workers of each cluster")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, *bin, machines)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, bin string, machines size) (err error) {
	capstan, err := measure.UpUpgrade(ctx, bin, version)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, capstan.Down(ctx)) }()
	fmt.Printf("%d + %d machines, %s to %s\n\n", machines.controlPlane, machines.workers, capstan.From, version)
	fmt.Printf("%-12s %-14s %9s %12s %12s %12s %14s %14s\n", "", "", "took", "per machine", "longest gap", "writes", "failed writes", "containers lost")
	for _, policy := range []infrav1.InPlacePolicy{infrav1.InPlaceOnly, infrav1.InPlaceNever} {
		if err := upgradeCluster(ctx, capstan, policy, machines); err != nil {
			return fmt.Errorf("policy %s: %w", policy, err)
		}
	}
	return nil
}

// upgradeCluster creates a cluster, upgrades it under a policy, prints a row for each role, and deletes the cluster.
func upgradeCluster(ctx context.Context, capstan *measure.Upgrade, policy infrav1.InPlacePolicy, machines size) (err error) {
	name := map[infrav1.InPlacePolicy]string{infrav1.InPlaceOnly: "in-place", infrav1.InPlaceNever: "replaced"}[policy]
	creator := &measure.Creator{Plane: capstan.Plane, Flags: []string{"--kubernetes-version", capstan.From,
		"--control-plane-machines", strconv.Itoa(machines.controlPlane), "--workers", strconv.Itoa(machines.workers)}}
	made, err := creator.Create(ctx, []string{name})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, creator.Delete(context.WithoutCancel(ctx), made)) }()
	workload, err := capstan.Capstan(ctx, "get", "kubeconfig", name)
	if err != nil {
		return err
	}
	s, err := newSubject(capstan.Client, []byte(workload), name, policy)
	if err != nil {
		return err
	}
	if err := s.startPods(ctx, 2*machines.workers); err != nil {
		return err
	}
	w, err := writeload.FromKubeconfig(ctx, []byte(workload), writePatience)
	if err != nil {
		return err
	}
	defer w.Stop()
	for _, role := range []struct {
		name     string
		machines int
		upgrade  func(context.Context) error
	}{
		{"control plane", machines.controlPlane, s.upgradeControlPlane}, {"workers", machines.workers, s.upgradeWorkers},
	} {
		w.LongestGap()
		writes, failed, start := w.Acknowledged(), len(w.Failed()), time.Now()
		if err := role.upgrade(ctx); err != nil {
			return fmt.Errorf("%s: %w", role.name, err)
		}
		took := time.Since(start).Seconds()
		lost, err := s.lostContainers(ctx)
		if err != nil {
			return err
		}
		fmt.Printf("%-12s %-14s %7.1f s %10.1f s %10.2f s %12d %14d %14s\n", name, role.name, took, took/float64(role.machines), w.LongestGap().Seconds(),
			w.Acknowledged()-writes, len(w.Failed())-failed, fmt.Sprintf("%d of %d", lost, len(s.containers)))
	}
	return nil
}
