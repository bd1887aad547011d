//go:build e2e

package node

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	"capstan.dev/capstan/internal/bootstrap/render"
	"capstan.dev/capstan/internal/node/initapi"
	"capstan.dev/capstan/internal/node/nodeconfig"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/test/e2e/harness"
)

const (
	registryImage = registryAddress + "/team/pause:v1"
	// preloadedImage is in the configuration of the worker.
	preloadedImage = registryAddress + "/team/preloaded:v1"
	// mirroredImage is an image of a public registry that only the mirror has.
	mirroredImage = "docker.io/team/pause:v1"
	// overriddenImage is an image of a registry whose mirror is a folder of the registry.
	overriddenImage = "hub.outside.test/pause:v1"
	// distrustedImage is an image of a registry for which the machine has another authority.
	distrustedImage = distrustedRegistry + "/team/pause:v1"
	// outsideImage is an image of a registry that only the proxy reaches.
	outsideImage = outsideRegistry + "/team/pause:v1"
)

// specs returns the CapstanConfigs of the machines of TestMachines.
func (o *outside) specs() map[nodeconfig.Role]bootstrapv1.CapstanConfigSpec {
	login, tokenLogin := bootstrapv1.SecretReference{Name: "login"}, bootstrapv1.SecretReference{Name: "token-login"}
	inline := bootstrapv1.Document{Content: string(o.ca)}
	mapped := bootstrapv1.Document{ContentFrom: bootstrapv1.ContentSource{ConfigMap: registryCA}}
	proxy := bootstrapv1.ProxySpec{HTTPS: "http://" + proxyAddress, NoProxy: []string{"unused.outside.test"}}
	worker := bootstrapv1.CapstanConfigSpec{
		Registries: []bootstrapv1.Registry{
			{Host: registryAddress, Credentials: login, CA: inline},
			{Host: "docker.io", Mirrors: []string{"https://" + registryAddress}, CA: mapped}, // The mirror is the registry above.
			{Host: outsideRegistry, Credentials: login, CA: mapped},
			{Host: "hub.outside.test", Mirrors: []string{"https://" + registryAddress + "/v2/team"}, OverridePath: ptr.To(true), Credentials: login, CA: mapped},
			{Host: distrustedRegistry, CA: bootstrapv1.Document{Content: string(o.otherCA)}},
			{Host: tokenRegistryAddress, Credentials: tokenLogin, CA: mapped},
			{Host: openRegistry, Mirrors: []string{"http://" + plainMirror}},
			{Host: "tokens.outside.test", Mirrors: []string{"https://" + tokenRegistryAddress}, CA: mapped},
			{Host: "both.outside.test", Mirrors: []string{"https://" + tokenRegistryAddress}, Credentials: login, CA: mapped},
			{Host: hostileAddress, CA: mapped},
		},
		Images: []string{preloadedImage, tokenPreloadedImage},
		Users: []bootstrapv1.User{{
			Name: "ann", Gecos: "Ann Example", Groups: []string{"adm", "tty"}, HomeDir: "/srv/people/ann", Shell: "/bin/bash", Sudo: "ALL=(ALL) NOPASSWD:ALL",
			PasswdFrom:        bootstrapv1.PasswdSource{Secret: bootstrapv1.SecretKeyReference{Name: "ann", Key: "hash"}},
			SSHAuthorizedKeys: []string{annsKey, `no-pty ` + annsKey + "2"},
		}, {Name: "bob", PrimaryGroup: "staff"}},
		Proxy:     bootstrapv1.ProxySpec{HTTP: "https://" + secureProxyAddress, HTTPS: "https://" + secureProxyAddress, NoProxy: proxy.NoProxy},
		Kubelet:   bootstrapv1.KubeletSpec{Configuration: runtime.RawExtension{Raw: []byte(`{"maxPods":77,"evictionHard":{"memory.available":"64Mi"}}`)}, Env: marked("kubelet")},
		KubeProxy: bootstrapv1.KubeProxySpec{Configuration: runtime.RawExtension{Raw: []byte(`{"metricsBindAddress":"0.0.0.0:10249","nftables":{"syncPeriod":"41s"}}`)}, Env: marked("kube-proxy")},
		Files: []bootstrapv1.File{{Path: "/etc/containerd/conf.d/own.toml", Permissions: "0600", Content: `version = 3
[metrics]
  address = "0.0.0.0:1338"
[plugins."io.containerd.cri.v1.images"]
  max_concurrent_downloads = 7
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.second]
  runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.second.options]
  BinaryName = "/opt/capstan/node/bin/runc"
`}, {Path: "/srv/people/ann/notes", Content: "of ann", Owner: "ann:adm", Permissions: "0640"},
			{Path: "/etc/ssl/certs/added.crt", Content: string(o.addedCA)}},
		PreCommands: []string{"id -u ann"},
	}
	proxy.ControlPlane = ptr.To(true)
	return map[nodeconfig.Role]bootstrapv1.CapstanConfigSpec{
		nodeconfig.RoleWorker: worker,
		nodeconfig.RoleInit: {Proxy: proxy, Cluster: bootstrapv1.ClusterConfiguration{
			LocalVolumes:        bootstrapv1.LocalVolumesDefaultStorageClass,
			EncryptionAlgorithm: "RSA-2048",
			CoreDNS: bootstrapv1.CoreDNSSpec{
				Upstreams:   []string{upstreamAddress},
				StubDomains: []bootstrapv1.StubDomain{{Domain: "corp.test", Servers: []string{stubAddress}}},
			},
			APIServer:         bootstrapv1.APIServerSpec{Env: marked("kube-apiserver")},
			ControllerManager: bootstrapv1.ComponentSpec{Env: marked("kube-controller-manager")},
			Scheduler:         bootstrapv1.ComponentSpec{Env: marked("kube-scheduler")},
			Etcd:              bootstrapv1.EtcdSpec{Env: marked("etcd")},
		}},
	}
}

