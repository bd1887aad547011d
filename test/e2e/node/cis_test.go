//go:build e2e

package node

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"capstan.dev/capstan/internal/node/accounts"
	"capstan.dev/capstan/internal/node/initapi"
	"capstan.dev/capstan/internal/node/nodeconfig"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/test/e2e/harness"
)

// cis contains the state of a cluster that the items of the CIS Kubernetes Benchmark are about: processes, files and
// kubelets.
type cis struct {
	cp, worker *host
	services   initapi.Status
	// kubelet is the configuration that the worker's kubelet reports.
	kubelet map[string]any
}

// errNotApplicable means that the item does not apply to the cluster.
var errNotApplicable = errors.New("not applicable")

// check evaluates an item. It returns nil if the item passes.
type check func(c *cis) error

// testCIS reads the state of each item from the cluster and compares it with docs/cis.md.
func testCIS(t *testing.T, cp, worker *host) {
	c := &cis{cp: cp, worker: worker, services: cp.until("ready", time.Minute, allReady)}
	var configz struct{ Kubeletconfig map[string]any }
	expect.NoError(t, json.Unmarshal([]byte(cp.mustKubectl("get", "--raw", "/api/v1/nodes/worker/proxy/configz")), &configz))
	c.kubelet = configz.Kubeletconfig
	documented := documentedItems(t)
	for item, judge := range cisChecks() {
		err := judge(c)
		state := "pass"
		if errors.Is(err, errNotApplicable) {
			state = "not applicable"
		} else if err != nil {
			state = "fail"
		}
		if documented[item] != state {
			t.Errorf("%s: %q in docs/cis.md, %q in the cluster (%v)", item, documented[item], state, err)
		}
		delete(documented, item)
	}
	for item := range documented {
		t.Errorf("%s of docs/cis.md is not checked", item)
	}
}

var itemRow = regexp.MustCompile(`(?m)^\| ([1-4]\.\d+(?:\.\d+)?) \| (pass|fail|not applicable) \|`)

func documentedItems(t *testing.T) map[string]string {
	data, err := os.ReadFile("../../../docs/cis.md")
	expect.NoError(t, err)
	items := map[string]string{}
	for _, row := range itemRow.FindAllStringSubmatch(string(data), -1) {
		items[row[1]] = row[2]
	}
	return items
}

