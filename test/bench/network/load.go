package main

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"capstan.dev/capstan/internal/testenv/testnetns"
)

// path is a way between two network namespaces.
type path struct {
	name     string
	from, to netns.NsHandle
	// address of the receiver.
	address netip.Addr
	// mtu of the sender's interface.
	mtu int
}

// newPath returns the path to an address.
func newPath(name string, from, to netns.NsHandle, address netip.Addr) (path, error) {
	p := path{name: name, from: from, to: to, address: address}
	err := testnetns.In(from, func() error {
		routes, err := netlink.RouteGet(address.AsSlice())
		if err != nil {
			return err
		}
		link, err := netlink.LinkByIndex(routes[0].LinkIndex)
		if err == nil {
			p.mtu = link.Attrs().MTU
		}
		return err
	})
	return p, err
}

// result of one measurement.
type result struct {
	throughput float64 // bytes per second of one connection
	trips      float64 // round trips per second of one connection, with one byte each
	p50, p99   time.Duration
}

// block is the size of a write.
const block = 128 << 10

// measure measures throughput and round trips with one connection each.
func (p path) measure(period time.Duration) (r result, err error) {
	received := make(chan float64, 1)
	err = p.converse(func(conn net.Conn) error {
		for buffer, end := make([]byte, block), time.Now().Add(period); time.Now().Before(end); {
			if _, err := conn.Write(buffer); err != nil {
				return err
			}
		}
		return nil
	}, func(conn net.Conn) error {
		start := time.Now()
		n, err := io.CopyBuffer(struct{ io.Writer }{io.Discard}, struct{ io.Reader }{conn}, make([]byte, block))
		received <- float64(n) / time.Since(start).Seconds()
		return err
	})
	if err != nil {
		return r, err
	}
	r.throughput = <-received
	var took []time.Duration
	start := time.Now()
	err = p.converse(func(conn net.Conn) error {
		for ball := make([]byte, 1); time.Since(start) < period; {
			before := time.Now()
			if _, err := conn.Write(ball); err != nil {
				return err
			}
			if _, err := io.ReadFull(conn, ball); err != nil {
				return err
			}
			took = append(took, time.Since(before))
		}
		return nil
	}, func(conn net.Conn) error {
		_, err := io.CopyBuffer(struct{ io.Writer }{conn}, struct{ io.Reader }{conn}, make([]byte, 1))
		return err
	})
	if err != nil {
		return r, err
	}
	r.trips = float64(len(took)) / time.Since(start).Seconds()
	slices.Sort(took)
	r.p50, r.p99 = took[len(took)/2], took[len(took)*99/100]
	return r, nil
}

// converse runs both ends of a connection until both return. The receiver sees the end of the connection when send returns.
func (p path) converse(send, receive func(net.Conn) error) error {
	var listener net.Listener
	err := testnetns.In(p.to, func() (err error) {
		listener, err = net.Listen("tcp", netip.AddrPortFrom(p.address, 0).String())
		return err
	})
	if err != nil {
		return err
	}
	defer func() { _ = listener.Close() }()
	received := make(chan error, 1)
	go func() {
		conn, err := listener.Accept()
		if err == nil {
			err = errors.Join(receive(conn), conn.Close())
		}
		received <- err
	}()
	var conn net.Conn
	err = testnetns.In(p.from, func() (err error) {
		conn, err = net.DialTimeout("tcp", listener.Addr().String(), 10*time.Second)
		return err
	})
	if err != nil {
		return err
	}
	err = errors.Join(send(conn), conn.Close())
	return errors.Join(err, <-received)
}
