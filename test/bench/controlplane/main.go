// Command controlplane measures how long a control plane takes from 1 to 3 machines, for a rollout and for an
// upgrade of 3, next to the floor of the same run, and how long a client that writes all the while had to wait.
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

	"golang.org/x/mod/semver"

	"capstan.dev/capstan/test/bench/floor"
	"capstan.dev/capstan/test/bench/measure"
)

const (
	version = "v1.36.3"
	cluster = "bench"
	// patience bounds each step; one that takes longer is a failure and not a figure.
	patience = 10 * time.Minute
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
	if bin, err = filepath.Abs(bin); err != nil {
		return err
	}
	base, err := floor.Measure(ctx, filepath.Join(bin, "kubernetes", version))
	if err != nil {
		return fmt.Errorf("floor: %w", err)
	}
	fmt.Printf("floor: etcd and API server from empty folders to /readyz: %.2f s\n\n", base.Seconds())
	from, err := former(bin)
	if err != nil {
		return err
	}
	capstan, err := measure.Up(ctx, bin, "")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, capstan.Down(ctx)) }()
	management, err := capstan.Run(ctx, "get", "kubeconfig", "--management")
	if err != nil {
		return err
	}
	plane, err := measure.NewPlane(management, func(ctx context.Context, name string) ([]byte, error) {
		return capstan.Run(ctx, "create", "cluster", name, "--dry-run", "--kubernetes-version", from, "--workers", "0")
	})
	if err != nil {
		return err
	}
	made, err := plane.Create(ctx, []string{cluster})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, plane.Delete(context.WithoutCancel(ctx), made)) }()
	report := func(what string, took, gap time.Duration) {
		fmt.Printf("%-44s %7.2f s %8.2f x floor %10.2f s\n", what, took.Seconds(), took.Seconds()/base.Seconds(), gap.Seconds())
	}
	fmt.Printf("%-44s %9s %16s %12s\n", "", "took", "", "longest gap")
	report("1 replica, initialized", made[0].Initialized, 0)

	s, err := newSubject(management)
	if err != nil {
		return err
	}
	if err := s.settled(ctx, 1, nil); err != nil {
		return err
	}
	usage, err := plane.Memory(ctx, made)
	if err != nil {
		return err
	}
	workload, err := capstan.Run(ctx, "get", "kubeconfig", cluster)
	if err != nil {
		return err
	}
	w, err := startWriter(ctx, workload)
	if err != nil {
		return err
	}
	defer w.end()
	for _, step := range []struct {
		what   string
		change func(context.Context) error
	}{
		{"from 1 to 3", func(ctx context.Context) error { return s.scale(ctx, 3) }},
		{"rollout of 3, another template", s.otherTemplate},
		{fmt.Sprintf("upgrade of 3, %s to %s", from, version), func(ctx context.Context) error { return s.upgrade(ctx, version) }},
		{"from 3 to 1", func(ctx context.Context) error { return s.scale(ctx, 1) }},
	} {
		took, err := s.step(ctx, step.change)
		if err != nil {
			return fmt.Errorf("%s: %w", step.what, err)
		}
		report(step.what, took, w.longestGap())
	}
	w.end()
	fmt.Printf("\n%d writes acknowledged, %d failed in spite of retries\n", w.acknowledged, w.failed)
	fmt.Println("\nresident memory (proportional set size) of an idle control plane machine:")
	measure.PrintUsage(usage)
	return nil
}

// former is the newest version of the minor before, of those that were built.
func former(bin string) (string, error) {
	dirs, err := os.ReadDir(filepath.Join(bin, "kubernetes"))
	if err != nil {
		return "", err
	}
	var found []string
	for _, d := range dirs {
		if semver.IsValid(d.Name()) && semver.Compare(semver.MajorMinor(d.Name()), semver.MajorMinor(version)) < 0 {
			found = append(found, d.Name())
		}
	}
	if len(found) == 0 {
		return "", errors.New("bin/kubernetes has no version of a former minor: run `make build-kube`")
	}
	return slices.MaxFunc(found, semver.Compare), nil
}
