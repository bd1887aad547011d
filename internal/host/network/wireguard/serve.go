package wireguard

import (
	"fmt"
	"log/slog"
	"net"
	"os"
	"syscall"

	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/device"
	"golang.zx2c4.com/wireguard/tun"
)

// socketFD is the descriptor of the socket that a process of Link.start inherits.
const socketFD = 3

// Serve is a WireGuard device without the kernel's one. It returns when the device is removed. It gives up all rights as soon as
// the device exists and has its port.
func Serve(keyFile string, uid int, log *slog.Logger) error {
	private, err := readKey(keyFile)
	if err != nil {
		return err
	}
	socket, err := net.FileListener(os.NewFile(socketFD, "control"))
	if err != nil {
		return fmt.Errorf("expected a socket as descriptor %d: %w", socketFD, err)
	}
	link, err := tun.CreateTUN(Device, device.DefaultMTU)
	if err != nil {
		return err
	}
	d := device.NewDevice(link, conn.NewDefaultBind(), &device.Logger{
		Verbosef: device.DiscardLogf, Errorf: func(format string, args ...any) { log.Error(fmt.Sprintf(format, args...)) },
	})
	defer d.Close()
	if err := d.IpcSet(fmt.Sprintf("private_key=%x\nlisten_port=%d\n", private[:], Port)); err != nil {
		return err
	}
	if err := d.Up(); err != nil {
		return fmt.Errorf("opening UDP port %d: %w", Port, err)
	}
	if err := drop(uid); err != nil {
		return err
	}
	go func() {
		for {
			client, err := socket.Accept()
			if err != nil {
				d.Close()
				return
			}
			go d.IpcHandle(client)
		}
	}()
	<-d.Wait()
	return nil
}

// drop makes the process that of an unprivileged user.
func drop(uid int) error {
	if err := syscall.Setgroups(nil); err != nil {
		return err
	}
	if err := syscall.Setgid(uid); err != nil {
		return err
	}
	return syscall.Setuid(uid)
}