func cisChecks() map[string]check { //nolint:funlen // a table of checks
	const (
		manifests = "/etc/kubernetes/manifests"
		server    = "kube-apiserver"
		manager   = "kube-controller-manager"
		scheduler = "kube-scheduler"
	)
	root := ownedBy("")
	checks := map[string]check{
		"1.1.9": mode(0o600, "/etc/cni/net.d"), "1.1.10": root("/etc/cni/net.d"),
		"1.1.11": mode(0o700, "/var/lib/etcd"), "1.1.12": ownedBy(accounts.Etcd)("/var/lib/etcd"),
		"1.1.13": mode(0o600, "/etc/kubernetes/admin.conf"), "1.1.14": root("/etc/kubernetes/admin.conf"),
		"1.1.15": mode(0o600, "/etc/kubernetes/scheduler.conf"), "1.1.16": root("/etc/kubernetes/scheduler.conf"),
		"1.1.17": mode(0o600, "/etc/kubernetes/controller-manager.conf"), "1.1.18": root("/etc/kubernetes/controller-manager.conf"),
		"1.1.19": root(nodeconfig.PKIDir), "1.1.20": suffixMode(0o644, ".crt"), "1.1.21": suffixMode(0o600, ".key"),

		"1.2.1": func(c *cis) error {
			return when(c.cp.anonymousGet("/api/v1/nodes") == 200, "anonymous users may list nodes")
		},
		"1.2.2":  unset(server, "token-auth-file"),
		"1.2.3":  has(server, "enable-admission-plugins", "DenyServiceExternalIPs"),
		"1.2.4":  all(set(server, "kubelet-client-certificate"), set(server, "kubelet-client-key")),
		"1.2.5":  set(server, "kubelet-certificate-authority"),
		"1.2.6":  lacks(server, "authorization-mode", "AlwaysAllow"),
		"1.2.7":  has(server, "authorization-mode", "Node"),
		"1.2.8":  has(server, "authorization-mode", "RBAC"),
		"1.2.9":  has(server, "enable-admission-plugins", "EventRateLimit"),
		"1.2.10": lacks(server, "enable-admission-plugins", "AlwaysAdmit"),
		"1.2.11": has(server, "enable-admission-plugins", "AlwaysPullImages"),
		"1.2.12": lacks(server, "disable-admission-plugins", "ServiceAccount"),
		"1.2.13": lacks(server, "disable-admission-plugins", "NamespaceLifecycle"),
		"1.2.14": has(server, "enable-admission-plugins", "NodeRestriction"),
		"1.2.15": is(server, "profiling", "false"),
		"1.2.16": set(server, "audit-log-path"),
		"1.2.17": atLeast(server, "audit-log-maxage", 30),
		"1.2.18": atLeast(server, "audit-log-maxbackup", 10),
		"1.2.19": atLeast(server, "audit-log-maxsize", 100),
		"1.2.20": unset(server, "request-timeout"), // then a minute
		"1.2.21": lacks(server, "service-account-lookup", "false"),
		"1.2.22": set(server, "service-account-key-file"),
		"1.2.23": all(set(server, "etcd-certfile"), set(server, "etcd-keyfile")),
		"1.2.24": all(set(server, "tls-cert-file"), set(server, "tls-private-key-file")),
		"1.2.25": set(server, "client-ca-file"),
		"1.2.26": set(server, "etcd-cafile"),
		"1.2.27": set(server, "encryption-provider-config"),
		"1.2.28": encrypted,
		"1.2.29": func(c *cis) error { return strong(strings.Split(c.flag(server, "tls-cipher-suites"), ",")) },
		"1.2.30": is(server, "service-account-extend-token-expiration", "false"),

		"1.3.1": set(manager, "terminated-pod-gc-threshold"),
		"1.3.2": is(manager, "profiling", "false"),
		"1.3.3": is(manager, "use-service-account-credentials", "true"),
		"1.3.4": set(manager, "service-account-private-key-file"),
		"1.3.5": set(manager, "root-ca-file"),
		"1.3.6": lacks(manager, "feature-gates", "RotateKubeletServerCertificate=false"),
		"1.3.7": is(manager, "bind-address", "127.0.0.1"),
		"1.4.1": is(scheduler, "profiling", "false"),
		"1.4.2": is(scheduler, "bind-address", "127.0.0.1"),

		"2.1": all(set("etcd", "cert-file"), set("etcd", "key-file")),
		"2.2": is("etcd", "client-cert-auth", "true"),
		"2.3": lacks("etcd", "auto-tls", "true"),
		"2.4": all(set("etcd", "peer-cert-file"), set("etcd", "peer-key-file")),
		"2.5": is("etcd", "peer-client-cert-auth", "true"),
		"2.6": lacks("etcd", "peer-auto-tls", "true"),
		"2.7": func(c *cis) error {
			own, err1 := os.ReadFile(filepath.Join(c.cp.root, c.flag("etcd", "trusted-ca-file")))
			cluster, err2 := os.ReadFile(filepath.Join(c.cp.root, c.flag(server, "client-ca-file")))
			return errors.Join(err1, err2, when(bytes.Equal(own, cluster), "etcd trusts the certificate authority of the cluster"))
		},

		"3.1.1": lacksText("/etc/kubernetes/admin.conf", "client-certificate"),
		"3.1.2": lacksText("/etc/kubernetes/admin.conf", "token"),
		"3.1.3": lacksText("/etc/kubernetes/admin.conf", tokenID),
		"3.2.1": func(c *cis) error {
			_, err := os.Stat(filepath.Join(c.cp.root, c.flag(server, "audit-policy-file")))
			return err
		},
		"3.2.2": audited,

		"4.1.1": mode(0o600, "/etc/capstan/services/kubelet.yaml"), "4.1.2": root("/etc/capstan/services/kubelet.yaml"),
		"4.1.3": mode(0o600, "/etc/kubernetes/kube-proxy.conf"), "4.1.4": root("/etc/kubernetes/kube-proxy.conf"),
		"4.1.5": mode(0o600, nodeconfig.KubeletKubeconfig), "4.1.6": root(nodeconfig.KubeletKubeconfig),
		"4.1.7": mode(0o644, nodeconfig.PKIDir+"/ca.crt"), "4.1.8": root(nodeconfig.PKIDir + "/ca.crt"),
		"4.1.9": mode(0o600, "/var/lib/kubelet/config.yaml"), "4.1.10": root("/var/lib/kubelet/config.yaml"),

		"4.2.1": kubelet("false", "authentication", "anonymous", "enabled"),
		"4.2.2": kubelet("Webhook", "authorization", "mode"),
		"4.2.3": kubelet(nodeconfig.PKIDir+"/ca.crt", "authentication", "x509", "clientCAFile"),
		"4.2.4": kubelet("<nil>", "readOnlyPort"), // none
		"4.2.5": kubelet("4h0m0s", "streamingConnectionIdleTimeout"),
		"4.2.6": kubelet("true", "makeIPTablesUtilChains"),
		"4.2.7": unset("kubelet", "hostname-override"),
		"4.2.8": kubelet("50", "eventRecordQPS"),
		"4.2.9": kubelet("true", "serverTLSBootstrap"), "4.2.10": kubelet("true", "rotateCertificates"),
		"4.2.11": func(c *cis) error {
			gates, _ := c.kubelet["featureGates"].(map[string]any)
			rotates, set := gates["RotateKubeletServerCertificate"].(bool)
			return when(set && !rotates, "the kubelet does not renew its serving certificate")
		},
		"4.2.12": func(c *cis) error {
			suites, _ := c.kubelet["tlsCipherSuites"].([]any)
			var names []string
			for _, s := range suites {
				names = append(names, fmt.Sprint(s))
			}
			return strong(names)
		},
		"4.2.13": func(c *cis) error {
			limit, _ := c.kubelet["podPidsLimit"].(float64)
			return when(limit <= 0, "pods have no limit of processes")
		},
		"4.2.14": kubelet("true", "seccompDefault"),
		"4.2.15": func(c *cis) error {
			return when(c.reachable("10250"), "the kubelet accepts connections from every address")
		},
		"4.3.1": func(c *cis) error {
			return when(c.reachable("10249"), "kube-proxy's metrics can be read from other machines")
		},
	}
	for i, name := range []string{server, manager, scheduler, "etcd"} {
		for j := range 2 {
			checks[fmt.Sprintf("1.1.%d", 2*i+j+1)] = func(c *cis) error {
				if _, err := os.Stat(filepath.Join(c.cp.root, manifests, name+".yaml")); errors.Is(err, fs.ErrNotExist) {
					return errNotApplicable
				}
				return errors.New("a manifest exists")
			}
		}
	}
	return checks
}

