package hostpb

import (
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"
)

// Keepalive says when each side of a connection asks the other one for a sign of life. A box that loses its power, or
// its way to the other one, closes nothing: without the question nobody would hear of it for as long as TCP tries, a quarter
// of an hour, or for ever where nothing is sent.
type Keepalive struct {
	// Idle is for how long nothing was heard when a side asks. gRPC makes it 10 s at least for clients, and 1 s for
	// servers.
	Idle time.Duration
	// Answer is how long the other side has for its answer. Then the connection is closed, and every call and
	// stream on it ends with the code Unavailable.
	Answer time.Duration
}

// DefaultKeepalive of managers and capstand.
var DefaultKeepalive = Keepalive{Idle: 10 * time.Second, Answer: 10 * time.Second}

// Client is for those who dial.
func (k Keepalive) Client() grpc.DialOption {
	return grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: k.Idle, Timeout: k.Answer, PermitWithoutStream: true})
}

// Server is for those who serve: they let clients ask as often as they do, and ask themselves.
func (k Keepalive) Server() []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: k.Idle, Timeout: k.Answer}),
	}
}
