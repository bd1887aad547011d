// Package unixsocket connects to unix sockets in folders that a less privileged user can write to.
//
// Layer: host. Allowed imports: api, library, contract.
package unixsocket

import (
	"context"
	"fmt"
	"net"
	"os"

	"golang.org/x/sys/unix"
)

// Dial connects to the socket with a name in a folder. It opens the socket's file first, and connects through the descriptor:
// the path of a socket is limited to 107 characters, and the owner of the folder may have replaced the file by a link to a socket
// of the host.
func Dial(ctx context.Context, folder *os.File, name string) (net.Conn, error) {
	fd, err := unix.Openat(int(folder.Fd()), name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("opening the socket %s: %w", name, err)
	}
	defer func() { _ = unix.Close(fd) }()
	var d net.Dialer
	return d.DialContext(ctx, "unix", fmt.Sprintf("/proc/self/fd/%d", fd))
}
