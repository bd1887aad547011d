package embedded

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"capstan.dev/capstan/internal/host/joining"
)

// The components of a management plane. Logs, folders and the status use these names.
const (
	etcd              = "etcd"
	apiServer         = "kube-apiserver"
	controllerManager = "kube-controller-manager"
	coreManager       = "capi-core-manager"
	manager           = "manager"
	capstand          = "capstand" // capstand-<host> when there are several

	// Clients that are not components.
	admin     = "admin"
	installer = "installer"
)

const (
	portEtcd              = "etcd"
	portEtcdPeer          = "etcd-peer"
	portAPIServer         = "kube-apiserver"
	portControllerManager = "kube-controller-manager"
	portCoreWebhook       = "capi-core-webhook"
	portCoreHealth        = "capi-core-health"
	portCoreDiagnostics   = "capi-core-diagnostics"
	portManagerWebhook    = "manager-webhook"
	portManagerHealth     = "manager-health"
	portManagerMetrics    = "manager-metrics"
)

var portNames = []string{
	portEtcd, portEtcdPeer, portAPIServer, portControllerManager,
	portCoreWebhook, portCoreHealth, portCoreDiagnostics,
	portManagerWebhook, portManagerHealth, portManagerMetrics,
}

const (
	coreNamespace         = "capi-system"
	coreServiceAccount    = "capi-manager"
	managerNamespace      = joining.DefaultNamespace
	managerServiceAccount = "capstan-manager"
	adminGroup            = "capstan:administrators"
	// frontProxyClient is the name of the API server when it forwards requests to the manager.
	frontProxyClient = "front-proxy-client"
	// accessService is the Service of the APIService of the manager.
	accessService = "capstan-infrastructure-webhook-service"

	// etcdName is the name of etcd's only member.
	etcdName = "capstan"
)

// component is one process of the plane.
type component struct {
	name string
	path string
	args []string
	env  []string
	// asRoot is set for capstand only. Other components run as the system user.
	asRoot bool
	// grace is the time that it needs to end in order; stopGrace if it is less.
	grace time.Duration
	// ready returns nil when the component answers.
	ready func(context.Context) error
}

// with returns the component with additional arguments.
func (c component) with(args []string) component {
	c.args = append(c.args, args...)
	return c
}

// etcdComponent is the database: one member, with TLS for clients and peers.
func etcdComponent(l Layout, s State) component {
	dir := l.Component(etcd)
	client, peer := loopback("https", s.port(portEtcd)), loopback("https", s.port(portEtcdPeer))
	crt, key, ca := filepath.Join(dir, "server.crt"), filepath.Join(dir, "server.key"), filepath.Join(dir, "ca.crt")
	return component{
		name: etcd,
		path: filepath.Join(l.Bin(), "etcd"),
		args: []string{
			"--name=" + etcdName, "--data-dir=" + l.Etcd(), "--initial-cluster=" + etcdName + "=" + peer,
			"--listen-client-urls=" + client, "--advertise-client-urls=" + client,
			"--listen-peer-urls=" + peer, "--initial-advertise-peer-urls=" + peer,
			"--cert-file=" + crt, "--key-file=" + key, "--trusted-ca-file=" + ca, "--client-cert-auth",
			"--peer-cert-file=" + crt, "--peer-key-file=" + key, "--peer-trusted-ca-file=" + ca, "--peer-client-cert-auth",
			"--auto-compaction-mode=revision", "--auto-compaction-retention=5000", "--logger=zap", "--log-level=warn",
		},
		ready: httpProbe(client+"/health", ca, filepath.Join(l.Component(apiServer), "etcd-client")),
	}
}

