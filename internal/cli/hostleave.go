//go:build linux

package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/embedded"
	"capstan.dev/capstan/internal/host/credentials"
	"capstan.dev/capstan/internal/host/statelock"
)

// leaveOptions are the flags of `capstan host leave`.
type leaveOptions struct {
	dir, defaults string
	force         bool
	// systemd exists if systemd runs.
	systemd string
}

func (a *app) hostLeaveCommand() *cobra.Command {
	o := leaveOptions{defaults: "/etc/default/capstand", systemd: systemdFolder}
	var timeout time.Duration
	c := &cobra.Command{
		Use: "leave", Short: "Leave the management cluster that this host has joined", Args: cobra.NoArgs,
		Long: `Leave the management cluster that this host has joined with 'capstan host join'.

The command stops and disables capstand.service, and removes the certificates, the key and the options that the join made. It removes
nothing else: the state folder with the backups of etcd, the packages and other options stay. Drain the host before. The command
refuses a host that still has machines, load balancers or volumes. If it was interrupted, run it again.`,
		RunE: func(c *cobra.Command, _ []string) error {
			ctx, cancel := withTimeout(c.Context(), timeout)
			defer cancel()
			return a.leave(ctx, o)
		},
	}
	f := c.Flags()
	f.StringVar(&o.dir, "dir", "/var/lib/capstan/host/tls", "folder with the certificates: the folder tls in capstand's --root")
	f.BoolVar(&o.force, "force", false, "leave although the host has machines, load balancers or volumes. Machines and load balancers run until the box restarts, and nothing manages them. The data of volumes stays")
	f.DurationVar(&timeout, "timeout", 2*time.Minute, "time limit; 0 for none")
	return c
}

// leave undoes a join. The record of the join is removed last, so that a second run completes an interrupted one.
func (a *app) leave(ctx context.Context, o leaveOptions) error {
	if os.Geteuid() != 0 {
		return embedded.ErrNotRoot
	}
	record, err := readJoinRecord(o.dir)
	if err != nil {
		return fmt.Errorf("expected the record of the join: %w; if the file is damaged, remove %s, and run `systemctl disable --now %s`", err, o.dir, capstandUnit)
	}
	if record == nil {
		return a.neverJoined(o)
	}
	left, err := occupants(filepath.Dir(o.dir))
	if err != nil {
		return err
	}
	if len(left) > 0 && !o.force {
		return occupied(record.Request.Name, left)
	}
	for _, step := range a.leaveSteps(o, record) {
		if err := step(ctx); err != nil {
			return err
		}
	}
	return a.printLeft(o, record)
}

// neverJoined changes nothing, except that it removes the empty folder of a leave that was interrupted.
func (a *app) neverJoined(o leaveOptions) error {
	why := ""
	if atomicfile.Exists(filepath.Join(o.dir, "ca.key")) {
		why = " It has credentials of `capstan host credentials`. To remove it from its management cluster, delete its CapstanHost there, stop capstand, and remove " + o.dir + "."
	}
	_ = os.Remove(o.dir) // fails if it is not empty
	_, err := fmt.Fprintf(a.out, "This host has not joined a management cluster: there is no %s. Nothing was changed.%s\n", filepath.Join(o.dir, joinedFile), why)
	return err
}

// leaveSteps returns the steps of leave, in order. Each can be repeated.
func (a *app) leaveSteps(o leaveOptions, record *joinRecord) []func(context.Context) error {
	return []func(context.Context) error{
		func(ctx context.Context) error { return a.stopCapstand(ctx, o, record.Request.Name) },
		func(context.Context) error {
			a.step("Removing the options of the join from %s", o.defaults)
			return unsetDefaults(o.defaults, record.Options, record.MadeDefaults)
		},
		func(context.Context) error {
			a.step("Removing the key and the certificates from %s", o.dir)
			files := credentials.In(o.dir)
			unfinished, err := filepath.Glob(filepath.Join(o.dir, ".new-*")) // of a join that was killed
			return errors.Join(err, removeFiles(o.dir, append(unfinished, files.Key, files.Cert, files.ClientCA)...))
		},
		func(context.Context) error {
			a.step("Removing the record of the join")
			return removeFiles(o.dir, filepath.Join(o.dir, joinedFile))
		},
		func(context.Context) error {
			_ = os.Remove(o.dir) // fails if it has other files, which stay
			return nil
		},
	}
}

// removeFiles removes files of a folder durably. Those that do not exist are no error.
func removeFiles(dir string, paths ...string) (err error) {
	for _, path := range paths {
		err = errors.Join(err, atomicfile.Remove(path))
	}
	return errors.Join(err, atomicfile.SyncDir(dir))
}

