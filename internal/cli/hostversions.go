//go:build linux

package cli

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"capstan.dev/capstan/internal/embedded"
	"capstan.dev/capstan/internal/host/versions"
)

func (a *app) hostVersionsCommand() *cobra.Command {
	return group("versions", "List, add and remove the Kubernetes versions of this host",
		a.hostVersionsListCommand(), a.hostVersionsAddCommand(), a.hostVersionsRemoveCommand())
}

func (a *app) hostVersionsListCommand() *cobra.Command {
	return &cobra.Command{
		Use: "list", Short: "List the Kubernetes versions of this host, and their users", Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			store, err := a.versionStore()
			if err != nil {
				return err
			}
			list, err := store.List()
			if err != nil {
				return err
			}
			return a.printVersions(list)
		},
	}
}

func (a *app) hostVersionsAddCommand() *cobra.Command {
	var sums []string
	var caFile, version string
	var timeout time.Duration
	c := &cobra.Command{
		Use: "add SOURCE...", Short: "Add a Kubernetes version to this host",
		Long: `Add a Kubernetes version to this host. capstand reports it within seconds, without a restart.

A SOURCE is a folder with the programs, an archive (.tar.gz), or the http or https URL of an archive. Archives are those of a release of
Capstan, kubernetes-server-linux-ARCHITECTURE.tar.gz of upstream, and others with all programs in one folder. Upstream's archive contains
no etcd. Give etcd's archive as a second SOURCE, or the host can run only workers of this version. An archive of Capstan can contain
several versions: choose one with --version.

The command checks the programs before machines can use them. It runs each of them to compare its version. Use only sources that you
trust: the programs run as root in machines. The command can be interrupted and repeated.`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			sources, err := versionSources(args, sums, caFile)
			if err != nil {
				return coded{err, exitUsage}
			}
			if version != "" {
				if err := checkVersion(version); err != nil {
					return err
				}
			}
			ctx, cancel := withTimeout(c.Context(), timeout)
			defer cancel()
			return a.addVersion(ctx, versions.Request{Sources: sources, Version: version})
		},
	}
	f := c.Flags()
	f.StringArrayVar(&sums, "sha256", nil, "SHA-256 of the archive; for several sources repeat it in their order, empty for a folder. URLs need it")
	f.StringVar(&caFile, "ca-file", "", "file with the authorities, in PEM, of the server of a URL (default: those of this host)")
	f.StringVar(&version, "version", "", "version to add, for example v1.36.3 (default: that of the programs)")
	f.DurationVar(&timeout, "timeout", 30*time.Minute, "time limit; 0 for none")
	return c
}

// versionSources joins sources and checksums.
func versionSources(locations, sums []string, caFile string) (out []versions.Source, err error) {
	if len(sums) > 0 && len(sums) != len(locations) {
		return nil, fmt.Errorf("expected --sha256 once for each of %d sources, found it %d times", len(locations), len(sums))
	}
	for i, location := range locations {
		source := versions.Source{Location: location, CAFile: caFile}
		if len(sums) > 0 {
			source.SHA256 = sums[i]
		}
		err = errors.Join(err, source.Check())
		out = append(out, source)
	}
	return out, err
}

func checkVersion(name string) error {
	if !versions.Valid(name) {
		return coded{fmt.Errorf("expected a version such as v1.36.3, found %q", name), exitUsage}
	}
	return nil
}

func (a *app) hostVersionsRemoveCommand() *cobra.Command {
	var force bool
	c := &cobra.Command{
		Use: "remove VERSION", Short: "Remove a Kubernetes version from this host",
		Long: `Remove a Kubernetes version from this host. The command refuses a version that machines or the management plane of
this host use, and names them. Do not remove files of a Debian package in this way: remove the package.`,
		Args: cobra.ExactArgs(1),
		ValidArgsFunction: func(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			return a.completeVersions(args), cobra.ShellCompDirectiveNoFileComp
		},
		PreRunE: func(_ *cobra.Command, args []string) error { return checkVersion(args[0]) },
		RunE:    func(_ *cobra.Command, args []string) error { return a.removeVersion(args[0], force) },
	}
	c.Flags().BoolVar(&force, "force", false, "remove the version although it is used. Machines that use it fail at their next restart")
	return c
}

