// Command hosts measures one manager with many hosts: it adds hollow hosts, creates clusters and machines on them, and stops
// one host. It does so for several numbers of hosts, each on a management plane of its own, and compares the costs. The cost of a step includes
// the writes that follow it.
//
// The clusters have no control planes: their endpoint is external. So the figures contain the work for clusters, placement and
// machines, and not that of API servers of clusters.
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
	"time"

	"github.com/go-logr/logr"
	ctrl "sigs.k8s.io/controller-runtime"

	"capstan.dev/capstan/test/bench/measure"
	"capstan.dev/capstan/test/versions"
)

type options struct {
	bin      string
	version  string
	hosts    string
	machines int
	clusters int
	atOnce   int
}

func main() {
	ctrl.SetLogger(logr.Discard())
	var o options
	flag.StringVar(&o.bin, "bin", "bin", "folder of the built binaries")
	flag.StringVar(&o.version, "version", versions.Default, "Kubernetes version of the machines")
	flag.StringVar(&o.hosts, "hosts", "10,100", "numbers of hosts, separated by commas")
	flag.IntVar(&o.machines, "machines", 50, "machines per host")
	flag.IntVar(&o.clusters, "clusters", 2, "clusters per host")
	flag.IntVar(&o.atOnce, "at-once", 100, "machines that are created at a time; the next one follows when one runs")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, o)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench-hosts:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, o options) (err error) {
	if o.bin, err = filepath.Abs(o.bin); err != nil {
		return err
	}
	if o.machines < 1 || o.clusters < 1 || o.atOnce < 1 {
		return errors.New("--machines, --clusters and --at-once: expected at least 1")
	}
	var first *result
	for field := range strings.SplitSeq(o.hosts, ",") {
		n, err := strconv.Atoi(field)
		if err != nil || n < 1 {
			return fmt.Errorf("--hosts: expected numbers of hosts, found %q", field)
		}
		r, err := measureFleet(ctx, o, n)
		if err != nil {
			return fmt.Errorf("%d hosts: %w", n, err)
		}
		if first == nil {
			first = r
		}
		r.print(first)
	}
	return nil
}

// measureFleet measures n hosts on a plane of their own.
func measureFleet(ctx context.Context, o options, n int) (r *result, err error) {
	capstan, err := measure.Up(ctx, o.bin, "")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, capstan.Down(ctx)) }()
	f, err := newFleet(capstan, o, n)
	if err != nil {
		return nil, err
	}
	defer f.stop()
	return f.measure(ctx)
}

// result contains the figures of one number of hosts.
type result struct {
	hosts, clusters, machines      int
	connect, provision, create     measure.Step
	rest                           measure.Rest
	work                           time.Duration // the processor time of a fixed piece of work while machines were created
	lost                           float64
	busiest, leastBusy, hostsInUse int
}

// perMachine is the manager's processor time for a machine, in milliseconds.
func (r *result) perMachine() float64 { return r.create.CPU.Seconds() * 1000 / float64(r.machines) }

// perMachineAlone is perMachine without the work that the manager also does at rest: the more machines there are, the longer they start.
func (r *result) perMachineAlone() float64 {
	atRest := r.rest.Cost.CPU.Seconds() / r.rest.Quiet.Seconds()
	return (r.create.CPU.Seconds() - atRest*r.create.Measured) * 1000 / float64(r.machines)
}

// inWork returns milliseconds as a multiple of the fixed piece of work: the speed of the box changes between two numbers of hosts.
func (r *result) inWork(ms float64) float64 { return ms / (r.work.Seconds() * 1000) }

func (r *result) print(first *result) {
	fmt.Printf("%d hosts, %d clusters, %d machines\n", r.hosts, r.clusters, r.machines)
	line := func(what string, p measure.Step, n int) {
		per := float64(n)
		fmt.Printf("  %-26s %8.1f s %8.1f/s %8.1f ms of the manager's CPU each, %.1f writes each\n",
			what, p.Seconds, per/p.Seconds, p.CPU.Seconds()*1000/per, float64(p.Ours)/per)
	}
	line("hosts Ready", r.connect, r.hosts)
	line("clusters provisioned", r.provision, r.clusters)
	line("machines placed and running", r.create, r.machines)
	fmt.Printf("  machines on a host: %d to %d, on %d hosts\n", r.leastBusy, r.busiest, r.hostsInUse)
	fmt.Printf("  memory of the manager: %d MiB, %.2f MiB for each host with its machines\n", r.create.RSS>>20, float64(r.create.RSS>>20)/float64(r.hosts))
	fmt.Printf("  at rest after %.0f s: in %.0f s %d writes to our objects and %.1f s of the manager's CPU\n",
		r.rest.Settled.Seconds(), r.rest.Quiet.Seconds(), r.rest.Cost.Ours, r.rest.Cost.CPU.Seconds())
	fmt.Printf("  a stopped host is reported after %.1f s\n", r.lost)
	fmt.Printf("  manager's CPU for a machine: %.2f ms, %.2f x that of the first line\n", r.perMachine(), r.perMachine()/first.perMachine())
	fmt.Printf("  without its work at rest: %.2f ms, %.2f x that of the first line\n", r.perMachineAlone(), r.perMachineAlone()/first.perMachineAlone())
	fmt.Printf("  a fixed piece of work took %.1f ms of CPU meanwhile; in multiples of it, a machine cost %.2f x that of the first line, without the work at rest %.2f x\n\n",
		r.work.Seconds()*1000, r.inWork(r.perMachine())/first.inWork(first.perMachine()), r.inWork(r.perMachineAlone())/first.inWork(first.perMachineAlone()))
}
