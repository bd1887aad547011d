package dialing_test

import (
	"crypto/tls"
	"log/slog"
	"net"
	"sync/atomic"
	"testing"
	"time"

	. "github.com/onsi/gomega"

	"capstan.dev/capstan/internal/host/credentials"
	"capstan.dev/capstan/internal/host/dialing"
	"capstan.dev/capstan/internal/testenv/expect"
)

// A listener keeps exactly one spare connection, and reads its certificates for each one.
func TestOneSpareConnection(t *testing.T) {
	t.Parallel()
	g := NewWithT(t)
	g.SetDefaultEventuallyTimeout(expect.Patience)
	dir := t.TempDir()
	files := credentials.In(dir)
	manager, err := credentials.Make(dir, []string{"h"}, time.Hour, time.Now())
	g.Expect(err).NotTo(HaveOccurred())
	config, err := manager.AcceptConfig("h", time.Now())
	g.Expect(err).NotTo(HaveOccurred())
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	g.Expect(err).NotTo(HaveOccurred())
	accepted := make(chan *tls.Conn, 10)
	go func() {
		for {
			raw, err := listener.Accept()
			if err != nil {
				return
			}
			conn := tls.Server(raw, config)
			if conn.Handshake() == nil {
				accepted <- conn
			}
		}
	}()
	t.Cleanup(func() { _ = listener.Close() })
	host := dialing.Dialer{Address: listener.Addr().String(), Config: func() (*tls.Config, error) { return files.DialConfig("h") }, Spare: time.Minute, Log: slog.New(slog.DiscardHandler)}.Listen(t.Context())
	t.Cleanup(func() { _ = host.Close() })
	var first *tls.Conn
	g.Eventually(accepted).Should(Receive(&first))
	g.Consistently(accepted, "300ms").ShouldNot(Receive())
	_, err = first.Write([]byte("ab"))
	g.Expect(err).NotTo(HaveOccurred())
	conn, err := host.Accept()
	g.Expect(err).NotTo(HaveOccurred())
	got := make([]byte, 2)
	_, err = conn.Read(got[:1])
	g.Expect(err).NotTo(HaveOccurred())
	_, err = conn.Read(got[1:])
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(string(got)).To(Equal("ab"))
	var second *tls.Conn
	g.Eventually(accepted).Should(Receive(&second))
	g.Consistently(accepted, "300ms").ShouldNot(Receive())
	g.Expect(host.Close()).To(Succeed())
	_, err = second.Read(got)
	g.Expect(err).To(HaveOccurred(), "the spare connection ends with the listener")
	g.Expect(conn.Close()).To(Succeed())
}

// lines counts the lines of a log.
type lines struct{ atomic.Int32 }

func (l *lines) Write(p []byte) (int, error) {
	l.Add(1)
	return len(p), nil
}

// A manager that resets each connection is one line of the log, although the port of the host differs each time.
func TestOneLineForOneReason(t *testing.T) {
	t.Parallel()
	g := NewWithT(t)
	g.SetDefaultEventuallyTimeout(expect.Patience)
	dir := t.TempDir()
	_, err := credentials.Make(dir, []string{"h"}, time.Hour, time.Now())
	g.Expect(err).NotTo(HaveOccurred())
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	g.Expect(err).NotTo(HaveOccurred())
	t.Cleanup(func() { _ = listener.Close() })
	var resets atomic.Int32
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			_, _ = conn.Read(make([]byte, 4096)) // the hello
			_ = conn.(*net.TCPConn).SetLinger(0)
			_ = conn.Close()
			resets.Add(1)
		}
	}()
	log := &lines{}
	host := dialing.Dialer{
		Address: listener.Addr().String(), Config: func() (*tls.Config, error) { return credentials.In(dir).DialConfig("h") }, Spare: time.Minute,
		Log: slog.New(slog.NewTextHandler(log, nil)),
	}.Listen(t.Context())
	t.Cleanup(func() { _ = host.Close() })
	g.Eventually(resets.Load).Should(BeNumerically(">=", 4))
	g.Expect(log.Load()).To(Equal(int32(1)))
}
