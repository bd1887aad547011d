// Package testcluster simulates Cluster API core and the infrastructure in the integration tests of the bootstrap and control
// plane providers.
package testcluster

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/spf13/pflag"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/certs"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/manager"
	"capstan.dev/capstan/internal/reconciling"
	"capstan.dev/capstan/internal/testenv"
)

// StartManager runs a provider against a test API server, with no more rights than its role in
// config/<provider>/rbac gives it. stop ends it and waits.
func StartManager(env *testenv.Env, provider reconciling.Provider) (stop func(), err error) {
	restConfig, err := Restricted(env, provider.Name)
	if err != nil {
		return nil, err
	}
	providers := []reconciling.Provider{provider}
	fs := pflag.NewFlagSet("manager", pflag.ContinueOnError)
	flags := manager.AddFlags(fs, providers)
	args := []string{"--health-addr=0", "--diagnostics-address=0", "--webhook-port=0"}
	if env.Webhooks.LocalServingPort != 0 {
		args = append(args[:2], "--webhook-host="+env.Webhooks.LocalServingHost, "--webhook-cert-dir="+env.Webhooks.LocalServingCertDir,
			fmt.Sprintf("--webhook-port=%d", env.Webhooks.LocalServingPort))
	}
	if err := fs.Parse(args); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctrl.LoggerInto(context.Background(), ctrl.Log))
	mgr, err := manager.New(ctx, restConfig, flags, providers)
	if err != nil {
		cancel()
		return nil, err
	}
	done := make(chan error, 1)
	go func() { done <- mgr.Start(ctx) }()
	if env.Webhooks.LocalServingPort != 0 {
		address := net.JoinHostPort(env.Webhooks.LocalServingHost, strconv.Itoa(env.Webhooks.LocalServingPort))
		if err := waitForPort(address, done); err != nil {
			cancel()
			return nil, err
		}
	}
	return func() { cancel(); <-done }, nil
}

// Restricted returns the configuration of a user with the role of a provider.
func Restricted(env *testenv.Env, provider string) (*rest.Config, error) {
	data, err := os.ReadFile(filepath.Join(testenv.Root(), "config", provider, "rbac", "role.yaml"))
	if err != nil {
		return nil, err
	}
	role := &rbacv1.ClusterRole{}
	if err := yaml.UnmarshalStrict(data, role); err != nil {
		return nil, err
	}
	binding := &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: role.Name},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role.Name},
		Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: role.Name}},
	}
	for _, obj := range []client.Object{role, binding} {
		if err := env.Client.Create(context.Background(), obj); err != nil {
			return nil, err
		}
	}
	out := rest.CopyConfig(env.Config)
	out.Impersonate.UserName = role.Name
	return out, nil
}

func waitForPort(address string, done <-chan error) error {
	var err error
	for end := time.Now().Add(testenv.Patience); time.Now().Before(end); {
		var conn net.Conn
		if conn, err = net.Dial("tcp", address); err == nil {
			return conn.Close()
		}
		select {
		case err := <-done:
			return fmt.Errorf("the manager ended: %w", err)
		case <-time.After(50 * time.Millisecond):
		}
	}
	return fmt.Errorf("the webhook server at %s does not listen: %w", address, err)
}

// Cluster is a Cluster with its infrastructure and its control plane. The references between them are those that core
// writes.
type Cluster struct {
	*clusterv1.Cluster
	t *testing.T
	c client.Client
}

// New creates the Cluster `demo` in a new namespace, and its CapstanCluster. change may modify the Cluster before it is
// created.
func New(t *testing.T, env *testenv.Env, change func(*clusterv1.Cluster)) *Cluster {
	t.Helper()
	out := &Cluster{t: t, c: env.Client, Cluster: &clusterv1.Cluster{
		ObjectMeta: metav1.ObjectMeta{Namespace: env.Namespace(t), Name: "demo"},
		Spec: clusterv1.ClusterSpec{
			InfrastructureRef: clusterv1.ContractVersionedObjectReference{APIGroup: infrav1.GroupVersion.Group, Kind: "CapstanCluster", Name: "demo"},
			ControlPlaneRef:   clusterv1.ContractVersionedObjectReference{APIGroup: controlplanev1.GroupVersion.Group, Kind: "CapstanControlPlane", Name: "demo"},
		},
	}}
	if change != nil {
		change(out.Cluster)
	}
	out.Create(out.Cluster)
	infra := &infrav1.CapstanCluster{ObjectMeta: out.Meta("demo")}
	infra.OwnerReferences = []metav1.OwnerReference{out.OwnerRef()}
	out.Create(infra)
	out.MachineTemplate("demo")
	return out
}

// MachineTemplate creates a template of infrastructure machines.
func (c *Cluster) MachineTemplate(name string) {
	c.t.Helper()
	template := &infrav1.CapstanMachineTemplate{ObjectMeta: c.Meta(name)}
	template.Spec.Template.Spec.CPUs = 1
	c.Create(template)
}

