//go:build linux

package doctor

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/overhead"
)

const (
	// maxPath is the largest packet that a probe tries, in bytes.
	maxPath = 9216
	// echoWait is the time that a probe waits for each of its echoes, echoTries the number of echoes.
	echoWait, echoTries = 400 * time.Millisecond, 3
	// defaultPath is the packet size for which clusters across hosts get their default MTU.
	defaultPath = overhead.EthernetMTU
)

// ParsePeers returns the tunnel addresses of other hosts.
func ParsePeers(peers []string) (out []netip.Addr, err error) {
	for _, text := range peers {
		peer, err := netip.ParseAddr(text)
		if err != nil || !peer.IsGlobalUnicast() {
			return nil, fmt.Errorf("expected --peer with the IP address of another host, for example 192.0.2.10, found %q", text)
		}
		out = append(out, peer.Unmap())
	}
	return out, nil
}

// CheckPeers measures the paths to the tunnel addresses of other hosts.
func CheckPeers(ctx context.Context, peers []netip.Addr) (out []Result) {
	for _, peer := range peers {
		mtu, err := pathMTU(ctx, peer)
		out = append(out, pathResult(peer, mtu, err))
	}
	return out
}

// pathResult says which MTU the overlay needs on a path.
func pathResult(peer netip.Addr, mtu int, err error) Result {
	extra := overhead.Of(peer, false)
	overlay := mtu - extra
	r := Result{Name: "path to " + peer.String(), Level: OK, Found: fmt.Sprintf("packets of %d bytes pass: a cluster across hosts can have the MTU %d", mtu, overlay)}
	switch {
	case err != nil:
		r.Level, r.Found = Fail, err.Error()
		r.Mend = "allow ICMP echo and UDP port 4789 between the hosts; run the command as root"
	case overlay < overhead.MinMTU:
		r.Level = Fail
		r.Mend = fmt.Sprintf("a cluster across hosts needs packets of %d bytes: raise the MTU of the links on the path", overhead.MinMTU+extra)
	case mtu < defaultPath:
		r.Level = Warn
		r.Mend = fmt.Sprintf("raise the MTU of the path to %d, or set spec.network.mtu of each new CapstanCluster to %d at most",
			defaultPath, overlay)
	}
	return r
}

// pathMTU returns the size of the largest IP packet that reaches the peer, and whose echo returns, without fragmentation. It sends
// ICMP echoes and does not rely on ICMP errors, which firewalls often drop.
func pathMTU(ctx context.Context, peer netip.Addr) (int, error) {
	e, err := newEcho(peer)
	if err != nil {
		return 0, err
	}
	defer func() { _ = unix.Close(e.socket) }()
	smallest := 576
	if peer.Is6() {
		smallest = 1280
	}
	ok, err := e.passes(ctx, smallest)
	if err == nil && !ok {
		err = fmt.Errorf("no answer to ICMP echoes of %d bytes from %s", smallest, peer)
	}
	if err != nil {
		return 0, err
	}
	low, high := smallest, maxPath+1 // low passes, high does not
	for high-low > 1 {
		middle := (low + high) / 2
		if low < defaultPath && high > defaultPath+1 {
			middle = defaultPath + (low+1)/(defaultPath+1) // The usual answers first: 1500, and then 1501.
		}
		ok, err := e.passes(ctx, middle)
		if err != nil {
			return 0, err
		}
		if ok {
			low = middle
		} else {
			high = middle
		}
	}
	return low, nil
}

// echo sends ICMP echoes to a peer.
type echo struct {
	peer   netip.Addr
	socket int
	id     uint16
	number uint16
}

func newEcho(peer netip.Addr) (*echo, error) {
	family, protocol := unix.AF_INET, unix.IPPROTO_ICMP
	if peer.Is6() {
		family, protocol = unix.AF_INET6, unix.IPPROTO_ICMPV6
	}
	socket, err := unix.Socket(family, unix.SOCK_RAW|unix.SOCK_CLOEXEC, protocol)
	if err != nil {
		return nil, fmt.Errorf("probing %s: %w", peer, err)
	}
	if peer.Is6() {
		err = errors.Join(
			unix.SetsockoptInt(socket, unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER, unix.IPV6_PMTUDISC_PROBE),
			unix.SetsockoptInt(socket, unix.IPPROTO_IPV6, unix.IPV6_DONTFRAG, 1))
	} else { // Sets "do not fragment", and ignores the MTU of the path that the kernel has recorded.
		err = unix.SetsockoptInt(socket, unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_PROBE)
	}
	var id [2]byte
	_, _ = rand.Read(id[:])
	if err != nil {
		_ = unix.Close(socket)
		return nil, err
	}
	return &echo{peer: peer, socket: socket, id: binary.BigEndian.Uint16(id[:])}, nil
}

// passes returns whether an IP packet of the size and its echo pass.
func (e *echo) passes(ctx context.Context, size int) (bool, error) {
	for range echoTries {
		if err := ctx.Err(); err != nil {
			return false, err
		}
		e.number++
		switch err := unix.Sendto(e.socket, e.packet(size), 0, e.sockaddr()); {
		case errors.Is(err, unix.EMSGSIZE):
			return false, nil
		case err != nil && !errors.Is(err, unix.ENOBUFS):
			return false, fmt.Errorf("probing %s: %w", e.peer, err)
		}
		if e.answered(time.Now().Add(echoWait)) {
			return true, nil
		}
	}
	return false, nil
}

func (e *echo) sockaddr() unix.Sockaddr {
	if e.peer.Is6() {
		return &unix.SockaddrInet6{Addr: e.peer.As16()}
	}
	return &unix.SockaddrInet4{Addr: e.peer.As4()}
}

// types of a request and of its answer.
func (e *echo) types() (request, answer byte) {
	if e.peer.Is6() {
		return 128, 129
	}
	return 8, 0
}

// packet returns the ICMP part of an IP packet of the size. The kernel fills in the checksum of ICMPv6.
func (e *echo) packet(size int) []byte {
	header := 20
	if e.peer.Is6() {
		header = 40
	}
	p := make([]byte, size-header)
	p[0], _ = e.types()
	binary.BigEndian.PutUint16(p[4:], e.id)
	binary.BigEndian.PutUint16(p[6:], e.number)
	if e.peer.Is4() {
		binary.BigEndian.PutUint16(p[2:], checksum(p))
	}
	return p
}

func checksum(p []byte) uint16 {
	var sum uint32
	for pair := range slices.Chunk(p, 2) {
		sum += uint32(pair[0]) << 8
		if len(pair) > 1 {
			sum += uint32(pair[1])
		}
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}

// answered waits for the answer to the last request.
func (e *echo) answered(deadline time.Time) bool {
	buffer := make([]byte, maxPath+1)
	for {
		left := time.Until(deadline)
		if left <= 0 {
			return false
		}
		timeout := unix.NsecToTimeval(max(left, time.Millisecond).Nanoseconds())
		if unix.SetsockoptTimeval(e.socket, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &timeout) != nil {
			return false
		}
		n, _, err := unix.Recvfrom(e.socket, buffer, 0)
		if err != nil {
			continue // Also errors of the path, for example that a host is unreachable.
		}
		p := buffer[:n]
		if e.peer.Is4() && n > 0 { // A raw IPv4 socket receives the IP header too.
			p = p[min(n, int(p[0]&0x0f)*4):]
		}
		_, answer := e.types()
		if len(p) >= 8 && p[0] == answer && binary.BigEndian.Uint16(p[4:]) == e.id && binary.BigEndian.Uint16(p[6:]) == e.number {
			return true
		}
	}
}
