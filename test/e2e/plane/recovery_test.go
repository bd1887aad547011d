//go:build e2e

package plane

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"capstan.dev/capstan/test/e2e/harness"
)

// host is a capstand that does not belong to a plane. It stands for the other hosts of a rack.
type host struct {
	t             *testing.T
	root, address string
}

// startHost creates the credentials of a host and starts its capstand.
func startHost(i *installation) (h host, manifests string) {
	i.t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		i.t.Fatal(err)
	}
	root, err := os.MkdirTemp("", "cap") // The path is short because the folder contains sockets of machines.
	if err != nil {
		i.t.Fatal(err)
	}
	h = host{t: i.t, root: root, address: listener.Addr().String()}
	if err := errors.Join(listener.Close(), os.Chmod(root, 0o755)); err != nil {
		i.t.Fatal(err)
	}
	manifests = i.capstan("host", "credentials", "rack-1", "--address", h.address, "--dir", filepath.Join(h.root, "tls"))
	log, err := os.Create(filepath.Join(i.t.TempDir(), "capstand.log"))
	if err != nil {
		i.t.Fatal(err)
	}
	defer log.Close()
	cmd := exec.Command(filepath.Join(i.bin, "capstand"), "--root="+h.root, "--assets="+i.bin, "--name=rack-1", "--listen="+h.address)
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		i.t.Fatal(err)
	}
	i.t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		_ = cmd.Wait()
		if text, err := os.ReadFile(log.Name()); err == nil && i.t.Failed() {
			i.t.Logf("capstand:\n%s", text[max(0, len(text)-4000):])
		}
		_ = os.RemoveAll(h.root)
	})
	return h, manifests
}

// machines returns the machines that the host runs: the id of each, and the start time of its PID 1.
func (h host) machines() map[string]string {
	h.t.Helper()
	found := map[string]string{}
	pids, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		h.t.Fatal(err)
	}
	entries, err := os.ReadDir(filepath.Join(h.root, "machines"))
	if err != nil && !os.IsNotExist(err) {
		h.t.Fatal(err)
	}
	for _, e := range entries {
		found[e.Name()] = ""
	}
	for _, file := range pids {
		dir := filepath.Dir(file)
		cgroups, _ := os.ReadFile(filepath.Join(dir, "cgroup"))
		status, _ := os.ReadFile(filepath.Join(dir, "status"))
		first := false // The first process of a machine has number 1 in its innermost namespace.
		for line := range strings.Lines(string(status)) {
			if fields := strings.Fields(line); len(fields) == 3 && fields[0] == "NSpid:" && fields[2] == "1" {
				first = true
			}
		}
		for id := range found {
			if stat, err := os.ReadFile(filepath.Join(dir, "stat")); first && err == nil && strings.Contains(string(cgroups), id) {
				found[id] = strings.Fields(string(stat))[21]
			}
		}
	}
	return found
}

// sameMachines checks that the same machines still run.
func (h host) sameMachines(before map[string]string, when string) {
	h.t.Helper()
	if after := h.machines(); len(before) == 0 || fmt.Sprint(after) != fmt.Sprint(before) {
		h.t.Errorf("%s: machines %v, then %v", when, before, after)
	}
}

// recovery is a plane whose host is lost with all data, and the plane that is restored from its backup on another host.
type recovery struct {
	t               *testing.T
	lost, found     *installation
	rack            host
	backups, backup string
	// machines of the rack, objects of the backup, and the network of the cluster that was created after it
	machines         map[string]string
	objects, network string
}

// The host of a plane is lost with all data. A plane that is restored from the backup on another host has the same
// objects, can read the Secrets, connects to the hosts with their credentials, and manages their running machines.
func TestRecovery(t *testing.T) {
	r := &recovery{t: t, lost: newInstallation(t), backups: t.TempDir(), backup: filepath.Join(t.TempDir(), "plane.tar.gz")}
	r.createPlane()
	r.backUp()
	r.changeAfterBackup()
	r.lost.destroy()
	r.rack.sameMachines(r.machines, "without a plane")
	r.restore()
	r.hasContentOfBackup()
	id := r.listsUnknownMachine()
	r.givesAnotherNetwork()
	r.prunes(id)
	r.managesMachines()
}