func (a *app) versionStore() (*versions.Store, error) {
	assets, err := a.assetsDir()
	return &versions.Store{Dir: assets.Kubernetes()}, err
}

func (a *app) completeVersions(args []string) (names []string) {
	store, err := a.versionStore()
	if err != nil || len(args) > 0 {
		return nil
	}
	list, _ := store.List() // Completion shows no errors.
	for _, v := range list {
		names = append(names, v.Name)
	}
	return names
}

func (a *app) addVersion(ctx context.Context, r versions.Request) error {
	if os.Geteuid() != 0 {
		return embedded.ErrNotRoot
	}
	store, err := a.versionStore()
	if err != nil {
		return err
	}
	v, added, err := store.Add(ctx, r)
	if err != nil {
		return missingFile(err)
	}
	if a.structured() {
		return a.print(v)
	}
	if !added {
		_, err = fmt.Fprintf(a.out, "This host already has Kubernetes %s with the same content.\n", v.Name)
		return err
	}
	_, err = fmt.Fprintf(a.out, "Kubernetes %s was added. capstand reports it within seconds.\n", v.Name)
	if len(v.Missing) > 0 {
		_, err = fmt.Fprintf(a.out, "This host can run only workers of this version: it has no %s.\n", strings.Join(v.Missing, ", "))
	}
	return err
}

func (a *app) removeVersion(name string, force bool) error {
	if os.Geteuid() != 0 {
		return embedded.ErrNotRoot
	}
	store, err := a.versionStore()
	if err != nil {
		return err
	}
	err = store.Remove(name, func() ([]string, error) { return a.versionUsers(name) }, force)
	if errors.Is(err, versions.ErrNotInstalled) {
		return coded{err, exitNotFound}
	}
	if err == nil {
		_, err = fmt.Fprintf(a.out, "Kubernetes %s was removed.\n", name)
	}
	return err
}

// capstandRoots returns the state folders that capstands of this box can have in --root: those of the plane, --root itself, and that of
// capstand.service.
func (a *app) capstandRoots() ([]string, error) {
	roots, err := filepath.Glob(a.layout().HostRoot("*"))
	return append(roots, a.root, a.layout().JoinedHost()), err
}

// versionUsers returns the users of a version: machines of the capstands with a state folder in --root, and the management plane there.
func (a *app) versionUsers(version string) ([]string, error) {
	roots, err := a.capstandRoots()
	if err != nil {
		return nil, err
	}
	users, err := versions.Machines(version, roots...)
	if err != nil {
		return nil, err
	}
	state, err := embedded.LoadState(a.layout())
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return users, nil
	case err == nil && state.KubernetesVersion == version:
		users = append(users, fmt.Sprintf("the management plane in %s (`capstan up%s --kubernetes-version` changes its version)", a.root, a.rootFlag()))
	}
	return users, err
}

// versionRow is a version and its users, for --output json.
type versionRow struct {
	versions.Version

	UsedBy []string `json:"usedBy,omitempty"`
}

func (a *app) printVersions(list []versions.Version) error {
	rows := []versionRow{}
	for _, v := range list {
		users, err := a.versionUsers(v.Name)
		if err != nil {
			return err
		}
		rows = append(rows, versionRow{v, users})
	}
	if a.structured() {
		return a.print(rows)
	}
	out := tabwriter.NewWriter(a.out, 0, 8, 2, ' ', 0)
	fmt.Fprintln(out, "VERSION\tSIZE\tCONTROL PLANES\tUSED BY")
	for _, row := range rows {
		controlPlanes := "yes"
		if len(row.Missing) > 0 {
			controlPlanes = "no: without " + strings.Join(row.Missing, ", ")
		}
		fmt.Fprintf(out, "%s\t%d MiB\t%s\t%s\n", row.Name, row.Bytes>>20, controlPlanes, strings.Join(row.UsedBy, ", "))
	}
	return out.Flush()
}
