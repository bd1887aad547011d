package balancer

import (
	"io"
	"net"
	"os"
	"os/exec"
	"testing"
	"time"

	"capstan.dev/capstan/internal/host/network/ownnet"
)

// A backend that is cut off closes nothing. The client must not wait for it: its connection ends, and the next one goes to
// another backend.
func TestBackendCutOff(t *testing.T) {
	if !ownnet.Run(t) {
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
		t.Errorf("the connection to a backend that is cut off goes on: %v", err)
	}
}

func shell(t *testing.T, command string) {
	t.Helper()
	if out, err := exec.Command("sh", "-c", command).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v: %s", command, err, out)
	}
}