func when(wrong bool, what string) error {
	if wrong {
		return errors.New(what)
	}
	return nil
}

func all(checks ...check) check {
	return func(c *cis) error {
		var errs []error
		for _, judge := range checks {
			errs = append(errs, judge(c))
		}
		return errors.Join(errs...)
	}
}

// flag returns a flag of a running process, or "".
func (c *cis) flag(service, name string) string {
	command, err := c.cp.exec("/bin/cat", fmt.Sprintf("/proc/%d/cmdline", find(c.services, service).PID))
	expect.NoError(c.cp.t, err)
	value := ""
	for _, a := range strings.Split(command, "\x00") {
		if v, found := strings.CutPrefix(a, "--"+name+"="); found {
			value = v
		}
	}
	return value
}

func (c *cis) reachable(port string) bool {
	var conn net.Conn
	var err error
	c.cp.inside(c.cp.bridge, func() { conn, err = net.DialTimeout("tcp", net.JoinHostPort(c.worker.ip, port), 5*time.Second) })
	if err != nil {
		return false
	}
	_ = conn.Close()
	return true
}

func flag(service, name, want string, ok func(value string) bool) check {
	return func(c *cis) error {
		value := c.flag(service, name)
		return when(!ok(value), fmt.Sprintf("%s: --%s=%s, want %s", service, name, value, want))
	}
}

func is(service, name, want string) check {
	return flag(service, name, want, func(v string) bool { return v == want })
}
func set(service, name string) check {
	return flag(service, name, "a value", func(v string) bool { return v != "" })
}
func unset(service, name string) check {
	return flag(service, name, "none", func(v string) bool { return v == "" })
}
func has(service, name, part string) check {
	return flag(service, name, part, func(v string) bool { return slices.Contains(strings.Split(v, ","), part) })
}
func lacks(service, name, part string) check {
	return flag(service, name, "not "+part, func(v string) bool { return !slices.Contains(strings.Split(v, ","), part) })
}
func atLeast(service, name string, least int) check {
	return flag(service, name, fmt.Sprint(least), func(v string) bool { n, err := strconv.Atoi(v); return err == nil && n >= least })
}

