//go:build e2e && monitoring

package plane

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// poolManifest gives the panels about pools an address that is used.
const poolManifest = `apiVersion: ipam.capstan.dev/v1beta2
kind: CapstanIPPool
metadata: {name: panels, namespace: default}
spec: {subnets: [{cidr: 198.18.7.0/24, gateway: 198.18.7.1, ranges: [198.18.7.10-198.18.7.20]}]}
---
apiVersion: ipam.cluster.x-k8s.io/v1beta2
kind: IPAddressClaim
metadata: {name: panels, namespace: default}
spec: {clusterName: one, poolRef: {apiGroup: ipam.capstan.dev, kind: CapstanIPPool, name: panels}}
`

// TestMonitoring: Debian's Prometheus scrapes the manager of an embedded plane with a cluster and a pool. Each panel of the
// dashboards has data, and the alerts that must not fire are silent.
func TestMonitoring(t *testing.T) {
	i := newInstallation(t)
	i.capstan("up")
	i.capstan("create", "cluster", "one", "--workers", "1")
	dir := t.TempDir()
	manifest := filepath.Join(dir, "pool.yaml")
	if err := os.WriteFile(manifest, []byte(poolManifest), 0o600); err != nil {
		t.Fatal(err)
	}
	i.kubectl("apply", "-f", manifest)
	i.kubectl("create", "serviceaccount", "prometheus")
	i.kubectl("create", "clusterrolebinding", "prometheus", "--clusterrole", "capstan-infrastructure-metrics-reader", "--serviceaccount", "default:prometheus")
	address := i.startPrometheus(dir, strings.TrimSpace(i.kubectl("create", "token", "prometheus")))
	for _, panel := range panels(t) {
		i.eventually(panel.title, func() bool { return len(query(t, address, panel.expr)) > 0 })
	}
	if firing := query(t, address, `ALERTS{alertname=~"CapstanHostNotConnected|CapstanMachineFailed|CapstanEtcd.*|CapstanCertificateExpires"}`); len(firing) > 0 {
		t.Errorf("alerts of a healthy plane: %s", firing)
	}
}

func (i *installation) eventually(what string, is func() bool) {
	i.t.Helper()
	eventually(i.t, "data of the panel "+what, 3*time.Minute, is)
}

type panel struct{ title, expr string }

// panels returns the queries of all dashboards.
func panels(t *testing.T) (all []panel) {
	t.Helper()
	files, err := filepath.Glob("../../../config/prometheus/dashboards/*.json")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		var dashboard struct {
			Panels []struct {
				Title   string
				Targets []struct{ Expr string }
			}
		}
		data, err := os.ReadFile(file)
		if err == nil {
			err = json.Unmarshal(data, &dashboard)
		}
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range dashboard.Panels {
			all = append(all, panel{filepath.Base(file) + ": " + p.Title, p.Targets[0].Expr})
		}
	}
	if len(all) < 15 {
		t.Fatalf("found %d panels", len(all))
	}
	return all
}

// startPrometheus starts a Prometheus that scrapes the manager every second, and returns its address.
func (i *installation) startPrometheus(dir, token string) string {
	i.t.Helper()
	arguments, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", i.component("manager").PID))
	if err != nil {
		i.t.Fatal(err)
	}
	_, metrics, _ := strings.Cut(string(arguments), "--diagnostics-address=")
	metrics, _, _ = strings.Cut(metrics, "\x00")
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		i.t.Fatal(err)
	}
	address := listener.Addr().String()
	listener.Close()
	rules, err := exec.Command("sed", "-n", `/^spec:$/,$s/^  //p`, "../../../config/prometheus/rules.yaml").Output()
	if err != nil {
		i.t.Fatal(err)
	}
	config := fmt.Sprintf(`{global: {scrape_interval: 1s, evaluation_interval: 1s}, rule_files: [rules.yaml], scrape_configs: [{job_name: manager, scheme: https,
tls_config: {insecure_skip_verify: true}, authorization: {credentials: %q}, static_configs: [{targets: [%q]}]}]}`, token, metrics)
	for name, content := range map[string][]byte{"prometheus.yml": []byte(config), "rules.yaml": rules} {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o600); err != nil {
			i.t.Fatal(err)
		}
	}
	cmd := exec.Command("prometheus", "--config.file="+filepath.Join(dir, "prometheus.yml"), "--storage.tsdb.path="+filepath.Join(dir, "data"), "--web.listen-address="+address)
	log, err := os.Create(filepath.Join(dir, "prometheus.log"))
	if err != nil {
		i.t.Fatal(err)
	}
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		i.t.Fatal(err)
	}
	i.t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		log.Close()
		if i.t.Failed() {
			data, _ := os.ReadFile(log.Name())
			i.t.Logf("Prometheus: %s", data[max(0, len(data)-4000):])
		}
	})
	i.eventually("up", func() bool {
		for _, value := range query(i.t, address, "up") {
			return strings.Contains(string(value), `"1"`)
		}
		return false
	})
	return address
}

// query returns the series of an instant query; none while Prometheus starts.
func query(t *testing.T, address, expr string) []json.RawMessage {
	t.Helper()
	response, err := http.Get("http://" + address + "/api/v1/query?query=" + url.QueryEscape(expr))
	if err != nil {
		return nil
	}
	defer response.Body.Close()
	var answer struct {
		Status, Error string
		Data          struct{ Result []json.RawMessage }
	}
	if err := json.NewDecoder(response.Body).Decode(&answer); err != nil {
		return nil // it starts
	}
	if answer.Status != "success" {
		t.Fatalf("query %s: %s", expr, answer.Error)
	}
	return answer.Data.Result
}
