// Package testenv starts a real etcd and kube-apiserver for integration tests, with the CRDs of Cluster API and Capstan.
package testenv

import (
	"context"
	"crypto/rand"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	k8sruntime "k8s.io/apimachinery/pkg/runtime"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/internal/testenv/ports"
)

// startTries is the number of attempts to start an API server. An attempt can fail because of a busy machine or a port
// in use.
const startTries = 3

// Env is a running API server.
type Env struct {
	// Config is the configuration of a cluster-admin.
	Config *rest.Config
	// Kubeconfig is the kubeconfig of a cluster-admin, for commands that need a file.
	Kubeconfig []byte
	// Scheme contains the types of Kubernetes, Cluster API and Options.
	Scheme *k8sruntime.Scheme
	// Client reads live.
	Client client.Client
	// Webhooks is the address of the webhook server that the API server calls, if Options.Webhooks are set.
	Webhooks envtest.WebhookInstallOptions

	env *envtest.Environment
}

// Etcd returns the address of the etcd of the API server, to read objects as they are stored.
func (e *Env) Etcd() string { return e.env.ControlPlane.Etcd.URL.String() }

// Endpoint returns the address of the API server, for clusters whose API server it is too.
func (e *Env) Endpoint() clusterv1.APIEndpoint {
	address := e.env.ControlPlane.GetAPIServer().SecureServing.ListenAddr
	port, err := strconv.ParseInt(address.Port, 10, 32)
	utilruntime.Must(err)
	return clusterv1.APIEndpoint{Host: address.Address, Port: int32(port)}
}

// WebhookFlags returns the flags of a manager that serves the webhooks.
func (e *Env) WebhookFlags() []string {
	w := e.Webhooks
	return []string{"--webhook-host=" + w.LocalServingHost, fmt.Sprint("--webhook-port=", w.LocalServingPort), "--webhook-cert-dir=" + w.LocalServingCertDir}
}

// Options of Start.
type Options struct {
	// AddToScheme adds the types of the tests.
	AddToScheme []func(*k8sruntime.Scheme) error
	// Webhooks are folders with webhook configurations, relative to the repository.
	Webhooks []string
	// CRDLabels are labels of all CRDs, beside their own. An API server needs seconds to accept a change of each CRD.
	CRDLabels map[string]string
	// AdmissionPlugins of the API server, in addition to those that are enabled by default.
	AdmissionPlugins []string
}

// Run starts an API server, runs the tests of a package and stops it. For TestMain:
//
//	func TestMain(m *testing.M) { os.Exit(testenv.Run(m, testenv.Options{...}, &env)) }
func Run(m *testing.M, opts Options, into **Env) int {
	return RunWith(m, opts, into, func() (end func(), err error) { return func() {}, nil })
}

