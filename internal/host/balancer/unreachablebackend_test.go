package balancer

import (
	"io"
	"net"
	"os"
	"os/exec"
	"testing"
	"time"

	"capstan.dev/capstan/internal/testenv/testnetns"
)

// An unreachable backend does not close its connections. The balancer closes them, so that clients do not wait. New
// connections go to another backend.
func TestBackendCutOff(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	shell(t, "ip link set lo up")
	client, pool := pipeThrough(t, func(conn *net.TCPConn) { _, _ = io.Copy(conn, conn) })
	if err := echoes(client); err != nil {
		t.Fatal(err)
	}
	_, port, err := net.SplitHostPort(pool.backends[0].Address)
	if err != nil {
		t.Fatal(err)
	}
	shell(t, "nft add table inet cut && nft 'add chain inet cut output { type filter hook output priority 0; }' && nft add rule inet cut output tcp dport "+port+" drop")
	if _, err := client.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if err := client.SetReadDeadline(time.Now().Add(20 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if _, err := client.Read(make([]byte, 1)); err == nil || os.IsTimeout(err) {
		t.Errorf("the connection to an unreachable backend stays open: %v", err)
	}
}

func shell(t *testing.T, command string) {
	t.Helper()
	if out, err := exec.Command("sh", "-c", command).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v: %s", command, err, out)
	}
}