// apiServerComponent is the management API, without anonymous access. It listens on loopback only, unless the state has an
// address for other boxes.
func apiServerComponent(l Layout, s State) component {
	dir := l.Component(apiServer)
	file := func(name string) string { return filepath.Join(dir, name) }
	return component{
		name: apiServer,
		path: filepath.Join(l.Bin(), "kube-apiserver"),
		args: append([]string{
			"--bind-address=" + s.apiBindAddress(), "--advertise-address=127.0.0.1", "--secure-port=" + strconv.Itoa(s.port(portAPIServer)),
			// This plane has no nodes and no pods, so no client uses the endpoints of the Service kubernetes.
			"--endpoint-reconciler-type=none", "--service-cluster-ip-range=10.255.255.0/24",
			"--etcd-servers=" + loopback("https", s.port(portEtcd)),
			"--etcd-cafile=" + file("etcd-ca.crt"), "--etcd-certfile=" + file("etcd-client.crt"), "--etcd-keyfile=" + file("etcd-client.key"),
			"--tls-cert-file=" + file("server.crt"), "--tls-private-key-file=" + file("server.key"), "--tls-min-version=VersionTLS12",
			"--client-ca-file=" + file("ca.crt"), "--anonymous-auth=false", "--authorization-mode=RBAC", "--profiling=false",
			"--requestheader-client-ca-file=" + file("front-proxy-ca.crt"), "--requestheader-allowed-names=" + frontProxyClient,
			"--requestheader-username-headers=X-Remote-User", "--requestheader-group-headers=X-Remote-Group", "--requestheader-extra-headers-prefix=X-Remote-Extra-",
			"--proxy-client-cert-file=" + file(frontProxyClient+".crt"), "--proxy-client-key-file=" + file(frontProxyClient+".key"),
			"--service-account-issuer=https://kubernetes.default.svc",
			"--service-account-key-file=" + file("service-account.key"), "--service-account-signing-key-file=" + file("service-account.key"),
			"--encryption-provider-config=" + l.EncryptionConfig(),
			// The API server has a watch cache for each version of a kind, also for a version that nobody reads. It converts every
			// object that is written for each of these caches, with a call of a webhook, and keeps all versions of some minutes. A
			// plane has few watches, so etcd can serve them.
			"--watch-cache=false",
			// Without that cache there are no bookmarks, and a watch of a quiet kind stays at the revision of its first list. With the
			// default of 5 minutes, this revision was gone whenever such a watch ended, and each client listed the kind again.
			"--etcd-compaction-interval=30m",
		}, auditArgs(l)...),
		// With the default of 100, a quarter of the processor time was the collection of garbage.
		env:   []string{"GOGC=200"},
		ready: httpProbe(loopback("https", s.port(portAPIServer))+"/readyz", file("ca.crt"), filepath.Join(l.Component(installer), "client")),
	}
}

// planeControllers are the controllers that a plane without nodes and pods needs.
var planeControllers = []string{
	"garbage-collector-controller",                 // deletes objects whose owner is gone
	"namespace-controller",                         // deletes the objects of a deleted namespace
	"certificatesigningrequest-cleaner-controller", // deletes old certificate requests
	"clusterrole-aggregation-controller",           // Cluster API's role gets its rules by aggregation
	"serviceaccount-controller",                    // makes the ServiceAccount default of each namespace
	"resourcequota-controller",                     // the API server enforces a quota only when this controller has set its status
	"validatingadmissionpolicy-status-controller",  // shows errors in the expressions of policies
}

// controllerManagerComponent runs the controllers of Kubernetes that the plane needs.
func controllerManagerComponent(l Layout, s State) component {
	dir := l.Component(controllerManager)
	return component{
		name: controllerManager,
		path: filepath.Join(l.Bin(), "kube-controller-manager"),
		args: []string{
			"--kubeconfig=" + l.Kubeconfig(controllerManager), "--leader-elect=false", "--profiling=false",
			"--authentication-kubeconfig=" + l.Kubeconfig(controllerManager), "--authorization-kubeconfig=" + l.Kubeconfig(controllerManager),
			"--bind-address=127.0.0.1", "--secure-port=" + strconv.Itoa(s.port(portControllerManager)),
			"--tls-cert-file=" + filepath.Join(dir, "server.crt"), "--tls-private-key-file=" + filepath.Join(dir, "server.key"),
			// Each controller uses its own role: the common role lacks the rights of the garbage collector.
			"--use-service-account-credentials",
			"--controllers=" + strings.Join(planeControllers, ","),
		},
		ready: httpProbe(loopback("https", s.port(portControllerManager))+"/healthz", filepath.Join(dir, "ca.crt"), ""),
	}
}

// coreManagerComponent is Cluster API core. It has no flag for the address of its webhooks. They listen on all addresses,
// with TLS, and only validate objects.
func coreManagerComponent(l Layout, s State) component {
	return component{
		name: coreManager,
		path: filepath.Join(l.Bin(), "capi-core-manager"),
		args: []string{
			"--kubeconfig=" + l.Kubeconfig(coreManager), coreFeatureGates(s),
			"--webhook-port=" + strconv.Itoa(s.port(portCoreWebhook)), "--webhook-cert-dir=" + l.Component(coreManager),
			// With the default of 100, the workers slow each other down on the box of a plane, and work with old caches: 15 writes of
			// each new machine ended with a conflict when 100 machines were created at once. With 30, there were 2 or 3.
			"--machine-concurrency=30",
			"--runtime-extension-client-cert-file=" + filepath.Join(l.Component(coreManager), "client.crt"),
			"--runtime-extension-client-key-file=" + filepath.Join(l.Component(coreManager), "client.key"),
			"--health-addr=" + hostPort(s.port(portCoreHealth)),
			"--diagnostics-address=" + hostPort(s.port(portCoreDiagnostics)),
		},
		env:   []string{"POD_NAMESPACE=" + coreNamespace},
		ready: httpProbe(loopback("http", s.port(portCoreHealth))+"/readyz", "", ""),
	}
}

