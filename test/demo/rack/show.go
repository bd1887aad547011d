//go:build e2e

package main

import (
	"context"
	"fmt"
	"os"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"k8s.io/client-go/tools/clientcmd"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/test/e2e/harness"
	"capstan.dev/capstan/test/rack"
)

const (
	cluster = "demo"
	// before and after are the times of writes around the loss.
	before, after = 5 * time.Second, 12 * time.Second
)

// play is the state of the demonstration.
type play struct {
	*stage
	plane   *harness.Plane
	boxes   []*rack.Box
	lost    *rack.Box
	started time.Time
}

func show(ctx context.Context) error {
	return perform(ctx, func(ctx context.Context, s *stage) {
		p := &play{stage: s, started: time.Now()}
		p.build(ctx)
		w := p.writer(ctx)
		p.placement(ctx)
		p.lose(ctx, w)
	})
}

func (p *play) say(format string, args ...any) {
	fmt.Printf("%6.1f s  %s\n", time.Since(p.started).Seconds(), fmt.Sprintf(format, args...))
}

func (p *play) must(err error) {
	if err != nil {
		p.Fatalf("%w", err)
	}
}

// build creates the management plane, the hosts and the cluster.
func (p *play) build(ctx context.Context) {
	p.say("Starting a management plane ...")
	plane, err := harness.Start()
	if plane != nil {
		p.Cleanup(func() { p.must(plane.Down()) })
	}
	p.must(err)
	p.plane = plane
	p.say("Starting three hosts, each with its own network, mounts and capstand ...")
	p.boxes, _ = rack.Register(ctx, p, plane, 3)
	p.Cleanup(p.endHosts)
	p.say("Creating a cluster with three control plane machines and three workers ...")
	p.Cleanup(p.removeCluster)
	_, err = plane.Capstan(ctx, "create", "cluster", cluster, "--control-plane-machines", "3", "--workers", "3")
	p.must(err)
}

// writer returns a client that connects to the endpoint, as users do.
func (p *play) writer(ctx context.Context) *rack.Writer {
	kubeconfig, err := p.plane.Capstan(ctx, "get", "kubeconfig", cluster)
	p.must(err)
	config, err := clientcmd.RESTConfigFromKubeConfig([]byte(kubeconfig))
	p.must(err)
	w, err := rack.NewWriter(config)
	p.must(err)
	return w
}

// placement prints the machines of each host, and which one has the endpoint.
func (p *play) placement(ctx context.Context) {
	list := &infrav1.CapstanMachineList{}
	p.must(p.plane.Client.List(ctx, list, client.InNamespace("default"), client.MatchingLabels{clusterv1.ClusterNameLabel: cluster}))
	controlPlanes, workers := map[string][]string{}, map[string][]string{}
	for i := range list.Items {
		m := &list.Items[i]
		role := workers
		if _, ok := m.Labels[clusterv1.MachineControlPlaneLabel]; ok {
			role = controlPlanes
		}
		role[m.Spec.HostName] = append(role[m.Spec.HostName], m.Name)
	}
	holder := rack.Holder(p, p.boxes)
	fmt.Println()
	table := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "HOST\tADDRESS\tCONTROL PLANE\tWORKERS\tENDPOINT")
	for _, b := range p.boxes {
		endpoint := ""
		if b == holder {
			endpoint = rack.VirtualAddress
		}
		fmt.Fprintf(table, "%s\t%s\t%s\t%s\t%s\n", b.Name(), b.Tunnel(), strings.Join(controlPlanes[b.Name()], " "), strings.Join(workers[b.Name()], " "), endpoint)
	}
	p.must(table.Flush())
	fmt.Println()
}

// lose cuts off the host of the endpoint while the client writes.
func (p *play) lose(ctx context.Context, w *rack.Writer) {
	p.say("A client writes to https://%s:6443, one object after another ...", rack.VirtualAddress)
	writes, err := w.Write(ctx, before)
	p.must(err)
	p.say("All hosts are well: %s", writes)
	p.lost = rack.Holder(p, p.boxes)
	p.say("Cutting off %s, which has the endpoint ...", p.lost.Name())
	p.lost.Lose()
	writes, err = w.Write(ctx, after)
	p.must(err)
	lost, err := w.Lost(ctx)
	p.must(err)
	now := rack.Holder(p, rack.Others(p.boxes, p.lost))
	fmt.Printf(`
  endpoint                          %s -> %s
  seconds without successful write  %.1f
  failed writes                     %d
  acknowledged writes               %d
  acknowledged writes that are lost %d

`, p.lost.Name(), now.Name(), writes.Longest.Seconds(), writes.Failed, writes.Acknowledged, len(lost))
	if len(lost) > 0 {
		p.Fatalf("the cluster lost acknowledged writes: %v", lost)
	}
}

// removeCluster deletes the cluster. A lost host returns before: deletions wait for it.
func (p *play) removeCluster() {
	if p.err == nil {
		p.say("Done. Removing the cluster and the hosts ...")
	} else {
		p.say("Ended: %v. Removing the cluster and the hosts ...", p.err)
	}
	if p.lost != nil {
		p.lost.Return()
	}
	_, err := p.plane.Capstan(context.Background(), "delete", "cluster", cluster)
	p.must(client.IgnoreNotFound(err))
}

func (p *play) endHosts() {
	for _, b := range p.boxes {
		b.End(syscall.SIGTERM)
	}
}
