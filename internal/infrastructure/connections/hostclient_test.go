package connections_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/infrastructure/connections"
	"capstan.dev/capstan/internal/infrastructure/connections/fakehost"
	"capstan.dev/capstan/internal/testenv/expect"
)

const gib = 1 << 30

// connect connects to a host with a pool that setup can change.
func connect(t *testing.T, address string, setup ...func(*connections.Pool)) (*WithT, *connections.Pool, *connections.Host, chan connections.Event) {
	t.Helper()
	g := NewWithT(t)
	g.SetDefaultEventuallyTimeout(expect.Patience)
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	pool := connections.NewPool(ctx, nil)
	for _, f := range setup {
		f(pool)
	}
	events := make(chan connections.Event, 1000)
	queue := workqueue.NewTypedRateLimitingQueue(workqueue.DefaultTypedControllerRateLimiter[reconcile.Request]())
	g.Expect(pool.Source(func(_ context.Context, e connections.Event) []reconcile.Request {
		events <- e
		return nil
	}).Start(ctx, queue)).To(Succeed())
	h, err := pool.Connect(ctx, &infrav1.CapstanHost{ObjectMeta: metav1.ObjectMeta{Name: "h"}, Spec: infrav1.CapstanHostSpec{Address: address}})
	g.Expect(err).NotTo(HaveOccurred())
	return g, pool, h, events
}

func ensure(g *WithT, h *connections.Host, id, name, address string, memory int64) {
	_, err := h.EnsureMachine(context.Background(), &hostpb.EnsureMachineRequest{Spec: &hostpb.MachineSpec{
		Id: id, Namespace: "ns", Name: name, MemoryBytes: memory, Image: "host", KubernetesVersion: "v1.36.3",
		Network:   &hostpb.Network{Id: "net", Namespace: "ns", Name: "c", Cidr: "10.200.0.0/21"},
		Addresses: []*hostpb.Address{{Address: address, Prefix: 21}},
	}})
	g.Expect(err).NotTo(HaveOccurred())
}

// The mirror follows the host, also after an outage in which a machine is lost.
func TestMirrorSurvivesAnOutage(t *testing.T) {
	server := fakehost.New(t)
	g, pool, h, events := connect(t, server.Address())
	g.Eventually(h.ConnectionError).Should(Succeed())
	g.Expect(h.Info().GetCpus()).To(Equal(int32(4)))

	ensure(g, h, "id-1", "a", "10.200.0.2", gib)
	g.Expect(h.Machine("id-1")).NotTo(BeNil(), "known as soon as it is made")
	ensure(g, h, "id-2", "b", "10.200.0.3", gib)
	g.Eventually(func() hostpb.MachineStatus_Phase { return h.Machine("id-1").GetStatus().GetPhase() }).Should(Equal(hostpb.MachineStatus_RUNNING))
	g.Eventually(func() *hostpb.Machine { return h.Machine("id-2") }).ShouldNot(BeNil())

	server.Stop()
	g.Eventually(h.ConnectionError).Should(HaveOccurred())
	g.Expect(h.Machine("id-1")).NotTo(BeNil(), "what was known is kept")
	server.Lose("id-1")
	drain(events)
	server.Start(t)
	g.Eventually(h.ConnectionError).Should(Succeed())
	g.Expect(h.Machine("id-1")).To(BeNil())
	g.Expect(h.Machine("id-2")).NotTo(BeNil())
	g.Eventually(events).Should(Receive(WithTransform(func(e connections.Event) string { return e.Machine.GetSpec().GetId() }, Equal("id-1"))))

	pool.Disconnect("h")
	g.Expect(pool.Get("h")).To(BeNil())
}

func drain(events chan connections.Event) {
	for {
		select {
		case <-events:
		default:
			return
		}
	}
}

// A host that starts later is connected as soon as it serves.
func TestConnectsLater(t *testing.T) {
	server := fakehost.New(t)
	server.Stop()
	g, _, h, _ := connect(t, server.Address())
	g.Eventually(h.ConnectionError).Should(MatchError(ContainSubstring("no such file or directory")))
	server.Start(t)
	g.Eventually(h.ConnectionError).Should(Succeed())
}

