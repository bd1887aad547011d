package balancer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// handoverSocket is the socket in the balancer's folder where a balancer passes its listening sockets to its successor.
	handoverSocket = "handover.sock"
	// handoverTime bounds each step of a handover.
	handoverTime = 10 * time.Second
	// maxListeners is the largest number of sockets in one message; the kernel's own limit is 253.
	maxListeners = 64
)

// A handover takes place between two processes. Each of them can die at any step:
//
//  1. the successor connects, and gets the addresses and their listening sockets;
//  2. it accepts connections and writes its status: from here on both serve;
//  3. it sends one byte. The predecessor closes its sockets, unlocks the folder, and finishes the connections that it
//     has. If the byte does not arrive, it continues to serve and writes its own status again.

// give offers the listening sockets to a successor until the listener is closed.
func (b *Balancer) give(listener *net.UnixListener) {
	for {
		conn, err := listener.AcceptUnix()
		if err != nil {
			return
		}
		err = b.giveTo(conn)
		_ = conn.Close()
		if err == nil {
			close(b.succeeded)
			return
		}
		b.log.Warn("The successor did not take over", "error", err)
		b.report()
	}
}

func (b *Balancer) giveTo(conn *net.UnixConn) error {
	if err := conn.SetDeadline(time.Now().Add(handoverTime)); err != nil {
		return err
	}
	if err := b.sendListeners(conn); err != nil {
		return err
	}
	_, err := conn.Read(make([]byte, 1))
	return err
}

func (b *Balancer) sendListeners(conn *net.UnixConn) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	var addresses []string
	var fds []int
	for address, listener := range b.listeners {
		raw, err := listener.(*net.TCPListener).SyscallConn()
		if err != nil {
			return err
		}
		if err := raw.Control(func(fd uintptr) { fds = append(fds, int(fd)) }); err != nil {
			return err
		}
		addresses = append(addresses, address)
	}
	data, err := json.Marshal(addresses)
	if err != nil {
		return err
	}
	_, _, err = conn.WriteMsgUnix(data, unix.UnixRights(fds...), nil)
	return err
}

// predecessor is the balancer that served before this one.
type predecessor struct{ conn *net.UnixConn }

// inherit receives the listening sockets of the balancer that holds the lock.
func (b *Balancer) inherit() (*predecessor, error) {
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: filepath.Join(b.dir, handoverSocket), Net: "unix"})
	if err != nil {
		return nil, err
	}
	err = conn.SetDeadline(time.Now().Add(handoverTime))
	if err == nil {
		err = b.receiveListeners(conn)
	}
	if err != nil {
		_ = conn.Close()
		return nil, err
	}
	return &predecessor{conn}, nil
}

func (b *Balancer) receiveListeners(conn *net.UnixConn) error {
	data, control := make([]byte, 1<<16), make([]byte, unix.CmsgSpace(4*maxListeners))
	n, controlN, _, _, err := conn.ReadMsgUnix(data, control)
	if err != nil {
		return err
	}
	var addresses []string
	if err := json.Unmarshal(data[:n], &addresses); err != nil {
		return err
	}
	messages, err := unix.ParseSocketControlMessage(control[:controlN])
	if err != nil {
		return err
	}
	var fds []int
	for i := range messages {
		more, err := unix.ParseUnixRights(&messages[i])
		if err != nil {
			return err
		}
		fds = append(fds, more...)
	}
	if len(fds) != len(addresses) {
		return fmt.Errorf("the previous balancer sent %d sockets for %d addresses", len(fds), len(addresses))
	}
	var errs error
	for i, fd := range fds {
		file := os.NewFile(uintptr(fd), addresses[i])
		listener, err := net.FileListener(file)
		errs = errors.Join(errs, err, file.Close())
		if err == nil {
			b.inherited[addresses[i]] = listener
		}
	}
	return errs
}

// replace ends the predecessor's service and waits until it releases the lock.
func (p *predecessor) replace(ctx context.Context, dir string) (unlock func(), err error) {
	defer func() { _ = p.conn.Close() }()
	if _, err := p.conn.Write([]byte{1}); err != nil {
		return nil, fmt.Errorf("the previous balancer does not hand over its sockets: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, handoverTime)
	defer cancel()
	for {
		if unlock, err = lock(dir); err == nil {
			return unlock, nil
		}
		// The kernel sends no event when a lock becomes free, and a blocking lock call cannot be cancelled.
		select {
		case <-ctx.Done():
			return nil, err
		case <-time.After(time.Millisecond):
		}
	}
}
