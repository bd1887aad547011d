//go:build linux

package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os/signal"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"capstan.dev/capstan/internal/cli/diagnosis"
	"capstan.dev/capstan/internal/embedded"
	"capstan.dev/capstan/internal/stall"
)

func (a *app) upCommand() *cobra.Command {
	o := embedded.Options{}
	var noHosts bool
	var timeout time.Duration
	c := &cobra.Command{
		Use: "up", Short: "Start the management plane of this box", Args: cobra.NoArgs,
		Long: "Start the management plane of this box and wait until it is ready. If it runs already, the command only waits, and applies the flags.",
		RunE: func(c *cobra.Command, _ []string) error {
			if noHosts {
				o.Hosts = -1
			}
			if err := checkTracing(c.Flags(), o.Tracing.Endpoint); err != nil {
				return err
			}
			if err := errors.Join(o.Backup.Absolute(), absolute(&o.Tracing.CAFile), absolute(&o.Tracing.CertFile), absolute(&o.Tracing.KeyFile)); err != nil {
				return err
			}
			if o.KubernetesVersion != "" {
				var err error
				if o.KubernetesVersion, err = parseVersion(o.KubernetesVersion); err != nil {
					return err
				}
			}
			status, err := a.up(c.Context(), o, timeout)
			if err != nil {
				return usage(err)
			}
			if o.Backup.To != "" && o.Backup.Beside(a.layout()) {
				a.warn("The backups in %s are on the file system of %s, and would be lost with it. If another file system is to be mounted there, use a folder in it, which is missing without the mount", o.Backup.To, a.root)
			}
			if a.structured() {
				return a.print(status)
			}
			fmt.Fprintf(a.out, "\nThe management plane is ready: export KUBECONFIG=%s\n", a.layout().AdminKubeconfig())
			return nil
		},
	}
	c.Flags().IntVar(&o.Hosts, "hosts", 0, "number of hosts on this box, each with its own capstand and failure domain; it cannot decrease (default: unchanged, at first 1)")
	c.Flags().BoolVar(&noHosts, "no-hosts", false, "create an installation without a host on this box: all hosts are other boxes")
	c.Flags().StringVar(&o.Listen, "listen", "", "local address, host:port or :port, on which the host of this box also serves remote management planes; needs the certificates of 'capstan host credentials'; none ends it (default: unchanged)")
	c.Flags().StringVar(&o.HostListenAddress, "host-listen-address", "", "local address, host:port or :port, on which the manager accepts hosts that dial it, for 'capstan host join --dial', which needs an address that leads to this one; none ends it (default: unchanged)")
	c.Flags().StringVar(&o.APIAddress, "api-address", "", "address, host:port, at which other boxes reach the management API, for 'capstan host join'; the API server then listens on this port of all addresses of this box, so do not use 6443, the port of load balancers; none ends it (default: unchanged)")
	c.Flags().StringVar(&o.CoreFeatureGates, "core-feature-gates", "", "feature gates of Cluster API, for example MachineTaintPropagation=true; none removes all (default: unchanged)")
	c.Flags().StringVar(&o.KubernetesVersion, "kubernetes-version", "", "Kubernetes version of the management plane; it must be installed on this box, must not be older than the current one, and can be one minor version newer (default: the current one; for a new plane the newest one)")
	_ = c.RegisterFlagCompletionFunc("kubernetes-version", func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
		versions, _ := a.localVersions() // Completion shows no errors.
		return versions, cobra.ShellCompDirectiveNoFileComp
	})
	c.MarkFlagsMutuallyExclusive("hosts", "no-hosts")
	o.Tracing.Add(c.Flags())
	c.Flags().Lookup("tracing-endpoint").Usage += "; none ends them (default: unchanged)"
	scheduleFlags(c.Flags(), &o.Backup)
	c.Flags().DurationVar(&timeout, "timeout", 10*time.Minute, "time without progress of a component; 0 for no limit. The start continues after it")
	return c
}

// checkTracing refuses flags of a collector without its address. They would have no effect: all flags of a collector are set together.
func checkTracing(f *pflag.FlagSet, endpoint string) (err error) {
	f.Visit(func(given *pflag.Flag) {
		if (endpoint == "" || endpoint == "none") && given.Name != "tracing-endpoint" && strings.HasPrefix(given.Name, "tracing-") {
			err = coded{fmt.Errorf("expected --tracing-endpoint HOST:PORT with --%s: the flags of a collector are set together", given.Name), exitUsage}
		}
	})
	return err
}

// usage gives an error about options the exit code of an invalid command line.
func usage(err error) error {
	if errors.As(err, &embedded.InvalidOptions{}) {
		return coded{err, exitUsage}
	}
	return err
}

// up starts the plane and shows the progress of each component. It gives up after the limit without progress; 0 is no limit.
func (a *app) up(ctx context.Context, o embedded.Options, limit time.Duration) (embedded.Status, error) {
	o.Root, o.Assets, o.Logging, o.Wait = a.root, a.assets, a.logs.Args(), a.waits
	p := a.newProgress()
	defer p.close()
	ctx, advance, cancel := stall.Context(ctx, limit)
	defer cancel()
	furthest := stall.Furthest{}
	return embedded.Up(ctx, o, func(s embedded.Status) {
		if furthest.Advance(planeRanks(s)) {
			advance()
		}
		p.show(planeSteps(s))
	})
}

