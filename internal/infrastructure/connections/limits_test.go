package connections

import (
	"crypto/tls"
	"io"
	"net"
	"testing"
	"time"

	. "github.com/onsi/gomega"

	"capstan.dev/capstan/internal/host/credentials"
)

// listen starts a manager with the place of a host, and returns the configuration of the host.
func listen(t *testing.T, change func(*Inbound)) (*WithT, *slot, *tls.Config, string) {
	t.Helper()
	g := NewWithT(t)
	dir := t.TempDir()
	creds, err := credentials.Make(dir, []string{"h"}, time.Hour, time.Now())
	g.Expect(err).NotTo(HaveOccurred())
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	g.Expect(err).NotTo(HaveOccurred())
	in := NewInbound()
	in.Address = listener.Addr().String()
	change(in)
	s, err := in.open("h", creds, nil)
	g.Expect(err).NotTo(HaveOccurred())
	go func() { _ = in.Serve(t.Context(), listener) }()
	config, err := credentials.In(dir).DialConfig("h")
	g.Expect(err).NotTo(HaveOccurred())
	return g, s, config, in.Address
}

// A peer that does not finish its handshake loses its connection, and one address does not take the places of others.
func TestSlowHandshakes(t *testing.T) {
	t.Parallel()
	g, s, config, address := listen(t, func(in *Inbound) { in.timeout = time.Minute })
	var slow []net.Conn
	for range maxHandshakesOfPeer {
		conn, err := net.Dial("tcp", address)
		g.Expect(err).NotTo(HaveOccurred())
		t.Cleanup(func() { _ = conn.Close() })
		slow = append(slow, conn)
	}
	closed, err := net.Dial("tcp", address)
	g.Expect(err).NotTo(HaveOccurred())
	t.Cleanup(func() { _ = closed.Close() })
	g.Expect(closed.SetDeadline(time.Now().Add(30 * time.Second))).To(Succeed())
	_, err = closed.Read(make([]byte, 1))
	g.Expect(err).To(MatchError(io.EOF), "one connection more than the handshakes of a peer")

	elsewhere := &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 2)}}
	conn, err := tls.DialWithDialer(elsewhere, "tcp", address, config)
	g.Expect(err).NotTo(HaveOccurred())
	t.Cleanup(func() { _ = conn.Close() })
	used, err := s.dial(t.Context(), "")
	g.Expect(err).NotTo(HaveOccurred(), "a host at another address gets in")
	g.Expect(used.Close()).To(Succeed())

	g.Expect(slow[0].Close()).To(Succeed())
	g.Eventually(func() error {
		conn, err := tls.Dial("tcp", address, config)
		if err == nil {
			err = conn.Close()
		}
		return err
	}, "30s").Should(Succeed(), "a place is free again")
}

func TestHandshakeTimeout(t *testing.T) {
	t.Parallel()
	g, _, _, address := listen(t, func(in *Inbound) { in.timeout = 100 * time.Millisecond })
	conn, err := net.Dial("tcp", address)
	g.Expect(err).NotTo(HaveOccurred())
	t.Cleanup(func() { _ = conn.Close() })
	g.Expect(conn.SetDeadline(time.Now().Add(30 * time.Second))).To(Succeed())
	_, err = conn.Read(make([]byte, 1))
	g.Expect(err).To(MatchError(io.EOF))
}

// A host has a bounded number of unused connections: the newest ones. A connection that the host closes is not used.
func TestIdleConnections(t *testing.T) {
	t.Parallel()
	g, s, config, address := listen(t, func(*Inbound) {})
	idle := func() int {
		s.mu.Lock()
		defer s.mu.Unlock()
		return len(s.idle)
	}
	var conns []*tls.Conn
	for n := range maxIdle + 2 {
		conn, err := tls.Dial("tcp", address, config)
		g.Expect(err).NotTo(HaveOccurred())
		t.Cleanup(func() { _ = conn.Close() })
		conns = append(conns, conn)
		g.Eventually(idle, "30s").Should(Equal(min(n+1, maxIdle)))
	}
	for _, old := range conns[:2] {
		g.Expect(old.SetDeadline(time.Now().Add(30 * time.Second))).To(Succeed())
		_, err := old.Read(make([]byte, 1))
		g.Expect(err).To(MatchError(io.EOF))
	}
	g.Expect(conns[maxIdle+1].Close()).To(Succeed())
	g.Eventually(idle, "30s").Should(Equal(maxIdle - 1))
	used, err := s.dial(t.Context(), "")
	g.Expect(err).NotTo(HaveOccurred())
	_, err = used.Write([]byte("x"))
	g.Expect(err).NotTo(HaveOccurred())
	newest := conns[maxIdle]
	g.Expect(newest.SetDeadline(time.Now().Add(30 * time.Second))).To(Succeed())
	_, err = newest.Read(make([]byte, 1))
	g.Expect(err).NotTo(HaveOccurred(), "the newest connection is used")
	_, err = newest.Write([]byte("y"))
	g.Expect(err).NotTo(HaveOccurred())
	_, err = used.Read(make([]byte, 1))
	g.Expect(err).NotTo(HaveOccurred(), "the end of the watch does not harm the connection")
	s.close()
	_, err = s.dial(t.Context(), "")
	g.Expect(err).To(MatchError(net.ErrClosed))
}
