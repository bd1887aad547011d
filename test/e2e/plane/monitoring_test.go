//go:build e2e && monitoring

package plane

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/yaml"

	"capstan.dev/capstan/internal/testenv/ports"
	"capstan.dev/capstan/test/e2e/harness"
)

// manifest gives the panels about pools an address that is used. It has a CapstanMachine without a Machine, and a CapstanVolume.
const manifest = `apiVersion: infrastructure.capstan.dev/v1beta2
kind: CapstanMachine
metadata: {name: updated, namespace: default}
spec: {}
---
apiVersion: infrastructure.capstan.dev/v1beta2
kind: CapstanVolume
metadata: {name: data, namespace: default}
spec: {id: volume-data, hostName: local, clusterName: one, owner: MachineDeployment/one, volumeName: data, sizeGiB: 1}
---
apiVersion: ipam.capstan.dev/v1beta2
kind: CapstanIPPool
metadata: {name: panels, namespace: default}
spec: {subnets: [{cidr: 198.18.7.0/24, gateway: 198.18.7.1, ranges: [198.18.7.10-198.18.7.20]}]}
---
apiVersion: ipam.capstan.dev/v1beta2
kind: GlobalCapstanIPPool
metadata: {name: panels}
spec: {subnets: [{cidr: 198.18.8.0/24, gateway: 198.18.8.1, ranges: [198.18.8.10-198.18.8.20]}]}
---
apiVersion: ipam.cluster.x-k8s.io/v1beta2
kind: IPAddressClaim
metadata: {name: panels, namespace: default}
spec: {clusterName: one, poolRef: {apiGroup: ipam.capstan.dev, kind: CapstanIPPool, name: panels}}
`

// TestMonitoring: Debian's Prometheus scrapes the manager and the capstand of an embedded plane with a cluster and a pool, and
// kube-state-metrics. Each panel of the dashboards and each metric of objects has data, and the alerts that must not fire are silent.
func TestMonitoring(t *testing.T) {
	i := newInstallation(t)
	i.capstan("up")
	i.capstan("create", "cluster", "one", "--flavor", "machinepool", "--workers", "1")
	dir := t.TempDir()
	i.write(dir, map[string]string{"objects.yaml": manifest})
	i.kubectl("apply", "-f", filepath.Join(dir, "objects.yaml"))
	// No machine of this test is updated in place, so an object without a machine has the status of one that was.
	i.kubectl("patch", "capstanmachine", "updated", "--subresource", "status", "--type", "merge", "-p", `{"status": {"update": {"id": "update-1", "phase": "Succeeded"}}}`)
	i.kubectl("create", "serviceaccount", "prometheus")
	i.kubectl("create", "clusterrolebinding", "prometheus", "--clusterrole", "capstan-infrastructure-metrics-reader", "--serviceaccount", "default:prometheus")
	capstand := i.metricsAddress("capstand", "--metrics-address")
	scrapes := i.scrapesOfCluster(dir, "one") + job("capstand", capstand) + i.scrapesOfObjects(dir)
	token := strings.TrimSpace(i.kubectl("create", "token", "prometheus"))
	address := i.startPrometheus(dir, token, scrapes)
	for _, expr := range slices.Concat(ofCapstand, ofComponents, ofObjects, objectMetrics(t)) {
		i.eventually(expr, func() bool { return len(query(t, address, expr)) > 0 })
	}
	i.needRights(dir)
	i.checkNames("http://"+capstand+"/metrics", "")
	i.checkNames("https://"+i.metricsAddress("manager", "--diagnostics-address")+"/metrics", token)
	for _, panel := range panels(t) {
		i.eventually(panel.title, func() bool { return len(query(t, address, panel.expr)) > 0 })
	}
	if firing := query(t, address, `ALERTS{alertname=~"CapstanManagerDown|CapstanHostNotConnected|CapstanMachineFailed|CapstanMachineRefused|CapstanBootstrap.*|CapstanEtcd.*|CapstanCertificateExpires|CapstanBalancer.*"}`); len(firing) > 0 {
		t.Errorf("alerts of a healthy plane: %s", firing)
	}
}

// ofComponents are metrics of the components of a cluster with one control plane machine and one worker.
var ofComponents = []string{
	`count(count by (instance) (kubelet_running_pods{job="kubelet"})) == 2`,
	`count(count by (instance) (kubeproxy_sync_proxy_rules_duration_seconds_count{job="kube-proxy"})) == 2`,
	`etcd_server_has_leader{job="etcd"} == 1`, `scheduler_pending_pods{job="kube-scheduler"}`,
	`workqueue_adds_total{job="kube-controller-manager"}`, `apiserver_request_total{job="kube-apiserver"}`,
}

