package cli

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/duration"
	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
)

func (a *app) hostPruneCommand() *cobra.Command {
	var all bool
	c := &cobra.Command{
		Use: "prune HOST [ID...]", Short: "List the machines of a host without a CapstanMachine, and remove named ones",
		Long: `List the machines of a host that belong to the management cluster and have no CapstanMachine. A restore of an
old etcd backup of the management cluster leaves such machines behind.

With ids, the host removes these machines and their disks. With --yes, it removes all listed machines. This cannot be
undone. Machines of other management clusters are never listed or removed.`,
		Args: cobra.MinimumNArgs(1),
		PreRunE: func(_ *cobra.Command, args []string) error {
			if all && len(args) > 1 {
				return coded{fmt.Errorf("expected ids or --yes, found both: give one of them"), exitUsage}
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			m, err := a.management()
			if err != nil {
				return err
			}
			return a.prune(cmd.Context(), m.client, args[0], args[1:], all)
		},
	}
	c.ValidArgsFunction = a.completeNames(new(string), described["host"]...)
	c.Flags().BoolVar(&all, "yes", false, "remove all listed machines and their disks")
	return c
}

func (a *app) prune(ctx context.Context, c client.Client, name string, ids []string, all bool) error {
	host := &infrav1.CapstanHost{}
	if err := c.Get(ctx, client.ObjectKey{Name: name}, host); apierrors.IsNotFound(err) {
		return coded{fmt.Errorf("there is no CapstanHost %s: `kubectl get capstanhosts` lists all", name), exitNotFound}
	} else if err != nil {
		return err
	}
	remove, err := pruned(host.Status.UnknownMachines, ids, all)
	if err != nil {
		return coded{err, exitNotFound}
	}
	if len(remove) == 0 {
		return a.printUnknown(host)
	}
	before := host.DeepCopy()
	metav1.SetMetaDataAnnotation(&host.ObjectMeta, infrav1.HostPruneAnnotation, strings.Join(remove, ","))
	if err := c.Patch(ctx, host, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})); err != nil {
		return err
	}
	_, err = fmt.Fprintf(a.out, "Host %s will remove: %s\n", name, strings.Join(remove, ", "))
	return err
}

// pruned returns the ids to remove. An id that is not listed is an error, and then no machine is removed.
func pruned(unknown []infrav1.UnknownMachine, ids []string, all bool) (remove []string, err error) {
	for _, u := range unknown {
		if all || slices.Contains(ids, u.ID) {
			remove = append(remove, u.ID)
		}
	}
	for _, id := range ids {
		if !slices.Contains(remove, id) {
			return nil, fmt.Errorf("expected ids of machines without a CapstanMachine, found %q, which is not one of them: run the command without ids to list them", id)
		}
	}
	return remove, nil
}

func (a *app) printUnknown(host *infrav1.CapstanHost) error {
	if a.structured() {
		return a.print(host.Status.UnknownMachines)
	}
	if len(host.Status.UnknownMachines) == 0 {
		_, err := fmt.Fprintf(a.out, "Each machine of host %s has a CapstanMachine, or belongs to another management cluster.\n", host.Name)
		return err
	}
	out := tabwriter.NewWriter(a.out, 0, 8, 2, ' ', 0)
	fmt.Fprintln(out, "ID\tNAMESPACE\tNAME\tCLUSTER\tADDRESSES\tUNKNOWN FOR")
	for _, u := range host.Status.UnknownMachines {
		fmt.Fprintf(out, "%s\t%s\t%s\t%s\t%s\t%s\n", u.ID, u.Namespace, u.Name, u.Cluster, strings.Join(u.Addresses, ","), duration.HumanDuration(time.Since(u.Since.Time)))
	}
	if err := out.Flush(); err != nil {
		return err
	}
	_, err := fmt.Fprintf(a.out, "\nNo machine was removed. To remove machines and their disks: capstan host prune %s ID...\n", host.Name)
	return err
}
