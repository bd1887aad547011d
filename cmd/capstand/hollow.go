package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"

	"capstan.dev/capstan/internal/host/credentials"
	"capstan.dev/capstan/internal/host/hollow"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/statelock"
	"capstan.dev/capstan/internal/tracing"
)

// hollowCommand serves a host with simulated machines. It needs no privileges.
func hollowCommand() *cobra.Command {
	var o options
	var c hollow.Config
	var memory string
	cmd := &cobra.Command{
		Use:   "hollow",
		Short: "Serve a host with simulated machines, for tests with hundreds of machines",
		Long: `Serve a host with simulated machines. A machine starts after a delay, registers a Node in its cluster and keeps it
healthy. It runs no containers. Control planes need a real host: set spec.controlPlane of the CapstanHost of the
simulated host to false.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var err error
			if c.MemoryBytes, err = size("memory", memory); err != nil {
				return err
			}
			return runHollow(cmd.Context(), c, o, slog.Default())
		},
	}
	hostname, _ := os.Hostname()
	f := cmd.Flags()
	f.StringVar(&c.Root, "root", "/var/lib/capstan/hollow", "folder of all state; created if missing")
	f.StringVar(&o.socket, "socket", "", "path of the unix socket (default: <root>/capstand.sock)")
	f.StringVar(&o.socketGroup, "socket-group", "", "group, name or number, that can also connect (mode 0660)")
	f.IntVar(&o.socketUID, "socket-uid", -1, "number of the user that owns the socket (default: the current user)")
	o.addListenFlags(f)
	f.StringVar(&c.Name, "name", hostname+"-hollow", "name of the host (default: the hostname with -hollow)")
	f.Lookup("name").DefValue = "" // The help and the reference must be the same on every machine.
	f.Int32Var(&c.CPUs, "cpus", 1024, "number of processors that the host reports")
	f.StringVar(&memory, "memory", "16Ti", "memory for machines that the host reports")
	f.StringSliceVar(&c.Versions, "versions", nil, "Kubernetes versions that machines can report, for example v1.36.3")
	f.DurationVar(&c.Behaviour.StartDelay, "start-delay", 500*time.Millisecond, "time until a machine runs")
	f.DurationVar(&c.Behaviour.BootDelay, "boot-delay", 1500*time.Millisecond, "time from the start of a machine until its Node registers")
	f.Float64Var(&c.Behaviour.Jitter, "jitter", 0.2, "fraction by which the delays vary")
	f.Float64Var(&c.Behaviour.FailStart, "fail-start", 0, "probability that a machine never runs")
	f.Float64Var(&c.Behaviour.FailBootstrap, "fail-bootstrap", 0, "probability that a machine's bootstrap fails")
	f.DurationVar(&c.Behaviour.UpdateDelay, "update-delay", 2*time.Second, "time that an update in place takes")
	f.Float64Var(&c.Behaviour.FailUpdate, "fail-update", 0, "probability that an update in place is rolled back")
	f.DurationVar(&c.Behaviour.FailAfter, "fail-after", 0, "average time until a running machine fails; 0 for never")
	f.DurationVar(&c.Behaviour.LeaseInterval, "lease-interval", 10*time.Second, "interval between renewals of a Node's lease, at most 40s")
	_ = cmd.MarkFlagRequired("versions")
	return cmd
}

func runHollow(ctx context.Context, c hollow.Config, o options, log *slog.Logger) error {
	if err := checkHollow(c); err != nil {
		return err
	}
	root, err := filepath.Abs(c.Root)
	if err != nil {
		return err
	}
	c.Root = root
	socket, err := o.hostSocket(root)
	if err != nil {
		return err
	}
	if _, err := statelock.Lock(root); err != nil {
		return err
	}
	h, err := hollow.New(ctx, c, log)
	if err != nil {
		return err
	}
	o.root = root
	err = o.serve(ctx, socket, hollowServer{h, &credentials.Service{Server: o.tlsFiles()}}, log)
	h.Wait()
	return err
}

type hollowServer struct {
	*hollow.Host
	credentials hostpb.CredentialsServer
}

// Serve implements server.
func (h hollowServer) Serve(ctx context.Context, listener net.Listener, options ...grpc.ServerOption) error {
	server := grpc.NewServer(append(append(options, hostpb.DefaultKeepalive.Server()...), tracing.ServerOption())...)
	hostpb.RegisterHostServer(server, h)
	hostpb.RegisterCredentialsServer(server, h.credentials)
	stop := context.AfterFunc(ctx, server.Stop)
	defer stop()
	return server.Serve(listener)
}

func checkHollow(c hollow.Config) error {
	var errs []error
	for _, v := range c.Versions {
		if !strings.HasPrefix(v, "v") {
			errs = append(errs, fmt.Errorf("expected --versions with a leading v, for example v1.36.3, found %q", v))
		}
	}
	b := c.Behaviour
	for name, p := range map[string]float64{"--fail-start": b.FailStart, "--fail-bootstrap": b.FailBootstrap, "--fail-update": b.FailUpdate, "--jitter": b.Jitter} {
		if p < 0 || p > 1 {
			errs = append(errs, fmt.Errorf("expected %s from 0 to 1, found %v", name, p))
		}
	}
	if b.LeaseInterval > 40*time.Second {
		errs = append(errs, fmt.Errorf("expected --lease-interval of at most 40s, found %s: a Node is lost after 40s", b.LeaseInterval))
	}
	return errors.Join(errs...)
}
