//go:build linux

package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"capstan.dev/capstan/internal/doctor"
	"capstan.dev/capstan/internal/embedded"
)

func (a *app) doctorCommand() *cobra.Command {
	var peers []string
	var host bool
	cmd := &cobra.Command{
		Use: "doctor", Short: "Check whether this box can run clusters", Args: cobra.NoArgs,
		Long: `Check whether this box can run clusters, and print a solution for each problem.
With --host, the box is checked as a host of a remote management plane, which needs less. This is the default if the folder of this
program contains the programs of a host only.`,
		RunE: func(c *cobra.Command, _ []string) error {
			addresses, err := doctor.ParsePeers(peers)
			if err != nil {
				return coded{err, exitUsage}
			}
			assets, err := a.assetsDir()
			if err != nil {
				return err
			}
			results, err := a.examine(c.Context(), host || onlyHost(assets))
			if err != nil {
				return err
			}
			results = append(results, doctor.CheckPeers(c.Context(), addresses)...)
			if a.structured() {
				err = a.print(results)
			} else {
				a.printResults(results, false)
			}
			if err == nil && !doctor.Fit(results) {
				err = errUnfit
			}
			return err
		},
	}
	cmd.Flags().BoolVar(&host, "host", false, "check a host of a remote management plane")
	cmd.Flags().StringSliceVar(&peers, "peer", nil, "tunnel addresses of other hosts: also measure the largest packet on the path to each of them (needs root)")
	return cmd
}

var errUnfit = coded{errors.New("this box cannot run clusters: fix the problems marked ✗"), exitUnfit}

// onlyHost reports whether the folder contains capstand and no manager of a management plane. The box is then a host of a
// remote management plane.
func onlyHost(assets embedded.Assets) bool {
	there := func(path string) bool { _, err := os.Stat(path); return err == nil }
	return there(assets.Capstand()) && !there(assets.Manager()) && !there(assets.CoreManager())
}

// examine collects the facts of this box and evaluates them. host: the box is a host only, without a management plane.
func (a *app) examine(ctx context.Context, host bool) ([]doctor.Result, error) {
	assets, err := a.assetsDir()
	if err != nil {
		return nil, err
	}
	facts := doctor.Gather(a.root)
	facts.Host = host
	plane, err := embedded.GetStatus(ctx, a.layout())
	facts.Running, facts.PlaneProblem, facts.PlaneLog = err == nil, plane.Problem(), plane.Log()
	facts.Machines = a.hasMachines()
	facts.FreePorts = embedded.FreePorts(doctor.WantedPorts)
	if problem := embedded.Enterable(a.root); facts.RootProblem == "" && problem != nil {
		facts.RootProblem = problem.Error()
	}
	if facts.Versions, err = embedded.KubernetesVersions(assets); err != nil {
		return nil, err
	}
	if facts.CertificatesExpiring, facts.AuthoritiesExpiring, err = embedded.CertificatesExpiring(a.layout(), time.Now()); err != nil {
		return nil, err
	}
	facts.MissingAssets, facts.Assets = missingAssets(assets, facts.Versions, host), doctor.FolderOf(assets.Dir)
	return doctor.Check(facts), nil
}

// hasMachines reports whether a host of this box has machines, those of capstand.service included.
func (a *app) hasMachines() bool {
	roots, _ := a.capstandRoots() // An unprivileged user cannot read them, and gets other results that are worse.
	return slices.ContainsFunc(roots, func(root string) bool {
		machines, _ := recorded(root, "machines", "machine")
		return len(machines) > 0
	})
}

func missingAssets(a embedded.Assets, versions []string, host bool) []string {
	var missing []string
	if len(versions) == 0 {
		missing = append(missing, a.Kubernetes())
	}
	wanted := []string{
		a.Capstand(), filepath.Join(a.Dir, "capstan-init"), a.Runc(),
		filepath.Join(a.Dir, "node", "bin", "containerd"), filepath.Join(a.Dir, "node", "cni", "ptp"), filepath.Join(a.Dir, "images", "pause.tar"),
	}
	if !host {
		wanted = append(wanted, a.Manager(), a.CoreManager(), a.CoreComponents())
	}
	for _, path := range wanted {
		if _, err := os.Stat(path); err != nil {
			missing = append(missing, path)
		}
	}
	return missing
}

// printResults prints the results. brief: only problems.
func (a *app) printResults(results []doctor.Result, brief bool) {
	marks := map[doctor.Level]string{doctor.OK: "✓", doctor.Info: "·", doctor.Warn: "!", doctor.Fail: "✗"}
	for _, r := range results {
		if brief && (r.Level == doctor.OK || r.Level == doctor.Info) {
			continue
		}
		fmt.Fprintf(a.out, "%s %s: %s\n", marks[r.Level], r.Name, r.Found)
		if r.Mend != "" && r.Level != doctor.OK {
			fmt.Fprintf(a.out, "    → %s\n", r.Mend)
		}
	}
}
