//go:build e2e

package node

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"capstan.dev/capstan/internal/node/accounts"
	"capstan.dev/capstan/internal/node/initapi"
	"capstan.dev/capstan/internal/node/nodeconfig"
	"capstan.dev/capstan/internal/testenv/expect"
)

// Capabilities as /proc shows them.
const (
	none           = 0
	netBindService = 1 << 10
	netAdmin       = 1 << 12
	agent          = 1<<0 | 1<<1 | 1<<3 | netAdmin
)

// testUsers: each process has its own user and only the capabilities that it uses. No process can read the keys of
// another.
func testUsers(t *testing.T, cp, worker *host) {
	want := map[string]struct {
		user         string
		capabilities uint64
	}{
		"etcd": {accounts.Etcd, none}, "kube-apiserver": {accounts.APIServer, none},
		"kube-controller-manager": {accounts.ControllerManager, none}, "kube-scheduler": {accounts.Scheduler, none},
		"coredns": {accounts.CoreDNS, netBindService}, "kube-proxy": {accounts.KubeProxy, netAdmin}, "node-agent": {"", agent},
	}
	for _, h := range []*host{cp, worker} {
		for _, service := range h.until("ready", time.Minute, allReady).Services {
			w, confined := want[service.Name]
			if !confined {
				continue // containerd and the kubelet create containers
			}
			id := 0
			if w.user != "" {
				id, _ = accounts.ID(w.user)
			}
			status := procStatus(h, service)
			caps := fmt.Sprintf("%016x", w.capabilities)
			for field, value := range map[string]string{
				"Uid": strings.TrimSpace(strings.Repeat(fmt.Sprint(id)+" ", 4)), "Gid": strings.TrimSpace(strings.Repeat(fmt.Sprint(id)+" ", 4)),
				"CapEff": caps, "CapPrm": caps, "CapBnd": caps, "NoNewPrivs": "1",
			} {
				if status[field] != value {
					t.Errorf("%s on %s: %s is %q, want %q", service.Name, h.name, field, status[field], value)
				}
			}
		}
	}
	coredns := nodeconfig.PKIDir + "/clients/coredns.key"
	for path, readable := range map[string]bool{
		coredns: true, nodeconfig.PKIDir + "/ca.crt": true,
		nodeconfig.PKIDir + "/ca.key": false, nodeconfig.PKIDir + "/sa.key": false, nodeconfig.PKIDir + "/etcd/server.key": false,
		"/etc/kubernetes/admin.conf": false, nodeconfig.EncryptionConfigPath: false, "/var/lib/etcd/member": false,
	} {
		if err := cp.readAs(accounts.CoreDNS, path); (err == nil) != readable {
			t.Errorf("coredns can read %s: %v, want %v", path, err, readable)
		}
	}
	for user, path := range map[string]string{
		accounts.APIServer: nodeconfig.PKIDir + "/ca.key", accounts.Scheduler: coredns,
		accounts.KubeProxy: "/run/capstan/init.sock", accounts.Etcd: nodeconfig.PKIDir + "/etcd/ca.key",
	} {
		if cp.readAs(user, path) == nil {
			t.Errorf("%s can read %s", user, path)
		}
	}
}

func procStatus(h *host, service initapi.Service) map[string]string {
	h.t.Helper()
	out, err := h.exec("/bin/cat", fmt.Sprintf("/proc/%d/status", service.PID))
	expect.NoError(h.t, err)
	status := map[string]string{}
	for line := range strings.Lines(out) {
		name, value, _ := strings.Cut(line, ":")
		status[name] = strings.Join(strings.Fields(value), " ")
	}
	return status
}

// readAs opens a file, or lists a folder, as a user of the machine.
func (h *host) readAs(user, path string) error {
	id, _ := accounts.ID(user)
	cmd := []string{"--user", fmt.Sprintf("%d:%d", id, id), h.id, "/bin/sh", "-c", "if [ -d $0 ]; then ls $0; else cat $0; fi >/dev/null", path}
	_, err := h.runcExec("", cmd...)
	return err
}

// chownToRoot changes the owner of all files of services to root, as on machines of earlier versions.
func chownToRoot(h *host) {
	h.t.Helper()
	for _, folder := range []string{"etc/kubernetes", "var/lib/etcd", "var/log/kubernetes"} {
		err := filepath.WalkDir(filepath.Join(h.root, folder), func(path string, _ fs.DirEntry, err error) error {
			if err != nil {
				return nil // A worker does not have all of them.
			}
			return os.Lchown(path, 0, 0)
		})
		expect.NoError(h.t, err)
	}
}
