//go:build linux

package cli

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/embedded"
)

func (a *app) downCommand() *cobra.Command {
	var keepState, yes bool
	c := &cobra.Command{
		Use: "down", Short: "Remove the management plane and every cluster of this box", Args: cobra.NoArgs,
		Long: `Stop the management plane. Remove each machine, load balancer and network of the installation, and its root folder, except for
backups and the folder host of capstand.service: its machines continue, until 'capstan host leave' or their management plane ends them.
If a host of this box also has machines of other management planes, the command asks before it removes them. It asks before it deletes
volumes that outlive machines, with their data. It also asks if the plane has machines on other boxes: they continue without a
management plane, and the keys of their clusters are deleted. If the management plane does not answer, the command asks as well: it does
not know which machines belong to the plane, and whether other boxes have some.`,
		RunE: func(c *cobra.Command, _ []string) error {
			if !keepState && !yes {
				if err := a.confirmDown(c.Context()); err != nil {
					return err
				}
			}
			return embedded.Down(c.Context(), embedded.Options{Root: a.root, Assets: a.assets, Unit: a.unit(), Wait: a.waits}, keepState, func(what string) { a.step("%s", what) })
		},
	}
	c.Flags().BoolVar(&keepState, "keep-state", false, "only stop the management plane; clusters keep running, and 'capstan up' starts the plane again")
	c.Flags().BoolVar(&yes, "yes", false, "remove without a question: machines of other management planes or of unknown ones, volumes with their data, the plane of machines on other boxes")
	return c
}

// confirmDown asks before machines of other planes, and data that outlives machines, are removed, and before machines on other boxes lose
// their plane. Only a running plane can separate its own machines from others, and list those on other boxes. While it does not run, each
// machine can belong to another plane, also if the host no longer listens for one, and any other box can have machines.
func (a *app) confirmDown(ctx context.Context) error {
	if !embedded.Installed(a.layout()) {
		return nil // Down removes nothing.
	}
	hosts, err := embedded.HostFolders(a.layout())
	if errors.Is(err, fs.ErrPermission) {
		return embedded.ErrNotRoot
	} else if err != nil {
		return err
	}
	state, err := embedded.LoadState(a.layout()) // Down does not need it.
	if errors.Is(err, fs.ErrPermission) {
		return embedded.ErrNotRoot
	}
	machines, clusters := "", a.removesPlane()
	if err == nil {
		machines, clusters, err = a.planeRemoves(ctx, state.Hosts)
	}
	if err != nil {
		machines = removesAny(state.Listen, a.stored(hosts, "machines", "machine"))
	}
	what := slices.DeleteFunc([]string{machines, clusters, removesVolumes(a.stored(hosts, "volumes", "volume"))}, func(s string) bool { return s == "" })
	if len(what) == 0 {
		return nil
	}
	question := strings.Join(what, "; and ")
	if err != nil {
		question += fmt.Sprintf(" (%v)", err)
	}
	return confirm(ctx, os.Stdin, a.errOut, term.IsTerminal(int(os.Stdin.Fd())), question)
}

// removesVolumes describes the removal of volumes; "" without volumes.
func removesVolumes(volumes []string) string {
	if len(volumes) == 0 {
		return ""
	}
	return "volumes with their data: " + strings.Join(volumes, ", ")
}

// removesOthers describes the removal of machines of other planes; "" without such machines.
func removesOthers(others []string) string {
	if len(others) == 0 {
		return ""
	}
	return fmt.Sprintf("%d machines of other management planes: %s", len(others), strings.Join(others, ", "))
}

// removesAny describes the removal of machines whose plane is unknown; "" without such machines.
func removesAny(listen string, machines []string) string {
	switch {
	case listen != "":
		return "all machines of its hosts, which serve other management planes on " + listen
	case len(machines) > 0:
		return "machines, possibly of other management planes: " + strings.Join(machines, ", ")
	}
	return ""
}

// removesPlaneOf describes the removal of the plane of machines on other boxes; "" without such machines.
func removesPlaneOf(elsewhere []string) string {
	if len(elsewhere) == 0 {
		return ""
	}
	return fmt.Sprintf("the management plane and the cluster keys of %d machines on other boxes: %s", len(elsewhere), strings.Join(elsewhere, ", "))
}