// Meta returns the metadata of an object of the cluster.
func (c *Cluster) Meta(name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: c.Namespace, Name: name, Labels: map[string]string{clusterv1.ClusterNameLabel: c.Name}}
}

// OwnerRef returns the owner reference to the Cluster.
func (c *Cluster) OwnerRef() metav1.OwnerReference {
	return metav1.OwnerReference{APIVersion: clusterv1.GroupVersion.String(), Kind: "Cluster", Name: c.Name, UID: c.UID, Controller: ptr.To(true), BlockOwnerDeletion: ptr.To(true)}
}

// ControlPlane creates the CapstanControlPlane. change may modify it before.
func (c *Cluster) ControlPlane(change func(*controlplanev1.CapstanControlPlane)) *controlplanev1.CapstanControlPlane {
	c.t.Helper()
	out := &controlplanev1.CapstanControlPlane{ObjectMeta: c.Meta("demo")}
	out.OwnerReferences = []metav1.OwnerReference{c.OwnerRef()}
	out.Spec.Version = "v1.36.3"
	out.Spec.MachineTemplate.Spec.InfrastructureRef = clusterv1.ContractVersionedObjectReference{
		APIGroup: infrav1.GroupVersion.Group, Kind: "CapstanMachineTemplate", Name: "demo",
	}
	if change != nil {
		change(out)
	}
	c.Create(out)
	return out
}

// Machine creates a Machine with a CapstanConfig of the same name and the owner references that core writes.
func (c *Cluster) Machine(name string, changeMachine func(*clusterv1.Machine), changeConfig func(*bootstrapv1.CapstanConfig)) (*clusterv1.Machine, *bootstrapv1.CapstanConfig) {
	c.t.Helper()
	machine := &clusterv1.Machine{ObjectMeta: c.Meta(name), Spec: clusterv1.MachineSpec{
		ClusterName: c.Name, Version: "v1.36.3",
		Bootstrap: clusterv1.Bootstrap{ConfigRef: clusterv1.ContractVersionedObjectReference{APIGroup: bootstrapv1.GroupVersion.Group, Kind: "CapstanConfig", Name: name}},
		InfrastructureRef: clusterv1.ContractVersionedObjectReference{
			APIGroup: infrav1.GroupVersion.Group, Kind: "CapstanMachine", Name: name,
		},
	}}
	if changeMachine != nil {
		changeMachine(machine)
	}
	c.Create(machine)
	config := &bootstrapv1.CapstanConfig{ObjectMeta: c.Meta(name)}
	config.OwnerReferences = []metav1.OwnerReference{*metav1.NewControllerRef(machine, clusterv1.GroupVersion.WithKind("Machine"))}
	if changeConfig != nil {
		changeConfig(config)
	}
	c.Create(config)
	return machine, config
}

// SetInfraEndpoint writes the endpoint as the infrastructure provider does. It reports no failure domains.
func (c *Cluster) SetInfraEndpoint(endpoint clusterv1.APIEndpoint) {
	c.t.Helper()
	infra := &infrav1.CapstanCluster{}
	infra.Namespace, infra.Name = c.Namespace, "demo"
	c.Change(infra, func() { infra.Spec.ControlPlaneEndpoint = endpoint })
	c.ChangeStatus(infra, func() { infra.Status.Initialization.Provisioned = ptr.To(true) })
}

// SetEndpoint writes the fields that core writes when the infrastructure is provisioned.
func (c *Cluster) SetEndpoint(endpoint clusterv1.APIEndpoint) {
	c.t.Helper()
	c.Change(c.Cluster, func() { c.Spec.ControlPlaneEndpoint = endpoint })
	c.ChangeStatus(c.Cluster, func() { c.Status.Initialization.InfrastructureProvisioned = ptr.To(true) })
}

// Create creates an object.
func (c *Cluster) Create(obj client.Object) {
	c.t.Helper()
	if err := c.c.Create(context.Background(), obj); err != nil {
		c.t.Fatalf("cannot create %T %s: %v", obj, obj.GetName(), err)
	}
}

// Get reads the current state of an object.
func (c *Cluster) Get(obj client.Object) error {
	return c.c.Get(context.Background(), client.ObjectKeyFromObject(obj), obj)
}

// Change reads, modifies and updates an object. It repeats that after a conflict.
func (c *Cluster) Change(obj client.Object, change func()) {
	c.t.Helper()
	if err := testenv.Change(context.Background(), c.c, obj, func(client.Object) { change() }); err != nil {
		c.t.Fatalf("cannot change %T %s: %v", obj, obj.GetName(), err)
	}
}

