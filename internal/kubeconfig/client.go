package kubeconfig

import (
	"errors"
	"io"
	"net/http"
	"time"

	"k8s.io/client-go/rest"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// maxResponse is the maximum size of a response in bytes. Managers read single small objects with this client.
const maxResponse = 8 << 20

// NewClient returns a client of the cluster of a kubeconfig that Load accepts. Its requests are those of HTTPClient. Without a mapper in
// opts, the client asks the API server for its kinds before its first request.
func NewClient(data []byte, endpoint clusterv1.APIEndpoint, timeout time.Duration, opts client.Options) (client.Client, error) {
	config, err := Load(data, endpoint)
	if err != nil {
		return nil, err
	}
	if opts.HTTPClient, err = HTTPClient(config, timeout); err != nil {
		return nil, err
	}
	return client.New(config, opts)
}

// HTTPClient returns a client for a connection that Load has accepted. Each request has its own connection, so that a
// hanging one does not affect the next. Redirects are not followed, because a tenant controls the API server of the
// cluster and could redirect the manager to any server. timeout limits a request including its response.
func HTTPClient(config *rest.Config, timeout time.Duration) (*http.Client, error) {
	tls, err := rest.TLSConfigFor(config)
	if err != nil {
		return nil, err
	}
	transport, err := rest.HTTPWrappersForConfig(config, &http.Transport{
		TLSClientConfig: tls, DisableKeepAlives: true, DisableCompression: true, MaxResponseHeaderBytes: 64 << 10,
	})
	if err != nil {
		return nil, err
	}
	return &http.Client{
		Timeout: timeout, Transport: bounded{transport},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}, nil
}

// bounded limits the bodies of responses.
type bounded struct{ http.RoundTripper }

func (b bounded) RoundTrip(req *http.Request) (*http.Response, error) {
	resp, err := b.RoundTripper.RoundTrip(req)
	if err == nil {
		resp.Body = &boundedBody{ReadCloser: resp.Body, left: maxResponse}
	}
	return resp, err
}

type boundedBody struct {
	io.ReadCloser
	left int
}

var errTooLong = errors.New("the answer of the API server is too long")

func (b *boundedBody) Read(p []byte) (int, error) {
	if b.left == 0 {
		return 0, errTooLong
	}
	n, err := b.ReadCloser.Read(p[:min(len(p), b.left)])
	b.left -= n
	return n, err
}
