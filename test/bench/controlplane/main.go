// Command controlplane measures the time in which a control plane scales from 1 to 3 machines, rolls out and upgrades 3
// machines, next to the floor of the same run. It also measures the longest wait of a client that writes all the time.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"capstan.dev/capstan/test/bench/measure"
	"capstan.dev/capstan/test/versions"
	"capstan.dev/capstan/test/writeload"
)

const (
	version = versions.Default
	cluster = "bench"
	// patience bounds each step. A step that takes longer fails.
	patience = 10 * time.Minute
	// writePatience is the time for which an ordinary client repeats one write.
	writePatience = 15 * time.Second
)

func main() {
	bin := flag.String("bin", "bin", "folder of the built binaries")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, *bin)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, bin string) (err error) {
	capstan, err := measure.UpUpgrade(ctx, bin, version)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, capstan.Down(ctx)) }()
	creator := &measure.Creator{Plane: capstan.Plane, Flags: []string{"--kubernetes-version", capstan.From, "--workers", "0"}}
	made, err := creator.Create(ctx, []string{cluster})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, creator.Delete(context.WithoutCancel(ctx), made)) }()
	fmt.Printf("%-44s %9s %16s %12s\n", "", "took", "", "longest gap")
	report(capstan, "1 replica, initialized", made[0].Initialized, 0)

	s := &subject{client: capstan.Client}
	if err := s.settled(ctx, 1, nil); err != nil {
		return err
	}
	usage, err := creator.Memory(ctx, made)
	if err != nil {
		return err
	}
	if err := changeUnderLoad(ctx, capstan, s); err != nil {
		return err
	}
	fmt.Println("\nresident memory (proportional set size) of an idle control plane machine:")
	measure.PrintUsage(usage)
	return nil
}

// changeUnderLoad scales, rolls out and upgrades the control plane while a client writes, and prints a row for each change.
func changeUnderLoad(ctx context.Context, capstan *measure.Upgrade, s *subject) error {
	workload, err := capstan.Capstan(ctx, "get", "kubeconfig", cluster)
	if err != nil {
		return err
	}
	w, err := writeload.FromKubeconfig(ctx, []byte(workload), writePatience)
	if err != nil {
		return err
	}
	defer w.Stop()
	for _, step := range []struct {
		what   string
		change func(context.Context) error
	}{
		{"from 1 to 3", func(ctx context.Context) error { return s.scale(ctx, 3) }},
		{"rollout of 3, another template", s.otherTemplate},
		{fmt.Sprintf("upgrade of 3, %s to %s", capstan.From, version), func(ctx context.Context) error { return s.upgrade(ctx, version) }},
		{"from 3 to 1", func(ctx context.Context) error { return s.scale(ctx, 1) }},
	} {
		took, err := s.step(ctx, step.change)
		if err != nil {
			return fmt.Errorf("%s: %w", step.what, err)
		}
		report(capstan, step.what, took, w.LongestGap())
	}
	w.Stop()
	fmt.Printf("\n%d writes acknowledged, %d failed in spite of retries\n", w.Acknowledged(), len(w.Failed()))
	return nil
}

// report prints a row.
func report(capstan *measure.Upgrade, what string, took, gap time.Duration) {
	fmt.Printf("%-44s %7.2f s %8.2f x floor %10.2f s\n", what, took.Seconds(), took.Seconds()/capstan.Floor.Seconds(), gap.Seconds())
}