// files calls see for a file, or for a folder and all files in it. It does so on both machines, if they have it.
func files(path string, see func(path string, info fs.FileInfo) error) check {
	return func(c *cis) error {
		var errs []error
		seen := false
		for _, h := range []*host{c.cp, c.worker} {
			err := filepath.WalkDir(filepath.Join(h.root, path), func(p string, entry fs.DirEntry, err error) error {
				if err != nil {
					return nil // etcd creates and removes files meanwhile.
				}
				if info, err := entry.Info(); err == nil {
					seen = true
					errs = append(errs, see(strings.TrimPrefix(p, h.root), info))
				}
				return nil
			})
			errs = append(errs, err)
		}
		return errors.Join(append(errs, when(!seen, path+" does not exist"))...)
	}
}

// mode checks the mode of a file, or of the files in a folder. For mode 0700, it also checks the folder itself.
func mode(most fs.FileMode, path string) check {
	return files(path, func(p string, info fs.FileInfo) error {
		if info.IsDir() != (most == 0o700) || info.IsDir() && p != path {
			return nil
		}
		return when(info.Mode().Perm()&^most != 0, fmt.Sprintf("%s has mode %s", p, info.Mode()))
	})
}

func suffixMode(most fs.FileMode, suffix string) check {
	return files(nodeconfig.PKIDir, func(p string, info fs.FileInfo) error {
		return when(strings.HasSuffix(p, suffix) && info.Mode().Perm()&^most != 0, fmt.Sprintf("%s has mode %s", p, info.Mode()))
	})
}

// ownedBy checks that a file belongs to a user, or to root if the name is empty.
func ownedBy(user string) func(path string) check {
	id := 0
	if user != "" {
		id, _ = accounts.ID(user)
	}
	return func(path string) check {
		return files(path, func(p string, info fs.FileInfo) error {
			stat := info.Sys().(*syscall.Stat_t)
			return when(int(stat.Uid) != id || int(stat.Gid) != id, fmt.Sprintf("the owner of %s is %d:%d", p, stat.Uid, stat.Gid))
		})
	}
}

func lacksText(path, text string) check {
	return func(c *cis) error {
		data, err := os.ReadFile(filepath.Join(c.cp.root, path))
		return errors.Join(err, when(strings.Contains(string(data), text), path+" has "+text))
	}
}

func kubelet(want string, path ...string) check {
	return func(c *cis) error {
		var value any = c.kubelet
		for _, name := range path {
			inner, _ := value.(map[string]any)
			value = inner[name]
		}
		return when(fmt.Sprint(value) != want, fmt.Sprintf("the kubelet's %s is %v, want %s", strings.Join(path, "."), value, want))
	}
}

func strong(suites []string) error {
	for _, s := range suites {
		if !strings.HasPrefix(s, "TLS_ECDHE_") || !strings.Contains(s, "_GCM_") && !strings.Contains(s, "_CHACHA20_") {
			return fmt.Errorf("cipher suite %q", s)
		}
	}
	return nil
}

func encrypted(c *cis) error {
	data, err := os.ReadFile(filepath.Join(c.cp.root, c.flag("kube-apiserver", "encryption-provider-config")))
	at := bytes.Index(data, []byte("secretbox"))
	return errors.Join(err, when(at < 0 || at > bytes.Index(data, []byte("identity")), "Secrets are not encrypted with secretbox first"))
}

// audited checks that the log contains the user who created a Secret and the user who ran a program in a pod. The log
// must not contain data of the Secret.
func audited(c *cis) error {
	const body = "do-not-log-this-8d1f"
	c.cp.mustKubectl("create", "secret", "generic", "audited", "--from-literal=a="+body)
	c.cp.mustKubectl("exec", "other", "--", "/echo", "lookup", "-for", "120s", "kubernetes.default.svc.cluster.local")
	path := filepath.Join(c.cp.root, c.flag("kube-apiserver", "audit-log-path"))
	var log string
	harness.Wait(c.cp.t, "the audit log has the requests", time.Minute, func() error {
		data, err := os.ReadFile(path)
		log = string(data)
		for _, want := range []string{`"requestURI":"/api/v1/namespaces/default/secrets`, `"requestURI":"/api/v1/namespaces/default/pods/other/exec`} {
			err = errors.Join(err, when(!strings.Contains(log, want), "the audit log lacks "+want))
		}
		return err
	})
	return errors.Join(
		when(strings.Contains(log, body), "the audit log has the body of a Secret"),
		when(strings.Contains(log, `"resource":"leases"`), "the audit log has heartbeats"),
		when(strings.Contains(log, "requestObject"), "the audit log has bodies of requests"))
}
