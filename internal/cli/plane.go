package cli

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os/signal"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"capstan.dev/capstan/internal/embedded"
)

func (a *app) upCommand() *cobra.Command {
	o := embedded.Options{}
	var noHosts bool
	var timeout time.Duration
	c := &cobra.Command{
		Use: "up", Short: "Start the management plane of this box", Args: noArgs,
		Long: "Start the management plane of this box and wait until it is ready. If it runs already, the command only waits, and applies the flags.",
		RunE: func(c *cobra.Command, _ []string) error {
			ctx, cancel := withTimeout(c.Context(), timeout)
			defer cancel()
			if noHosts {
				o.Hosts = -1
			}
			if err := o.Backup.Absolute(); err != nil {
				return err
			}
			status, err := a.up(ctx, o)
			if err != nil {
				return err
			}
			if a.json() {
				return a.printJSON(status)
			}
			fmt.Fprintf(a.out, "\nThe management plane is ready: export KUBECONFIG=%s\n", a.layout().AdminKubeconfig())
			return nil
		},
	}
	c.Flags().IntVar(&o.Hosts, "hosts", 0, "number of hosts on this box, each with its own capstand and failure domain (default: unchanged, at first 1)")
	c.Flags().BoolVar(&noHosts, "no-hosts", false, "run no host on this box: all hosts are other boxes")
	c.Flags().StringVar(&o.Listen, "listen", "", "address, host:port, on which the host of this box also serves remote management planes; needs the certificates of 'capstan host credentials'; none ends it (default: unchanged)")
	c.Flags().StringVar(&o.CoreFeatureGates, "core-feature-gates", "", "feature gates of Cluster API, for example MachineTaintPropagation=true; none removes all (default: unchanged)")
	c.MarkFlagsMutuallyExclusive("hosts", "no-hosts")
	scheduleFlags(c.Flags(), &o.Backup)
	c.Flags().DurationVar(&timeout, "timeout", 3*time.Minute, "time limit; 0 for none")
	return c
}

// up starts the plane and shows the progress of each component.
func (a *app) up(ctx context.Context, o embedded.Options) (embedded.Status, error) {
	o.Root, o.Assets = a.root, a.assets
	p := a.newProgress()
	defer p.close()
	return embedded.Up(ctx, o, func(s embedded.Status) { p.show(planeSteps(s)) })
}

// planeSteps returns the steps of the start of a plane.
func planeSteps(s embedded.Status) []step {
	steps := []step{}
	for _, c := range s.Components {
		steps = append(steps, step{name: componentTitle(c.Name), done: c.State == embedded.ProcessReady, note: c.Message})
		if c.Name == "kube-apiserver" {
			steps = append(steps, step{name: "CRDs, roles and webhooks", done: s.Installed})
		}
	}
	return append(steps, step{name: "management plane", done: s.Ready, note: s.Error})
}

func componentTitle(name string) string {
	switch name {
	case "kube-apiserver":
		return "API server"
	case "kube-controller-manager":
		return "controller manager"
	case "capi-core-manager":
		return "Cluster API"
	case "manager":
		return "Capstan's providers"
	}
	return name
}

func (a *app) downCommand() *cobra.Command {
	var keepState bool
	c := &cobra.Command{
		Use: "down", Short: "Remove the management plane and every cluster of this box", Args: noArgs,
		Long: "Stop the management plane. Remove each machine, load balancer and network of the installation, and its root folder.",
		RunE: func(c *cobra.Command, _ []string) error {
			start := time.Now()
			return embedded.Down(c.Context(), embedded.Options{Root: a.root, Assets: a.assets}, keepState, func(what string) {
				fmt.Fprintf(a.errOut, "%6.1fs  %s\n", time.Since(start).Seconds(), what)
			})
		},
	}
	c.Flags().BoolVar(&keepState, "keep-state", false, "only stop the management plane; clusters keep running, and 'capstan up' starts the plane again")
	return c
}

