package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"capstan.dev/capstan/test/bench/measure"
)

// runPlanes measures claims in complete management planes: Cluster API core with its webhooks, and all managers of Capstan.
func runPlanes(ctx context.Context, claims, bin string, s settings) error {
	sizes, err := numbers(claims)
	if err != nil || len(sizes) == 0 {
		return err
	}
	if bin, err = filepath.Abs(bin); err != nil {
		return err
	}
	fmt.Printf("\nin a management plane:\n%8s %9s %9s %6s %9s %9s %8s %8s %9s  %s\n",
		"claims", "claims/s", "floor/s", "ratio", "cpu/claim", "floor cpu", "p50", "p99", "server", "cpu per claim of each program")
	for _, n := range sizes {
		r, programs, err := measureInPlane(ctx, bin, s, n)
		if err != nil {
			return fmt.Errorf("%d claims in a plane: %w", n, err)
		}
		fmt.Printf("%8d %9.1f %9.1f %6.2f %9s %9s %8s %8s %8dM  %s\n", n, r.perSecond, r.floor, r.perSecond/r.floor, milliseconds(r.cpu), milliseconds(r.floorCPU),
			r.p50.Round(time.Millisecond), r.p99.Round(time.Millisecond), r.serverMemory>>20, programs)
	}
	return nil
}

// measureInPlane measures the floor in one plane and the provider in another.
func measureInPlane(ctx context.Context, bin string, s settings, n int) (r result, programs string, err error) {
	r = result{claims: n}
	err = withPlane(ctx, bin, s, func(b *bench, p plane) error {
		before := p.usage()
		err := b.floor(ctx, n, &r)
		r.floorCPU = p.usage().since(before).sum() / time.Duration(n)
		return err
	})
	if err != nil {
		return r, "", fmt.Errorf("floor: %w", err)
	}
	err = withPlane(ctx, bin, s, func(b *bench, p plane) error {
		if _, err := b.one(ctx, "first"); err != nil {
			return err
		}
		before := p.usage()
		err := b.serve(ctx, n, &r)
		used := p.usage().since(before)
		r.cpu, programs = used.sum()/time.Duration(n), used.perClaim(n)
		r.serverMemory = p.serverMemory()
		return err
	})
	return r, programs, err
}

func withPlane(ctx context.Context, bin string, s settings, f func(*bench, plane) error) error {
	capstan, err := measure.Up(ctx, bin, "")
	if err != nil {
		return err
	}
	b := &bench{settings: s, namespace: "bench", client: capstan.Client}
	if err = b.pool(ctx); err == nil {
		err = f(b, plane{capstan.Root})
	}
	return errors.Join(err, capstan.Down(ctx))
}

// plane is a running management plane.
type plane struct{ root string }

// usage is the processor time of each program of a plane, and of this process, by name.
type usage map[string]time.Duration

func (p plane) usage() usage {
	all := usage{}
	for dir, name := range measure.Programs(p.root) {
		if p, err := measure.ReadStat(dir); err == nil {
			all[name] += p.CPU
		}
	}
	if p, err := measure.ReadStat("/proc/self"); err == nil {
		all["client"] = p.CPU
	}
	return all
}

// serverMemory returns the maximum memory of the API server, in bytes.
func (p plane) serverMemory() uint64 {
	for dir, name := range measure.Programs(p.root) {
		if name == "kube-apiserver" {
			return peakMemory(dir)
		}
	}
	return 0
}

func (u usage) since(before usage) usage {
	used := usage{}
	for name, cpu := range u {
		used[name] = cpu - before[name]
	}
	return used
}

func (u usage) sum() (all time.Duration) {
	for _, cpu := range u {
		all += cpu
	}
	return all
}

// perClaim describes the processor time per claim of each program, the largest first.
func (u usage) perClaim(n int) string {
	names := slices.SortedFunc(maps.Keys(u), func(a, b string) int { return int(u[b] - u[a]) })
	var all []string
	for _, name := range names {
		if cpu := u[name] / time.Duration(n); cpu >= 100*time.Microsecond {
			all = append(all, name+" "+milliseconds(cpu))
		}
	}
	return strings.Join(all, ", ")
}
