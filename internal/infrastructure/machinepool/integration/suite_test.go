package integration

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/runtime"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/infrastructure"
	"capstan.dev/capstan/internal/manager"
	"capstan.dev/capstan/internal/testenv"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/internal/testenv/ports"
)

var (
	env *testenv.Env
	ctx = context.Background()
	// kubeconfigFile is the file with the kubeconfig.
	kubeconfigFile string
	provider       *process
)

func TestMain(m *testing.M) {
	if os.Getenv(asProvider) != "" {
		if err := manager.Command(infrastructure.Provider()).ExecuteContext(ctx); err != nil {
			os.Exit(fail(err))
		}
		return
	}
	testenv.Parallel(8) // Tests mostly wait for machines.
	os.Exit(run(m))
}

func run(m *testing.M) int {
	dir, err := os.MkdirTemp("", "pools")
	if err != nil {
		return fail(err)
	}
	defer os.RemoveAll(dir)
	env, err = testenv.Start(testenv.Options{
		AddToScheme: []func(*runtime.Scheme) error{infrav1.AddToScheme, bootstrapv1.AddToScheme},
		Webhooks:    []string{"config/infrastructure/webhook"},
	})
	if err != nil {
		return fail(err)
	}
	defer func() { _ = env.Stop() }()
	kubeconfigFile = filepath.Join(dir, "kubeconfig")
	if err := os.WriteFile(kubeconfigFile, env.Kubeconfig, 0o600); err != nil {
		return fail(err)
	}
	stopCore, err := startCore(kubeconfigFile)
	if err != nil {
		return fail(err)
	}
	defer stopCore()
	provider = newProcess(kubeconfigFile)
	if err := provider.start(); err != nil {
		return fail(err)
	}
	defer provider.kill()
	return m.Run()
}

func fail(err error) int {
	fmt.Fprintln(os.Stderr, err)
	return 1
}

// startCore runs Cluster API core as `make build-capi` built it.
func startCore(file string) (stop func(), err error) {
	port, err := ports.Take()
	if err != nil {
		return nil, err
	}
	log := io.Discard
	if path := os.Getenv("CAPI_CORE_LOG"); path != "" {
		if log, err = os.Create(path); err != nil {
			return nil, err
		}
	}
	cmd := exec.Command(filepath.Join(testenv.Root(), "bin", "capi", "capi-core-manager"),
		"--kubeconfig="+file, "--leader-elect=false", "--diagnostics-address=0", "--health-addr=0",
		fmt.Sprint("--webhook-port=", port), "--webhook-cert-dir="+env.Webhooks.LocalServingCertDir,
		// In production, core reconciles an object at most once a second.
		"--feature-gates=ReconcilerRateLimiting=false")
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("cannot start Cluster API core (run `make build-capi` first): %w", err)
	}
	return func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}, nil
}

// process is the infrastructure provider in a separate process, so that tests can kill it at any moment. The test binary starts
// itself.
type process struct {
	args []string
	cmd  *exec.Cmd
}

// asProvider is set for the provider's process.
const asProvider = "CAPSTAN_TEST_RUN_PROVIDER"

func newProcess(kubeconfig string) *process {
	return &process{args: append(env.WebhookFlags(), "--kubeconfig="+kubeconfig, "--health-addr=0", "--diagnostics-address=0", "--leader-elect=false")}
}

// start starts the process with additional flags.
func (p *process) start(flags ...string) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	p.cmd = exec.Command(self, slices.Concat([]string{"infrastructure"}, p.args, flags)...)
	p.cmd.Env = append(os.Environ(), asProvider+"=1")
	if path := os.Getenv("CAPSTAN_LOG"); path != "" {
		log, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
		if err != nil {
			return err
		}
		p.cmd.Stdout, p.cmd.Stderr = log, log
	}
	if err := p.cmd.Start(); err != nil {
		return err
	}
	return p.serving()
}

// serving waits until the webhooks answer.
func (p *process) serving() error {
	w := env.Webhooks
	for deadline := time.Now().Add(expect.Patience); ; time.Sleep(20 * time.Millisecond) {
		c, err := net.Dial("tcp", net.JoinHostPort(w.LocalServingHost, fmt.Sprint(w.LocalServingPort)))
		if err == nil {
			return c.Close()
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("the provider does not serve: %w", err)
		}
	}
}

// restart kills the process and starts it with additional flags.
func (p *process) restart(t *testing.T, flags ...string) {
	t.Helper()
	p.kill()
	if err := p.start(flags...); err != nil {
		t.Fatal(err)
	}
}

// kill ends the process as kill -9 does.
func (p *process) kill() {
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait()
}