// marked returns an environment variable that has the name of a component as its value.
func marked(component string) []bootstrapv1.EnvVar {
	return []bootstrapv1.EnvVar{{Name: "MARK", Value: component}}
}

var registryCA = bootstrapv1.ConfigMapKeyReference{Name: "registry", Key: "ca.crt"}

// rendered returns the bootstrap data of a machine with its CapstanConfig.
func (c *cluster) rendered(role nodeconfig.Role, o *outside) []byte {
	c.t.Helper()
	return c.renderedSpec(role, o, o.specs()[role])
}

// renderedSpec returns the bootstrap data of a machine with a CapstanConfig.
func (c *cluster) renderedSpec(role nodeconfig.Role, o *outside, spec bootstrapv1.CapstanConfigSpec) []byte {
	c.t.Helper()
	in := render.Input{
		ClusterName: "e2e", KubernetesVersion: version, Role: role, Endpoint: c.endpoint, APIServerPort: 6443,
		Network: nodeconfig.Network{
			PodCIDRs: []string{"10.244.0.0/16"}, ServiceCIDRs: []string{"10.96.0.0/16"}, ServiceDomain: "cluster.local", DNSServiceIP: "10.96.0.10",
		},
		Spec:          spec,
		EncryptionKey: make([]byte, render.EncryptionKeySize),
		Secrets: map[bootstrapv1.SecretKeyReference][]byte{
			{Name: "login", Key: "username"}: []byte(registryUser), {Name: "login", Key: "password"}: []byte(registryPassword),
			{Name: "token-login", Key: "username"}: []byte(tokenUser), {Name: "token-login", Key: "password"}: []byte(tokenPassword),
			{Name: "ann", Key: "hash"}: []byte(annsHash),
		},
		ConfigMaps: map[bootstrapv1.ConfigMapKeyReference][]byte{registryCA: o.ca},
	}
	for path, content := range c.files {
		ca := path == nodeconfig.PKIDir+"/ca.crt"
		if path != nodeconfig.EncryptionConfigPath && (ca || role != nodeconfig.RoleWorker) {
			in.Certificates = append(in.Certificates, render.File{Path: path, Permissions: "0600", Content: content})
		}
	}
	if role == nodeconfig.RoleWorker {
		in.Token = tokenID + "." + tokenSecret
	}
	data, err := render.CloudConfig(in)
	expect.NoError(c.t, err)
	return data
}

