package supervisor

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"time"

	"capstan.dev/capstan/internal/node/process"
)

// Probe defines when a service is ready. Exactly one of URL, TCP, Unix, Exec and File is set.
type Probe struct {
	// URL must answer 200 to a GET; http or https.
	URL string `json:"url,omitempty"`
	// CAFile verifies an https URL.
	CAFile string `json:"caFile,omitempty"`
	// CertFile and KeyFile are the probe's client certificate, if the service requires one.
	CertFile string `json:"certFile,omitempty"`
	KeyFile  string `json:"keyFile,omitempty"`
	// TCP address (host:port) that must accept connections.
	TCP string `json:"tcp,omitempty"`
	// Unix socket that must accept connections.
	Unix string `json:"unix,omitempty"`
	// Exec must end with status 0.
	Exec []string `json:"exec,omitempty"`
	// File must exist.
	File string `json:"file,omitempty"`
	// TimeoutSeconds of one attempt; 2 by default.
	TimeoutSeconds int `json:"timeoutSeconds,omitempty"`
}

func (p *Probe) validate() error {
	set := 0
	for _, is := range []bool{p.URL != "", p.TCP != "", p.Unix != "", len(p.Exec) > 0, p.File != ""} {
		if is {
			set++
		}
	}
	if set != 1 {
		return errors.New("ready: expected exactly one of url, tcp, unix, exec and file")
	}
	return nil
}

func (p *Probe) timeout() time.Duration {
	if p.TimeoutSeconds <= 0 {
		return 2 * time.Second
	}
	return time.Duration(p.TimeoutSeconds) * time.Second
}

// prober repeats a probe over one connection if possible. Attempts are frequent during a start, and a TLS handshake for each
// would slow the service down.
type prober struct {
	*Probe
	starter process.Starter
	client  *http.Client
}

// try probes once.
func (p *prober) try(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, p.timeout())
	defer cancel()
	switch {
	case p.URL != "":
		return p.get(ctx)
	case p.TCP != "":
		return dial(ctx, "tcp", p.TCP)
	case p.Unix != "":
		return dial(ctx, "unix", p.Unix)
	case p.File != "":
		_, err := os.Stat(p.File)
		return err
	}
	return p.run(ctx)
}

func (p *prober) close() {
	if p.client != nil {
		p.client.CloseIdleConnections()
		p.client = nil
	}
}

func dial(ctx context.Context, network, address string) error {
	conn, err := (&net.Dialer{}).DialContext(ctx, network, address)
	if err != nil {
		return err
	}
	return conn.Close()
}

func (p *prober) get(ctx context.Context) error {
	if p.client == nil {
		config, err := p.tlsConfig()
		if err != nil {
			return err
		}
		p.client = &http.Client{Transport: &http.Transport{TLSClientConfig: config}}
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, p.URL, nil)
	if err != nil {
		return err
	}
	resp, err := p.client.Do(req)
	if err != nil {
		// Certificates may have changed.
		p.close()
		return err
	}
	defer resp.Body.Close()
	_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, 1<<16))
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s answers %s", p.URL, resp.Status)
	}
	return nil
}

func (p *Probe) tlsConfig() (*tls.Config, error) {
	config := &tls.Config{MinVersion: tls.VersionTLS12}
	if p.CAFile != "" {
		pem, err := os.ReadFile(p.CAFile)
		if err != nil {
			return nil, err
		}
		config.RootCAs = x509.NewCertPool()
		config.RootCAs.AppendCertsFromPEM(pem)
	}
	if p.CertFile != "" {
		cert, err := tls.LoadX509KeyPair(p.CertFile, p.KeyFile)
		if err != nil {
			return nil, err
		}
		config.Certificates = []tls.Certificate{cert}
	}
	return config, nil
}

func (p *prober) run(ctx context.Context) error {
	cmd := exec.Command(p.Exec[0], p.Exec[1:]...)
	done, err := p.starter.Start(cmd)
	if err != nil {
		return err
	}
	select {
	case exit := <-done:
		return exit.Err()
	case <-ctx.Done():
		_ = kill(cmd.Process.Pid)
		<-done
		return ctx.Err()
	}
}