// ChangeStatus is Change for the status.
func (c *Cluster) ChangeStatus(obj client.Object, change func()) {
	c.t.Helper()
	if err := testenv.ChangeStatus(context.Background(), c.c, obj, func(client.Object) { change() }); err != nil {
		c.t.Fatalf("cannot change the status of %T %s: %v", obj, obj.GetName(), err)
	}
}

// Secret returns a secret of the cluster, or nil if it does not exist.
func (c *Cluster) Secret(name string) *corev1.Secret {
	out := &corev1.Secret{}
	if err := c.c.Get(context.Background(), client.ObjectKey{Namespace: c.Namespace, Name: name}, out); err != nil {
		return nil
	}
	return out
}

// Eventually waits until a condition is true.
func Eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	for start := time.Now(); time.Since(start) < testenv.Patience; time.Sleep(testenv.Pause(time.Since(start))) {
		if holds() {
			return
		}
	}
	t.Fatalf("did not become true: %s", what)
}

// Rest waits until the result of a function has not changed for two seconds, and returns it.
func Rest(t *testing.T, tell func() string) string {
	t.Helper()
	last, since := tell(), time.Now()
	Eventually(t, "rest", func() bool {
		if now := tell(); now != last {
			last, since = now, time.Now()
		}
		return time.Since(since) > 2*time.Second
	})
	return last
}

// Consistently checks that a condition remains true.
func Consistently(t *testing.T, what string, holds func() bool) {
	t.Helper()
	for end := time.Now().Add(700 * time.Millisecond); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		if !holds() {
			t.Fatalf("did not remain true: %s", what)
		}
	}
}

// Endpoint is a control plane endpoint on loopback. Until Serve is called it holds connections,
// as a load balancer does while no API server is healthy.
type Endpoint struct {
	clusterv1.APIEndpoint
	listener net.Listener
	server   *http.Server
}

// NewEndpoint opens an endpoint; it is closed when the test ends.
func NewEndpoint(t *testing.T) *Endpoint {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	out := &Endpoint{listener: listener}
	out.Host, out.Port = "127.0.0.1", int32(listener.Addr().(*net.TCPAddr).Port)
	t.Cleanup(out.Close)
	return out
}

// Asked waits for a client before Serve is called, and ends its connection.
func (e *Endpoint) Asked(t *testing.T) {
	t.Helper()
	_ = e.listener.(*net.TCPListener).SetDeadline(time.Now().Add(testenv.Patience))
	conn, err := e.listener.Accept()
	if err != nil {
		t.Fatalf("no client of the endpoint: %v", err)
	}
	_ = conn.Close()
}

// Close ends the endpoint.
func (e *Endpoint) Close() {
	if e.server != nil {
		_ = e.server.Close()
	}
	_ = e.listener.Close()
}

// Serve connects the endpoint to a real API server. The serving certificate is from the cluster's authority, and
// clients need a certificate of it as well.
func (e *Endpoint) Serve(t *testing.T, ca *corev1.Secret, backend *rest.Config) {
	t.Helper()
	cert, err := ServingCertificate(ca, e.Host)
	if err != nil {
		t.Fatal(err)
	}
	clients := x509.NewCertPool()
	clients.AppendCertsFromPEM(ca.Data[corev1.TLSCertKey])
	target, err := url.Parse(backend.Host)
	if err != nil {
		t.Fatal(err)
	}
	proxy := httputil.NewSingleHostReverseProxy(target)
	proxy.FlushInterval = -1 // Watches.
	if proxy.Transport, err = rest.TransportFor(backend); err != nil {
		t.Fatal(err)
	}
	e.server = &http.Server{Handler: proxy, ReadHeaderTimeout: time.Minute, TLSConfig: &tls.Config{
		Certificates: []tls.Certificate{cert}, ClientCAs: clients, ClientAuth: tls.RequireAndVerifyClientCert, MinVersion: tls.VersionTLS12,
	}}
	go func() { _ = e.server.ServeTLS(e.listener, "", "") }()
}

// ServingCertificate returns a certificate for an API server at an address, signed by the authority in a Secret.
func ServingCertificate(ca *corev1.Secret, host string) (tls.Certificate, error) {
	caCert, err := certs.DecodeCertPEM(ca.Data[corev1.TLSCertKey])
	if err != nil {
		return tls.Certificate{}, err
	}
	caKey, err := certs.DecodePrivateKeyPEM(ca.Data[corev1.TLSPrivateKeyKey])
	if err != nil {
		return tls.Certificate{}, err
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, err
	}
	config := certs.Config{CommonName: "kube-apiserver", AltNames: certs.AltNames{IPs: []net.IP{net.ParseIP(host)}}, Usages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}
	cert, err := config.NewSignedCert(key, caCert, caKey)
	if err != nil {
		return tls.Certificate{}, err
	}
	return tls.Certificate{Certificate: [][]byte{cert.Raw}, PrivateKey: key}, nil
}