// testConfiguration observes the effect of each setting of the machines' CapstanConfigs.
func testConfiguration(t *testing.T, o *outside, cp, worker *host) {
	testPreloaded(cp)
	push(t, worker, worker.root+"/etc/capstan/registries/10.77.0.1_5000/ca.crt", registryImage)
	testPulls(t, o, cp)
	testTokens(t, o, cp)
	testProxyUse(t, o, cp, worker)
	testComponentSettings(t, cp, worker)
	testEnvironment(t, cp, worker)
	testRuntimeHandler(t, cp)
	testDNSOptions(t, cp)
	testImports(t, worker)
	testRegistrySecrets(t, cp, worker)
	testChangedConfiguration(t, cp, worker)
	cp.mustKubectl("delete", "pod", "--wait", "--grace-period=1", "preloaded", "preloaded-tokens", "registry", "mirrored", "overridden", "outside", "stranger", "distrusted", "second")
}

// push copies an image into the registry that no pod of other tests has: the kubelet allows no pod to use an image without a pull
// that it has itself pulled by another name.
func push(t *testing.T, h *host, ca, image string) {
	t.Helper()
	ctr := []string{"/opt/capstan/node/bin/ctr", "-n", "k8s.io", "images"}
	_, err := os.Stat(ca)
	expect.NoError(t, err)
	for _, args := range [][]string{
		{"tag", "registry.capstan.dev/pause:v1", image},
		{"push", "--local", "--tlscacert", strings.TrimPrefix(ca, h.root), "--user", registryUser + ":" + registryPassword, image},
		{"rm", image},
	} {
		_, err := h.exec(append(ctr, args...)...)
		expect.NoError(t, err)
	}
}

// pushPreloaded pushes the image for which the kubelet of the worker waits, from the control plane machine.
func pushPreloaded(t *testing.T, o *outside, cp *host) {
	t.Helper()
	harness.Wait(t, "the pause image is imported", time.Minute, func() error {
		out, err := cp.exec("/opt/capstan/node/bin/ctr", "-n", "k8s.io", "images", "list", "-q")
		if err == nil && !strings.Contains(out, "registry.capstan.dev/pause:v1") {
			err = fmt.Errorf("no pause image in %s", out)
		}
		return err
	})
	ca := cp.root + "/etc/registry.crt"
	expect.NoError(t, os.WriteFile(ca, o.ca, 0o600))
	push(t, cp, ca, preloadedImage)
	o.publishTokenImages(t)
	expect.NoError(t, os.Remove(ca))
}

// testForeignAuthority: a machine has another authority for the registry of its images. It reports the answer of the first pull, tries
// on, and becomes a Node when it has the right authority. Row IM-08.
func testForeignAuthority(t *testing.T, c *cluster, o *outside, cp, foreign *host) {
	start := time.Now()
	foreign.start(c.renderedSpec(nodeconfig.RoleWorker, o, bootstrapv1.CapstanConfigSpec{
		Registries: []bootstrapv1.Registry{{Host: registryAddress, Credentials: bootstrapv1.SecretReference{Name: "login"}, CA: bootstrapv1.Document{Content: string(o.otherCA)}}},
		Images:     []string{preloadedImage},
	}))
	defer foreign.kill()
	status := foreign.until("a refused pull", time.Minute, func(s initapi.Status) bool { return s.BootstrapMessage != "" })
	t.Logf("reported after %s: %s", time.Since(start).Round(time.Millisecond), status.BootstrapMessage)
	for _, want := range []string{"spec.images", preloadedImage, "x509: certificate signed by unknown authority"} {
		if !strings.Contains(status.BootstrapMessage, want) {
			t.Errorf("want %q in the report %q", want, status.BootstrapMessage)
		}
	}
	if status.Bootstrap != initapi.Started || strings.Contains(status.BootstrapMessage, registryPassword) {
		t.Errorf("bootstrap %s: %s", status.Bootstrap, status.BootstrapMessage)
	}
	ca := filepath.Join(foreign.root, "etc/capstan/registries/10.77.0.1_5000/ca.crt")
	_, err := os.Stat(ca)
	expect.NoError(t, err)
	expect.NoError(t, os.WriteFile(ca, o.ca, 0o644))
	foreign.until("no report", time.Minute, func(s initapi.Status) bool { return s.BootstrapMessage == "" || s.Bootstrap == initapi.Failed })
	foreign.untilBootstrapped()
	cp.mustKubectl("delete", "node", "foreign")
}

