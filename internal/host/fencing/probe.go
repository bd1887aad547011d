package fencing

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"net"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/boottime"
)

// Port is the UDP port of probes, on the address that a box has in the overlay of a network. Only boxes of the network reach it.
const Port = 4788

const (
	// maxMessage is the size of the largest probe in bytes.
	maxMessage = 2048
	// maxPending is the largest number of probes of one host that may still be answered.
	maxPending = 16
	// maxSettings is the largest number of management clusters in a probe.
	maxSettings = 16
)

// message is a probe, or the answer to one.
type message struct {
	// Nonce is random: only a box that received the probe can answer it.
	Nonce  string `json:"nonce"`
	Answer bool   `json:"answer,omitempty"`
	// Settings of the host that sends the probe, for management clusters with machines in the network.
	Settings Settings `json:"settings,omitempty"`
}

func (m message) valid() bool {
	if len(m.Nonce) < 16 || len(m.Nonce) > 64 || len(m.Settings) > maxSettings {
		return false
	}
	for id, seconds := range m.Settings {
		if len(id) > 128 || seconds < 1 || time.Duration(seconds)*time.Second > maxStopAfter {
			return false
		}
	}
	return true
}

// pending is a probe that was sent.
type pending struct {
	nonce string
	at    time.Duration
}

// prober sends the probes of one network, and answers those of the other hosts.
type prober struct {
	conn *net.UDPConn
	// probed returns whether the probe was recorded, so that it may be answered; nil answers none. reached records an answer.
	probed  func(host netip.Addr, s Settings) bool
	reached func(sent time.Duration)

	mu sync.Mutex
	// hosts are the tunnel addresses of the other hosts, by their addresses in the overlay.
	hosts map[netip.Addr]netip.Addr
	sent  map[netip.Addr][]pending
}

// newProber listens at the address of this host in the overlay, until it is closed. It must answer no probes at another port than Port: the
// firewall protects only this one from probes of machines.
func newProber(at netip.AddrPort, probed func(netip.Addr, Settings) bool, reached func(time.Duration)) (*prober, error) {
	conn, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(at))
	if err != nil {
		return nil, err
	}
	p := &prober{conn: conn, probed: probed, reached: reached, sent: map[netip.Addr][]pending{}}
	go p.receive()
	return p, nil
}

// answers reports whether the prober answers the probes of other hosts.
func (p *prober) answers() bool { return p.probed != nil }

func (p *prober) close() { _ = p.conn.Close() }

// setHosts replaces the other hosts.
func (p *prober) setHosts(hosts map[netip.Addr]netip.Addr) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.hosts = hosts
	for address := range p.sent {
		if _, ok := hosts[address]; !ok {
			delete(p.sent, address)
		}
	}
}

// probe sends one probe to each of the other hosts. An error is the same as a lost packet.
func (p *prober) probe(s Settings) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for address := range p.hosts {
		nonce := rand.Text()
		data, err := json.Marshal(message{Nonce: nonce, Settings: s})
		if err != nil || len(data) > maxMessage {
			return
		}
		old := p.sent[address]
		p.sent[address] = append(old[max(0, len(old)+1-maxPending):], pending{nonce, boottime.Now()})
		_, _ = p.conn.WriteToUDPAddrPort(data, netip.AddrPortFrom(address, Port))
	}
}

func (p *prober) receive() {
	buffer := make([]byte, maxMessage+1)
	for {
		n, from, err := p.conn.ReadFromUDPAddrPort(buffer)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil || n > maxMessage {
			continue // For example ICMP errors of earlier probes.
		}
		var m message
		if json.Unmarshal(buffer[:n], &m) == nil && m.valid() {
			p.handle(m, from)
		}
	}
}

// handle processes a message. The firewall of the overlay admits packets of the network's hosts only.
func (p *prober) handle(m message, from netip.AddrPort) {
	p.mu.Lock()
	host, known := p.hosts[from.Addr().Unmap()]
	p.mu.Unlock()
	switch {
	case !known:
	case m.Answer:
		p.answered(m, from.Addr().Unmap())
	case p.answers() && p.probed(host, m.Settings):
		if data, err := json.Marshal(message{Nonce: m.Nonce, Answer: true}); err == nil {
			_, _ = p.conn.WriteToUDPAddrPort(data, from)
		}
	}
}

func (p *prober) answered(m message, from netip.Addr) {
	p.mu.Lock()
	var at time.Duration
	for _, sent := range p.sent[from] {
		if sent.nonce == m.Nonce {
			at = sent.at
		}
	}
	p.mu.Unlock()
	if at > 0 {
		p.reached(at)
	}
}

// Reachable returns whether a box answers at its address in an overlay: its capstand, or its kernel with the message that no
// capstand listens there. from is the own address.
func Reachable(ctx context.Context, from, to netip.Addr) bool {
	dialer := net.Dialer{LocalAddr: net.UDPAddrFromAddrPort(netip.AddrPortFrom(from, 0))}
	conn, err := dialer.DialContext(ctx, "udp", netip.AddrPortFrom(to, Port).String())
	if err != nil {
		return false
	}
	defer func() { _ = conn.Close() }()
	if deadline, ok := ctx.Deadline(); ok {
		_ = conn.SetDeadline(deadline)
	}
	data, err := json.Marshal(message{Nonce: rand.Text()})
	if err != nil {
		return false
	}
	for range 3 {
		_, _ = conn.Write(data)
	}
	_, err = conn.Read(make([]byte, maxMessage))
	return err == nil || errors.Is(err, unix.ECONNREFUSED)
}
