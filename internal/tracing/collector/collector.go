// Package collector contains the flags that name the collector of spans. It does not import OpenTelemetry, so that programs that
// only pass the flags on stay small.
//
// Layer: library. Allowed imports: api.
package collector

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"

	"github.com/spf13/pflag"
)

// PerMillion is the sampling rate of all traces.
const PerMillion = 1_000_000

// Flags describe the collector.
type Flags struct {
	// Endpoint is host:port; empty for no traces.
	Endpoint     string `json:"endpoint"`
	SamplingRate int32  `json:"samplingRatePerMillion"`
	CAFile       string `json:"caFile,omitempty"`
	CertFile     string `json:"certFile,omitempty"`
	KeyFile      string `json:"keyFile,omitempty"`
	Insecure     bool   `json:"insecure,omitempty"`
}

// Add adds the flags of a process.
func (f *Flags) Add(fs *pflag.FlagSet) {
	fs.StringVar(&f.Endpoint, "tracing-endpoint", "", "host:port of a collector that receives spans (OTLP over gRPC, with TLS); no traces when empty")
	fs.Int32Var(&f.SamplingRate, "tracing-sampling-rate-per-million", PerMillion, "number of traces per million that are recorded; a process records a trace of another process if that one does")
	fs.StringVar(&f.CAFile, "tracing-ca-file", "", "certificate authority of the collector; the authorities of the system when empty")
	fs.StringVar(&f.CertFile, "tracing-cert-file", "", "client certificate for the collector; none when empty")
	fs.StringVar(&f.KeyFile, "tracing-key-file", "", "private key of --tracing-cert-file")
	fs.BoolVar(&f.Insecure, "tracing-insecure", false, "connect to the collector without TLS: anyone on the path can read and change the spans")
}

// Args returns the flags of a process that sends spans to the same collector.
func (f *Flags) Args() []string {
	if f == nil || f.Endpoint == "" {
		return nil
	}
	args := []string{"--tracing-endpoint=" + f.Endpoint, "--tracing-sampling-rate-per-million=" + strconv.Itoa(int(f.SamplingRate))}
	for _, file := range [][2]string{{"ca", f.CAFile}, {"cert", f.CertFile}, {"key", f.KeyFile}} {
		if file[1] != "" {
			args = append(args, "--tracing-"+file[0]+"-file="+file[1])
		}
	}
	if f.Insecure {
		args = append(args, "--tracing-insecure")
	}
	return args
}

// Check returns an error if a flag has an invalid value.
func (f *Flags) Check() error {
	if f == nil || f.Endpoint == "" {
		return nil
	}
	if _, _, err := net.SplitHostPort(f.Endpoint); err != nil {
		return fmt.Errorf("--tracing-endpoint: expected host:port, found %q", f.Endpoint)
	}
	if f.SamplingRate < 0 || f.SamplingRate > PerMillion {
		return fmt.Errorf("--tracing-sampling-rate-per-million: expected a number from 0 to %d, found %d", PerMillion, f.SamplingRate)
	}
	if f.Insecure && f.CAFile+f.CertFile+f.KeyFile != "" {
		return errors.New("--tracing-insecure: expected no --tracing-ca-file, --tracing-cert-file and --tracing-key-file: a connection without TLS uses no certificates")
	}
	return nil
}

// TLS reads the files of the flags and returns the settings of a connection; nil for a connection without TLS.
func (f *Flags) TLS() (*tls.Config, error) {
	if f.Insecure {
		return nil, nil
	}
	config := &tls.Config{MinVersion: tls.VersionTLS12}
	if f.CAFile != "" {
		ca, err := os.ReadFile(f.CAFile)
		if err != nil {
			return nil, fmt.Errorf("--tracing-ca-file: %w", err)
		}
		if config.RootCAs = x509.NewCertPool(); !config.RootCAs.AppendCertsFromPEM(ca) {
			return nil, fmt.Errorf("--tracing-ca-file: expected a certificate in %s, found none", f.CAFile)
		}
	}
	if f.CertFile != "" || f.KeyFile != "" {
		if _, err := tls.LoadX509KeyPair(f.CertFile, f.KeyFile); err != nil {
			return nil, fmt.Errorf("--tracing-cert-file and --tracing-key-file: %w", err)
		}
		config.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { // follows a renewal
			pair, err := tls.LoadX509KeyPair(f.CertFile, f.KeyFile)
			return &pair, err
		}
	}
	return config, nil
}
