//go:build e2e

// Package harness starts a separate management plane for end-to-end tests, and compares the state of the host before and
// after. The tests need root and the built binaries.
package harness

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	apiruntime "k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	addonsv1 "sigs.k8s.io/cluster-api/api/addons/v1beta2"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
	"capstan.dev/capstan/internal/testenv"
	"capstan.dev/capstan/test/versions"
)

// KubernetesVersion is the version that the tests use: that in CAPSTAN_KUBERNETES_VERSION, or the one of make test.
var KubernetesVersion = cmp.Or(os.Getenv("CAPSTAN_KUBERNETES_VERSION"), versions.Default)

// Plane is a management plane below its own root folder.
type Plane struct {
	Root   string
	Client client.WithWatch
}

// Bin returns the folder of the built binaries: bin, or the folder in CAPSTAN_BIN.
func Bin() string {
	if dir := os.Getenv("CAPSTAN_BIN"); dir != "" {
		return dir
	}
	return filepath.Join(testenv.Root(), "bin")
}

// Kubectl returns the path of kubectl.
func Kubectl() string {
	return filepath.Join(Bin(), "kubernetes", KubernetesVersion, "kubectl")
}

// Kubectl runs kubectl against the API server of the plane, as its administrator, and returns its output. Clean-ups can call it.
func (p *Plane) Kubectl(t *testing.T, args ...string) (string, error) {
	t.Helper()
	return Command(context.WithoutCancel(t.Context()), nil, Kubectl(), append([]string{"--kubeconfig", filepath.Join(p.Root, "admin.kubeconfig")}, args...)...)
}

// MustKubectl runs kubectl and fails the test on an error.
func (p *Plane) MustKubectl(t *testing.T, args ...string) string {
	t.Helper()
	out, err := p.Kubectl(t, args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// Run starts a plane, runs the tests of a package with it, and takes it down. It fails if a trace of the plane is left.
// TestMain calls it.
func Run(m *testing.M, plane **Plane, upArgs ...string) int {
	before, err := Look()
	if err != nil {
		fmt.Fprintln(os.Stderr, "reading the state of the host:", err)
		return 1
	}
	p, err := Start(upArgs...)
	if err != nil {
		fmt.Fprintln(os.Stderr, "starting the management plane:", err)
		if p != nil {
			p.dumpLogs()
			_ = p.Down()
		}
		return 1
	}
	*plane = p
	code := m.Run()
	if code != 0 {
		p.dumpLogs()
	}
	if err := p.Down(); err != nil {
		fmt.Fprintln(os.Stderr, "taking the management plane down:", err)
		code = 1
	}
	if err := nothingMore(before); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	return code
}

// nothingMore returns an error if the host has more objects than before. It waits for processes that were killed.
func nothingMore(before Holdings) error {
	for end := time.Now().Add(patience); ; time.Sleep(250 * time.Millisecond) {
		after, err := Look()
		if err != nil {
			return fmt.Errorf("reading the state of the host: %w", err)
		}
		left := after.Minus(before)
		if len(left) == 0 {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("left on the host after `capstan down`:\n  %s", strings.Join(left, "\n  "))
		}
	}
}

// Start starts a plane below a new folder. If it fails after the folder was created, it also returns the plane, so that
// the caller can take it down.
func Start(upArgs ...string) (*Plane, error) {
	// The name is short, because the paths of sockets are limited to 108 bytes.
	root, err := os.MkdirTemp("", "cap")
	if err != nil {
		return nil, err
	}
	p := &Plane{Root: root}
	if _, err := p.Capstan(context.Background(), append([]string{"up"}, upArgs...)...); err != nil {
		return p, err
	}
	err = p.Connect()
	return p, err
}

// Connect reads the plane's kubeconfig and creates the client.
func (p *Plane) Connect() error {
	kubeconfig, err := p.Capstan(context.Background(), "get", "kubeconfig", "--management")
	if err != nil {
		return err
	}
	config, err := clientcmd.RESTConfigFromKubeConfig([]byte(kubeconfig))
	if err != nil {
		return err
	}
	p.Client, err = NewClient(config)
	return err
}

// NewClient returns a client for the kinds of Kubernetes, Cluster API and Capstan.
func NewClient(config *rest.Config) (client.WithWatch, error) {
	scheme := apiruntime.NewScheme()
	for _, add := range []func(*apiruntime.Scheme) error{
		clientgoscheme.AddToScheme, addonsv1.AddToScheme, clusterv1.AddToScheme,
		infrav1.AddToScheme, controlplanev1.AddToScheme, bootstrapv1.AddToScheme, ipamv1.AddToScheme, capiipamv1.AddToScheme,
	} {
		if err := add(scheme); err != nil {
			return nil, err
		}
	}
	config.QPS = -1
	return client.NewWithWatch(config, client.Options{Scheme: scheme})
}

// Capstan runs the CLI against this plane and returns its output. The arguments behind "--" are those of a command in a machine.
func (p *Plane) Capstan(ctx context.Context, args ...string) (string, error) {
	end := slices.Index(args, "--")
	if end < 0 {
		end = len(args)
	}
	return Command(ctx, nil, filepath.Join(Bin(), "capstan"), slices.Insert(slices.Clone(args), end, "--root", p.Root)...)
}

// Command runs a program and returns its standard output. The error contains its standard error.
func Command(ctx context.Context, env []string, name string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env = append(os.Environ(), env...)
	// A daemon that the command starts inherits its files. The test must not wait for the daemon.
	cmd.WaitDelay = 5 * time.Second
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	if err != nil && !errors.Is(err, exec.ErrWaitDelay) {
		return stdout.String(), fmt.Errorf("%s %s: %w\n%s", filepath.Base(name), strings.Join(args, " "), err, stderr.String())
	}
	return stdout.String(), nil
}

// Down takes the plane down and removes its folder.
func (p *Plane) Down() error {
	_, err := p.Capstan(context.Background(), "down", "--yes")
	return errors.Join(err, os.RemoveAll(p.Root))
}

// dumpLogs prints the end of every log of the plane and of its machines, for a failed run.
func (p *Plane) dumpLogs() {
	const tail = 4 << 10
	logs, _ := filepath.Glob(filepath.Join(p.Root, "logs", "*.log"))
	inits, _ := filepath.Glob(filepath.Join(p.Root, "hosts", "*", "machines", "*", "init.log"))
	for _, path := range append(logs, inits...) {
		data, err := os.ReadFile(path)
		if err != nil {
			continue
		}
		if len(data) > tail {
			data = data[len(data)-tail:]
		}
		fmt.Fprintf(os.Stderr, "---- %s\n%s\n", path, data)
	}
}
