package credentials

import (
	"crypto/tls"
	"errors"
	"io"
	"net"
	"testing"
	"time"
)

// Clients that finish no handshake hold a bounded number of connections, and keep no manager out.
func TestListenIsBounded(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	client, err := Make(dir, []string{"127.0.0.1"}, time.Hour, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	raw, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l, err := In(dir).listen(raw, time.Hour, func(err error) { t.Error(err) })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	var slow []net.Conn
	for range MaxHandshakes + 1 {
		conn, err := (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 2)}}).Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close() })
		slow = append(slow, conn)
	}
	_ = slow[0].SetReadDeadline(time.Now().Add(time.Minute))
	if _, err := slow[0].Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("the oldest handshake: %v, want its end", err)
	}
	config, err := client.config(time.Now())
	if err != nil {
		t.Fatal(err)
	}
	config.ServerName, config.NextProtos = "127.0.0.1", []string{"h2"}
	conn, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	if err := tls.Client(conn, config).HandshakeContext(t.Context()); err != nil {
		t.Fatal(err)
	}
	passed, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = passed.Close() })
	if passed.RemoteAddr().String() != conn.LocalAddr().String() {
		t.Errorf("accepted %s", passed.RemoteAddr())
	}
	_ = l.Close()
	if _, err := l.Accept(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("a closed listener: %v", err)
	}
}
