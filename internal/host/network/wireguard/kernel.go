package wireguard

import (
	"errors"

	"golang.zx2c4.com/wireguard/wgctrl"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"
)

// kernel controls a device of the kernel.
type kernel struct{}

// startKernel gives a new device of the kernel its key.
func (l *Link) startKernel() (control, error) {
	private, err := readKey(l.KeyFile)
	if err != nil {
		return nil, err
	}
	port := Port
	return kernel{}, kernel{}.configure(wgtypes.Config{PrivateKey: &private, ListenPort: &port})
}

func (kernel) device() (d *wgtypes.Device, err error) {
	client, err := wgctrl.New()
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, client.Close()) }()
	return client.Device(Device)
}

func (k kernel) peers() (all []wgtypes.Key, err error) {
	device, err := k.device()
	if err != nil {
		return nil, err
	}
	for i := range device.Peers {
		all = append(all, device.Peers[i].PublicKey)
	}
	return all, nil
}

func (kernel) configure(c wgtypes.Config) (err error) {
	client, err := wgctrl.New()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, client.Close()) }()
	return client.ConfigureDevice(Device, c)
}
