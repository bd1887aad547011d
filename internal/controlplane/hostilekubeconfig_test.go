package controlplane

import (
	"crypto/tls"
	"encoding/base64"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/controlplane/model"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/internal/testenv/testcluster"
	"capstan.dev/capstan/internal/testenv/testmetrics"
)

// trap is a server of a tenant. It asks for a client certificate, because that makes client-go run an exec plugin.
type trap struct {
	clusterv1.APIEndpoint
	ca       []byte
	contacts atomic.Int32
}

func newTrap(t *testing.T) *trap {
	t.Helper()
	ca := newCA(t)
	cert, err := testcluster.ServingCertificate(&corev1.Secret{Data: map[string][]byte{"tls.crt": ca.Cert, "tls.key": ca.Key}}, "127.0.0.1")
	if err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = listener.Close() })
	out := &trap{ca: ca.Cert}
	out.Host, out.Port = "127.0.0.1", int32(listener.Addr().(*net.TCPAddr).Port)
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			out.contacts.Add(1)
			go func() {
				defer conn.Close()
				_ = conn.SetDeadline(time.Now().Add(5 * time.Second))
				_ = tls.Server(conn, &tls.Config{Certificates: []tls.Certificate{cert}, ClientAuth: tls.RequireAnyClientCert, MinVersion: tls.VersionTLS12}).Handshake()
			}()
		}
	}()
	return out
}

// kubeconfig returns a kubeconfig with additional lines in the cluster and the user.
func (p *trap) kubeconfig(server, cluster, user string) []byte {
	return []byte(fmt.Sprintf(`apiVersion: v1
kind: Config
current-context: x
contexts: [{name: x, context: {cluster: c, user: u}}]
clusters:
- name: c
  cluster: {server: %q, certificate-authority-data: %s%s}
users:
- name: u
  user: {%s}
`, server, base64.StdEncoding.EncodeToString(p.ca), cluster, user))
}

// TestHostileKubeconfig: a tenant writes the kubeconfig Secret of a cluster. The manager runs no program, reads no file and
// connects to no server that the tenant chose.
func TestHostileKubeconfig(t *testing.T) {
	for field, c := range map[string]struct {
		server        string
		cluster, user string
	}{
		"user.exec":                        {user: `exec: {apiVersion: client.authentication.k8s.io/v1, interactiveMode: Never, command: /bin/sh, args: ["-c", "touch FILE"]}`},
		"user.tokenFile":                   {user: `tokenFile: /etc/hostname`},
		"cluster.proxy-url":                {user: `token: t`, cluster: `, proxy-url: "http://TRAP"`},
		"cluster.insecure-skip-tls-verify": {user: `token: t`, cluster: `, insecure-skip-tls-verify: true`},
		"cluster.server":                   {user: `token: t`, server: "https://localhost:TRAPPORT"},
	} {
		t.Run(field, func(t *testing.T) {
			t.Parallel()
			trap, file := newTrap(t), filepath.Join(t.TempDir(), "touched")
			fill := strings.NewReplacer("FILE", file, "TRAPPORT", fmt.Sprint(trap.Port), "TRAP", trap.String())
			server := "https://" + trap.String()
			if c.server != "" {
				server = fill.Replace(c.server)
			}
			cluster := testcluster.New(t, env, func(c *clusterv1.Cluster) { c.Spec.ControlPlaneEndpoint = trap.APIEndpoint })
			unchecked(t, cluster.Namespace) // Admission refuses it; this test checks the reader.
			cluster.Create(&corev1.Secret{ObjectMeta: cluster.Meta("demo-kubeconfig"), Type: corev1.SecretTypeOpaque,
				Data: map[string][]byte{"value": trap.kubeconfig(server, fill.Replace(c.cluster), fill.Replace(c.user))}})
			cluster.SetInfraEndpoint(trap.APIEndpoint)
			cp := cluster.ControlPlane(nil)
			safe := func() bool {
				_, err := os.Stat(file)
				return os.IsNotExist(err) && trap.contacts.Load() == 0
			}
			refused := func() bool {
				return testcluster.Has(cp, controlplanev1.KubeconfigAvailableCondition, metav1.ConditionFalse, "the kubeconfig is refused: "+field+":")
			}
			cluster.Becomes(t, cp, "a condition refuses the kubeconfig, or the server of the tenant got a connection", func() bool { return refused() || !safe() })
			expect.True(t, "the first Machine, so that its API server is probed", func() bool { return !safe() || len(machinesOf(t, cluster)) == 1 })
			// In an initialized cluster, more code and the cache of workload clusters connect.
			cluster.ChangeStatus(cp, func() { cp.Status.Initialization.ControlPlaneInitialized = ptr.To(true) })
			cluster.ChangeStatus(cluster.Cluster, func() {
				cluster.Status.Initialization = clusterv1.ClusterInitializationStatus{ControlPlaneInitialized: ptr.To(true), InfrastructureProvisioned: ptr.To(true)}
			})
			cluster.Becomes(t, cp, "Available is False", func() bool {
				return testcluster.Has(cp, controlplanev1.AvailableCondition, metav1.ConditionFalse, "because the kubeconfig is refused") || !safe()
			})
			expect.True(t, "the cache of workload clusters tries to connect", func() bool { return triedToConnect(t, cluster) || !safe() })
			expect.Consistently(t, fmt.Sprintf("no program, no connection (%d)", trap.contacts.Load()), safe)
		})
	}
}

