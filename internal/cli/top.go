package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"capstan.dev/capstan/internal/cli/diagnosis"
)

// column is a column of a table: a heading and the value of an object.
type column struct {
	heading string
	value   func(*unstructured.Unstructured) string
}

func path(heading, path string) column {
	return column{heading, func(o *unstructured.Unstructured) string { return field(o, path) }}
}

// outOf is the part of a total, for example 2/3.
func outOf(heading, part, total string) column {
	return column{heading, func(o *unstructured.Unstructured) string {
		have, want := field(o, part), field(o, total)
		if have == "" && want == "" {
			return ""
		}
		return cmp.Or(humanSize(have), "0") + "/" + cmp.Or(humanSize(want), "0")
	}}
}

// humanSize is a value for people: hosts report sizes in Ki. Documents for programs have the value as it is.
func humanSize(value string) string {
	q, err := resource.ParseQuantity(value)
	if err != nil || !strings.HasSuffix(value, "Ki") {
		return value
	}
	return fmt.Sprintf("%.1fGi", float64(q.Value())/(1<<30))
}

// topColumns are the columns of each kind, besides namespace, name, and the reason of a wait.
var topColumns = map[string][]column{
	"cluster": {
		path("PHASE", "status.phase"),
		outOf("CONTROL PLANE", "status.controlPlane.readyReplicas", "status.controlPlane.desiredReplicas"),
		outOf("WORKERS", "status.workers.readyReplicas", "status.workers.desiredReplicas"),
	},
	"machine": {path("PHASE", "status.phase"), path("CLUSTER", "spec.clusterName"), path("VERSION", "status.nodeInfo.kubeletVersion"), path("NODE", "status.nodeRef.name")},
	"host": {
		path("MACHINES", "status.machines"), outOf("FREE CPUS", "status.allocatable.cpu", "status.capacity.cpu"),
		outOf("FREE MEMORY", "status.allocatable.memory", "status.capacity.memory"),
		outOf("UNCLAIMED DISK", "status.allocatable.ephemeral-storage", "status.capacity.ephemeral-storage"), path("KUBERNETES", "status.versions"),
	},
	"pool": {
		path("TOTAL", "status.addresses.total"), path("FREE", "status.addresses.free"), path("USED", "status.addresses.used"),
		path("WAITING CLAIMS", "status.addresses.waiting"),
	},
	"machinepool": {
		path("CLUSTER", "spec.clusterName"), path("VERSION", "spec.template.spec.version"), outOf("READY", "status.readyReplicas", "spec.replicas"),
		outOf("UP TO DATE", "status.upToDateReplicas", "spec.replicas"),
	},
}

func (a *app) topCommand() *cobra.Command {
	var namespace string
	c := &cobra.Command{
		Use: "top [clusters|machines|hosts|pools|machinepools]", Short: "Show clusters, machines, hosts, pools and machine pools, their sizes and their waits",
		ValidArgs: []string{"clusters", "machines", "hosts", "pools", "machinepools"},
		Args: func(c *cobra.Command, args []string) error {
			if len(args) == 0 || len(args) == 1 && described[singular(args[0])] != nil {
				return nil
			}
			return coded{fmt.Errorf("expected nothing, or one of %s, found %q", strings.Join(c.ValidArgs, ", "), args), exitUsage}
		},
		RunE: func(c *cobra.Command, args []string) error {
			m, err := a.management()
			if err != nil {
				return err
			}
			kinds := describedOrder
			if len(args) == 1 {
				kinds = []string{singular(args[0])}
			}
			return a.top(c.Context(), m, kinds, namespace)
		},
	}
	c.Flags().StringVarP(&namespace, "namespace", "n", "", "namespace (default: all)")
	return c
}