const stateMetricsConfig = "../../../config/prometheus/kube-state-metrics.yaml"

// ofObjects are values of metrics of objects.
var ofObjects = []string{
	`capi_capstanhost_status_condition{type="Ready",status="True"} == 1`, `capi_capstanhost_status_condition{type="Ready",status="False"} == 0`,
	`capi_capstanhost_status_capacity{resource="memory"} > 1e8`,
	`capi_capstanippool_status_addresses{name="panels",namespace="default",state="used"} == 1`,
	`capi_globalcapstanippool_status_addresses{name="panels",state="free"} == 11`,
	`capi_capstancontrolplane_status_replicas_ready{cluster_name="one"} == 1`,
	`capi_capstanmachinepool_status_replicas_ready{cluster_name="one"} == 1`,
	`capi_capstanmachine_status_condition{type="Ready",status="True"} * on (namespace, name) group_left (host) capi_capstanmachine_info{host!=""} == 1`,
	`capi_capstanmachine_status_update_phase{name="updated",phase="Succeeded"} == 1`,
}

const (
	controlPlaneRole = "node-role.kubernetes.io/control-plane"
	nodeAddresses    = `jsonpath={.items[*].status.addresses[?(@.type=="InternalIP")].address}`
)

// scrapesOfCluster returns the scrape configurations for a Prometheus in the cluster. The Prometheus of this test runs on the box, so
// it gets the files of a ServiceAccount in dir.
func (i *installation) scrapesOfCluster(dir, cluster string) string {
	i.t.Helper()
	kubeconfig := filepath.Join(dir, "kubeconfig")
	i.write(dir, map[string]string{"kubeconfig": i.capstan("get", "kubeconfig", cluster)})
	kubectl := func(args ...string) string {
		i.t.Helper()
		return strings.TrimSpace(i.kubectl(append([]string{"--kubeconfig", kubeconfig}, args...)...))
	}
	for _, name := range []string{"prometheus", "stranger"} {
		kubectl("create", "serviceaccount", name)
	}
	kubectl("create", "clusterrolebinding", "prometheus-metrics", "--clusterrole", "capstan:metrics-reader", "--serviceaccount", "default:prometheus")
	ca, err := base64.StdEncoding.DecodeString(kubectl("config", "view", "--raw", "-o", "jsonpath={.clusters[0].cluster.certificate-authority-data}"))
	if err != nil {
		i.t.Fatal(err)
	}
	i.write(dir, map[string]string{
		"token": kubectl("create", "token", "prometheus"), "ca.crt": string(ca), "stranger": kubectl("create", "token", "stranger"),
		"server": kubectl("config", "view", "-o", "jsonpath={.clusters[0].cluster.server}"),
		"node":   kubectl("get", "nodes", "-l", controlPlaneRole, "-o", nodeAddresses),
	})
	scrapes, err := os.ReadFile("../../../config/prometheus/workload-cluster.yaml")
	if err != nil {
		i.t.Fatal(err)
	}
	_, jobs, _ := strings.Cut(string(scrapes), "scrape_configs:\n")
	jobs = strings.ReplaceAll(jobs, "kubernetes_sd_configs: [{role: node}]", "static_configs: "+targets(kubectl))
	return strings.ReplaceAll(jobs, "/var/run/secrets/kubernetes.io/serviceaccount", dir)
}

// metricsAddress returns the address at which a component of the plane serves its metrics.
func (i *installation) metricsAddress(component, flag string) string {
	i.t.Helper()
	arguments, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", i.component(component).PID))
	if err != nil {
		i.t.Fatal(err)
	}
	_, address, _ := strings.Cut(string(arguments), flag+"=")
	address, _, _ = strings.Cut(address, "\x00")
	return address
}

// ofCapstand are metrics of the host, of the services of its machines and of its load balancer, of the real capstand.
var ofCapstand = []string{
	`capstand_info{job="capstand"} == 1`, `capstand_machines{job="capstand",state="RUNNING"} == 2`,
	`capstand_service_ready{job="capstand",namespace="default",service="etcd"} == 1`,
	`count(capstand_service_ready{job="capstand",service="kubelet"} == 1) == 2`,
	`capstand_machine_start_seconds_count{job="capstand"} >= 2`, `capstand_disk_bytes{job="capstand",state="free"} > 0`,
	`capstan_balancer_healthy_backends{job="capstand",namespace="default",cluster="one"} == 1`,
	`capstan_machine_pool_machines{job="manager",namespace="default",state="ready"} == 1`,
	`capstan_placement_attempts_total{job="manager",result="Placed"} >= 2`,
}

