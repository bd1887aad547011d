//go:build e2e

package rack

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"time"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/thread"
)

// Line describes the connection of a slow box.
type Line struct {
	// Delay of each packet, in each direction.
	Delay time.Duration
	// Loss is the share of packets that are dropped, from 0 to 1.
	Loss float64
}

const (
	// maxPacket is larger than the MTU of all lines, in bytes.
	maxPacket = 4096
	// queued is the largest number of packets on a line, in one direction.
	queued = 4096
)

// Slow sends the packets between a box and the router through a relay, until the returned function is called. The kernel need not
// have netem: the relay is a goroutine between two TUN devices.
func Slow(t T, router Space, b *Box, line Line) (mend func()) {
	t.Helper()
	near, err := b.tun("slow")
	check(t, err)
	far, err := router.tun(fmt.Sprint("slow", b.Number))
	check(t, err)
	router.Run(fmt.Sprintf("ip link set slow%d mtu 1500 up; ip route replace %s dev slow%d", b.Number, b.Tunnel(), b.Number))
	b.Run("ip link set slow mtu 1500 up; ip route replace 198.51.100.1 dev slow; ip route replace default via 198.51.100.1 dev slow src " + b.Tunnel())
	var relays sync.WaitGroup
	relays.Go(func() { relay(near, far, line) })
	relays.Go(func() { relay(far, near, line) })
	return sync.OnceFunc(func() {
		_, _ = near.Close(), far.Close()
		relays.Wait()
		router.Run(fmt.Sprintf("ip route replace %s dev port%d", b.Tunnel(), b.Number))
		b.Run("ip route replace 198.51.100.1 dev uplink; ip route replace default via 198.51.100.1 dev uplink src " + b.Tunnel())
	})
}

// tun creates a TUN device in the namespace. It exists until the file is closed.
func (s Space) tun(name string) (f *os.File, err error) {
	thread.Throwaway(func() {
		var ns netns.NsHandle
		if ns, err = netns.GetFromPath("/proc/" + s.PID + "/ns/net"); err != nil {
			return
		}
		defer func() { _ = ns.Close() }()
		if err = netns.Set(ns); err == nil {
			f, err = openTUN(name)
		}
	})
	return f, err
}

func openTUN(name string) (*os.File, error) {
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("/dev/net/tun: %w", err)
	}
	request, err := unix.NewIfreq(name)
	if err == nil {
		request.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
		err = unix.IoctlIfreq(fd, unix.TUNSETIFF, request)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("TUN device %s: %w", name, err), unix.Close(fd))
	}
	return os.NewFile(uintptr(fd), name), nil // The file is not blocking: Close ends a Read.
}

// relay copies packets until a device is closed.
func relay(from, to *os.File, line Line) {
	type packet struct {
		data []byte
		due  time.Time
	}
	packets := make(chan packet, queued)
	var writer sync.WaitGroup
	writer.Go(func() {
		for p := range packets {
			time.Sleep(time.Until(p.due))
			_, _ = to.Write(p.data) // A closed device also ends the reader.
		}
	})
	for buffer := make([]byte, maxPacket); ; {
		n, err := from.Read(buffer)
		if err != nil {
			break
		}
		if rand.Float64() < line.Loss {
			continue
		}
		select {
		case packets <- packet{append([]byte(nil), buffer[:n]...), time.Now().Add(line.Delay)}:
		default: // The line is full.
		}
	}
	close(packets)
	writer.Wait()
}