// removesPlane describes the removal of a plane that does not answer; "" if it never had objects. Its settings do not tell whether other
// boxes have its machines: it connects to hosts that joined without a token, and to those that joined before a change of the settings.
func (a *app) removesPlane() string {
	if !atomicfile.Exists(a.layout().Etcd()) {
		return ""
	}
	return "the management plane and the cluster keys of any machines on other boxes"
}

// stored lists the objects in a folder of each host of a plane, as capstand need not run. A folder that cannot be read may contain
// objects.
func (a *app) stored(hosts []string, folder, kind string) (all []string) {
	for _, host := range hosts {
		objects, err := recorded(a.layout().HostRoot(host), folder, kind)
		if err != nil {
			objects = []string{fmt.Sprintf("each %s of host %s (%v)", kind, host, err)}
		}
		all = append(all, objects...)
	}
	return all
}

// planeRemoves describes, according to a running plane, the removal of machines on this box that belong to no cluster of the plane, and
// the removal of the plane for those of its machines that are on other boxes. With an error, clusters is right and machines is unknown.
func (a *app) planeRemoves(ctx context.Context, hosts []string) (machines, clusters string, err error) {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	known, objects := &infrav1.CapstanClusterList{}, &infrav1.CapstanMachineList{}
	m, err := a.localManagement()
	if err == nil {
		err = errors.Join(m.client.List(ctx, known), m.client.List(ctx, objects))
	}
	if err != nil {
		return "", a.removesPlane(), fmt.Errorf("the plane of this box does not answer: %w", err)
	}
	clusters = removesPlaneOf(onOtherBoxes(objects.Items, hosts))
	all, err := a.localMachines(ctx)
	if err != nil {
		return "", clusters, err
	}
	return removesOthers(foreign(all, known.Items, objects.Items)), clusters, nil
}

// onOtherBoxes returns the machines on hosts that are none of this box.
func onOtherBoxes(machines []infrav1.CapstanMachine, hosts []string) (out []string) {
	for _, m := range machines {
		if m.Spec.HostName != "" && !slices.Contains(hosts, m.Spec.HostName) {
			out = append(out, m.Namespace+"/"+m.Name)
		}
	}
	slices.Sort(out)
	return out
}

// foreign returns the machines without a CapstanMachine whose network belongs to no CapstanCluster.
func foreign(all []located, clusters []infrav1.CapstanCluster, machines []infrav1.CapstanMachine) []string {
	ours := map[string]bool{}
	for _, c := range clusters {
		ours[c.Spec.ID] = true
	}
	for _, m := range machines {
		ours[m.Spec.ID] = true
	}
	delete(ours, "") // of objects that have no id yet
	var out []string
	for _, l := range all {
		if s := l.machine.GetSpec(); !ours[s.GetId()] && !ours[s.GetNetwork().GetId()] {
			out = append(out, s.GetNamespace()+"/"+s.GetName())
		}
	}
	slices.Sort(out)
	return out
}

// confirm asks a user on a terminal. Without a terminal, only a flag can confirm.
func confirm(ctx context.Context, in io.Reader, out io.Writer, terminal bool, what string) error {
	if !terminal {
		return coded{fmt.Errorf("the command would remove %s: repeat it with --yes to do so", what), exitUsage}
	}
	fmt.Fprintf(out, "This removes %s.\nType yes to continue: ", what)
	nothing := coded{errors.New("nothing was removed"), exitFailed}
	answered := make(chan error, 1)
	go func() { // A read of standard input does not end with a context.
		answer, err := bufio.NewReader(in).ReadString('\n')
		switch {
		case strings.TrimSpace(answer) == "yes":
			answered <- nil
		case err != nil && !errors.Is(err, io.EOF):
			answered <- err
		default:
			answered <- nothing
		}
	}()
	select {
	case err := <-answered:
		if ctx.Err() == nil {
			return err
		}
	case <-ctx.Done():
	}
	return nothing
}
