package network

import (
	"io"
	"net"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"capstan.dev/capstan/internal/testenv/testnetns"
)

// A connection from the box to a load balancer on the box survives the removal of other networks. If the rules of a network
// masqueraded such a connection, the kernel would give it another network's address and drop it with that address.
func TestConnectionOutlivesOtherNetwork(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	b := box(t, t.TempDir(), "a")
	for _, n := range []Network{
		{ID: "other", CIDR: "10.231.6.0/24", Cluster: "default/other"},
		{ID: "own", CIDR: "10.231.7.0/24", Cluster: "default/own"},
	} {
		if err := b.Ensure(t.Context(), n); err != nil {
			t.Fatal(err)
		}
	}
	loopback, err := netlink.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	if err := netlink.LinkSetUp(loopback); err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("tcp", "10.231.7.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	client, err := net.Dial("tcp", listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	server, err := listener.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	if got, want := server.RemoteAddr().String(), client.LocalAddr().String(); got != want {
		t.Errorf("the client has the address %s, and the server sees %s", want, got)
	}

	if err := b.Release(t.Context(), "other"); err != nil {
		t.Fatal(err)
	}
	if _, err := client.Write([]byte("hello")); err != nil {
		t.Fatal(err)
	}
	if err := server.SetReadDeadline(time.Now().Add(5 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(server, make([]byte, len("hello"))); err != nil {
		t.Errorf("the connection does not work after the removal of another network: %v", err)
	}
}
