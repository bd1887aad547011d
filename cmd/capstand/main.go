// Command capstand is the root daemon of a host. See package host.
//
// Layer: main. Allowed imports: api, library, contract, reconciler, manager, host, node, tool.
package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"os/user"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/api/resource"

	"capstan.dev/capstan/internal/host"
	"capstan.dev/capstan/internal/host/balancer"
	"capstan.dev/capstan/internal/host/credentials"
	"capstan.dev/capstan/internal/host/devices"
	"capstan.dev/capstan/internal/host/fencing"
	"capstan.dev/capstan/internal/host/network"
	"capstan.dev/capstan/internal/host/network/wireguard"
	"capstan.dev/capstan/internal/host/statelock"
	"capstan.dev/capstan/internal/logging"
	"capstan.dev/capstan/internal/machineapi"
	"capstan.dev/capstan/internal/manpages"
	"capstan.dev/capstan/internal/searchpath"
	"capstan.dev/capstan/internal/tracing"
	"capstan.dev/capstan/internal/tracing/collector"
	"capstan.dev/capstan/internal/version"
)

func main() {
	syscall.Umask(0o022) // The disks of machines contain files of other users.
	searchpath.Complete()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	root := command()
	root.AddCommand(balancerCommand(), guardCommand(), wireguardCommand(), hollowCommand(), manpages.Command("8"))
	if failed, err := root.ExecuteContextC(ctx); err != nil {
		logging.LastError(failed, os.Stderr, "capstand ends", err)
		os.Exit(1)
	}
}

type options struct {
	root, assets, name, socket string
	backups, images            string
	containerImages            string
	cdiDirs                    []string
	socketGroup                string
	socketUID                  int
	reserveMemory, reserveDisk string
	preallocateDisks           bool
	balancerUID                int
	overlayEncryption          string
	listen, dial               string
	absence, confirmTimeout    time.Duration
	stopPodsWithin             time.Duration
	tls                        credentials.Server
	metrics                    metricsOptions
	tracing                    collector.Flags
	logs                       *logging.Flags
}

// command returns the command, which sets up the logs for itself and its subcommands: they use the default logger.
func command() *cobra.Command {
	o := options{logs: logging.New()}
	cmd := &cobra.Command{
		Use:           "capstand",
		Short:         "Run machines, networks and load balancers of Cluster API clusters on this Linux host",
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE:          func(cmd *cobra.Command, _ []string) error { return run(cmd.Context(), o, slog.Default()) },
		PersistentPreRunE: func(*cobra.Command, []string) error {
			_, err := o.logs.Apply(os.Stderr)
			return err
		},
	}
	o.logs.Add(cmd.PersistentFlags())
	hostname, _ := os.Hostname()
	f := cmd.Flags()
	f.StringVar(&o.root, "root", "/var/lib/capstan/host", "folder of all state; created if missing")
	f.StringVar(&o.assets, "assets", "/usr/lib/capstan", "folder of the programs of machines: the output of make build")
	f.StringVar(&o.backups, "backups", "", "folder for etcd backups of clusters; control plane machines see the folder of their cluster at /var/lib/capstan/backups (default: <root>/backups)")
	f.StringVar(&o.images, "images-dir", "", "folder with images of machines, as folders or OCI archives NAME.tar, which the administrator fills; only root may change it (default: <root>/images)")
	f.StringVar(&o.containerImages, "container-images-dir", "", "folder with OCI archives NAME.tar of container images, which the administrator fills and each machine imports at its first start; only root may change it (default: <root>/container-images)")
	f.StringSliceVar(&o.cdiDirs, "cdi-dirs", devices.SpecDirs, "folders with the CDI specifications of devices that machines can have; later ones have priority")
	f.StringVar(&o.socket, "socket", "", "path of the unix socket (default: <root>/capstand.sock)")
	f.StringVar(&o.name, "name", hostname, "name of the host (default: the hostname)")
	f.Lookup("name").DefValue = "" // The help and the man page must be the same on every machine.
	f.StringVar(&o.socketGroup, "socket-group", "", "group, name or number, that can also connect (mode 0660)")
	f.IntVar(&o.socketUID, "socket-uid", -1, "number of the user that owns the socket (default: root)")
	o.addListenFlags(f)
	o.metrics.addFlags(f)
	o.tracing.Add(f)
	f.StringVar(&o.reserveMemory, "reserve-memory", "1Gi", "memory that machines cannot use: for the host itself and the management plane")
	f.StringVar(&o.reserveDisk, "reserve-disk", "1Gi", "free disk space below which the host accepts no new machine")
	f.BoolVar(&o.preallocateDisks, "preallocate-disks", false, "reserve the full size of a new machine's disk at once, instead of only the space that the machine uses")
	f.DurationVar(&o.absence, "absence", host.DefaultAbsence, "time without a manager after which capstand asks before it starts a machine: the machine may have been replaced on another host")
	f.DurationVar(&o.confirmTimeout, "confirm-timeout", host.DefaultConfirmTimeout, "time after which capstand starts such machines if no manager of their management cluster has connected; 0 waits without a limit")
	f.DurationVar(&o.stopPodsWithin, "stop-pods-within", machineapi.DefaultStopPods, "time that the pods of a machine have to stop, by their grace periods, when the machine is deleted or the host shuts down; at most 1h, 0 kills them")
	f.IntVar(&o.balancerUID, "balancer-uid", 65534, "number of the user and group of load balancers")
	f.StringVar(&o.overlayEncryption, "overlay-encryption", "", "WireGuard encrypts the traffic of clusters to other hosts. All hosts of a cluster must have the same value, and it cannot change while the host has a network of a cluster across hosts (default: no encryption)")
	return cmd
}

