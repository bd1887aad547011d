//go:build e2e

// Package harness starts a separate management plane for end-to-end tests, and compares the state of the host before and
// after. The tests need root and the built binaries.
package harness

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"capstan.dev/capstan/internal/testenv"
	"capstan.dev/capstan/test/plane"
	"capstan.dev/capstan/test/versions"
)

// KubernetesVersion is the version that the tests use: that in CAPSTAN_KUBERNETES_VERSION, or the one of make test.
var KubernetesVersion = cmp.Or(os.Getenv("CAPSTAN_KUBERNETES_VERSION"), versions.Default)

// Plane is a management plane below its own root folder.
type Plane struct{ *plane.Plane }

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
func Run(m *testing.M, into **Plane, upArgs ...string) int {
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
	*into = p
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
	p, err := plane.Start(context.Background(), Bin(), "", upArgs...)
	if p == nil {
		return nil, err
	}
	return &Plane{p}, err
}

// Connect reads the plane's kubeconfig and creates the client.
func (p *Plane) Connect() error { return p.Plane.Connect(context.Background()) }

// Down takes the plane down and removes its folder.
func (p *Plane) Down() error { return p.Plane.Down(context.Background()) }

// NewClient returns a client for the kinds of Kubernetes, Cluster API and Capstan.
func NewClient(config *rest.Config) (client.WithWatch, error) { return plane.NewClient(config) }

// Command runs a program and returns its standard output. The error contains its standard error.
func Command(ctx context.Context, env []string, name string, args ...string) (string, error) {
	return plane.Command(ctx, env, name, args...)
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