// scrapesOfObjects starts kube-state-metrics with the configuration and the role of config/prometheus.
func (i *installation) scrapesOfObjects(dir string) string {
	i.t.Helper()
	i.kubectl("apply", "-f", "../../../config/prometheus/kube-state-metrics-role.yaml")
	i.kubectl("create", "serviceaccount", "kube-state-metrics")
	i.kubectl("create", "clusterrolebinding", "kube-state-metrics", "--clusterrole", "capstan-kube-state-metrics", "--serviceaccount", "default:kube-state-metrics")
	config, err := clientcmd.LoadFromFile(filepath.Join(i.root, "admin.kubeconfig"))
	if err != nil {
		i.t.Fatal(err)
	}
	for name := range config.AuthInfos {
		config.AuthInfos[name] = &clientcmdapi.AuthInfo{Token: strings.TrimSpace(i.kubectl("create", "token", "kube-state-metrics"))}
	}
	kubeconfig := filepath.Join(dir, "kube-state-metrics.kubeconfig")
	if err := clientcmd.WriteToFile(*config, kubeconfig); err != nil {
		i.t.Fatal(err)
	}
	args := []string{"--kubeconfig=" + kubeconfig, "--custom-resource-state-only", "--custom-resource-state-config-file=" + stateMetricsConfig}
	address := ports.Address(i.t)
	for option, address := range map[string]string{"": address, "telemetry-": ports.Address(i.t)} {
		host, port, _ := net.SplitHostPort(address)
		args = append(args, "--"+option+"host="+host, "--"+option+"port="+port)
	}
	i.spawn(dir, exec.Command(filepath.Join(i.bin, "tools", "kube-state-metrics"), args...))
	return job("kube-state-metrics", address)
}

// job is a scrape configuration with one target.
func job(name, address string) string {
	return fmt.Sprintf("- {job_name: %s, static_configs: [{targets: [%q]}]}\n", name, address)
}

// objectMetrics returns the names of all metrics of objects.
func objectMetrics(t *testing.T) (names []string) {
	t.Helper()
	var config struct {
		Spec struct {
			Resources []struct {
				MetricNamePrefix string
				Metrics          []struct{ Name string }
			}
		}
	}
	data, err := os.ReadFile(stateMetricsConfig)
	if err == nil {
		err = yaml.Unmarshal(data, &config)
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, resource := range config.Spec.Resources {
		for _, metric := range resource.Metrics {
			names = append(names, resource.MetricNamePrefix+"_"+metric.Name)
		}
	}
	return names
}

// targets returns the kubelets as static targets, with the labels that Prometheus finds at Nodes: Debian's Prometheus has no client
// of Kubernetes.
func targets(kubectl func(args ...string) string) string {
	const present = "__meta_kubernetes_node_labelpresent_node_role_kubernetes_io_control_plane"
	var groups []string
	for selector, labels := range map[string]string{controlPlaneRole: present + `: "true"`, "!" + controlPlaneRole: ""} {
		for _, address := range strings.Fields(kubectl("get", "nodes", "-l", selector, "-o", nodeAddresses)) {
			groups = append(groups, fmt.Sprintf("{targets: [%q], labels: {%s}}", net.JoinHostPort(address, "10250"), labels))
		}
	}
	return "[" + strings.Join(groups, ", ") + "]"
}

func (i *installation) write(dir string, files map[string]string) {
	i.t.Helper()
	for name, content := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			i.t.Fatal(err)
		}
	}
}

// checkNames checks the names, types and texts of Capstan's metrics at an address with promtool. The libraries of others have metrics
// that promtool criticises.
func (i *installation) checkNames(url, token string) {
	i.t.Helper()
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}}
	status, body := i.fetch(client, url, token)
	if status != http.StatusOK || !strings.Contains(body, "\n# HELP capstan") {
		i.t.Fatalf("%s: status %d: %.300s", url, status, body)
	}
	check := exec.Command("promtool", "check", "metrics")
	check.Stdin = strings.NewReader(body)
	out, err := check.CombinedOutput()
	if strings.HasPrefix(string(out), "capstan") || strings.Contains(string(out), "\ncapstan") || err != nil && check.ProcessState.ExitCode() != criticised {
		i.t.Errorf("promtool check metrics %s: %v: %s", url, err, out)
	}
}

// criticised is the exit code of `promtool check metrics` if it can read all metrics and criticises some.
const criticised = 3