// Promised memory counts as used until the host reports the machine.
func TestPromisesCountOnce(t *testing.T) {
	server := fakehost.New(t)
	g, _, h, _ := connect(t, server.Address())
	g.Eventually(h.ConnectionError).Should(Succeed())
	all := h.FreeMemory()
	h.Promise("id-1", connections.Resources{Memory: 2 * gib})
	g.Expect(h.FreeMemory()).To(Equal(all - 2*gib))
	h.Promise("id-1", connections.Resources{Memory: 2 * gib})
	h.Promise("id-2", connections.Resources{Memory: gib})
	g.Expect(h.FreeMemory()).To(Equal(all - 3*gib))
	h.Release("id-2")
	ensure(g, h, "id-1", "a", "10.200.0.2", 2*gib)
	g.Eventually(func() *hostpb.Machine { return h.Machine("id-1") }).ShouldNot(BeNil())
	g.Consistently(h.FreeMemory, "200ms").Should(Equal(all - 2*gib))
	h.Promise("id-1", connections.Resources{Memory: 2 * gib})
	g.Expect(h.FreeMemory()).To(Equal(all-2*gib), "the host has it already")
}

// TCP is served with mutual TLS only, with the credentials of the host's Secret.
func TestMutualTLS(t *testing.T) {
	g := NewWithT(t)
	g.SetDefaultEventuallyTimeout(expect.Patience)
	ca := newCA(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	g.Expect(err).NotTo(HaveOccurred())
	pair, err := tls.X509KeyPair(ca.issue(t, "127.0.0.1"))
	g.Expect(err).NotTo(HaveOccurred())
	roots := x509.NewCertPool()
	roots.AddCert(ca.cert)
	server := grpc.NewServer(grpc.Creds(credentials.NewTLS(&tls.Config{
		Certificates: []tls.Certificate{pair}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: roots, MinVersion: tls.VersionTLS13,
	})))
	hostpb.RegisterHostServer(server, fakehost.New(t))
	go func() { _ = server.Serve(l) }()
	t.Cleanup(server.Stop)

	cert, key := ca.issue(t, "manager")
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "creds"}, Data: map[string][]byte{
		"ca.crt": ca.pem, "tls.crt": cert, "tls.key": key,
	}}
	secrets := fake.NewClientBuilder().WithObjects(secret).Build()
	unread := false
	reader := interceptor.NewClient(secrets, interceptor.Funcs{Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, obj client.Object, opts ...client.GetOption) error {
		if unread {
			return apierrors.NewTimeoutError("no answer", 1)
		}
		return c.Get(ctx, key, obj, opts...)
	}})
	pool := connections.NewPool(t.Context(), reader)
	host := &infrav1.CapstanHost{ObjectMeta: metav1.ObjectMeta{Name: "h"}, Spec: infrav1.CapstanHostSpec{
		Address: l.Addr().String(), CredentialsRef: infrav1.SecretReference{Namespace: "ns", Name: "creds"},
	}}
	h, err := pool.Connect(t.Context(), host)
	g.Expect(err).NotTo(HaveOccurred())
	g.Eventually(h.ConnectionError).Should(Succeed())
	same, err := pool.Connect(t.Context(), host)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(same).To(BeIdenticalTo(h), "a connection is kept")

	unread = true
	_, err = pool.Connect(t.Context(), host)
	g.Expect(err).To(MatchError(ContainSubstring("no answer")))
	g.Expect(pool.Get("h")).To(BeIdenticalTo(h), "a failed read ends no connection")
	unread = false

	// A certificate of another authority is refused, and the new credentials are used.
	cert, key = newCA(t).issue(t, "manager")
	secret.Data["tls.crt"], secret.Data["tls.key"] = cert, key
	g.Expect(secrets.Update(t.Context(), secret)).To(Succeed())
	h, err = pool.Connect(t.Context(), host)
	g.Expect(err).NotTo(HaveOccurred())
	g.Eventually(h.ConnectionError).Should(MatchError(ContainSubstring("unknown certificate authority")))

	delete(secret.Data, "tls.key")
	g.Expect(secrets.Update(t.Context(), secret)).To(Succeed())
	_, err = pool.Connect(t.Context(), host)
	g.Expect(err).To(MatchError(ContainSubstring("must have ca.crt, tls.crt and tls.key")))
	g.Expect(client.IgnoreNotFound(secrets.Delete(t.Context(), secret))).To(Succeed())
	_, err = pool.Connect(t.Context(), host)
	g.Expect(err).To(MatchError(ContainSubstring("not found")))
	g.Expect(pool.Get("h")).To(BeNil())
}

type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pem  []byte
}

func newCA(t *testing.T) authority {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "ca"}, NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return authority{cert: cert, key: key, pem: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})}
}

func (a authority) issue(t *testing.T, name string) (cert, keyPEM []byte) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: name}, NotAfter: time.Now().Add(time.Hour),
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	if ip := net.ParseIP(name); ip != nil {
		template.IPAddresses = []net.IP{ip}
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, key.Public(), a.key)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: keyDER})
}
