package balancer

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"time"
)

const (
	recordHeader    = 5
	handshakeRecord = 22
	// maxRecord is the longest record that TLS allows.
	maxRecord = 1 << 14
)

var (
	errSilent = errors.New("the client sent no TLS handshake")
	errNotTLS = errors.New("the client sent data that is not a TLS handshake")
)

// readHello reads the first record of a TLS handshake, which a client sends at once. Connections without a handshake do not
// reach an API server.
func readHello(client net.Conn, within time.Duration) ([]byte, error) {
	if err := client.SetReadDeadline(time.Now().Add(within)); err != nil {
		return nil, err
	}
	var header [recordHeader]byte
	if _, err := io.ReadFull(client, header[:]); err != nil {
		return nil, helloError(err, within)
	}
	length := int(binary.BigEndian.Uint16(header[3:]))
	if header[0] != handshakeRecord || header[1] != 3 || length == 0 || length > maxRecord {
		return nil, errNotTLS
	}
	hello := make([]byte, recordHeader+length)
	copy(hello, header[:])
	if _, err := io.ReadFull(client, hello[recordHeader:]); err != nil {
		return nil, helloError(err, within)
	}
	return hello, client.SetReadDeadline(time.Time{})
}

func helloError(err error, within time.Duration) error {
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return fmt.Errorf("%w within %s", errSilent, within)
	}
	return fmt.Errorf("%w: %w", errSilent, err)
}