// needRights: the node agent refuses clients without a token and without the right. The right also allows the discovery of Nodes.
func (i *installation) needRights(dir string) {
	i.t.Helper()
	read := func(name string) string {
		data, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			i.t.Fatal(err)
		}
		return string(data)
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM([]byte(read("ca.crt")))
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool}}}
	agent, server := "https://"+net.JoinHostPort(read("node"), "10253"), read("server")
	for _, test := range []struct {
		url, token string
		want       int
	}{
		{agent + "/metrics/etcd", "", http.StatusUnauthorized}, {agent + "/metrics/etcd", "nonsense", http.StatusForbidden},
		{agent + "/metrics/etcd", read("stranger"), http.StatusForbidden}, {agent + "/metrics/etcd", read("token"), http.StatusOK},
		{server + nodeList, read("stranger"), http.StatusForbidden}, {server + nodeList, read("token"), http.StatusOK},
		{server + nodeWatch, read("stranger"), http.StatusForbidden}, {server + nodeWatch, read("token"), http.StatusOK},
	} {
		if status, _ := i.fetch(client, test.url, test.token); status != test.want {
			i.t.Errorf("%s with the token %q: status %d, expected %d", test.url, test.token, status, test.want)
		}
	}
	for _, url := range []string{server + nodeList, server + nodeWatch} {
		if _, body := i.fetch(client, url, read("token")); strings.Count(body, read("node")) == 0 {
			i.t.Errorf("%s does not have the Node with the address %s: %.300s", url, read("node"), body)
		}
	}
}

// The requests of the discovery of Nodes: a list and a watch of all.
const (
	nodeList  = "/api/v1/nodes"
	nodeWatch = "/api/v1/nodes?watch=true&timeoutSeconds=1"
)

// fetch returns the status and the body of a request with a bearer token; without one if it is empty.
func (i *installation) fetch(client *http.Client, url, token string) (status int, body string) {
	i.t.Helper()
	request, err := http.NewRequestWithContext(i.t.Context(), http.MethodGet, url, nil)
	if err != nil {
		i.t.Fatal(err)
	}
	if token != "" {
		request.Header.Set("Authorization", "Bearer "+token)
	}
	response, err := client.Do(request)
	if err != nil {
		i.t.Fatal(err)
	}
	defer response.Body.Close()
	data, err := io.ReadAll(response.Body)
	if err != nil {
		i.t.Fatal(err)
	}
	return response.StatusCode, string(data)
}

func (i *installation) eventually(what string, is func() bool) {
	i.t.Helper()
	harness.True(i.t, "data of "+what, 3*time.Minute, is)
}

type panel struct{ title, expr string }

// variables of the dashboards, for the cluster of the test.
var variables = strings.NewReplacer("$namespace", "default", "$cluster", "one")

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
			all = append(all, panel{filepath.Base(file) + ": " + p.Title, variables.Replace(p.Targets[0].Expr)})
		}
	}
	if len(all) < 15 {
		t.Fatalf("found %d panels", len(all))
	}
	return all
}

// startPrometheus starts a Prometheus that scrapes the manager and other jobs every second, and returns its address.
func (i *installation) startPrometheus(dir, token, jobs string) string {
	i.t.Helper()
	metrics := i.metricsAddress("manager", "--diagnostics-address")
	address := ports.Address(i.t)
	rules, err := exec.Command("sed", "-n", `/^spec:$/,$s/^  //p`, "../../../config/prometheus/rules.yaml").Output()
	if err != nil {
		i.t.Fatal(err)
	}
	config := fmt.Sprintf(`global: {scrape_interval: 1s, evaluation_interval: 1s}
rule_files: [rules.yaml]
scrape_configs:
- {job_name: manager, scheme: https, tls_config: {insecure_skip_verify: true}, authorization: {credentials: %q}, static_configs: [{targets: [%q]}]}
%s`, token, metrics, jobs)
	i.write(dir, map[string]string{"prometheus.yml": config, "rules.yaml": string(rules)})
	i.spawn(dir, exec.Command("prometheus", "--config.file="+filepath.Join(dir, "prometheus.yml"), "--storage.tsdb.path="+filepath.Join(dir, "data"), "--web.listen-address="+address))
	i.eventually("up", func() bool {
		for _, value := range query(i.t, address, `up{job="manager"}`) {
			return strings.Contains(string(value), `"1"`)
		}
		return false
	})
	return address
}

// spawn runs a program until the test ends. A failed test prints the end of its log.
func (i *installation) spawn(dir string, cmd *exec.Cmd) {
	i.t.Helper()
	log, err := os.Create(filepath.Join(dir, filepath.Base(cmd.Path)+".log"))
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
			i.t.Logf("%s: %s", cmd.Path, data[max(0, len(data)-4000):])
		}
	})
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
