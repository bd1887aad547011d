package connections_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"net"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/credentials"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/infrastructure/connections"
	"capstan.dev/capstan/internal/infrastructure/connections/fakehost"
	"capstan.dev/capstan/internal/testenv/expect"
)

// plane is a manager that listens for hosts.
type plane struct {
	*WithT
	t       *testing.T
	secrets client.Client
	pool    *connections.Pool
	address string
	stop    func()
}

// newPlane starts a manager. Its address is free, or that of a manager that has stopped.
func newPlane(t *testing.T, secrets client.Client, address string) *plane {
	t.Helper()
	p := &plane{WithT: NewWithT(t), t: t, secrets: secrets}
	p.SetDefaultEventuallyTimeout(expect.Patience)
	ctx, cancel := context.WithCancel(t.Context())
	listener, err := net.Listen("tcp", address)
	p.Expect(err).NotTo(HaveOccurred())
	p.address = listener.Addr().String()
	p.pool = connections.NewPool(ctx, secrets)
	p.pool.Inbound.Address = p.address
	p.pool.Keepalive.Answer = time.Second
	ended := make(chan error, 1)
	go func() { ended <- p.pool.Inbound.Serve(ctx, listener) }()
	p.stop = func() {
		p.pool.Disconnect("h")
		cancel()
		p.Eventually(ended).Should(Receive(BeNil()))
		ended <- nil
	}
	t.Cleanup(p.stop)
	return p
}

// dialling returns a host that dials, its files, and its Secret in secrets.
func dialling(t *testing.T, name string) (host *infrav1.CapstanHost, files credentials.Server, dir string, secrets client.Client) {
	t.Helper()
	dir = t.TempDir()
	creds, err := credentials.Make(dir, []string{name}, time.Hour, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "creds"}, Data: creds.Data()}
	return &infrav1.CapstanHost{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: infrav1.CapstanHostSpec{
		Connection: infrav1.HostConnectionFromHost, CredentialsRef: infrav1.SecretReference{Namespace: "ns", Name: "creds"},
	}}, credentials.In(dir), dir, fake.NewClientBuilder().WithObjects(secret).Build()
}

func (p *plane) connect(host *infrav1.CapstanHost) *connections.Host {
	p.t.Helper()
	h, err := p.pool.Connect(p.t.Context(), host)
	p.Expect(err).NotTo(HaveOccurred())
	return h
}

// A manager uses a host that dials it, for its reconcilers and for shells, after restarts of either side and with renewed certificates.
func TestHostDials(t *testing.T) {
	t.Parallel()
	host, files, dir, secrets := dialling(t, "h")
	server := fakehost.New(t)
	p := newPlane(t, secrets, "127.0.0.1:0")
	h := p.connect(host)
	p.Eventually(h.ConnectionError).Should(MatchError(ContainSubstring("found no connection of it: start capstand with --dial")))

	stop := server.Dial(t, p.address, "h", files, time.Minute)
	p.Eventually(h.ConnectionError).Should(Succeed())
	p.Expect(p.connect(host)).To(BeIdenticalTo(h), "a connection is kept")
	ensure(p.WithT, h, "id-1", "a", "10.200.0.2", gib)

	// More connections at once than the host has spare ones.
	for range 4 {
		shell, closer, err := connections.Dial(t.Context(), secrets, host, p.pool.Inbound)
		p.Expect(err).NotTo(HaveOccurred())
		t.Cleanup(func() { _ = closer.Close() })
		_, err = shell.GetInfo(t.Context(), &hostpb.GetInfoRequest{})
		p.Expect(err).NotTo(HaveOccurred())
	}

	// A renewed certificate is shown by the next connection, and the connection in use stays.
	before := h.Served()
	p.Expect(before.DNSNames).To(ConsistOf("h"))
	_, err := credentials.Make(dir, []string{"h"}, time.Hour, time.Now())
	p.Expect(err).NotTo(HaveOccurred())
	p.Eventually(func() bool { // The host may have read its certificate for a spare connection before.
		return h.Handshake(t.Context(), time.Now()) == nil && !h.Served().Equal(before)
	}).Should(BeTrue())
	p.Expect(h.ConnectionError()).To(Succeed())

	stop()
	p.Eventually(h.ConnectionError).Should(HaveOccurred())
	p.Expect(h.Machine("id-1")).NotTo(BeNil(), "what was known is kept")
	server.Dial(t, p.address, "h", files, time.Minute)
	p.Eventually(h.ConnectionError).Should(Succeed())

	p.stop()
	p = newPlane(t, secrets, p.address)
	h = p.connect(host)
	p.Eventually(h.ConnectionError).Should(Succeed())
	p.Expect(h.Machine("id-1")).NotTo(BeNil())

	// The host's place is gone with the CapstanHost.
	p.pool.Disconnect("h")
	_, _, err = connections.Dial(t.Context(), secrets, host, p.pool.Inbound)
	p.Expect(err).To(MatchError(ContainSubstring("send the request to the leader")))
}

