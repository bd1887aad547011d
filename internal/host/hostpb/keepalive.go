package hostpb

import (
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"
)

// Keepalive is the interval in which each side of a connection checks the other side. A box that loses its power or its
// network closes no connection. Without the check, the loss is noticed only when TCP gives up after a quarter of an
// hour, or never if nothing is sent.
type Keepalive struct {
	// Idle is the time without received data after which a side sends a check. gRPC raises it to at least 10 s for clients and
	// 1 s for servers.
	Idle time.Duration
	// Answer is the time limit for the other side's answer. Then the connection is closed, and every call and stream on
	// it ends with the code Unavailable.
	Answer time.Duration
}

// DefaultKeepalive of managers and capstand. A loss is noticed 18 s after the last received data. The API shows it within 20 s.
var DefaultKeepalive = Keepalive{Idle: 10 * time.Second, Answer: 8 * time.Second}

// Client returns the option of clients.
func (k Keepalive) Client() grpc.DialOption {
	return grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: k.Idle, Timeout: k.Answer, PermitWithoutStream: true})
}

// Server returns the options of servers. They accept the checks of clients and send their own.
func (k Keepalive) Server() []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: k.Idle, Timeout: k.Answer}),
	}
}

// Pulses detect the loss of a host with addresses of Services sooner than Keepalive, which closes the connection and is therefore more
// patient.
const (
	// Silence is the time after the last answered pulse after which a manager may move addresses to another host. A manager sends
	// three pulses in this time.
	Silence = 6 * time.Second
	// PulseLease is the time after the last pulse in which a host announces its addresses. It is shorter than Silence, so that the
	// host stops before the manager moves them.
	PulseLease = 5 * time.Second
)
