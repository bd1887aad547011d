package balancer

import (
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"os/exec"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/testenv/testnetns"
)

// An unreachable backend does not close its connections. The balancer closes them, also idle ones, so that clients do not wait.
// The backend serves again when it is back.
func TestBackendCutOff(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	shell(t, "ip link set lo up")
	backend := apiServer(t, "a", ready(200))
	timing := fast
	timing.CheckTimeout = 2 * time.Second // for a check that has just connected
	f := start(t, timing, backend)
	f.awaitHealthy(1)
	client, err := tls.Dial("tcp", f.address, &tls.Config{InsecureSkipVerify: true})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = client.Close() }()
	_, port, err := net.SplitHostPort(backend.Address)
	if err != nil {
		t.Fatal(err)
	}
	shell(t, "nft add table inet cut && nft 'add chain inet cut output { type filter hook output priority 0; }' && nft add rule inet cut output tcp dport "+port+" drop")
	if err := client.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	if _, err := client.Read(make([]byte, 1)); err == nil || os.IsTimeout(err) {
		t.Errorf("the connection to an unreachable backend stays open: %v", err)
	}
	shell(t, "nft delete table inet cut")
	f.awaitHealthy(1)
	if _, err := f.get(); err != nil {
		t.Errorf("the backend is back: %v", err)
	}
}

func TestUnreachable(t *testing.T) {
	dial := func(err error) error {
		return &url.Error{Op: "Get", Err: &net.OpError{Op: "dial", Err: err}}
	}
	for _, c := range []struct {
		name string
		err  error
		want bool
	}{
		{"healthy", nil, false},
		{"not ready", errors.New("readyz answered 500"), false},
		{"no answer to the attempt to connect", dial(os.ErrDeadlineExceeded), true},
		{"no neighbour", dial(os.NewSyscallError("connect", unix.EHOSTUNREACH)), true},
		{"no route", dial(os.NewSyscallError("connect", unix.ENETUNREACH)), true},
		{"the API server does not run", dial(os.NewSyscallError("connect", unix.ECONNREFUSED)), false},
		{"the balancer has no descriptors left", dial(os.NewSyscallError("socket", unix.EMFILE)), false},
		{"the API server is busy", &url.Error{Op: "Get", Err: os.ErrDeadlineExceeded}, false},
		{"the API server is busy in its handshake", &url.Error{Op: "Get", Err: &net.OpError{Op: "read", Err: os.ErrDeadlineExceeded}}, false},
	} {
		if got := unreachable(c.err); got != c.want {
			t.Errorf("%s: unreachable is %t, want %t", c.name, got, c.want)
		}
	}
}

// TestPausedReader: a connection outlives the pause of a backend that reads nothing for a while, although the kernel of the balancer probes
// its closed window many times. `kubectl exec -i db -- psql <dump.sql` makes such pauses.
func TestPausedReader(t *testing.T) {
	testPause(t, func(backend, client *net.TCPConn) (reader, writer *net.TCPConn) { return backend, client })
}

// TestPausedClient: the same for a client.
func TestPausedClient(t *testing.T) {
	testPause(t, func(backend, client *net.TCPConn) (reader, writer *net.TCPConn) { return client, backend })
}

// testPause fills the connection until the reader's side accepts no more, and then reads everything.
func testPause(t *testing.T, ends func(backend, client *net.TCPConn) (reader, writer *net.TCPConn)) {
	accepted := make(chan *net.TCPConn, 1)
	client, _ := pipeThrough(t, func(conn *net.TCPConn) { accepted <- conn })
	if _, err := client.Write(record("x")); err != nil {
		t.Fatal(err)
	}
	backend := <-accepted
	defer func() { _ = backend.Close() }()
	if _, err := io.ReadFull(backend, make([]byte, len(record("x")))); err != nil {
		t.Fatal(err)
	}
	reader, writer := ends(backend, client)
	sent, err := fill(writer)
	if !os.IsTimeout(err) {
		t.Fatalf("after %d bytes: %v, want a connection that waits", sent, err)
	}
	go func() { _ = writer.CloseWrite() }()
	if got, err := io.Copy(io.Discard, reader); err != nil || got != sent {
		t.Errorf("read %d of %d bytes: %v", got, sent, err)
	}
}

// fill writes until nothing was accepted for so long that the kernel has probed the closed window three times: after 0.2, 0.6 and
// 1.4 seconds.
func fill(to *net.TCPConn) (sent int64, err error) {
	chunk := make([]byte, 1<<20)
	for err == nil {
		if err = to.SetWriteDeadline(time.Now().Add(3 * time.Second)); err != nil {
			return sent, fmt.Errorf("deadline: %w", err)
		}
		var n int
		n, err = to.Write(chunk)
		sent += int64(n)
	}
	return sent, err
}

func shell(t *testing.T, command string) {
	t.Helper()
	if out, err := exec.Command("sh", "-c", command).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v: %s", command, err, out)
	}
}
