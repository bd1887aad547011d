// Package floor measures a lower bound for the creation of a cluster: the time in which one etcd and one API server
// start from empty folders, until /readyz answers ok.
package floor

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"
)

// pollInterval is the interval of requests to /readyz. It bounds the error of the measurement.
const pollInterval = 20 * time.Millisecond

// Measure starts etcd and kube-apiserver from the folder assets. It returns the time until the API server is ready. When
// it returns, both processes have ended and their files are removed.
func Measure(ctx context.Context, assets string) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	dir, err := os.MkdirTemp("", "capstan-floor-")
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(dir)
	keyFile := filepath.Join(dir, "sa.key")
	if err := writeKey(keyFile); err != nil {
		return 0, err
	}
	ports, err := freePorts(3)
	if err != nil {
		return 0, err
	}
	client := fmt.Sprintf("http://127.0.0.1:%d", ports[0])
	peer := fmt.Sprintf("http://127.0.0.1:%d", ports[1])

	start := time.Now()
	stopEtcd, err := run(ctx, filepath.Join(assets, "etcd"), dir,
		"--data-dir="+filepath.Join(dir, "etcd"),
		"--listen-client-urls="+client, "--advertise-client-urls="+client,
		"--listen-peer-urls="+peer, "--initial-advertise-peer-urls="+peer,
		"--initial-cluster=default="+peer)
	if err != nil {
		return 0, err
	}
	defer stopEtcd()
	stopAPI, err := run(ctx, filepath.Join(assets, "kube-apiserver"), dir,
		"--etcd-servers="+client, "--cert-dir="+filepath.Join(dir, "certs"),
		"--bind-address=127.0.0.1", fmt.Sprintf("--secure-port=%d", ports[2]),
		"--authorization-mode=Node,RBAC", "--service-cluster-ip-range=10.96.0.0/16",
		"--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-key-file="+keyFile, "--service-account-signing-key-file="+keyFile)
	if err != nil {
		return 0, err
	}
	defer stopAPI()
	if err := waitReady(ctx, fmt.Sprintf("https://127.0.0.1:%d/readyz", ports[2])); err != nil {
		return 0, err
	}
	return time.Since(start), nil
}

// run starts a process in its own process group and returns the function that stops it.
func run(ctx context.Context, path, dir string, args ...string) (func(), error) {
	log, err := os.Create(filepath.Join(dir, filepath.Base(path)+".log"))
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	return func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		_ = log.Close()
	}, nil
}

func waitReady(ctx context.Context, url string) error {
	// The API server has just created its certificate, and the request contains no data.
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}}
	defer client.CloseIdleConnections()
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()
	for {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
		if err != nil {
			return err
		}
		if resp, err := client.Do(req); err == nil {
			_ = resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				return nil
			}
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s did not answer ok: %w", url, ctx.Err())
		case <-tick.C:
		}
	}
}

func writeKey(path string) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return err
	}
	return os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der}), 0o600)
}

// freePorts returns free ports. It holds all of them until it has found the last one, so that they differ.
func freePorts(n int) ([]int, error) {
	ports, held := make([]int, 0, n), make([]net.Listener, 0, n)
	defer func() {
		for _, l := range held {
			_ = l.Close()
		}
	}()
	for range n {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, err
		}
		held = append(held, l)
		ports = append(ports, l.Addr().(*net.TCPAddr).Port)
	}
	return ports, nil
}
