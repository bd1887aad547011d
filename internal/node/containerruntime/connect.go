// Package containerruntime connects to the container runtime of a machine, for calls of its API (CRI).
//
// Layer: node. Allowed imports: api, library, contract.
package containerruntime

import (
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

// maxMessage is the limit of the kubelet for an answer of the runtime, in bytes.
const maxMessage = 16 << 20

// Connect returns a connection to the runtime's socket. It connects with the first call, which fails at once if nobody listens.
func Connect(socket string) (*grpc.ClientConn, error) {
	return grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage)))
}
