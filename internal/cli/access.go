package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"
	"golang.org/x/term"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/remotecommand"
	"k8s.io/client-go/util/exec"

	"capstan.dev/capstan/internal/accessapi"
)

// unitSocket is the socket of capstand on a host of a remote management plane. config/systemd/capstand.service sets it.
const unitSocket = "/run/capstan/capstand.sock"

// socketFlag adds the flag of commands that connect to capstand.
func (a *app) socketFlag(c *cobra.Command) {
	c.Flags().StringVar(&a.socket, "socket", "", "socket of the capstand of a remote management plane (default: "+unitSocket+" if this box has no plane); --root is then the folder of this capstand")
}

// terminal reports whether the user has a terminal for a shell.
func (a *app) terminal() bool { return term.IsTerminal(int(os.Stdin.Fd())) && a.live }

// exited is the result of a command in a machine that ended with another exit code than 0. The command has said why.
type exited int

func (e exited) Error() string { return fmt.Sprintf("the command ended with exit code %d", int(e)) }

// onThisBox reports whether logs, shells and images use the capstand of this box: the command line names it, or nothing names a
// management cluster and this box has a capstand.
func onThisBox(s surroundings, socket, here bool) bool {
	switch {
	case s.kubeconfig != "":
		return false
	case s.root || socket:
		return true
	case s.context != "" || s.environment != "":
		return false
	}
	return here
}

func (a *app) onThisBox() bool {
	return onThisBox(surroundings{
		kubeconfig: a.kubeconfig, context: a.context, environment: os.Getenv(clientcmd.RecommendedConfigPathEnvVar), root: a.rootGiven,
	}, a.socket != "", a.hostHere())
}

// joinedHosts reports whether this box has a plane that can have machines on hosts that joined it. --socket names one host only.
func (a *app) joinedHosts() bool {
	_, err := a.localKubeconfig()
	return err == nil && a.socket == ""
}

// onAnotherHost reports whether the error says that this box lacks the machines, and the plane of this box can have them.
func (a *app) onAnotherHost(err error) bool {
	return exitCode(err) == exitNotFound && a.joinedHosts()
}

const accessHelp = `
The command uses the management cluster of --kubeconfig, --context or $KUBECONFIG, with the rights of its user. Without them, and
with --root or --socket, it uses the capstand of this box, as root, and the plane of this box for machines on hosts that joined it. A
box without capstand uses ~/.kube/config.`

func (a *app) logsCommand() *cobra.Command {
	var namespace string
	var o accessapi.LogOptions
	c := &cobra.Command{
		Use: "logs MACHINE [SERVICE]", Short: "Print the log of a machine, or of one of its services",
		Long: "Print the log of PID 1 of a machine, or of one of its services.\n" + accessHelp,
		Args: cobra.RangeArgs(1, 2),
		RunE: func(c *cobra.Command, args []string) error {
			o.Service = accessapi.InitService
			if len(args) == 2 {
				o.Service = args[1]
			}
			if a.onThisBox() {
				if err := a.logsHere(c.Context(), namespace, args[0], o); !a.onAnotherHost(err) {
					return err
				}
			}
			return a.logsOfPlane(c.Context(), namespace, args[0], o)
		},
	}
	c.ValidArgsFunction = a.completeMachines(&namespace, true)
	a.machineFlags(c, &namespace)
	c.Flags().BoolVarP(&o.Follow, "follow", "f", false, "wait for new lines and print them")
	c.Flags().Int32Var(&o.TailLines, "tail", 0, "number of lines from the end; 0 for all")
	return c
}

func (a *app) machineFlags(c *cobra.Command, namespace *string) {
	c.Flags().StringVarP(namespace, "namespace", "n", "", "namespace of the machine (default: that of the context; on this box, any)")
	a.socketFlag(c)
}

func (a *app) shellCommand() *cobra.Command {
	var namespace string
	c := &cobra.Command{
		Use: "shell MACHINE [-- COMMAND...]", Short: "Run a shell, or a command, as root in a machine", Args: cobra.MinimumNArgs(1),
		Long: "Run a shell, or a command, as root in a machine. The exit code is that of the command.\n" + accessHelp,
		RunE: func(c *cobra.Command, args []string) error {
			if a.onThisBox() {
				if err := a.shellHere(c.Context(), namespace, args[0], args[1:]); !a.onAnotherHost(err) {
					return err
				}
			}
			return a.shellOfPlane(c.Context(), namespace, args[0], args[1:])
		},
	}
	c.ValidArgsFunction = a.completeMachines(&namespace, false)
	a.machineFlags(c, &namespace)
	return c
}