// createPlane creates a plane with a host on the rack, a cluster and a Secret.
func (r *recovery) createPlane() {
	r.t.Helper()
	r.lost.capstan("up", "--no-hosts", "--backup-to", r.backups, "--backup-every", "1h")
	var manifests string
	r.rack, manifests = startHost(r.lost)
	file := filepath.Join(r.t.TempDir(), "rack-1.yaml")
	if err := os.WriteFile(file, []byte(manifests), 0o600); err != nil {
		r.t.Fatal(err)
	}
	r.lost.kubectl("apply", "-f", file)
	r.lost.capstan("create", "cluster", "one", "--workers", "1")
	r.lost.kubectl("create", "secret", "generic", "probe", "--from-literal=password=correct-horse")
}

// backUp checks the schedule of backups, and makes a backup.
func (r *recovery) backUp() {
	r.t.Helper()
	if scheduled := r.lost.status().BackupStatus; scheduled.Last == nil || scheduled.Error != "" {
		r.t.Errorf("the schedule: %+v", scheduled)
	}
	if text := r.lost.capstan("status"); !strings.Contains(text, "every 1h to "+r.backups) {
		r.t.Errorf("capstan status: %s", text)
	}
	r.lost.capstan("backup", "--file", r.backup)
	r.objects = r.lost.identities()
}

// changeAfterBackup creates objects that the backup does not contain.
func (r *recovery) changeAfterBackup() {
	r.t.Helper()
	r.lost.kubectl("create", "configmap", "after-the-backup")
	r.lost.capstan("create", "cluster", "two", "--workers", "0")
	r.network = r.lost.kubectl("get", "capstancluster", "two", "-o", "jsonpath={.spec.network.machineCIDR}")
	r.machines = r.rack.machines()
}

// restore restores the backup into another installation, and starts it.
func (r *recovery) restore() {
	r.t.Helper()
	r.found = newInstallation(r.t)
	began := time.Now()
	r.found.capstan("restore", r.backup)
	r.found.capstan("up")
	r.t.Logf("restored and ready in %.1f s", time.Since(began).Seconds())
	if _, err := r.found.try("restore", r.backup); err == nil || !strings.Contains(err.Error(), "--keep-state") {
		r.t.Errorf("a restore over a running plane: %v", err)
	}
}

// hasContentOfBackup checks the restored Secret and objects, and waits for the host.
func (r *recovery) hasContentOfBackup() {
	r.t.Helper()
	if password := r.found.kubectl("get", "secret", "probe", "-o", "jsonpath={.data.password}"); password != "Y29ycmVjdC1ob3JzZQ==" {
		r.t.Errorf("the Secret has %q", password)
	}
	if left := r.found.kubectl("get", "configmap", "after-the-backup", "--ignore-not-found", "-o", "name"); left != "" {
		r.t.Errorf("created after the backup: %q", left)
	}
	if after := r.found.identities(); after != r.objects {
		r.t.Errorf("objects:\n%s\nthen:\n%s", r.objects, after)
	}
	harness.True(r.t, "the host is connected", time.Minute, func() bool {
		return r.found.kubectl("get", "capstanhost", "rack-1", "-o", `jsonpath={.status.conditions[?(@.type=="Connected")].status}`) == "True"
	})
}

// listsUnknownMachine returns the machine of the cluster that was created after the backup: the new plane lists it.
func (r *recovery) listsUnknownMachine() (id string) {
	r.t.Helper()
	harness.True(r.t, "a machine without a CapstanMachine is listed", time.Minute, func() bool {
		id = r.found.unknown()
		return id != ""
	})
	if r.machines[id] == "" {
		r.t.Fatalf("status.unknownMachines: %q, machines: %v", id, r.machines)
	}
	return id
}

// givesAnotherNetwork checks that the next cluster does not get the network of the unknown machine. The host refuses a network
// that a machine uses, and the cluster then gets another one.
func (r *recovery) givesAnotherNetwork() {
	r.t.Helper()
	r.found.capstan("create", "cluster", "three", "--workers", "0", "--wait=false")
	given, ready := "", false
	harness.True(r.t, "the network of the next cluster", time.Minute, func() bool {
		state := r.found.kubectl("get", "capstancluster", "three", "-o", `jsonpath={.status.conditions[?(@.type=="NetworkReady")].status} {.spec.network.machineCIDR}`)
		given, ready = strings.CutPrefix(state, "True ")
		return ready
	})
	if given == r.network || r.network == "" {
		r.t.Errorf("the next cluster has the network %q, the machine of the lost cluster has %q", given, r.network)
	}
	r.found.capstan("delete", "cluster", "three")
	r.rack.sameMachines(r.machines, "after the restore")
}