// planeRanks orders the states of the components. A component that has ended has no rank, so restarts are no progress.
func planeRanks(s embedded.Status) map[string]int {
	order := map[embedded.ProcessState]int{embedded.ProcessWaiting: 1, embedded.ProcessStarting: 2, embedded.ProcessReady: 3}
	ranks := map[string]int{}
	for _, c := range s.Components {
		ranks[c.Name] = order[c.State]
	}
	if s.Installed {
		ranks["installation"] = 1
	}
	return ranks
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

func (a *app) planeCommand() *cobra.Command {
	var supervisor embedded.Supervisor
	c := &cobra.Command{
		Use: "plane", Short: "Run the management plane in the foreground (for service managers)", Args: cobra.NoArgs,
		Annotations: map[string]string{daemon: "true"},
		RunE: func(c *cobra.Command, _ []string) error {
			ctx, stop := signal.NotifyContext(c.Context(), syscall.SIGTERM, syscall.SIGINT)
			defer stop()
			supervisor.Logging = a.logs.Args()
			return embedded.Run(ctx, a.layout(), supervisor)
		},
	}
	c.Flags().StringVar(&supervisor.Unit, "unit", "", "systemd unit that runs this command (%n); it takes over a plane that runs already, and 'capstan up' restarts the unit after an upgrade")
	c.Flags().IntVar(&supervisor.NotifyFD, "notify-fd", 0, "file descriptor to write to when the status can be read")
	_ = c.Flags().MarkHidden("notify-fd")
	return c
}

// planeHere reports whether this box has a plane that this process can read.
func (a *app) planeHere() bool {
	_, err := embedded.LoadState(a.layout())
	return !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, fs.ErrPermission)
}

// localStatus shows the state of the plane of this box.
func (a *app) localStatus(ctx context.Context) error {
	status, err := embedded.GetStatus(ctx, a.layout())
	if err != nil {
		return a.noPlane(err)
	}
	updates, updatesErr := a.updates(ctx)
	if a.structured() {
		return a.print(planeStatus{Status: status, Updates: updates})
	}
	w := tabwriter.NewWriter(a.out, 0, 0, 2, ' ', 0)
	fmt.Fprintf(w, "Root:\t%s\nServer:\t%s\nKubernetes:\t%s\nUnit:\t%s\nReady:\t%v\n", status.Root, status.Server, status.KubernetesVersion, cmp.Or(status.Unit, "none"), status.Ready)
	if status.Error != "" {
		fmt.Fprintf(w, "Start failed:\t%s\n", status.Error)
	}
	for _, certificate := range status.CertificatesExpiring {
		fmt.Fprintf(w, "Certificate not renewed:\t%s\n", certificate)
	}
	for _, authority := range status.AuthoritiesExpiring {
		fmt.Fprintf(w, "Authority expires:\t%s\n", authority)
	}
	if status.EtcdAlarms != "" {
		fmt.Fprintf(w, "Alarms of etcd:\t%s\n", status.EtcdAlarms)
	}
	printBackups(w, status)
	fmt.Fprintln(w, "\nCOMPONENT\tSTATE\tPID\tRESTARTS\tMESSAGE")
	for _, p := range status.Components {
		fmt.Fprintf(w, "%s\t%s\t%d\t%d\t%s\n", p.Name, p.State, p.PID, p.Restarts, p.Message)
	}
	if updatesErr != nil {
		fmt.Fprintf(w, "\nUpdates of machines cannot be read:\t%v\n", updatesErr)
	}
	printUpdates(w, updates, time.Now())
	return w.Flush()
}

// updatesTimeout bounds the reading of the updates. The state of the plane is shown without them if the API does not answer.
const updatesTimeout = 5 * time.Second

// planeStatus is the output of `capstan status` for scripts.
type planeStatus struct {
	embedded.Status

	Updates []diagnosis.Update `json:"updates,omitempty"`
}

// updates reads the updates in place of the machines of the plane of this box.
func (a *app) updates(ctx context.Context) ([]diagnosis.Update, error) {
	m, err := a.localManagement()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, updatesTimeout)
	defer cancel()
	return m.updates(ctx)
}

// noPlane returns the reason why the management plane does not answer, and the solution.
func (a *app) noPlane(err error) error {
	if _, stateErr := embedded.LoadState(a.layout()); errors.Is(stateErr, fs.ErrNotExist) {
		return coded{fmt.Errorf("there is no management plane in %s: create one with `capstan up%s`", a.root, a.rootFlag()), exitNotFound}
	}
	if errors.Is(err, fs.ErrPermission) {
		return embedded.ErrNotRoot
	}
	return fmt.Errorf("the management plane in %s does not answer: start it with `capstan up%s` (%w)", a.root, a.rootFlag(), err)
}
