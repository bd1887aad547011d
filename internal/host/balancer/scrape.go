package balancer

import (
	"context"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"k8s.io/utils/ptr"

	"capstan.dev/capstan/internal/host/unixsocket"
)

// maxScrape bounds the metrics of one balancer, in bytes: its process is less privileged than its reader.
const maxScrape = 64 << 10

// Scrape reads the metrics of the balancer with the folder dir, and adds labels to them. It accepts the balancer's own metrics
// only.
func Scrape(ctx context.Context, dir string, labels map[string]string) ([]*dto.MetricFamily, error) {
	folder, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	defer func() { _ = folder.Close() }()
	transport := &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return unixsocket.Dial(ctx, folder, MetricsSocket)
		},
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://balancer/metrics", nil)
	if err != nil {
		return nil, err
	}
	res, err := transport.RoundTrip(req)
	if err != nil {
		return nil, err
	}
	defer func() { _ = res.Body.Close() }()
	if res.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("expected the status 200, found %s", res.Status)
	}
	parser := expfmt.NewTextParser(model.LegacyValidation)
	families, err := parser.TextToMetricFamilies(io.LimitReader(res.Body, maxScrape))
	if err != nil {
		return nil, fmt.Errorf("reading the metrics: %w", err)
	}
	maps.DeleteFunc(families, func(name string, _ *dto.MetricFamily) bool { return !strings.HasPrefix(name, "capstan_balancer_") })
	out := slices.Collect(maps.Values(families))
	for _, family := range out {
		for _, m := range family.Metric {
			for _, name := range slices.Sorted(maps.Keys(labels)) {
				m.Label = append(m.Label, &dto.LabelPair{Name: ptr.To(name), Value: ptr.To(labels[name])})
			}
		}
	}
	return out, nil
}
