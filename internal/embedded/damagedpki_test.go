package embedded

import (
	"bytes"
	"crypto/tls"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// A damaged certificate file of the plane is created again if possible. Otherwise the error names the file. An
// authority, the key of the service accounts and the key of the Secrets are never replaced.
func TestDamagedPKI(t *testing.T) {
	l, s, owner := testPKI(t)
	if err := os.MkdirAll(filepath.Join(l.Etcd(), "member"), 0o700); err != nil { // The plane has data.
		t.Fatal(err)
	}
	files, err := filepath.Glob(filepath.Join(l.PKI(), "*", "*"))
	if err != nil {
		t.Fatal(err)
	}
	authorities, err := filepath.Glob(filepath.Join(l.PKI(), "*.*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range append(files, authorities...) {
		good, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for damage, content := range map[string][]byte{"empty": nil, "truncated": good[:len(good)/2], "zeros": make([]byte, len(good))} {
			t.Run(strings.TrimPrefix(path, l.PKI()+"/")+" "+damage, func(t *testing.T) {
				if err := os.WriteFile(path, content, 0o600); err != nil {
					t.Fatal(err)
				}
				checkDamaged(t, path, good, content, ensurePKI(l, s, owner, time.Now()))
				if err := os.WriteFile(path, good, 0o600); err != nil {
					t.Fatal(err)
				}
			})
		}
	}
}

func checkDamaged(t *testing.T, path string, good, damaged []byte, err error) {
	t.Helper()
	now, readErr := os.ReadFile(path)
	if readErr != nil {
		t.Fatal(readErr)
	}
	if err != nil {
		if !strings.Contains(err.Error(), path) {
			t.Errorf("the error does not name the file: %v", err)
		}
		if !bytes.Equal(now, damaged) {
			t.Error("the file was replaced")
		}
		return
	}
	switch filepath.Base(path) {
	case "server.crt", "server.key", "client.crt", "client.key", "etcd-client.crt", "etcd-client.key", "front-proxy-client.crt", "front-proxy-client.key", "tls.crt", "tls.key":
		base := strings.TrimSuffix(strings.TrimSuffix(path, ".crt"), ".key")
		if _, err := tls.LoadX509KeyPair(base+".crt", base+".key"); err != nil {
			t.Errorf("no error, and the file was not repaired: %v", err)
		}
	default:
		if !bytes.Equal(now, good) {
			t.Error("no error, and the file was not repaired")
		}
	}
}