// managerComponent runs the four providers of Capstan.
func managerComponent(l Layout, s State) component {
	var reported []string
	for _, name := range []string{etcd, apiServer, controllerManager, coreManager, manager} {
		reported = append(reported, l.Component(name))
	}
	more := s.Tracing.Args()
	if s.HostListenAddress != "" {
		more = append(more, "--host-listen-address="+s.HostListenAddress)
	}
	return component{
		name: manager,
		path: filepath.Join(l.Bin(), "manager"),
		args: append([]string{
			"all", "--certificate-dir=" + strings.Join(reported, ","), "--kubeconfig=" + l.Kubeconfig(manager), "--webhook-host=127.0.0.1",
			"--webhook-port=" + strconv.Itoa(s.port(portManagerWebhook)), "--webhook-cert-dir=" + l.Component(manager),
			"--runtime-extension-client-ca-file=" + filepath.Join(l.Component(manager), "ca.crt"),
			"--runtime-extension-client-name=" + serviceAccount(coreNamespace, coreServiceAccount).cn,
			"--health-addr=" + hostPort(s.port(portManagerHealth)),
			"--diagnostics-address=" + hostPort(s.port(portManagerMetrics)),
		}, more...),
		env:   []string{"POD_NAMESPACE=" + managerNamespace},
		ready: httpProbe(loopback("http", s.port(portManagerHealth))+"/readyz", "", ""),
	}
}

// capstandComponent is the daemon of one host of this box. It runs from the assets folder, because it mounts this folder
// into the machines. The socket belongs to the system user: only the managers use it.
func capstandComponent(l Layout, s State, host string, owner user, memory int64) component {
	socket := l.HostSocket(host)
	args := []string{
		"--root=" + l.HostRoot(host), "--assets=" + s.Assets, "--name=" + host,
		"--backups=" + l.Backups(),
		"--socket=" + socket, "--socket-uid=" + strconv.Itoa(owner.uid),
		"--reserve-memory=" + strconv.FormatInt(reserved(memory, len(s.Hosts)), 10),
	}
	if s.Listen != "" {
		args = append(args, "--listen="+s.Listen)
	}
	args = append(args, s.Tracing.Args()...)
	return component{
		name:   capstandName(host),
		path:   Assets{s.Assets}.Capstand(),
		args:   args,
		asRoot: true,
		grace:  capstandGrace,
		ready:  func(ctx context.Context) error { return dialSocket(ctx, socket) },
	}
}

// metricsArgs are the arguments of a capstand that serves metrics on an address, or none.
func metricsArgs(host, address string) []string {
	if address == "" {
		slog.Warn("A host serves no metrics: its port is in use, or the ports of the plane are too few", "host", host)
		return nil
	}
	return []string{"--metrics-address=" + address}
}

// planeMemory is the memory reserved for the management plane and the box itself, in bytes.
const planeMemory = 1 << 30

// reserved returns the memory that each of several hosts on one box leaves to the others, in bytes.
func reserved(memory int64, hosts int) int64 {
	return memory - max(0, memory-planeMemory)/int64(hosts)
}

func capstandName(host string) string {
	if host == hostName(0) {
		return capstand
	}
	return capstand + "-" + strings.TrimPrefix(host, hostName(0)+"-")
}

func hostPort(port int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) }

func loopback(scheme string, port int) string { return scheme + "://" + hostPort(port) }

func dialSocket(ctx context.Context, path string) error {
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", path)
	if err != nil {
		return err
	}
	return conn.Close()
}

// httpProbe expects status 200 from a URL. Each probe reads the certificate again, because it is renewed.
func httpProbe(url, caFile, clientPair string) func(context.Context) error {
	return func(ctx context.Context) error {
		transport, err := probeTransport(caFile, clientPair)
		if err != nil {
			return err
		}
		defer transport.CloseIdleConnections()
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
		if err != nil {
			return err
		}
		response, err := (&http.Client{Transport: transport, Timeout: 5 * time.Second}).Do(request)
		if err != nil {
			return err
		}
		defer response.Body.Close()
		if response.StatusCode != http.StatusOK {
			return fmt.Errorf("%s answers %s", url, response.Status)
		}
		return nil
	}
}

func probeTransport(caFile, clientPair string) (*http.Transport, error) {
	config := &tls.Config{MinVersion: tls.VersionTLS12}
	if caFile != "" {
		ca, err := os.ReadFile(caFile)
		if err != nil {
			return nil, err
		}
		config.RootCAs = x509.NewCertPool()
		config.RootCAs.AppendCertsFromPEM(ca)
	}
	if clientPair != "" {
		pair, err := tls.LoadX509KeyPair(clientPair+".crt", clientPair+".key")
		if err != nil {
			return nil, err
		}
		config.Certificates = []tls.Certificate{pair}
	}
	return &http.Transport{TLSClientConfig: config, DisableKeepAlives: true}, nil
}