// testPreloaded: pods that pull no image run, because the worker has pulled them before its kubelet started.
func testPreloaded(cp *host) {
	cp.apply(strings.ReplaceAll(pullPod("preloaded", "worker", preloadedImage)+pullPod("preloaded-tokens", "worker", tokenPreloadedImage), "Always", "Never"))
	cp.mustKubectl("wait", "--for=condition=Ready", "pod/preloaded", "pod/preloaded-tokens", "--timeout=1m")
}

func pullPod(name, node, image string) string {
	return fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata: {name: %s, labels: {app: pulled}}
spec:
  nodeName: %s
  tolerations: [{operator: Exists}]
  containers: [{name: pause, image: %q, imagePullPolicy: Always}]
---`, name, node, image)
}

// testPulls: the worker pulls from the registry, its mirrors and the registry behind the proxy. A machine refuses the registry
// without its authority, and with the authority of another one.
func testPulls(t *testing.T, o *outside, cp *host) {
	cp.apply(pullPod("registry", "worker", registryImage) + pullPod("mirrored", "worker", mirroredImage) +
		pullPod("overridden", "worker", overriddenImage) + pullPod("outside", "worker", outsideImage) +
		pullPod("stranger", "cp", registryImage) + pullPod("distrusted", "worker", distrustedImage))
	cp.mustKubectl("wait", "--for=condition=Ready", "pod/registry", "pod/mirrored", "pod/overridden", "pod/outside", "--timeout=3m")
	for _, pod := range []string{"stranger", "distrusted"} {
		untilPullFails(t, cp, pod, "x509: certificate signed by unknown authority")
	}
	if targets := o.proxy.targets.sorted(); !slices.Contains(targets, outsideRegistry+":443") {
		t.Errorf("the proxy has seen %v, and not %s", targets, outsideRegistry)
	}
}

// untilPullFails waits until an event has the cause of a failed pull.
func untilPullFails(t *testing.T, cp *host, pod, cause string) {
	t.Helper()
	harness.Wait(t, "the event of the refused pull", 3*time.Minute, func() error {
		out, err := cp.kubectl("get", "events", "--field-selector=involvedObject.name="+pod+",reason=Failed", "-o", "jsonpath={.items[*].message}")
		if err == nil && !strings.Contains(out, cause) {
			err = fmt.Errorf("the pull of %s says %q", pod, out)
		}
		return err
	})
}

const webhook = `apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingWebhookConfiguration
metadata: {name: outside}
webhooks:
- name: webhook.outside.test
  admissionReviewVersions: [v1]
  sideEffects: None
  failurePolicy: Fail
  clientConfig: {url: "https://webhook.outside.test/validate"}
  objectSelector: {matchLabels: {checked: outside}}
  rules: [{apiGroups: [""], apiVersions: [v1], operations: [CREATE], resources: [configmaps]}]
`

// testProxyUse: the API server uses the proxy too. Nothing in the networks of the cluster was reached through it.
func testProxyUse(t *testing.T, o *outside, cp, worker *host) {
	cp.apply(webhook)
	harness.Wait(t, "the webhook outside is called through the proxy", time.Minute, func() error {
		_, err := cp.execInput("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: checked, labels: {checked: outside}}\n",
			kubectl, "--kubeconfig=/etc/kubernetes/admin.conf", "create", "--dry-run=server", "-f", "-")
		if err == nil || !slices.Contains(o.proxy.targets.sorted(), outsideWebhook+":443") {
			return fmt.Errorf("the API server did not call the webhook through the proxy: %w; the proxy has seen %v", err, o.proxy.targets.sorted())
		}
		return nil
	})
	cp.mustKubectl("delete", "validatingwebhookconfiguration", "outside")
	for _, target := range o.proxy.targets.sorted() {
		if !strings.HasSuffix(target, ".outside.test:443") && target != plainMirror {
			t.Errorf("the proxy was used for %s", target)
		}
	}
	for name, uses := range map[string]bool{"containerd": true, "kubelet": true, "kube-proxy": false, "node-agent": false} {
		if got := strings.Contains(environment(t, worker, name), "HTTPS_PROXY=https://"+secureProxyAddress+"\n"); got != uses {
			t.Errorf("%s has the proxy in its environment: %v, want %v", name, got, uses)
		}
	}
	if env := environment(t, worker, "containerd"); !strings.Contains(env, "10.77.0.0/24,10.244.0.0/16,10.96.0.0/16,.svc,.cluster.local") ||
		!strings.Contains(env, ",unused.outside.test\n") {
		t.Errorf("the environment of containerd:\n%s", env)
	}
}

// environment returns the environment of a service, one variable a line.
func environment(t *testing.T, h *host, service string) string {
	t.Helper()
	pid := find(h.until("ready", time.Minute, allReady), service).PID
	out, err := h.exec("/bin/sh", "-c", fmt.Sprintf(`tr '\0' '\n' < /proc/%d/environ`, pid))
	expect.NoError(t, err)
	return out
}

// testComponentSettings: the kubelet and kube-proxy run with the patched fields and keep the others. The kubelet limits all pods together.
func testComponentSettings(t *testing.T, cp, worker *host) {
	if got := cp.mustKubectl("get", "node", "worker", "-o", "jsonpath={.status.capacity.pods}"); got != "77" {
		t.Errorf("the worker takes %s pods, want 77", got)
	}
	var kubelet struct {
		KubeletConfig struct {
			EvictionHard  map[string]string
			Authorization struct{ Mode string }
		}
	}
	out := cp.mustKubectl("get", "--raw", "/api/v1/nodes/worker/proxy/configz")
	expect.NoError(t, json.Unmarshal([]byte(out), &kubelet))
	if c := kubelet.KubeletConfig; c.EvictionHard["memory.available"] != "64Mi" || c.EvictionHard["nodefs.available"] != "1Gi" || c.Authorization.Mode != "Webhook" {
		t.Errorf("the kubelet runs with %s", out)
	}
	pods, err := os.ReadFile(filepath.Join(filepath.Dir(worker.limitOfProcesses(t)), "kubepods/pids.max"))
	if err != nil || strings.TrimSpace(string(pods)) != "12288" {
		t.Errorf("all pods together can have %q processes, %v; want three quarters of 16384", pods, err)
	}
	config, err := worker.get(t, "http://"+worker.ip+":10249/configz")
	expect.NoError(t, err)
	if !strings.Contains(config, `"syncPeriod":"41s"`) || !strings.Contains(config, `"mode":"nftables"`) {
		t.Errorf("kube-proxy runs with %s", config)
	}
}

// testEnvironment: each component has its own variable, and keys have the chosen algorithm.
func testEnvironment(t *testing.T, cp, worker *host) {
	for component, h := range map[string]*host{"kubelet": worker, "kube-proxy": worker, "kube-apiserver": cp, "kube-controller-manager": cp, "kube-scheduler": cp, "etcd": cp} {
		if env := environment(t, h, component); !strings.Contains("\n"+env, "\nMARK="+component+"\n") {
			t.Errorf("the environment of %s:\n%s", component, env)
		}
	}
	out, err := cp.exec("openssl", "x509", "-in", nodeconfig.PKIDir+"/apiserver.crt", "-noout", "-text")
	if err != nil || !strings.Contains(out, "Public-Key: (2048 bit)") || !strings.Contains(out, "rsaEncryption") {
		t.Errorf("the certificate of the API server: %s, %v", out, err)
	}
}

const runtimeClass = `apiVersion: node.k8s.io/v1
kind: RuntimeClass
metadata: {name: second}
handler: second
---
`

// testRuntimeHandler: a pod runs with a runtime of the user's file.
func testRuntimeHandler(t *testing.T, cp *host) {
	pod := strings.Replace(pullPod("second", "worker", "registry.capstan.dev/echo:v1"), "spec:", "spec:\n  runtimeClassName: second", 1)
	cp.apply(runtimeClass + strings.Replace(pod, "Always", "Never", 1))
	cp.mustKubectl("wait", "--for=condition=Ready", "pod/second", "--timeout=1m")
	if got := cp.mustKubectl("get", "node", "worker", "-o", "jsonpath={.status.runtimeHandlers[*].name}"); !slices.Contains(strings.Fields(got), "second") {
		t.Errorf("the worker has the runtimes %s", got)
	}
}

// testDNSOptions: a stub domain has its own servers, and other names go to the upstream.
func testDNSOptions(t *testing.T, cp *host) {
	for name, want := range map[string]string{
		"a.corp.test": "192.0.2.2", "corp.test": "192.0.2.2", "www.example.com": "192.0.2.1", "kubernetes.default.svc.cluster.local": "10.96.0.1",
	} {
		out, err := cp.kubectl("exec", "other", "--", "/echo", "lookup", "-for", "60s", name+".")
		if err != nil || strings.TrimSpace(out) != want {
			t.Errorf("%s is %q, %v; want %s", name, out, err, want)
		}
	}
}

// testImports: containerd reads the user's file in addition to Capstan's, whose registries work (testPulls).
func testImports(t *testing.T, worker *host) {
	metrics, err := worker.get(t, "http://"+worker.ip+":1338/v1/metrics")
	if err != nil || !strings.Contains(metrics, "containerd_build_info") {
		t.Errorf("containerd's metrics: %v, %.200s", err, metrics)
	}
	out, err := worker.exec("/opt/capstan/node/bin/containerd", "--config", "/etc/containerd/config.toml", "config", "dump")
	expect.NoError(t, err)
	for _, want := range []string{"max_concurrent_downloads = 7", `config_path = '/etc/containerd/certs.d'`, `runtimes.runc.options]`} {
		if !strings.Contains(out, want) {
			t.Errorf("want %s in containerd's configuration:\n%s", want, out)
		}
	}
}

// secretsOfRegistries are the passwords in all forms in which files have them.
func secretsOfRegistries() [][]byte {
	var out [][]byte
	for user, password := range map[string]string{registryUser: registryPassword, tokenUser: tokenPassword, tenant: tenantPassword} {
		quoted, _ := json.Marshal(password)
		login := base64.StdEncoding.EncodeToString([]byte(user + ":" + password))
		out = append(out, []byte(password), bytes.Trim(quoted, `"`), []byte(login))
	}
	return out
}

