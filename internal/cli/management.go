package cli

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	securejoin "github.com/cyphar/filepath-securejoin"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
)

// management is a client of a management cluster.
type management struct {
	config *rest.Config
	client client.WithWatch
	// namespace of the context.
	namespace string
	// gaps are the kinds that the user has no right to read. readable: there is something that the user could read.
	gaps     []gap
	readable bool
}

// source is the place in which a command finds the kubeconfig of the management cluster.
type source int

const (
	fromFlag source = iota
	fromEnvironment
	fromPlane
	fromHome
)

func (s source) String() string {
	return map[source]string{
		fromFlag: "--kubeconfig", fromEnvironment: "$KUBECONFIG", fromPlane: "the plane of this box", fromHome: "~/.kube/config",
	}[s]
}

// surroundings are the inputs of the choice of a kubeconfig.
type surroundings struct {
	kubeconfig, context, environment string
	// root: the command line names an installation of this box.
	root bool
	// plane: this box has a plane, and this process can read its kubeconfig.
	plane bool
	// home: ~/.kube/config exists.
	home bool
}

// choose returns the source of the kubeconfig: that of the command line, then $KUBECONFIG, then the plane of this box,
// then ~/.kube/config. A context is searched where kubectl searches it.
func choose(s surroundings) source {
	switch {
	case s.kubeconfig != "":
		return fromFlag
	case s.root:
		return fromPlane
	case s.environment != "":
		return fromEnvironment
	case s.context != "":
		return fromHome
	case s.plane || !s.home:
		return fromPlane
	}
	return fromHome
}

func (a *app) surroundings() surroundings {
	_, localErr := a.localKubeconfig()
	_, homeErr := os.Stat(clientcmd.RecommendedHomeFile)
	return surroundings{
		kubeconfig: a.kubeconfig, context: a.context, environment: os.Getenv(clientcmd.RecommendedConfigPathEnvVar),
		root: a.rootGiven, plane: localErr == nil, home: homeErr == nil,
	}
}

// clientConfig returns the kubeconfig of the management cluster, and its source.
func (a *app) clientConfig() (clientcmd.ClientConfig, source, error) {
	from := choose(a.surroundings())
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.WarnIfAllMissing = false
	switch from {
	case fromFlag:
		rules.ExplicitPath = a.kubeconfig
	case fromPlane:
		path, err := a.localKubeconfig()
		if err != nil {
			return nil, from, err
		}
		rules.ExplicitPath = path
	}
	return clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, &clientcmd.ConfigOverrides{CurrentContext: a.context}), from, nil
}

// namespace returns the namespace of the command line, else that of the context, else default.
func (a *app) namespace(given string) (string, error) {
	if given != "" {
		return given, nil
	}
	loader, from, err := a.clientConfig()
	if err != nil {
		return metav1.NamespaceDefault, nil // Without a kubeconfig there is no context. Connections report the error.
	}
	found, _, err := loader.Namespace()
	return found, kubeconfigError(from, err)
}

// kubeconfigError names the source of a kubeconfig that cannot be used, and the solution.
func kubeconfigError(from source, err error) error {
	switch {
	case err == nil:
		return nil
	case !clientcmd.IsEmptyConfig(err):
		return fmt.Errorf("expected the kubeconfig of a management cluster from %s: %w", from, err)
	case from == fromEnvironment:
		return coded{errors.New("expected the kubeconfig of a management cluster from $KUBECONFIG, found no file with a cluster: correct or unset $KUBECONFIG, or set --kubeconfig"), exitNotFound}
	}
	return coded{fmt.Errorf("expected the kubeconfig of a management cluster from %s, found no file with a cluster: set --kubeconfig or $KUBECONFIG", from), exitNotFound}
}

// management connects to the management cluster.
func (a *app) management() (*management, error) {
	loader, from, err := a.clientConfig()
	if err != nil {
		return nil, err
	}
	config, err := loader.ClientConfig()
	if err != nil {
		return nil, kubeconfigError(from, err)
	}
	m, err := connect(config, from.String())
	if errors.Is(err, syscall.ECONNREFUSED) && config.Host == a.localEndpoint() {
		return nil, fmt.Errorf("%w; start the management plane of this box with `capstan up%s`", err, a.rootFlag())
	}
	if err != nil {
		return nil, err
	}
	m.namespace, _, err = loader.Namespace()
	return m, err
}

// localEndpoint is the URL of the plane of this box for clients on this box; "" without a plane whose kubeconfig this process can read.
func (a *app) localEndpoint() string {
	path, err := a.localKubeconfig()
	if err != nil {
		return ""
	}
	config, err := clientcmd.BuildConfigFromFlags("", path)
	if err != nil {
		return ""
	}
	return config.Host
}

// localManagement connects to the plane of this box. It ignores $KUBECONFIG.
func (a *app) localManagement() (*management, error) {
	path, err := a.localKubeconfig()
	if err != nil {
		return nil, err
	}
	config, err := clientcmd.BuildConfigFromFlags("", path)
	if err != nil {
		return nil, err
	}
	return connect(config, fromPlane.String())
}

// connect fails unless the server has Cluster API. A kubeconfig of a workload cluster is a frequent mistake.
func connect(config *rest.Config, from string) (*management, error) {
	config.QPS, config.Burst = -1, -1 // the server has priority and fairness
	scheme := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), clusterv1.AddToScheme(scheme), infrav1.AddToScheme(scheme)); err != nil {
		return nil, err
	}
	c, err := client.NewWithWatch(config, client.Options{Scheme: scheme})
	if err != nil {
		return nil, fmt.Errorf("expected a management API at %s (from %s): %w", config.Host, from, err)
	}
	_, err = c.RESTMapper().RESTMapping(clusterv1.GroupVersion.WithKind("Cluster").GroupKind(), clusterv1.GroupVersion.Version)
	if apimeta.IsNoMatchError(err) {
		return nil, fmt.Errorf("expected Cluster API at %s (from %s), found another cluster: choose the management cluster with --kubeconfig, --context or $KUBECONFIG", config.Host, from)
	}
	if err != nil {
		return nil, fmt.Errorf("expected a management API at %s (from %s): %w", config.Host, from, err)
	}
	return &management{config: config, client: c}, nil
}

// self returns the command line that runs this program for the same management cluster.
func (a *app) self() string {
	self := a.program + a.rootFlag()
	if a.kubeconfig != "" {
		self += " --kubeconfig " + a.kubeconfig
	}
	if a.context != "" {
		self += " --context " + a.context
	}
	return self
}

// absolute makes a path absolute, because the processes that a command starts run in another folder.
func absolute(path *string) error {
	if *path == "" {
		return nil
	}
	full, err := filepath.Abs(*path)
	*path = full
	return err
}

// withoutLinks makes a path absolute and follows its symbolic links, also those to a folder that does not exist yet. A part that this
// user cannot read stays as it is.
func withoutLinks(path *string) error {
	if err := absolute(path); err != nil || *path == "" {
		return err
	}
	target, err := securejoin.SecureJoin("/", *path)
	if errors.Is(err, fs.ErrPermission) {
		return nil
	}
	if err != nil {
		return coded{fmt.Errorf("expected a folder, found %s, whose symbolic links cannot be followed: %w", *path, err), exitUsage}
	}
	*path = target
	return nil
}
