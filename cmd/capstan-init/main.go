// Command capstan-init is PID 1 of a machine. Its subcommands configure the machine as a Kubernetes node.
//
// Layer: main. Allowed imports: api, library, contract, reconciler, manager, host, node, tool.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"runtime/debug"
	"syscall"
	"text/tabwriter"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"capstan.dev/capstan/internal/logging"
	"capstan.dev/capstan/internal/machineapi"
	"capstan.dev/capstan/internal/node/agent"
	"capstan.dev/capstan/internal/node/blockvolume"
	"capstan.dev/capstan/internal/node/images"
	"capstan.dev/capstan/internal/node/initapi"
	"capstan.dev/capstan/internal/node/machine"
	"capstan.dev/capstan/internal/node/nodeconfig"
	"capstan.dev/capstan/internal/node/pid1"
	"capstan.dev/capstan/internal/node/provision"
	"capstan.dev/capstan/internal/node/update"
)

// gcPercent reduces the memory of these two processes, which run on each machine and do little work.
const gcPercent = 25

func main() {
	root := command(inherited(machine.MetadataPath))
	if filepath.Base(os.Args[0]) == blockvolume.Program {
		root = losetupCommand()
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	if failed, err := root.ExecuteContextC(ctx); err != nil {
		if logs(failed) {
			logging.LastError(failed, os.Stderr, "capstan-init ends", err)
		} else {
			fmt.Fprintln(os.Stderr, "capstan-init:", err)
		}
		if errors.Is(err, images.ErrArchive) {
			os.Exit(machineapi.ExitBadArchive)
		}
		os.Exit(1)
	}
}

// logs reports whether a command writes logs: PID 1 and the services of a machine. Users and capstand read the output of others.
func logs(c *cobra.Command) bool {
	return c.Name() != blockvolume.Program && (!c.HasParent() || c.Name() == nodeCommand || c.Parent().Name() == nodeCommand)
}

// nodeCommand has the commands that are services of a machine.
const nodeCommand = "node"

// inherited returns the flags of the logs, with the values that capstand has as defaults. PID 1 and the services of a machine
// have no other arguments. A wrong value must not end PID 1.
func inherited(metadataPath string) *logging.Flags {
	metadata, err := machine.LoadOptional(metadataPath)
	logs := logging.New()
	fs := pflag.NewFlagSet("metadata", pflag.ContinueOnError)
	logs.Add(fs)
	if errors.Join(err, fs.Parse(metadata.Logging), logs.Check()) != nil {
		return logging.New()
	}
	return logs
}

func command(logs *logging.Flags) *cobra.Command {
	root := &cobra.Command{
		Use:           "capstan-init",
		Short:         "PID 1 of a Capstan machine",
		Args:          cobra.NoArgs,
		SilenceErrors: true,
		SilenceUsage:  true,
		PersistentPreRunE: func(*cobra.Command, []string) error {
			_, err := logs.Apply(os.Stderr)
			return err
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			if os.Getpid() != 1 {
				return cmd.Help()
			}
			debug.SetGCPercent(gcPercent)
			pid1.Run(slog.Default())
			return nil
		},
	}
	logs.Add(root.PersistentFlags())
	node := &cobra.Command{Use: nodeCommand, Short: "Configure this machine as a Kubernetes node"}
	node.AddCommand(&cobra.Command{
		Use: "up", Short: "Create certificates and configuration, start the services, and wait until they are ready",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return provision.Run(cmd.Context(), slog.Default()) },
	}, &cobra.Command{
		Use: "update", Short: "Carry out the update in place that capstand requests, or continue it",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return update.Run(cmd.Context(), slog.Default()) },
	}, &cobra.Command{
		Use: "agent", Short: "Maintain the pod network, DNS endpoints and certificates",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			debug.SetGCPercent(gcPercent)
			return agent.Run(cmd.Context(), slog.Default())
		},
	})
	root.AddCommand(node, serviceCommand(), statusCommand(), imagesCommand())
	return root
}