// testRegistrySecrets: the passwords are only in files of root, and in no log, no event and no argument of a process.
func testRegistrySecrets(t *testing.T, cp, worker *host) {
	secrets := secretsOfRegistries()
	has := func(data []byte) bool {
		return slices.ContainsFunc(secrets, func(secret []byte) bool { return bytes.Contains(data, secret) })
	}
	var found []string
	expect.NoError(t, filepath.WalkDir(worker.root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.Type().IsRegular() {
			return nil // Files are created and removed meanwhile.
		}
		if data, _ := os.ReadFile(path); !has(data) {
			return nil
		}
		found = append(found, strings.TrimPrefix(path, worker.root))
		if info, err := entry.Info(); err == nil && info.Mode().Perm()&0o077 != 0 {
			t.Errorf("others can read %s, which has a password", path)
		}
		return nil
	}))
	const hosts = "/etc/containerd/certs.d/%s/hosts.toml"
	if want := []string{
		"/etc/capstan/node.yaml", fmt.Sprintf(hosts, "both.outside.test"), fmt.Sprintf(hosts, "docker.io"), fmt.Sprintf(hosts, "tokens.outside.test"),
	}; !slices.Equal(found, want) {
		t.Errorf("the passwords are in %v, want %v", found, want)
	}
	log, err := os.ReadFile(filepath.Join(worker.dir, worker.name+".log"))
	expect.NoError(t, err)
	if has(log) {
		t.Error("the log of the machine has a password")
	}
	if arguments, err := worker.exec("/bin/sh", "-c", "cat /proc/[0-9]*/cmdline"); !strings.Contains(arguments, "containerd") || has([]byte(arguments)) {
		t.Errorf("the arguments of processes: %v, %q", err, arguments)
	}
	if warnings, err := worker.exec("/opt/capstan/node/bin/ctr", "deprecations", "list"); err != nil || strings.Contains(warnings, "registry") {
		t.Errorf("containerd has deprecated settings of registries: %s, %v", warnings, err)
	}
	if out := cp.mustKubectl("get", "events,pods,nodes", "-A", "-o", "yaml"); has([]byte(out)) {
		t.Error("an object of the cluster has a password")
	}
}

