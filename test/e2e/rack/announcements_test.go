//go:build e2e && rack

package rack_test

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/test/rack"
)

// announcement is a packet that shows all stations who has an address: gratuitous ARP, or an unsolicited neighbour advertisement.
type announcement struct {
	address netip.Addr
	mac     string
}

// announced returns the announcement in an Ethernet frame.
func announced(frame []byte) (out announcement, ok bool) {
	const ethernet, ipv6, arp, advertisement = 14, 40, 28, 32
	switch {
	case len(frame) >= ethernet+arp && bytes.Equal(frame[12:14], []byte{0x08, 0x06}):
		sender, target, mac := [4]byte(frame[28:32]), [4]byte(frame[38:42]), frame[22:28]
		everyone := bytes.Equal(frame[:6], []byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff})
		return announcement{netip.AddrFrom4(sender), net.HardwareAddr(mac).String()}, everyone && sender == target && bytes.Equal(mac, frame[6:12])
	case len(frame) >= ethernet+ipv6+advertisement && bytes.Equal(frame[12:14], []byte{0x86, 0xdd}):
		next, hops, to, message := frame[20], frame[21], netip.AddrFrom16([16]byte(frame[38:54])), frame[54:]
		const solicited, override = 0x40, 0x20
		isAdvertisement := next == unix.IPPROTO_ICMPV6 && hops == 255 && message[0] == 136 && message[24] == 2
		everyone := to == netip.MustParseAddr("ff02::1") && message[4]&solicited == 0 && message[4]&override != 0
		return announcement{netip.AddrFrom16([16]byte(message[8:24])), net.HardwareAddr(message[26:32]).String()}, isAdvertisement && everyone
	}
	return out, false
}

// announcements are those that were seen on the wire.
type announcements struct {
	mu  sync.Mutex
	all []announcement
}

// listen looks at all packets that reach an interface, until the test ends.
func listen(t *testing.T, device string) *announcements {
	t.Helper()
	link, err := net.InterfaceByName(device)
	expect.NoError(t, err)
	const every = unix.ETH_P_ALL<<8&0xff00 | unix.ETH_P_ALL>>8
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, every)
	expect.NoError(t, err)
	expect.NoError(t, errors.Join(
		unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: every, Ifindex: link.Index}),
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Usec: 100_000}),
	))
	seen, end := &announcements{}, make(chan struct{})
	var listening sync.WaitGroup
	listening.Go(func() {
		defer func() { _ = unix.Close(fd) }()
		for frame := make([]byte, 2048); ; {
			select {
			case <-end:
				return
			default:
			}
			if n, _, err := unix.Recvfrom(fd, frame, 0); err == nil {
				seen.note(frame[:n])
			}
		}
	})
	t.Cleanup(func() { close(end); listening.Wait() })
	return seen
}

func (a *announcements) note(frame []byte) {
	if one, ok := announced(frame); ok {
		a.mu.Lock()
		defer a.mu.Unlock()
		a.all = append(a.all, one)
	}
}

// holders are the stations that announced an address, in turn, and the number of the announcements of each turn.
func (a *announcements) holders(address string) (macs []string, counts []int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, one := range a.all {
		switch n := len(macs); {
		case one.address.String() != address:
		case n > 0 && macs[n-1] == one.mac:
			counts[n-1]++
		default:
			macs, counts = append(macs, one.mac), append(counts, 1)
		}
	}
	return macs, counts
}

// by waits until a box announces an address once more.
func (a *announcements) by(t *testing.T, b *rack.Box, address string) {
	t.Helper()
	turns, before := a.holders(address)
	rack.Eventually(t, "an announcement of "+address+" by "+b.Name(), func() error {
		macs, counts := a.holders(address)
		n := len(macs)
		if n > 0 && macs[n-1] == lanMAC(b) && (n > len(turns) || counts[n-1] > before[n-1]) {
			return nil
		}
		return fmt.Errorf("announced by %v, %v times", macs, counts)
	})
}

// only expects that exactly these boxes announced an address, one after another.
func (a *announcements) only(t *testing.T, address string, boxes ...*rack.Box) {
	t.Helper()
	macs, counts := a.holders(address)
	var want, names []string
	for _, b := range boxes {
		want, names = append(want, lanMAC(b)), append(names, b.Name())
	}
	if !slices.Equal(macs, want) {
		t.Errorf("%s was announced by %v, want %v", address, macs, want)
	}
	t.Logf("announcements of %s: %v by %s", address, counts, strings.Join(names, ", then by "))
}