func run(ctx context.Context, o options, log *slog.Logger) error {
	if os.Geteuid() != 0 {
		return errors.New("expected to run as root, found another user: capstand creates containers and networks")
	}
	config, socket, err := o.parse()
	if err != nil {
		return err
	}
	if _, err := statelock.Lock(config.Root); err != nil {
		return err
	}
	if o.root = config.Root; o.listen != "" || o.dial != "" {
		config.Credentials = &credentials.Service{Server: o.tlsFiles()}
	}
	config.Certificates = o.certificates()
	stopTracing, err := tracing.Start(ctx, o.tracing, "capstand", version.Version, func(err error) { log.Warn("Tracing", "problem", err) })
	if err != nil {
		return err
	}
	defer stopTracing()
	ctx, end := context.WithCancel(ctx)
	defer end()
	h, err := host.New(ctx, config, log)
	if err != nil {
		return err
	}
	if err = o.serveMetrics(ctx, h.Metrics(), log); err == nil {
		err = o.serve(ctx, socket, h, log)
	}
	end()
	h.Wait()
	if host.ShutsDown(context.Background()) {
		h.StopMachines(context.Background())
		return err
	}
	log.Info("capstand ends. Machines and load balancers continue")
	return err
}

func (o options) parse() (config host.Config, socket host.Socket, err error) {
	if config, err = o.folders(); err != nil {
		return config, socket, err
	}
	if err := o.checkChoices(); err != nil {
		return config, socket, err
	}
	if config.ReserveMemory, err = size("reserve-memory", o.reserveMemory); err != nil {
		return config, socket, err
	}
	if config.ReserveDisk, err = size("reserve-disk", o.reserveDisk); err != nil {
		return config, socket, err
	}
	config.Name, config.CDIDirs, config.PreallocateDisks = o.name, o.cdiDirs, o.preallocateDisks
	config.BalancerUID, config.RunDir, config.EncryptOverlays = o.balancerUID, network.DefaultRunDir, o.overlayEncryption != ""
	config.Absence, config.ConfirmTimeout, config.StopPodsWithin = o.absence, o.confirmTimeout, o.stopPodsWithin
	config.Logging, config.Reboot = o.logs.Args(), host.SystemdReboot()
	socket, err = o.hostSocket(config.Root)
	return config, socket, err
}