func (a *app) planeCommand() *cobra.Command {
	var supervisor embedded.Supervisor
	c := &cobra.Command{
		Use: "plane", Short: "Run the management plane in the foreground (for service managers)", Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			ctx, stop := signal.NotifyContext(c.Context(), syscall.SIGTERM, syscall.SIGINT)
			defer stop()
			return embedded.Run(ctx, a.layout(), supervisor)
		},
	}
	c.Flags().StringVar(&supervisor.Unit, "unit", "", "systemd unit that runs this command (%n); it takes over a plane that runs already, and 'capstan up' restarts the unit after an upgrade")
	c.Flags().IntVar(&supervisor.NotifyFD, "notify-fd", 0, "file descriptor to write to when the status can be read")
	_ = c.Flags().MarkHidden("notify-fd")
	return c
}

func (a *app) statusCommand() *cobra.Command {
	return &cobra.Command{
		Use: "status", Short: "Show the state of the management plane", Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			status, err := embedded.GetStatus(c.Context(), a.layout())
			if err != nil {
				return a.noPlane(err)
			}
			if a.json() {
				return a.printJSON(status)
			}
			w := tabwriter.NewWriter(a.out, 0, 0, 2, ' ', 0)
			fmt.Fprintf(w, "Root:\t%s\nServer:\t%s\nKubernetes:\t%s\nUnit:\t%s\nReady:\t%v\n", status.Root, status.Server, status.KubernetesVersion, cmp.Or(status.Unit, "none"), status.Ready)
			for _, certificate := range status.CertificatesExpiring {
				fmt.Fprintf(w, "Certificate not renewed:\t%s\n", certificate)
			}
			if status.EtcdAlarms != "" {
				fmt.Fprintf(w, "Alarms of etcd:\t%s\n", status.EtcdAlarms)
			}
			printBackups(w, status)
			fmt.Fprintln(w, "\nCOMPONENT\tSTATE\tPID\tRESTARTS\tMESSAGE")
			for _, p := range status.Components {
				fmt.Fprintf(w, "%s\t%s\t%d\t%d\t%s\n", p.Name, p.State, p.PID, p.Restarts, p.Message)
			}
			return w.Flush()
		},
	}
}

// noPlane returns the reason why the management plane does not answer, and the solution.
func (a *app) noPlane(err error) error {
	if _, stateErr := embedded.LoadState(a.layout()); errors.Is(stateErr, fs.ErrNotExist) {
		return coded{fmt.Errorf("there is no management plane in %s: create one with `capstan up`", a.root), exitNotFound}
	}
	if errors.Is(err, fs.ErrPermission) {
		return embedded.ErrNotRoot
	}
	return fmt.Errorf("the management plane in %s does not answer: start it with `capstan up` (%w)", a.root, err)
}

func (a *app) versionCommand() *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "Show the versions of Capstan and Kubernetes", Args: noArgs,
		RunE: func(*cobra.Command, []string) error {
			assets, err := a.assetsDir()
			if err != nil {
				return err
			}
			kubernetes, err := embedded.KubernetesVersions(assets)
			if err != nil {
				return err
			}
			if a.json() {
				return a.printJSON(map[string]any{"capstan": embedded.Version, "kubernetes": kubernetes})
			}
			fmt.Fprintf(a.out, "capstan %s\nKubernetes %v\n", embedded.Version, kubernetes)
			return nil
		},
	}
}

func (a *app) assetsDir() (embedded.Assets, error) {
	dir, err := embedded.AssetsDir(a.assets)
	return embedded.Assets{Dir: dir}, err
}

func (a *app) printJSON(v any) error {
	e := json.NewEncoder(a.out)
	e.SetIndent("", "  ")
	return e.Encode(v)
}

func noArgs(c *cobra.Command, args []string) error {
	if err := cobra.NoArgs(c, args); err != nil {
		return coded{err, exitUsage}
	}
	return nil
}

func withTimeout(ctx context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	if d <= 0 {
		return context.WithCancel(ctx)
	}
	return context.WithTimeoutCause(ctx, d, fmt.Errorf("not complete after %s: %w", d, context.DeadlineExceeded))
}