// testChangedConfiguration: another configuration replaces the former one completely, and keeps files of users.
func testChangedConfiguration(t *testing.T, cp, worker *host) {
	own := filepath.Join(worker.root, "etc/containerd/certs.d/own.test/hosts.toml")
	expect.NoError(t, os.MkdirAll(filepath.Dir(own), 0o755))
	expect.NoError(t, os.WriteFile(own, []byte("server = \"https://own.test\"\n"), 0o600))
	path := filepath.Join(worker.root, nodeconfig.Path)
	data, err := os.ReadFile(path)
	expect.NoError(t, err)
	var config nodeconfig.NodeConfiguration
	expect.NoError(t, yaml.UnmarshalStrict(data, &config))
	config.Registries, config.Proxy, config.KubeProxy, config.Kubelet.Configuration["maxPods"] = config.Registries[:1], nil, nil, 78
	data, err = yaml.Marshal(config)
	expect.NoError(t, err)
	expect.NoError(t, os.WriteFile(path, data, 0o600))
	before := worker.until("ready", time.Minute, allReady)
	_, err = worker.exec("/opt/capstan/capstan-init", "node", "up")
	expect.NoError(t, err)
	after := worker.until("ready", time.Minute, allReady)
	for name, restarts := range map[string]bool{"containerd": true, "kubelet": true, "kube-proxy": true, "node-agent": false} {
		if restarted := find(before, name).PID != find(after, name).PID; restarted != restarts {
			t.Errorf("%s was restarted: %v, want %v", name, restarted, restarts)
		}
	}
	if env := environment(t, worker, "containerd"); strings.Contains(env, "PROXY") {
		t.Errorf("containerd still has the proxy:\n%s", env)
	}
	entries, err := os.ReadDir(filepath.Join(worker.root, "etc/containerd/certs.d"))
	expect.NoError(t, err)
	var names []string
	for _, entry := range entries {
		names = append(names, entry.Name())
	}
	if want := []string{registryAddress, "own.test"}; !slices.Equal(names, want) {
		t.Errorf("containerd has configurations for %v, want %v", names, want)
	}
	harness.Wait(t, "the worker takes 78 pods", time.Minute, func() error {
		if got, err := cp.kubectl("get", "node", "worker", "-o", "jsonpath={.status.capacity.pods}"); err != nil || got != "78" {
			return errors.Join(err, fmt.Errorf("the worker takes %s pods, want 78", got))
		}
		return nil
	})
	harness.Wait(t, "the worker and its pods are ready", time.Minute, func() error {
		_, err := cp.kubectl("wait", "--for=condition=Ready", "node/worker", "pod/registry", "pod/server", "--timeout=10s")
		return err
	})
}

