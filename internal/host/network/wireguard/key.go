package wireguard

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"capstan.dev/capstan/internal/atomicfile"
)

// readKey reads a private key. If the file does not exist, the error is fs.ErrNotExist.
func readKey(path string) (wgtypes.Key, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return wgtypes.Key{}, err
	}
	key, err := wgtypes.ParseKey(strings.TrimSpace(string(data)))
	if err != nil { // The error of ParseKey could show a part of the key.
		return key, fmt.Errorf("%s: expected a WireGuard key in base64, found %d other bytes: restore the file, or write another key with `head -c32 /dev/urandom | base64` and reboot the host", path, len(data))
	}
	return key, nil
}

// EnsureKey reads a private key, or creates it.
func EnsureKey(path string) (wgtypes.Key, error) {
	key, err := readKey(path)
	if !errors.Is(err, fs.ErrNotExist) {
		return key, err
	}
	if key, err = wgtypes.GeneratePrivateKey(); err != nil {
		return key, err
	}
	return key, atomicfile.WriteFile(path, []byte(key.String()+"\n"), 0o600)
}

// ParsePublic parses a public key in base64.
func ParsePublic(text string) (wgtypes.Key, error) {
	key, err := wgtypes.ParseKey(text)
	if err != nil || key == (wgtypes.Key{}) || key.String() != text {
		return key, fmt.Errorf("%q is not a public key of WireGuard: expected 32 bytes in base64", text)
	}
	return key, nil
}
