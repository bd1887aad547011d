package wireguard

import (
	"bufio"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/host/proc"
)

// logFile contains the errors of the process.
const logFile = "wireguard.log"

// controlWait bounds a call of the process.
const controlWait = 10 * time.Second

// process controls the device of a process, over its socket. The protocol is that of `wg`:
// https://www.wireguard.com/xplatform/#configuration-protocol
type process struct{ socket string }

// start starts the process and returns its control. The socket accepts connections at once, and answers when the device exists.
func (l *Link) start() (control, error) {
	if err := l.end(); err != nil {
		return nil, err
	}
	if err := free(); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(l.Dir, 0o700); err != nil {
		return nil, err
	}
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: l.socket()})
	if err != nil {
		return nil, err
	}
	listener.SetUnlinkOnClose(false)
	defer func() { _ = listener.Close() }()
	if err := os.Chmod(l.socket(), 0o600); err != nil {
		return nil, err
	}
	file, err := listener.File()
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }()
	if err := l.run(file); err != nil {
		return nil, err
	}
	return process{l.socket()}, nil
}

// free returns an error if another program has the port: the device itself would not report it.
func free() error {
	conn, err := net.ListenUDP("udp", &net.UDPAddr{Port: Port})
	if err != nil {
		return fmt.Errorf("UDP port %d of this host must be free for the encryption of overlays: %w", Port, err)
	}
	return conn.Close()
}

// run starts this program with the arguments of Serve and the socket, and records the process.
func (l *Link) run(socket *os.File) error {
	// It appends, so that capstand can truncate the file meanwhile.
	log, err := os.OpenFile(l.Log(), os.O_CREATE|os.O_TRUNC|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer func() { _ = log.Close() }()
	cmd := exec.Command("/proc/self/exe", append([]string{"wireguard", "--key", l.KeyFile, "--uid", strconv.Itoa(l.UID)}, l.Logging...)...)
	cmd.Args[0], cmd.Dir, cmd.Stderr, cmd.ExtraFiles = "capstan", "/", log, []*os.File{socket}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	ref, err := proc.Start(cmd)
	if errors.Is(err, proc.ErrGone) {
		return fmt.Errorf("the process of the WireGuard device has ended: see %s: %w", l.Log(), err)
	} else if err != nil {
		return err
	}
	return atomicfile.WriteJSON(l.record(), ref, 0o600)
}

// Log is the path of the log of the process, if the kernel has no device.
func (l *Link) Log() string { return filepath.Join(l.Dir, logFile) }

func (l *Link) record() string { return filepath.Join(l.Dir, "process.json") }

// running returns whether the recorded process lives.
func (l *Link) running() bool {
	var ref proc.Ref
	return atomicfile.ReadJSON(l.record(), &ref) == nil && ref.Alive()
}

// end ends the process and removes its files.
func (l *Link) end() (err error) {
	var ref proc.Ref
	if atomicfile.ReadJSON(l.record(), &ref) == nil {
		if err := kill(ref); err != nil {
			return err
		}
	}
	for _, path := range []string{l.record(), l.socket()} {
		err = errors.Join(err, atomicfile.Remove(path))
	}
	return err
}

// kill kills a process and waits for its end.
func kill(ref proc.Ref) error {
	handle, err := ref.Open()
	if errors.Is(err, proc.ErrGone) {
		return nil
	}
	if err != nil {
		return err
	}
	defer func() { _ = handle.Close() }()
	ctx, cancel := context.WithTimeout(context.Background(), controlWait)
	defer cancel()
	return errors.Join(handle.Signal(unix.SIGKILL), handle.Wait(ctx))
}

func (p process) peers() (all []wgtypes.Key, err error) {
	answer, err := p.call("get=1\n\n")
	if err != nil {
		return nil, err
	}
	for _, line := range answer {
		text, ok := strings.CutPrefix(line, "public_key=")
		if !ok {
			continue
		}
		data, err := hex.DecodeString(text)
		if err != nil {
			return nil, err
		}
		key, err := wgtypes.NewKey(data)
		if err != nil {
			return nil, err
		}
		all = append(all, key)
	}
	return all, nil
}

func (p process) configure(c wgtypes.Config) error {
	_, err := p.call("set=1\n" + text(c) + "\n")
	return err
}

// text returns a configuration of peers as lines of the protocol.
func text(c wgtypes.Config) string {
	var s strings.Builder
	for _, p := range c.Peers {
		fmt.Fprintf(&s, "public_key=%x\n", p.PublicKey[:])
		if p.Remove {
			s.WriteString("remove=true\n")
			continue
		}
		if p.UpdateOnly {
			s.WriteString("update_only=true\n")
		}
		if p.Endpoint != nil {
			fmt.Fprintf(&s, "endpoint=%s\n", p.Endpoint)
		}
		if p.PersistentKeepaliveInterval != nil {
			fmt.Fprintf(&s, "persistent_keepalive_interval=%d\n", int(p.PersistentKeepaliveInterval.Seconds()))
		}
		if p.ReplaceAllowedIPs {
			s.WriteString("replace_allowed_ips=true\n")
		}
		for _, a := range p.AllowedIPs {
			fmt.Fprintf(&s, "allowed_ip=%s\n", a.String())
		}
	}
	return s.String()
}

// call sends a request and returns the lines of the answer.
func (p process) call(request string) (lines []string, err error) {
	conn, err := (&net.Dialer{Timeout: controlWait}).DialContext(context.Background(), "unix", p.socket)
	if err != nil {
		return nil, err
	}
	defer func() { _ = conn.Close() }()
	if err := conn.SetDeadline(time.Now().Add(controlWait)); err != nil {
		return nil, err
	}
	if _, err := io.WriteString(conn, request); err != nil {
		return nil, err
	}
	scanner := bufio.NewScanner(conn)
	for scanner.Scan() {
		number, last := strings.CutPrefix(scanner.Text(), "errno=")
		switch {
		case last && number == "0":
			return lines, nil
		case last:
			return nil, fmt.Errorf("the process answered with error %s", number)
		}
		lines = append(lines, scanner.Text())
	}
	return nil, errors.Join(scanner.Err(), fmt.Errorf("the process of the device has ended: %s", lastLines(filepath.Join(filepath.Dir(p.socket), logFile))))
}

// lastLines returns the end of a log.
func lastLines(path string) string {
	const most = 1 << 10
	file, err := os.Open(path)
	if err != nil {
		return err.Error()
	}
	defer func() { _ = file.Close() }()
	info, err := file.Stat()
	if err != nil {
		return err.Error()
	}
	text := make([]byte, min(info.Size(), most))
	n, _ := file.ReadAt(text, info.Size()-int64(len(text)))
	return strings.TrimSpace(string(text[:n]))
}