// stopCapstand ends capstand for good. A capstand that runs would use its certificates from memory.
func (a *app) stopCapstand(ctx context.Context, o leaveOptions, name string) error {
	root := filepath.Dir(o.dir)
	unit := atomicfile.Exists(o.systemd)
	if unit {
		state, err := unitState(ctx)
		if err != nil {
			return err
		}
		unit = state != "not-found" // The package was removed.
	}
	if unit {
		a.step("Stopping %s", capstandUnit)
		if _, err := systemctl(ctx, "stop"); err != nil {
			return err
		}
	}
	unlock, err := statelock.Lock(root)
	if err != nil {
		return fmt.Errorf("expected that no capstand runs, found one that %s did not start: stop it, and run the command again: %w", capstandUnit, err)
	}
	left, err := occupants(root) // A manager may have created a machine before capstand stopped.
	unlock()
	if err == nil && len(left) > 0 && !o.force {
		err = occupied(name, left)
		if unit {
			_, started := systemctl(ctx, "start")
			err = errors.Join(err, started)
		}
	}
	if err != nil || !unit {
		return err
	}
	a.step("Disabling %s", capstandUnit)
	_, err = systemctl(ctx, "disable")
	return err
}

// occupants returns everything of a state folder that only the management cluster of the host can remove in order.
func occupants(root string) ([]string, error) {
	running, err1 := running(root)
	volumes, err2 := recorded(root, "volumes", "volume")
	return append(running, volumes...), errors.Join(err1, err2)
}

// running returns the machines and load balancers of a state folder.
func running(root string) ([]string, error) {
	machines, err1 := recorded(root, "machines", "machine")
	balancers, err2 := recorded(root, "balancers", "load balancer")
	return append(balancers, machines...), errors.Join(err1, err2)
}

// recorded returns the names of the objects in a folder of a state folder.
func recorded(root, folder, kind string) (out []string, err error) {
	entries, err := os.ReadDir(filepath.Join(root, folder))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	for _, entry := range entries {
		out = append(out, kind+" "+occupantName(filepath.Join(root, folder, entry.Name())))
	}
	slices.Sort(out)
	return out, nil
}

// occupantName returns namespace and name of an object, or its id if the record is damaged.
func occupantName(dir string) string {
	var spec struct{ Namespace, Name string }
	data, err := os.ReadFile(filepath.Join(dir, "spec.json"))
	if err != nil || json.Unmarshal(data, &spec) != nil || spec.Name == "" {
		return filepath.Base(dir)
	}
	return spec.Namespace + "/" + spec.Name
}

// occupied is the error of a host that is in use, with the way out.
func occupied(name string, left []string) error {
	return fmt.Errorf(`expected a host without machines, load balancers and volumes, found %s.
Drain the host from its management cluster, while capstand runs here:
  kubectl patch capstanhost %s --type=merge -p '{"spec":{"drain":true}}'
  kubectl wait capstanhost %s --for=condition=Drained --timeout=1h
Delete the clusters whose load balancers are here, or move these load balancers. Copy the data of volumes that you need, and delete their
CapstanVolumes, which deletes the data. Then run this command again, or with --force to leave the machines running without management,
and the data of volumes on this host`, strings.Join(left, ", "), name, name)
}

// printLeft prints the next steps of the administrator.
func (a *app) printLeft(o leaveOptions, record *joinRecord) error {
	name, root := record.Request.Name, filepath.Dir(o.dir)
	running, err1 := running(root)
	volumes, err2 := recorded(root, "volumes", "volume")
	networks, err3 := recorded(root, "networks", "network")
	if err := errors.Join(err1, err2, err3); err != nil {
		return err
	}
	fmt.Fprintf(a.out, "This host has left %s.\n\nWhat remains:\n- the folder %s with the id of the host and backups of etcd\n- the packages\n", record.Server, root)
	if record.Options == nil {
		fmt.Fprintf(a.out, "- the options in %s: an older version of Capstan joined, which did not record those that it added\n", o.defaults)
	}
	if len(running) > 0 {
		fmt.Fprintf(a.out, "- %s, which run until this box restarts. To end them, restart the box, and remove %s and %s\n", strings.Join(running, ", "), filepath.Join(root, "machines"), filepath.Join(root, "balancers"))
	}
	if len(volumes) > 0 {
		fmt.Fprintf(a.out, "- the data of %s. Nothing else has it: copy the file systems, %s, before you remove the folder\n", strings.Join(volumes, ", "), filepath.Join(root, "volumes", "*", "disk.img"))
	}
	if len(networks) > 0 {
		fmt.Fprintf(a.out, "- %s: links and firewall rules. Restart the box, and remove %s before you join another management cluster\n", strings.Join(networks, ", "), filepath.Join(root, "networks"))
	}
	fmt.Fprintf(a.out, "\nRemove the host from the management cluster. This also removes the credentials with which managers connected to it:\n")
	if len(running)+len(volumes) > 0 {
		fmt.Fprintf(a.out, "  kubectl annotate capstanhost %s infrastructure.capstan.dev/abandoned=\n", name)
	}
	_, err := fmt.Fprintf(a.out, "  kubectl delete capstanhost %s\n", name)
	return err
}