// accessRequest returns a request for a subresource of a machine, and the configuration of its client.
func (a *app) accessRequest(method, namespace, name, subresource string, query map[string][]string) (*rest.Request, *rest.Config, error) {
	namespace, err := a.namespace(namespace)
	if err != nil {
		return nil, nil, err
	}
	m, err := a.management()
	if err != nil {
		return nil, nil, err
	}
	return m.accessRequest(method, namespace, name, subresource, query)
}

func (m *management) accessRequest(method, namespace, name, subresource string, query map[string][]string) (*rest.Request, *rest.Config, error) {
	config := rest.CopyConfig(m.config)
	config.APIPath, config.GroupVersion = "/apis", &accessapi.GroupVersion
	config.NegotiatedSerializer = clientgoscheme.Codecs.WithoutConversion()
	c, err := rest.RESTClientFor(config)
	if err != nil {
		return nil, nil, err
	}
	request := c.Verb(method).AbsPath(accessapi.Path(namespace, name, subresource))
	for key, values := range query {
		for _, value := range values {
			request.Param(key, value)
		}
	}
	return request, config, nil
}

// logsOfPlane prints a log through the management cluster.
func (a *app) logsOfPlane(ctx context.Context, namespace, name string, o accessapi.LogOptions) error {
	request, _, err := a.accessRequest("GET", namespace, name, accessapi.Log, o.Query())
	if err != nil {
		return err
	}
	stream, err := request.Stream(ctx)
	if err != nil {
		return accessError(err)
	}
	defer stream.Close()
	if _, err = io.Copy(a.out, stream); err != nil && ctx.Err() == nil {
		return fmt.Errorf("the log is incomplete, because the manager or its host ended the connection: repeat the command (%w)", err)
	}
	return nil
}

// shellOfPlane runs a command through the management cluster.
func (a *app) shellOfPlane(ctx context.Context, namespace, name string, command []string) error {
	o := accessapi.ExecOptions{Command: command, Stdin: true, TTY: a.terminal(), Term: os.Getenv("TERM")}
	request, config, err := a.accessRequest("GET", namespace, name, accessapi.Exec, o.Query())
	if err != nil {
		return err
	}
	// The executor and the server use WebSockets only. Front proxies of API servers forward them.
	executor, err := remotecommand.NewWebSocketExecutor(config, "GET", request.URL().String())
	if err != nil {
		return err
	}
	options := remotecommand.StreamOptions{Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr, Tty: o.TTY}
	if o.TTY {
		options.Stderr = nil
		sizes, restore, err := rawTerminal(ctx)
		if err != nil {
			return err
		}
		defer restore()
		options.TerminalSizeQueue = sizes
	}
	err = executor.StreamWithContext(ctx, options)
	if code := (exec.CodeExitError{}); errors.As(err, &code) {
		return exited(code.Code)
	}
	return accessError(err)
}

// accessError adds the solution to errors of the API.
func accessError(err error) error {
	switch {
	case !apierrors.IsNotFound(err):
		return err
	case namesObject(err):
		return coded{err, exitNotFound}
	}
	return coded{fmt.Errorf("%w; expected a management cluster with the API %s: select it with --kubeconfig or --context, or upgrade Capstan there", err, accessapi.GroupVersion), exitNotFound}
}

// namesObject reports whether an error of the API is about an object, and not about the API itself.
func namesObject(err error) bool {
	status := apierrors.APIStatus(nil)
	return errors.As(err, &status) && status.Status().Details != nil && status.Status().Details.Name != ""
}

// terminalSizes passes the size of the terminal on, at first and after each change.
type terminalSizes struct {
	ctx     context.Context
	changed <-chan os.Signal
	first   bool
}

// Next implements remotecommand.TerminalSizeQueue.
func (t *terminalSizes) Next() *remotecommand.TerminalSize {
	if !t.first {
		select {
		case <-t.ctx.Done():
			return nil
		case <-t.changed:
		}
	}
	t.first = false
	columns, rows, err := term.GetSize(int(os.Stdout.Fd()))
	if err != nil {
		return nil
	}
	return &remotecommand.TerminalSize{Width: uint16(columns), Height: uint16(rows)}
}

// rawTerminal passes all keys to the machine until restore is called.
func rawTerminal(ctx context.Context) (_ *terminalSizes, restore func(), err error) {
	before, err := term.MakeRaw(int(os.Stdin.Fd()))
	if err != nil {
		return nil, nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	return &terminalSizes{ctx: ctx, changed: windowChanges(), first: true}, func() {
		cancel()
		_ = term.Restore(int(os.Stdin.Fd()), before)
	}, nil
}