// triedToConnect returns whether ClusterCache has tried to connect to a cluster and failed.
func triedToConnect(t *testing.T, cluster *testcluster.Cluster) bool {
	t.Helper()
	return len(testmetrics.Gather(t, "capi_cluster_cache_connection_up", map[string]string{"cluster_namespace": cluster.Namespace})) > 0
}

// TestUserKubeconfig (CP-14): a kubeconfig of the user works if it meets the rules, and is not changed. A repaired kubeconfig
// is used at once.
func TestUserKubeconfig(t *testing.T) {
	cluster := testcluster.New(t, env, nil)
	ca := newCA(t)
	authority := &corev1.Secret{ObjectMeta: cluster.Meta("demo-ca"), Type: corev1.SecretTypeTLS, Data: map[string][]byte{"tls.crt": ca.Cert, "tls.key": ca.Key}}
	cluster.Create(authority)
	endpoint := testcluster.NewEndpoint(t)
	data, err := newKubeconfig("mine", "https://"+endpoint.String(), ca, "", model.Day, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	mine := &corev1.Secret{ObjectMeta: cluster.Meta("demo-kubeconfig"), Type: corev1.SecretTypeOpaque,
		Data: map[string][]byte{"value": []byte(strings.Replace(string(data), "server: ", "proxy-url: http://127.0.0.1:1\n    server: ", 1))}}
	cluster.Create(mine)
	cluster.SetInfraEndpoint(endpoint.APIEndpoint)
	cp := cluster.ControlPlane(nil)
	endpoint.Serve(t, authority, env.Config)
	cluster.Becomes(t, cp, "refused", func() bool {
		return testcluster.Has(cp, controlplanev1.KubeconfigAvailableCondition, metav1.ConditionFalse, "cluster.proxy-url")
	})
	cluster.Change(mine, func() { mine.Data["value"] = data })
	cluster.Becomes(t, cp, "initialized through the user's kubeconfig", func() bool {
		return ptr.Deref(cp.Status.Initialization.ControlPlaneInitialized, false) && testcluster.Has(cp, controlplanev1.KubeconfigAvailableCondition, metav1.ConditionTrue, "")
	})
	if after := cluster.Secret("demo-kubeconfig"); after.ResourceVersion != mine.ResourceVersion {
		t.Error("the user's kubeconfig was changed")
	}
	for found, labels := range map[string]map[string]string{`found ""`: nil, `found "other"`: {clusterv1.ClusterNameLabel: "other"}} {
		cluster.Change(mine, func() { mine.Labels = labels })
		cluster.Becomes(t, cp, "CP-13: without the label", func() bool {
			return testcluster.Has(cp, controlplanev1.KubeconfigAvailableCondition, metav1.ConditionFalse, found+": set the label")
		})
		if after := cluster.Secret("demo-kubeconfig"); after.ResourceVersion != mine.ResourceVersion {
			t.Error("the user's kubeconfig was changed")
		}
		cluster.Change(mine, func() { mine.Labels = map[string]string{clusterv1.ClusterNameLabel: cluster.Name} })
		cluster.Becomes(t, cp, "CP-13: with the label", func() bool {
			return testcluster.Has(cp, controlplanev1.KubeconfigAvailableCondition, metav1.ConditionTrue, "")
		})
	}
}

// TestSpoiledKubeconfig: the control plane replaces its own Secret when a user adds a forbidden field.
// Row CP-14.
func TestSpoiledKubeconfig(t *testing.T) {
	cluster := testcluster.New(t, env, nil)
	cluster.SetInfraEndpoint(somewhere)
	cp := cluster.ControlPlane(nil)
	cluster.Becomes(t, cp, "a kubeconfig", func() bool {
		return testcluster.Has(cp, controlplanev1.KubeconfigAvailableCondition, metav1.ConditionTrue, "")
	})
	own := cluster.Secret("demo-kubeconfig")
	spoiled := strings.Replace(string(own.Data["value"]), "server: ", "proxy-url: http://127.0.0.1:1\n    server: ", 1)
	cluster.Change(own, func() { own.Data["value"] = []byte(spoiled) })
	expect.True(t, "created again", func() bool {
		return !strings.Contains(string(cluster.Secret("demo-kubeconfig").Data["value"]), "proxy-url")
	})
}