const (
	annsKey  = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIKfQv5o9bQ0v5m6n3b9m1nJrZb0Qn7o2xO5m1l8q0w5T"
	annsHash = "$6$saltsalt$notAHashOfAnyPassword"
)

// testAccounts: the users of the CapstanConfig can own files and processes, and their keys are where an SSH server expects them.
func testAccounts(t *testing.T, _, worker *host) {
	t.Helper()
	for command, want := range map[string]string{
		"id ann":            "uid=1000(ann) gid=1001(ann) groups=1001(ann),5(tty),1000(adm)\n",
		"id bob":            "uid=1001(bob) gid=1002(staff) groups=1002(staff)\n",
		"getent passwd ann": "ann:x:1000:1001:Ann Example:/srv/people/ann:/bin/bash\n",
		"cut -d: -f1,2 /etc/shadow | grep -E 'ann|bob'":                                             "ann:!" + annsHash + "\nbob:!\n",
		"stat -c '%a %U:%G %n' /srv/people/ann/.ssh /srv/people/ann/.ssh/* /srv/people/ann/notes":   "700 ann:ann /srv/people/ann/.ssh\n600 ann:ann /srv/people/ann/.ssh/authorized_keys\n640 ann:adm /srv/people/ann/notes\n",
		"stat -c '%a %U:%G' /etc/sudoers.d/90-capstan-ann; cat /etc/sudoers.d/90-capstan-ann":       "440 root:root\nann ALL=(ALL) NOPASSWD:ALL\n",
		"setpriv --reuid ann --regid ann --init-groups cat /srv/people/ann/.ssh/authorized_keys":    annsKey + "\nno-pty " + annsKey + "2\n",
		"setpriv --reuid bob --regid staff --init-groups cat /srv/people/ann/notes 2>&1 || echo no": "cat: /srv/people/ann/notes: Permission denied\nno\n",
	} {
		if out, err := worker.exec("/bin/sh", "-c", command); err != nil || out != want {
			t.Errorf("%s: %q, %v, want %q", command, out, err, want)
		}
	}
}