// prunes removes the unknown machine. The plane does this only on request.
func (r *recovery) prunes(id string) {
	r.t.Helper()
	if text := r.found.capstan("host", "prune", "rack-1"); !strings.Contains(text, id) {
		r.t.Errorf("capstan host prune: %s", text)
	}
	r.found.capstan("host", "prune", "rack-1", id)
	delete(r.machines, id)
	harness.True(r.t, "the machine of the lost cluster is removed", time.Minute, func() bool {
		asked := r.found.kubectl("get", "capstanhost", "rack-1", "-o", `jsonpath={.metadata.annotations.infrastructure\.capstan\.dev/prune}`)
		return asked == "" && r.found.unknown() == ""
	})
	r.rack.sameMachines(r.machines, "after host prune")
	r.rack.networks(1, "after host prune")
}

// managesMachines creates another worker, while the existing machines stay, and deletes all machines.
func (r *recovery) managesMachines() {
	r.t.Helper()
	workers := r.found.workers()
	r.found.kubectl("patch", "machinedeployment", workers, "--type=merge", "-p", `{"spec":{"replicas":2}}`)
	r.found.kubectl("wait", "machinedeployment", workers, "--for=jsonpath={.status.readyReplicas}=2", "--timeout=3m")
	after := r.rack.machines()
	if len(after) != len(r.machines)+1 {
		r.t.Errorf("machines %v, then %v", r.machines, after)
	}
	for id, started := range r.machines {
		if after[id] != started {
			r.t.Errorf("machine %s was started at %s, then at %s", id, started, after[id])
		}
	}
	r.found.capstan("delete", "cluster", "one")
	if left := r.rack.machines(); len(left) > 0 {
		r.t.Errorf("machines remain: %v", left)
	}
}

// unknown returns the id of the only machine without a CapstanMachine, from the status of its host.
func (i *installation) unknown() string {
	i.t.Helper()
	return i.kubectl("get", "capstanhost", "rack-1", "-o", "jsonpath={.status.unknownMachines[*].id}")
}

// networks checks the number of network records and of load balancers.
func (h host) networks(n int, when string) {
	h.t.Helper()
	for _, kind := range []string{"networks", "balancers"} {
		if found, err := os.ReadDir(filepath.Join(h.root, kind)); err != nil || len(found) != n {
			h.t.Errorf("%s: want %d %s, got %v (%v)", when, n, kind, found, err)
		}
	}
}

// destroy kills a plane and removes all its data on its host.
func (i *installation) destroy() {
	i.t.Helper()
	pid := i.status().PID
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		i.t.Fatal(err)
	}
	harness.True(i.t, "the processes of the plane have ended", time.Minute, func() bool { return !runs(pid) && len(processesOf(i.root)) == 0 })
	if err := os.RemoveAll(i.root); err != nil {
		i.t.Fatal(err)
	}
}

// identities returns the properties of the objects that must be the same after a restore.
func (i *installation) identities() string {
	i.t.Helper()
	var list struct {
		Items []struct {
			Kind     string
			Metadata struct{ Name, UID string }
			Spec     struct {
				ID string `json:"id"`
			}
		}
	}
	data := i.kubectl("get", "clusters,machines,capstanclusters,capstanmachines,capstancontrolplanes,capstanhosts", "-A", "-o", "json")
	if err := json.Unmarshal([]byte(data), &list); err != nil {
		i.t.Fatal(err)
	}
	var out strings.Builder
	for _, o := range list.Items {
		fmt.Fprintln(&out, o.Kind, o.Metadata.Name, o.Metadata.UID, o.Spec.ID)
	}
	return out.String()
}

// workers returns the name of the cluster's only MachineDeployment.
func (i *installation) workers() string {
	i.t.Helper()
	return strings.TrimSpace(i.kubectl("get", "machinedeployments", "-o", "jsonpath={.items[0].metadata.name}"))
}