// folders returns a configuration that contains the folders only.
func (o options) folders() (config host.Config, err error) {
	if config.Root, err = filepath.Abs(o.root); err != nil {
		return config, err
	}
	for _, folder := range []struct {
		to   *string
		path string
	}{
		{&config.Assets, o.assets},
		{&config.Backups, cmp.Or(o.backups, filepath.Join(config.Root, "backups"))},
		{&config.Images, cmp.Or(o.images, filepath.Join(config.Root, "images"))},
		{&config.ContainerImages, cmp.Or(o.containerImages, filepath.Join(config.Root, "container-images"))},
	} {
		if *folder.to, err = filepath.Abs(folder.path); err != nil {
			return config, err
		}
	}
	return config, nil
}

// checkChoices refuses values that a flag does not have.
func (o options) checkChoices() error {
	if o.stopPodsWithin < 0 || o.stopPodsWithin > machineapi.MaxStopPods {
		return fmt.Errorf("--stop-pods-within is %s, expected 0 to %s", o.stopPodsWithin, machineapi.MaxStopPods)
	}
	if o.overlayEncryption != "" && o.overlayEncryption != host.EncryptionWireGuard {
		return fmt.Errorf("--overlay-encryption %q: expected %s, or nothing", o.overlayEncryption, host.EncryptionWireGuard)
	}
	return nil
}

// size returns the bytes of a quantity.
func size(flag, text string) (int64, error) {
	quantity, err := resource.ParseQuantity(text)
	if err != nil {
		return 0, fmt.Errorf("--%s %q: %w", flag, text, err)
	}
	return quantity.Value(), nil
}

func (o options) hostSocket(root string) (socket host.Socket, err error) {
	socket = host.Socket{Path: cmp.Or(o.socket, filepath.Join(root, "capstand.sock")), UID: o.socketUID, GID: -1}
	if o.socketGroup != "" {
		if socket.GID, err = groupID(o.socketGroup); err != nil {
			return socket, fmt.Errorf("--socket-group: %w", err)
		}
	}
	return socket, nil
}

func groupID(name string) (int, error) {
	if id, err := strconv.Atoi(name); err == nil {
		return id, nil
	}
	group, err := user.LookupGroup(name)
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(group.Gid)
}

func guardCommand() *cobra.Command {
	var memory string
	cmd := &cobra.Command{
		Use:    "guard",
		Short:  "Stop machines whose leases have expired while capstand does not run (capstand starts it)",
		Hidden: true,
		Args:   cobra.NoArgs,
		// Without the context: the guard continues after the signal that ends capstand.
		RunE: func(*cobra.Command, []string) error {
			return fencing.Guard(context.Background(), memory, slog.Default())
		},
	}
	cmd.Flags().StringVar(&memory, "memory", "", "file with the leases")
	_ = cmd.MarkFlagRequired("memory")
	return cmd
}

func wireguardCommand() *cobra.Command {
	var key string
	var uid int
	cmd := &cobra.Command{
		Use:    "wireguard",
		Short:  "Run the WireGuard device of this host if its kernel has none (capstand starts it)",
		Hidden: true,
		Args:   cobra.NoArgs,
		// Without the context: the device continues after the signal that ends capstand.
		RunE: func(*cobra.Command, []string) error { return wireguard.Serve(key, uid, slog.Default()) },
	}
	cmd.Flags().StringVar(&key, "key", "", "file with the private key")
	cmd.Flags().IntVar(&uid, "uid", 65534, "number of the user and group of the process")
	_ = cmd.MarkFlagRequired("key")
	return cmd
}

func balancerCommand() *cobra.Command {
	var config string
	cmd := &cobra.Command{
		Use:    "balancer",
		Short:  "Run the load balancer of one cluster (capstand starts it)",
		Hidden: true,
		Args:   cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return balancer.New(filepath.Dir(config), balancer.DefaultTiming, slog.Default()).Run(cmd.Context())
		},
	}
	cmd.Flags().StringVar(&config, "config", "", "configuration file; the status is written to the same folder")
	_ = cmd.MarkFlagRequired("config")
	return cmd
}