func (a *app) top(ctx context.Context, m *management, kinds []string, namespace string) error {
	reports := map[string]any{}
	for i, kind := range kinds {
		objects, err := m.all(ctx, kind, namespace)
		if err != nil {
			return err
		}
		if a.structured() {
			reports[kind+"s"] = reportsOf(topRows(objects))
			continue
		}
		if i > 0 {
			fmt.Fprintln(a.out)
		}
		w := tabwriter.NewWriter(a.out, 0, 0, 2, ' ', 0)
		printTable(w, topTable(kind, topRows(objects), time.Now()))
		if err := w.Flush(); err != nil {
			return err
		}
	}
	if !a.structured() {
		printGaps(a.out, m.gaps)
		return m.noRights()
	}
	if len(m.gaps) > 0 {
		reports["unreadable"] = m.gaps
	}
	return errors.Join(a.print(reports), m.noRights())
}

// all returns the objects that users call by one kind, in all namespaces if namespace is empty.
func (m *management) all(ctx context.Context, kind, namespace string) (out []*unstructured.Unstructured, err error) {
	for _, gk := range described[kind] {
		list, err := m.listed(ctx, gk, namespace)
		if err != nil {
			return nil, err
		}
		out = append(out, list...)
	}
	return out, nil
}

// topRows returns the objects of each row: one, and with a MachinePool its CapstanMachinePool, whose conditions explain a wait of the pool.
func topRows(objects []*unstructured.Unstructured) (rows [][]*unstructured.Unstructured) {
	id := func(namespace, kind, name string) string { return namespace + "/" + kind + "/" + name }
	byID, shown := map[string]*unstructured.Unstructured{}, map[string]bool{}
	for _, o := range objects {
		byID[id(o.GetNamespace(), o.GetKind(), o.GetName())] = o
	}
	for _, o := range objects { // MachinePools are listed first
		const ref = "spec.template.spec.infrastructureRef"
		row := []*unstructured.Unstructured{o}
		part := id(o.GetNamespace(), field(o, ref+".kind"), field(o, ref+".name"))
		if infrastructure := byID[part]; infrastructure != nil && o.GetKind() == "MachinePool" {
			row = append(row, infrastructure)
			shown[part] = true
		}
		if !shown[id(o.GetNamespace(), o.GetKind(), o.GetName())] {
			rows = append(rows, row)
		}
	}
	return rows
}

// reportsOf returns the report of each row.
func reportsOf(rows [][]*unstructured.Unstructured) []report {
	out := []report{}
	for _, row := range rows {
		out = append(out, diagnose(row[0], row[1:], nil))
	}
	return out
}

func printTable(w io.Writer, rows [][]string) {
	for _, row := range rows {
		fmt.Fprintln(w, strings.Join(row, "\t"))
	}
}

// topTable returns the rows of a table, the heading first. Objects that wait come first, the longest wait at the top.
func topTable(kind string, objects [][]*unstructured.Unstructured, now time.Time) [][]string {
	head := []string{"NAMESPACE", strings.ToUpper(kind)}
	for _, c := range topColumns[kind] {
		head = append(head, c.heading)
	}
	type row struct {
		cells []string
		wait  *diagnosis.Waiting
	}
	var rows []row
	for _, all := range objects {
		o := all[0]
		r := row{cells: []string{cmp.Or(o.GetNamespace(), "-"), o.GetName()}}
		for _, c := range topColumns[kind] {
			r.cells = append(r.cells, cmp.Or(c.value(o), "-"))
		}
		if waits := diagnosis.WaitingFor(all); len(waits) > 0 {
			r.wait = &waits[0]
			r.cells = append(r.cells, strings.TrimSpace(waits[0].Condition+" "+waits[0].Reason), age(waits[0].Since, now))
		} else {
			r.cells = append(r.cells, "-", "-")
		}
		rows = append(rows, r)
	}
	slices.SortStableFunc(rows, func(a, b row) int {
		switch {
		case a.wait == nil && b.wait == nil:
			return 0
		case a.wait == nil:
			return 1
		case b.wait == nil:
			return -1
		}
		return a.wait.Since.Compare(b.wait.Since)
	})
	out := [][]string{append(head, "WAITING FOR", "SINCE")}
	for _, r := range rows {
		out = append(out, r.cells)
	}
	return out
}
