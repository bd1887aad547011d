//go:build linux

package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"capstan.dev/capstan/internal/accessapi"
	"capstan.dev/capstan/internal/embedded"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/runc"
)

// localHost is a capstand on this box.
type localHost struct {
	name, socket string
	// root is the folder of its state, and assets the folder of its programs.
	root, assets string
}

// located is a machine and its host on this box.
type located struct {
	machine *hostpb.Machine
	host    localHost
}

// localHosts returns the hosts on this box: the one with the socket from the command line; else the hosts of the management
// plane; else the one with the socket unit, if that exists.
func (a *app) localHosts(unit string) ([]localHost, error) {
	if a.socket != "" {
		return a.standalone(a.socket)
	}
	state, err := embedded.LoadState(a.layout())
	if errors.Is(err, fs.ErrNotExist) {
		if _, err := os.Stat(unit); err == nil {
			return a.standalone(unit)
		}
		return nil, fmt.Errorf("%w; on a host of a remote management plane, set --socket to the socket of its capstand", a.noPlane(err))
	}
	if err != nil {
		return nil, a.noPlane(err)
	}
	var hosts []localHost
	for _, name := range state.Hosts {
		hosts = append(hosts, localHost{name: name, socket: a.layout().HostSocket(name), root: a.layout().HostRoot(name), assets: state.Assets})
	}
	return hosts, nil
}

// standalone returns the host of a remote management plane. --root and its default are then those of capstand.
func (a *app) standalone(socket string) ([]localHost, error) {
	assets, err1 := a.assetsDir()
	name, err2 := os.Hostname() // capstand uses it as its default name
	host := localHost{name: name, socket: socket, root: a.root, assets: assets.Dir}
	if a.isDefaultRoot() {
		host.root = a.layout().JoinedHost()
	}
	return []localHost{host}, errors.Join(err1, err2)
}

// localMachines lists the machines of all hosts on this box, those of remote management planes included.
func (a *app) localMachines(ctx context.Context) ([]located, error) {
	unit := ""
	if a.isDefaultRoot() {
		unit = unitSocket
	}
	hosts, err := a.localHosts(unit)
	if err != nil {
		return nil, err
	}
	var found []located
	for _, host := range hosts {
		err := withHost(host, func(c hostpb.HostClient) error {
			list, err := c.ListMachines(ctx, &hostpb.ListMachinesRequest{})
			for _, m := range list.GetMachines() {
				found = append(found, located{m, host})
			}
			return err
		})
		if err != nil {
			return nil, err
		}
	}
	return found, nil
}

// withHost calls do with a client of the host's capstand.
func withHost(host localHost, do func(hostpb.HostClient) error) error {
	conn, err := embedded.DialHost(host.socket)
	if err != nil {
		return err
	}
	defer conn.Close()
	err = do(hostpb.NewHostClient(conn))
	if status.Code(err) == codes.Unavailable {
		return fmt.Errorf("expected an answer from capstand of host %s, found none at its socket %s: run `capstan status` or `systemctl status capstand` as root (%w)", host.name, host.socket, err)
	}
	return err
}

// hostHere reports whether this process finds a capstand on this box.
func (a *app) hostHere() bool {
	if _, err := embedded.LoadState(a.layout()); err == nil {
		return true
	}
	_, err := os.Stat(unitSocket)
	return err == nil
}

// findMachine finds a machine by its name. Its Node and CapstanMachine have the same name.
func findMachine(all []located, namespace, name string) (located, error) {
	matches := slices.DeleteFunc(slices.Clone(all), func(l located) bool {
		s := l.machine.GetSpec()
		return s.GetName() != name || namespace != "" && s.GetNamespace() != namespace
	})
	switch len(matches) {
	case 1:
		return matches[0], nil
	case 0:
		var names []string
		for _, l := range all {
			names = append(names, l.machine.GetSpec().GetName())
		}
		slices.Sort(names)
		return located{}, coded{fmt.Errorf("expected a machine %s on this box, found %s", name, cmp.Or(strings.Join(names, ", "), "none")), exitNotFound}
	}
	return located{}, coded{fmt.Errorf("%d machines are named %s: choose one with --namespace", len(matches), name), exitUsage}
}

