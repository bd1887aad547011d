//go:build e2e

package harness

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netns"

	"capstan.dev/capstan/internal/thread"
)

// Outside is a client in a network namespace that reaches the host through a cable.
type Outside struct{ ns netns.NsHandle }

// OutsideNetwork contains the addresses at the ends of the cable.
type OutsideNetwork struct {
	Host, Client string
	Bits         int
}

// NewOutside starts a client. link is the name of the host's end of its cable.
func NewOutside(t *testing.T, link string, networks ...OutsideNetwork) *Outside {
	t.Helper()
	client := exec.Command("unshare", "--net", "sleep", "infinity")
	if err := client.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = client.Process.Kill(), client.Wait() })
	pid := fmt.Sprint(client.Process.Pid)
	sh := func(lines ...string) {
		t.Helper()
		if out, err := exec.Command("sh", "-euc", strings.Join(lines, "\n")).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v: %s", lines, err, out)
		}
	}
	in := "nsenter --target " + pid + " --net -- "
	sh("until [ $(readlink /proc/"+pid+"/ns/net) != $(readlink /proc/self/ns/net) ]; do sleep 0.02; done",
		"ip link add "+link+" type veth peer name client netns "+pid, "ip link set "+link+" up", in+"ip link set client up")
	t.Cleanup(func() { sh("ip link del " + link) })
	for _, n := range networks {
		flags := ""
		if strings.Contains(n.Host, ":") {
			flags = " nodad"
		}
		sh(fmt.Sprintf("ip addr add %s/%d dev %s%s", n.Host, n.Bits, link, flags),
			in+fmt.Sprintf("ip addr add %s/%d dev client%s", n.Client, n.Bits, flags), in+"ip route add default via "+n.Host)
	}
	ns, err := netns.GetFromPid(client.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ns.Close() })
	return &Outside{ns}
}

// In runs f in the namespace of the client.
func (o *Outside) In(f func() error) (err error) {
	thread.Throwaway(func() {
		if err = netns.Set(o.ns); err == nil {
			err = f()
		}
	})
	return err
}

// ClientSeen asks an echo server over HTTP for the address of its client, which connects with dial.
func ClientSeen(ctx context.Context, url string, dial func(ctx context.Context, network, address string) (net.Conn, error)) (from string, err error) {
	web := http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{DisableKeepAlives: true, DialContext: dial}}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, http.NoBody)
	if err != nil {
		return "", err
	}
	resp, err := web.Do(request)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	var info map[string]string
	if err := json.NewDecoder(io.LimitReader(resp.Body, 1<<16)).Decode(&info); err != nil {
		return "", err
	}
	from, _, err = net.SplitHostPort(info["client"])
	return from, err
}