// RunWith is Run for tests with a manager: prepare is called before the tests, and end after them.
func RunWith(m *testing.M, opts Options, into **Env, prepare func() (end func(), err error)) (code int) {
	fail := func(err error) int {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	env, err := Start(opts)
	if err != nil {
		return fail(err)
	}
	*into = env
	defer func() {
		if err := env.Stop(); err != nil {
			code = fail(err)
		}
	}()
	end, err := prepare()
	if err != nil {
		return fail(err)
	}
	defer end()
	return m.Run()
}

// Parallel sets how many tests with t.Parallel run at the same time, for packages whose tests mostly wait. The default is the
// number of processors. The flag -parallel has priority. Call it in TestMain.
func Parallel(n int) {
	const name = "test.parallel"
	flag.Parse()
	given := false
	flag.Visit(func(f *flag.Flag) { given = given || f.Name == name })
	if !given {
		utilruntime.Must(flag.Set(name, strconv.Itoa(n)))
	}
}

// Start starts etcd and kube-apiserver from KUBEBUILDER_ASSETS, or from the output of `make build-kube` if that is not
// set. The caller must call Stop, also after a failed test.
func Start(opts Options) (*Env, error) {
	ctrl.SetLogger(klog.Background())
	scheme := k8sruntime.NewScheme()
	add := append([]func(*k8sruntime.Scheme) error{clientgoscheme.AddToScheme, clusterv1.AddToScheme, capiipamv1.AddToScheme}, opts.AddToScheme...)
	for _, f := range add {
		utilruntime.Must(f(scheme))
	}
	root := Root()
	assets, err := assets(root)
	if err != nil {
		return nil, err
	}
	capi, err := moduleDir("sigs.k8s.io/cluster-api")
	if err != nil {
		return nil, err
	}
	hooks, err := webhooks(root, opts.Webhooks)
	if err != nil {
		return nil, err
	}
	crds, err := readCRDs(root, capi, hooks, opts.Webhooks)
	if err != nil {
		return nil, err
	}
	for _, crd := range crds {
		crd.Labels = labels.Merge(crd.Labels, opts.CRDLabels)
	}
	out := &Env{Scheme: scheme, Webhooks: hooks}
	for try := 1; ; try++ {
		out.env = environment(assets, scheme, crds, opts.AdmissionPlugins)
		if out.Config, err = out.env.Start(); err == nil {
			break
		}
		_ = out.env.Stop() // the processes that were started
		err = fmt.Errorf("cannot start a test API server from %s (run `make build-kube` first): %w", assets, err)
		if try == startTries {
			return nil, errors.Join(err, hooks.Cleanup())
		}
		fmt.Fprintln(os.Stderr, err)
	}
	if err := out.prepare(crds); err != nil {
		_ = out.Stop()
		return nil, err
	}
	return out, nil
}

// prepare waits until the API server serves the CRDs, and installs the webhooks.
func (e *Env) prepare(crds []*apiextensionsv1.CustomResourceDefinition) (err error) {
	// The client's own rate limit must not delay tests.
	e.Config.QPS, e.Config.Burst = 1000, 2000
	e.Kubeconfig = e.env.KubeConfig
	if err := envtest.WaitForCRDs(e.Config, crds, envtest.CRDInstallOptions{MaxTime: expect.Patience, PollInterval: 100 * time.Millisecond}); err != nil {
		return err
	}
	if len(e.Webhooks.Paths) > 0 {
		if err := e.Webhooks.Install(e.Config); err != nil {
			return err
		}
	}
	e.Client, err = client.New(e.Config, client.Options{Scheme: e.Scheme})
	return err
}

// environment is an API server that was not started yet.
func environment(assets string, scheme *k8sruntime.Scheme, crds []*apiextensionsv1.CustomResourceDefinition, admissionPlugins []string) *envtest.Environment {
	env := &envtest.Environment{
		Scheme:                   scheme,
		BinaryAssetsDirectory:    assets,
		ControlPlaneStartTimeout: expect.Patience,
		ControlPlaneStopTimeout:  expect.Patience,
	}
	server := env.ControlPlane.GetAPIServer()
	server.SecureServing.Authn = &tokenAuthn{token: rand.Text(), beforeServer: func() error {
		return storeCRDs(server.EtcdURL.String(), crds)
	}}
	// Services of both address families. Clients do not wait for their turn.
	flags := server.Configure().Set("service-cluster-ip-range", "10.0.0.0/24,fd00:10::/112").Set("enable-priority-and-fairness", "false")
	if len(admissionPlugins) > 0 {
		flags.Append("enable-admission-plugins", admissionPlugins...)
	}
	return env
}

// webhooks returns the address and the certificates of the webhook server of a suite, and the webhooks of folders.
func webhooks(root string, folders []string) (out envtest.WebhookInstallOptions, err error) {
	if len(folders) == 0 {
		return out, nil
	}
	// Managers that serve the webhooks are killed and started again, so their port must be reserved.
	port, err := ports.Take()
	if err != nil {
		return out, err
	}
	out = envtest.WebhookInstallOptions{LocalServingHost: "127.0.0.1", LocalServingPort: port, MaxTime: expect.Patience}
	for _, folder := range folders {
		out.Paths = append(out.Paths, filepath.Join(root, folder))
	}
	if err := out.PrepWithoutInstalling(); err != nil {
		return out, err
	}
	// controller-gen gives the configurations of all providers the same names, and one would replace another.
	for i, c := range out.MutatingWebhooks {
		c.Name = fmt.Sprintf("%s-%d", c.Name, i)
	}
	for i, c := range out.ValidatingWebhooks {
		c.Name = fmt.Sprintf("%s-%d", c.Name, i)
	}
	return out, nil
}

// Stop ends the API server and etcd.
func (e *Env) Stop() error { return errors.Join(e.env.Stop(), e.Webhooks.Cleanup()) }

// Namespace creates a namespace for a test. It is not removed, because the API server ends with the tests.
func (e *Env) Namespace(t testing.TB) string {
	t.Helper()
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "test-"}}
	if err := e.Client.Create(context.Background(), ns); err != nil {
		t.Fatal(err)
	}
	return ns.Name
}

// Root is the repository's folder. Go starts a test in the folder of its package, below the folder of go.mod. The paths of
// source files in a binary do not contain the folder, because of -trimpath.
var Root = sync.OnceValue(func() string {
	dir, err := os.Getwd()
	if err != nil {
		panic(err)
	}
	for !atomicfile.Exists(filepath.Join(dir, "go.mod")) {
		if dir == filepath.Dir(dir) {
			panic("no go.mod above the working directory: start the test in the folder of its package, as `go test` does")
		}
		dir = filepath.Dir(dir)
	}
	return dir
})

// Assets returns the folder with the etcd and the kube-apiserver of the tests.
func Assets() (string, error) { return assets(Root()) }

func assets(root string) (string, error) {
	if dir := os.Getenv("KUBEBUILDER_ASSETS"); dir != "" {
		return dir, nil
	}
	built, err := filepath.Glob(filepath.Join(root, "bin", "kubernetes", "v*"))
	if err != nil {
		return "", err
	}
	if len(built) == 0 {
		return "", fmt.Errorf("no kube-apiserver in %s: run `make build-kube`, or set KUBEBUILDER_ASSETS", filepath.Join(root, "bin", "kubernetes"))
	}
	return slices.Max(built), nil
}

func moduleDir(module string) (string, error) {
	cmd := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", module)
	cmd.Dir = Root()
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("cannot find the source of %s: %w", module, err)
	}
	return strings.TrimSpace(string(out)), nil
}