// logsHere prints a log of a machine on this box.
func (a *app) logsHere(ctx context.Context, namespace, name string, o accessapi.LogOptions) error {
	found, err := a.findHere(ctx, namespace, name)
	if err != nil {
		return err
	}
	request := &hostpb.LogsRequest{Machine: found.machine.GetSpec().GetId(), Service: o.Service, Follow: o.Follow, TailLines: o.TailLines}
	return withHost(found.host, func(h hostpb.HostClient) error { return copyLogs(ctx, h, request, a.out) })
}

func (a *app) findHere(ctx context.Context, namespace, name string) (located, error) {
	all, err := a.localMachines(ctx)
	if err != nil {
		return located{}, err
	}
	return findMachine(all, namespace, name)
}

// machineNamesHere lists the machines of a namespace on this box; of all namespaces if it is empty.
func (a *app) machineNamesHere(ctx context.Context, namespace string) (names []string) {
	all, _ := a.localMachines(ctx)
	for _, l := range all {
		if s := l.machine.GetSpec(); namespace == "" || s.GetNamespace() == namespace {
			names = append(names, s.GetName())
		}
	}
	return names
}

func copyLogs(ctx context.Context, h hostpb.HostClient, request *hostpb.LogsRequest, out io.Writer) error {
	stream, err := h.Logs(ctx, request)
	if err != nil {
		return err
	}
	for {
		chunk, err := stream.Recv()
		if errors.Is(err, io.EOF) || status.Code(err) == codes.Canceled {
			return nil // the log ended, or the user ended the command
		}
		if err != nil {
			return err
		}
		if _, err := out.Write(chunk.GetData()); err != nil {
			return err
		}
	}
}

// imageTargetsHere returns the machines of a cluster on this box.
func (a *app) imageTargetsHere(ctx context.Context, namespace, cluster string) ([]imageTarget, error) {
	namespace = cmp.Or(namespace, metav1.NamespaceDefault)
	all, err := a.localMachines(ctx)
	if err != nil {
		return nil, err
	}
	var targets []imageTarget
	for _, l := range all {
		s := l.machine.GetSpec()
		if s.GetCluster() != cluster || s.GetNamespace() != namespace {
			continue
		}
		targets = append(targets, imageTarget{s.GetName(), func(ctx context.Context, archive io.Reader) (images []string, err error) {
			err = withHost(l.host, func(h hostpb.HostClient) error {
				images, err = sendImage(ctx, h, s.GetId(), archive)
				return err
			})
			return images, err
		}})
	}
	if len(targets) == 0 {
		return nil, coded{fmt.Errorf("expected machines of cluster %s (namespace %s) on this box, found none", cluster, namespace), exitNotFound}
	}
	return targets, nil
}

// sendImage sends an archive to a machine. capstand does not take the end of a call that was cancelled for the end of the archive.
func sendImage(ctx context.Context, h hostpb.HostClient, machine string, archive io.Reader) ([]string, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := h.LoadImage(ctx)
	if err != nil {
		return nil, err
	}
	for err = stream.Send(&hostpb.LoadImageRequest{Machine: machine}); err == nil; {
		part := make([]byte, 256<<10) // gRPC can use a message after it was sent
		n, readErr := archive.Read(part)
		if n > 0 {
			err = stream.Send(&hostpb.LoadImageRequest{Chunk: part[:n]})
		}
		if errors.Is(readErr, io.EOF) {
			break
		}
		if readErr != nil {
			return nil, readErr
		}
	}
	// When capstand refuses the image, the response contains the cause. The error of Send does not.
	response, err := stream.CloseAndRecv()
	return response.GetImages(), err
}

// shellHere runs a command in a machine on this box.
func (a *app) shellHere(ctx context.Context, namespace, name string, command []string) error {
	found, err := a.findHere(ctx, namespace, name)
	if err != nil {
		return err
	}
	return a.shell(found, command)
}

// shell replaces this process with runc, which runs the command in the container of the machine.
func (a *app) shell(l located, command []string) error {
	state := filepath.Join(l.host.root, "runc")
	if _, err := os.Stat(state); err != nil {
		return fmt.Errorf("expected the state of capstand's machines: %w; run the command as root, and set --root to the same folder as for capstand", err)
	}
	program := embedded.Assets{Dir: l.host.assets}.Runc()
	in := runc.Command{Args: command, Term: os.Getenv("TERM"), TTY: a.terminal(), KubernetesVersion: l.machine.GetSpec().GetKubernetesVersion()}
	args := append([]string{"runc", "--root", state}, in.ExecArgs(l.machine.GetSpec().GetId())...)
	return fmt.Errorf("cannot run %s: %w", program, syscall.Exec(program, args, os.Environ()))
}