// A manager without --host-listen-address says so.
func TestHostDialsNobody(t *testing.T) {
	t.Parallel()
	host, _, _, secrets := dialling(t, "h")
	p := newPlane(t, secrets, "127.0.0.1:0")
	p.pool.Inbound.Address = ""
	p.Eventually(p.connect(host).ConnectionError).Should(MatchError(ContainSubstring("start it with --host-listen-address")))
}

// A host is not displaced by peers that cannot prove to be it, and they get nothing from the manager.
func TestHostDialsRefused(t *testing.T) {
	t.Parallel()
	host, files, dir, secrets := dialling(t, "h")
	_, strangers, _, _ := dialling(t, "h")
	p := newPlane(t, secrets, "127.0.0.1:0")
	h := p.connect(host)
	fakehost.New(t).Dial(t, p.address, "h", files, time.Minute)
	p.Eventually(h.ConnectionError).Should(Succeed())
	good, err := files.DialConfig("h")
	p.Expect(err).NotTo(HaveOccurred())
	foreign, err := strangers.DialConfig("h")
	p.Expect(err).NotTo(HaveOccurred())
	for name, change := range map[string]func(*tls.Config){
		"another authority":      func(c *tls.Config) { c.Certificates = foreign.Certificates },
		"no certificate":         func(c *tls.Config) { c.Certificates = nil },
		"an unknown name":        func(c *tls.Config) { c.ServerName = credentials.DialServerName("other") },
		"a name without the end": func(c *tls.Config) { c.ServerName = "h" },
		"no name":                func(c *tls.Config) { c.ServerName = "" },
	} {
		config := good.Clone()
		change(config)
		for range 10 { // More than the unused connections of a host.
			p.Expect(firstByte(p.address, config)).To(HaveOccurred(), name)
		}
	}
	p.Expect(h.ConnectionError()).To(Succeed())
	p.Expect(h.Handshake(t.Context(), time.Now())).To(Succeed(), "the host's next connection is accepted")

	// A former certificate of the host, without its key, is refused and does not count as the certificate of the host.
	_, err = credentials.Make(dir, []string{"h"}, time.Hour, time.Now())
	p.Expect(err).NotTo(HaveOccurred())
	former := good.Certificates[0]
	isFormer := func() bool { return bytes.Equal(h.Served().Raw, former.Certificate[0]) }
	p.Eventually(func() bool { return h.Handshake(t.Context(), time.Now()) == nil && !isFormer() }).Should(BeTrue())
	replayed := good.Clone()
	replayed.Certificates = []tls.Certificate{{Certificate: former.Certificate, PrivateKey: foreign.Certificates[0].PrivateKey}}
	p.Expect(firstByte(p.address, replayed)).To(HaveOccurred())
	p.Expect(isFormer()).To(BeFalse(), "the host seems to show its former certificate")

	// Another host of the same authority.
	_, err = credentials.Make(dir, []string{"other"}, time.Hour, time.Now())
	p.Expect(err).NotTo(HaveOccurred())
	other, err := files.DialConfig("other")
	p.Expect(err).NotTo(HaveOccurred())
	other.ServerName = credentials.DialServerName("h")
	p.Expect(firstByte(p.address, other)).To(HaveOccurred())
	p.Expect(h.ConnectionError()).To(Succeed())
}

// firstByte connects to a manager and waits until it uses the connection.
func firstByte(address string, config *tls.Config) error {
	conn, err := net.Dial("tcp", address)
	if err != nil {
		return err
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(expect.Patience))
	_, err = tls.Client(conn, config).Read(make([]byte, 1))
	return err
}

// A loss without a closed connection is detected, also of the spare connection, and the host returns with the network.
func TestDiallingHostIsSilent(t *testing.T) {
	t.Parallel()
	host, files, _, secrets := dialling(t, "h")
	server := fakehost.New(t, func(h *fakehost.Host) { h.Keepalive = hostpb.Keepalive{Idle: time.Second, Answer: time.Second} })
	p := newPlane(t, secrets, "127.0.0.1:0")
	line, address := newLine(t, p.address)
	h := p.connect(host)
	server.Dial(t, address, "h", files, 2*time.Second)
	p.Eventually(h.ConnectionError).Should(Succeed())
	line.sever()
	p.Eventually(h.ConnectionError).Should(MatchError(ContainSubstring("keepalive")))
	p.Eventually(server.Watchers).Should(BeZero())
	line.mend()
	p.Eventually(h.ConnectionError).Should(Succeed())
}