// losetupCommand returns the part of the program losetup that the kubelet uses for block volumes. It sees only devices of this machine.
func losetupCommand() *cobra.Command {
	file, loop := "", ""
	cmd := &cobra.Command{
		Use: blockvolume.Program + " {-f DEVICE | -d LOOPDEVICE}", Short: "Hold a block device open with a loop device, or end that",
		Args: cobra.NoArgs, SilenceErrors: true, SilenceUsage: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			init := initapi.NewClient(initapi.Socket)
			if file != "" {
				return init.HoldDevice(cmd.Context(), file)
			}
			return init.ReleaseDevice(cmd.Context(), loop)
		},
	}
	cmd.Flags().StringVarP(&file, "find", "f", "", "path of a block device")
	cmd.Flags().StringVarP(&loop, "detach", "d", "", "loop device of a block device that is held")
	cmd.MarkFlagsOneRequired("find", "detach")
	cmd.MarkFlagsMutuallyExclusive("find", "detach")
	return cmd
}

func serviceCommand() *cobra.Command {
	service := &cobra.Command{Use: "service", Short: "List and control the services of this machine"}
	service.AddCommand(&cobra.Command{
		Use: "list", Short: "List the services", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return listServices(cmd.Context()) },
	})
	for action, short := range map[string]string{
		"start": "Start a service", "stop": "Stop a service until the machine restarts",
		"restart": "Stop and start a service", "reload": "Send SIGHUP to a service",
	} {
		service.AddCommand(&cobra.Command{
			Use: action + " NAME", Short: short, Args: cobra.ExactArgs(1),
			RunE: func(cmd *cobra.Command, args []string) error {
				return initapi.NewClient(initapi.Socket).Service(cmd.Context(), args[0], action)
			},
		})
	}
	return service
}

func listServices(ctx context.Context) error {
	status, err := initapi.NewClient(initapi.Socket).Status(ctx)
	if err != nil {
		return err
	}
	out := tabwriter.NewWriter(os.Stdout, 0, 8, 2, ' ', 0)
	fmt.Fprintln(out, "NAME\tSTATE\tPID\tRESTARTS\tMESSAGE")
	for _, s := range status.Services {
		fmt.Fprintf(out, "%s\t%s\t%d\t%d\t%s\n", s.Name, s.State, s.PID, s.Restarts, s.Message)
	}
	return out.Flush()
}

func statusCommand() *cobra.Command {
	watch := false
	cmd := &cobra.Command{
		Use: "status", Short: "Print the machine's state as JSON", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			encoder := json.NewEncoder(os.Stdout)
			return initapi.NewClient(initapi.Socket).Watch(cmd.Context(), func(s initapi.Status) bool {
				return encoder.Encode(s) == nil && watch
			})
		},
	}
	cmd.Flags().BoolVarP(&watch, "watch", "w", false, "print each change")
	return cmd
}

// imagesCommand contains the subcommand that capstand runs for `capstan load image`, and that of the kubelet.
func imagesCommand() *cobra.Command {
	c := &cobra.Command{Use: "images", Short: "Manage the images of this machine"}
	c.AddCommand(&cobra.Command{
		Use: "credentials", Short: "Print the credentials of an image, for a request of the kubelet in standard input",
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			config, err := nodeconfig.Load(nodeconfig.Path)
			if err != nil {
				return err
			}
			return images.Credentials(os.Stdin, os.Stdout, config)
		},
	})
	c.AddCommand(&cobra.Command{
		Use: "import", Short: "Import an image archive from standard input into containerd; print the names as JSON",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			names, err := images.Import(cmd.Context(), images.Socket, os.Stdin)
			if err != nil {
				return err
			}
			return json.NewEncoder(os.Stdout).Encode(machineapi.ImportedImages{Names: names})
		},
	})
	return c
}
