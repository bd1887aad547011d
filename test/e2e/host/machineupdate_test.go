//go:build e2e

package host_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/client-go/util/keyutil"
	"sigs.k8s.io/yaml"

	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/refusal"
	"capstan.dev/capstan/internal/host/runc"
	"capstan.dev/capstan/internal/node/nodeconfig"
	"capstan.dev/capstan/internal/pki"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/test/e2e/harness"
)

const (
	formerVersion = "v1.35.4"
	// brokenVersion has a kubelet that ends at once.
	brokenVersion = "v1.36.9"
)

// updated is a machine of a real capstand that is a cluster of one node.
type updated struct {
	*capstand
	spec   *hostpb.MachineSpec
	config *nodeconfig.NodeConfiguration
}

// Row ALL-17: a machine changes in place, with its pods. Each process that takes part is killed in between: capstan-init's update
// in each step, capstand, and PID 1. A version that does not work is rolled back.
func TestMachineUpdate_ALL17(t *testing.T) {
	leavesNothing(t)
	u := newUpdated(t)
	u.startPod()
	container, uid := u.container(), u.kubectl("get", "pod", "p", "-o", "jsonpath={.metadata.uid}")
	u.inside("echo kept > /var/lib/kubelet/pods/" + uid + "/volumes/kubernetes.io~empty-dir/data/file")
	before := u.services()

	t.Run("next minor, killed in each step", func(t *testing.T) {
		u := u.with(t)
		u.spec.KubernetesVersion, u.config.KubernetesVersion = version, version
		u.spec.MemoryBytes, u.spec.PidsLimit = 3<<30, 20000
		u.growDisk(3 << 30)
		u.config.ControlPlane.CertSANs = []string{"updated.example.com"}
		u.config.Registries = []nodeconfig.Registry{{Host: "registry.example.com", Username: "u", Password: "p"}}
		start := time.Now()
		m := u.update("u-1", u.killEachStep)
		t.Logf("updated after %s", time.Since(start).Round(time.Millisecond))
		if m.Status.Update.Phase != hostpb.UpdateStatus_SUCCEEDED || m.Status.Restarts != 0 || m.Spec.KubernetesVersion != version {
			t.Fatalf("the machine after the update: %v\n%s", m.Status.Update, u.logs(m.Spec.Id, "update", 0))
		}
		if got := u.container(); got != container {
			t.Errorf("the container was %s, is %s", container, got)
		}
		if got := u.inside("cat /var/lib/kubelet/pods/" + uid + "/volumes/kubernetes.io~empty-dir/data/file"); got != "kept" {
			t.Errorf("the pod's data is %q", got)
		}
		u.runs(version)
		after := u.services()
		for name, restarted := range map[string]bool{"etcd": true, "kube-apiserver": true, "containerd": false, "kubelet": true, "coredns": false} {
			if (before[name] != after[name]) != restarted {
				t.Errorf("%s: process %d before, %d after the update, restarted should be %v", name, before[name], after[name], restarted)
			}
		}
		u.hasLimits()
		if sans := u.inside("openssl x509 -in /etc/kubernetes/pki/apiserver.crt -noout -ext subjectAltName"); !strings.Contains(sans, "updated.example.com") {
			t.Errorf("the certificate of the API server has %s", sans)
		}
		if got := u.inside("cat /etc/updated; wc -l < /root/commands"); !strings.HasPrefix(got, "u-1") {
			t.Errorf("the file and the command of the update left %q", got)
		}
		eventually(t, "no files of the update", func() error { // They are removed after the result was recorded.
			if left := u.inside("ls /run/capstan /var/lib/capstan/update"); strings.Contains(left, "update-data") || strings.Contains(left, "previous") {
				return fmt.Errorf("the update left files: %s", left)
			}
			return nil
		})
		if again, err := u.UpdateMachine(u.ctx(), u.request("u-1")); err != nil || again.Status.Update.Phase != hostpb.UpdateStatus_SUCCEEDED {
			t.Errorf("the same update again: %v, %v", again, err)
		}
	})
	t.Run("a version that does not work", func(t *testing.T) {
		u := u.with(t)
		was := proto.CloneOf(u.spec)
		u.spec.KubernetesVersion, u.config.KubernetesVersion, u.spec.MemoryBytes = brokenVersion, brokenVersion, 2<<30
		start := time.Now()
		m := u.update("u-2", nil)
		t.Logf("rolled back after %s: %s", time.Since(start).Round(time.Millisecond), m.Status.Update.Message)
		if got := m.Status.Update; got.Phase != hostpb.UpdateStatus_ROLLED_BACK || !strings.Contains(got.Message, "kubelet") {
			t.Fatalf("the update: %v\n%s", got, u.logs(m.Spec.Id, "update", 0))
		}
		if m.Spec.KubernetesVersion != version || m.Spec.MemoryBytes != was.MemoryBytes {
			t.Errorf("the spec after the rollback: %v", m.Spec)
		}
		proto.Reset(u.spec)
		proto.Merge(u.spec, was)
		u.config.KubernetesVersion = version
		u.runs(version)
		u.hasLimits()
		if got := u.container(); got != container {
			t.Errorf("the container was %s, is %s", container, got)
		}
	})
	t.Run("the machine restarts in between", func(t *testing.T) {
		u := u.with(t)
		u.config.ControlPlane.APIServer.ExtraArgs = []nodeconfig.Arg{{Name: "max-requests-inflight", Value: "500"}}
		u.config.Node.Labels = map[string]string{"example.com/updated": "yes"}
		u.config.Node.Taints = []string{"example.com/updated=yes:PreferNoSchedule"}
		pid1 := u.await(u.spec.Id, func(*hostpb.Machine) bool { return true }).Status.Pid
		m := u.update("u-3", func(step string) {
			if step == "kube-apiserver" {
				expect.NoError(t, syscall.Kill(int(pid1), syscall.SIGKILL))
			}
		})
		if m.Status.Update.Phase != hostpb.UpdateStatus_SUCCEEDED || m.Status.Restarts != 1 {
			t.Fatalf("the machine after the update: %v", m.Status)
		}
		if args := u.inside("tr '\\0' ' ' < /proc/$(pidof kube-apiserver)/cmdline"); !strings.Contains(args, "--max-requests-inflight=500") {
			t.Errorf("the API server runs with %s", args)
		}
		if got := u.kubectl("get", "node", "-o", "jsonpath={.items[*].metadata.labels.example\\.com/updated} {.items[*].spec.taints[*].key}"); got != "yes example.com/updated" {
			t.Errorf("the Node has the label and the taint %q", got)
		}
		u.runs(version)
	})
}

// newUpdated boots a cluster of one node with the former version.
func newUpdated(t *testing.T) *updated {
	t.Helper()
	c := newCapstand(t)
	host(t, "rm -r "+c.assets+"/kubernetes "+c.assets+"/node && cd "+harness.Bin()+" && cp -a node kubernetes images "+c.assets)
	expect.NoError(t, os.Remove(filepath.Join(c.assets, "capstan-init")))
	expect.NoError(t, harness.GoBuild(filepath.Join(c.assets, "capstan-init"), "capstan.dev/capstan/cmd/capstan-init"))
	broken := filepath.Join(c.assets, "kubernetes", brokenVersion)
	host(t, "cp -al "+filepath.Join(c.assets, "kubernetes", version)+" "+broken+" && rm "+broken+"/kubelet")
	expect.NoError(t, os.WriteFile(filepath.Join(broken, "kubelet"), []byte("#!/bin/sh\n[ \"$1\" = --version ] && echo Kubernetes "+brokenVersion+" && exit\nexit 1\n"), 0o755))
	u := &updated{capstand: c, spec: blue.machine(10), config: &nodeconfig.NodeConfiguration{
		APIVersion: nodeconfig.APIVersion, Kind: nodeconfig.Kind, ClusterName: "blue", KubernetesVersion: formerVersion, Role: nodeconfig.RoleInit,
		Endpoint:     blue.address(10) + ":6443",
		Network:      nodeconfig.Network{PodCIDRs: []string{"10.244.0.0/16"}, ServiceCIDRs: []string{"10.96.0.0/16"}, DNSServiceIP: "10.96.0.10"},
		ControlPlane: &nodeconfig.ControlPlane{},
	}}
	u.spec.KubernetesVersion, u.spec.ControlPlane = formerVersion, true
	u.spec.Cpus, u.spec.MemoryBytes, u.spec.DiskBytes = 2, 2<<30, 2<<30
	files := authorities(t)
	files[nodeconfig.Path] = u.nodeYAML()
	data := cloudConfig(t, files, "/opt/capstan/capstan-init node up", "echo success > /run/cluster-api/bootstrap-success.complete")
	_, err := c.EnsureMachine(c.ctx(), &hostpb.EnsureMachineRequest{Spec: u.spec, BootstrapData: data})
	expect.NoError(t, err)
	m := c.await(u.spec.Id, func(m *hostpb.Machine) bool {
		return m.Status.Bootstrap == hostpb.MachineStatus_SUCCEEDED || m.Status.Bootstrap == hostpb.MachineStatus_BOOTSTRAP_FAILED
	})
	if m.Status.Bootstrap != hostpb.MachineStatus_SUCCEEDED {
		t.Fatalf("the bootstrap: %s", m.Status.BootstrapMessage)
	}
	u.runs(formerVersion)
	return u
}

// with lets helpers fail a part of the test.
func (u *updated) with(t *testing.T) *updated {
	inner := *u
	u.capstand.t = t
	t.Cleanup(func() { u.capstand.t = t })
	return &inner
}

func (u *updated) nodeYAML() []byte {
	data, err := yaml.Marshal(u.config)
	expect.NoError(u.t, err)
	return data
}

// request is the update to the present spec and configuration.
func (u *updated) request(id string) *hostpb.UpdateMachineRequest {
	files := map[string][]byte{nodeconfig.Path: u.nodeYAML(), "/etc/updated": []byte(id)}
	data := cloudConfig(u.t, files, "/opt/capstan/capstan-init node update", "echo "+id+" >> /root/commands")
	return &hostpb.UpdateMachineRequest{Spec: u.spec, UpdateId: id, Data: data}
}

// growDisk makes the disk a part of the next update. A host without CAP_SYS_RESOURCE refuses it.
func (u *updated) growDisk(size int64) {
	u.t.Helper()
	capabilities, err := runc.OwnCapabilities()
	expect.NoError(u.t, err)
	request := u.request("u-0")
	request.Spec = proto.CloneOf(u.spec)
	request.Spec.DiskBytes = size
	if slices.Contains(capabilities, "CAP_SYS_RESOURCE") {
		u.spec.DiskBytes = size
	} else if _, err := u.UpdateMachine(u.ctx(), request); refusal.Of(err).Reason != hostpb.Refusal_UNSUPPORTED {
		u.t.Errorf("the growth of a disk without CAP_SYS_RESOURCE: %v", err)
	}
}

// update carries out an update and calls see with each step.
func (u *updated) update(id string, see func(step string)) *hostpb.Machine {
	u.t.Helper()
	_, err := u.UpdateMachine(u.ctx(), u.request(id))
	expect.NoError(u.t, err)
	seen := map[string]bool{}
	for {
		m := u.await(u.spec.Id, func(m *hostpb.Machine) bool {
			s := m.Status.Update
			return s.GetId() == id && (s.CompletedAt != nil || s.Step != "" && !seen[s.Step])
		})
		s := m.Status.Update
		if s.CompletedAt != nil {
			return m
		}
		seen[s.Step] = true
		if see != nil {
			see(s.Step)
		}
	}
}

// killEachStep kills the process that updates the machine, and in one step capstand.
func (u *updated) killEachStep(step string) {
	_ = exec.Command(u.runc(), "--root", filepath.Join(u.root, "runc"), "exec", u.spec.Id, "pkill", "-KILL", "-f", "^/opt/capstan/capstan-init node update").Run()
	if step == "kube-apiserver" {
		u.kill()
		u.start()
	}
}

func (u *updated) runc() string { return filepath.Join(u.assets, "node/bin/runc") }

// inside runs a shell command in the machine.
func (u *updated) inside(command string) string {
	u.t.Helper()
	out, err := u.try("/bin/sh", "-c", command)
	if err != nil {
		u.t.Fatalf("%s: %v: %s", command, err, out)
	}
	return out
}

func (u *updated) try(args ...string) (string, error) {
	out, err := exec.Command(u.runc(), append([]string{"--root", filepath.Join(u.root, "runc"), "exec", u.spec.Id}, args...)...).CombinedOutput()
	return strings.TrimSpace(string(out)), err
}

func (u *updated) kubectl(args ...string) string {
	u.t.Helper()
	out, err := u.try(append([]string{"/opt/capstan/kubernetes/" + version + "/kubectl", "--kubeconfig=/etc/kubernetes/admin.conf"}, args...)...)
	if err != nil {
		u.t.Fatalf("kubectl %v: %v: %s", args, err, out)
	}
	return out
}

func (u *updated) startPod() {
	u.t.Helper()
	manifest := `{"apiVersion":"v1","kind":"Pod","metadata":{"name":"p"},"spec":{"containers":[{"name":"c","image":"registry.capstan.dev/pause:v1",
"volumeMounts":[{"name":"data","mountPath":"/data"}]}],"volumes":[{"name":"data","emptyDir":{}}]}}`
	eventually(u.t, "the pod is created", func() error { // The default service account appears a moment after the API server is ready.
		out, err := u.try("/bin/sh", "-c", "echo '"+manifest+"' | /opt/capstan/kubernetes/"+version+"/kubectl --kubeconfig=/etc/kubernetes/admin.conf apply -f -")
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	})
	u.kubectl("wait", "--for=condition=Ready", "pod/p", "--timeout=120s")
}

// container returns the identity of the pod's container and how often it was restarted.
func (u *updated) container() string {
	u.t.Helper()
	u.kubectl("wait", "--for=condition=Ready", "pod/p", "--timeout=120s")
	return u.kubectl("get", "pod", "p", "-o", "jsonpath={.status.containerStatuses[0].containerID} {.status.containerStatuses[0].restartCount}") +
		" process " + u.inside("pidof pause")
}

// services returns the process ids of the services.
func (u *updated) services() map[string]int32 {
	u.t.Helper()
	all := map[string]int32{}
	for _, s := range u.await(u.spec.Id, func(m *hostpb.Machine) bool { return len(m.Status.Services) > 5 }).Status.Services {
		all[s.Name] = s.Pid
	}
	return all
}

// runs checks that the Node is Ready with a version, and that every service runs from the folder of that version.
func (u *updated) runs(want string) {
	u.t.Helper()
	u.kubectl("wait", "--for=condition=Ready", "node", "--all", "--timeout=120s")
	if got := u.kubectl("get", "node", "-o", "jsonpath={.items[*].status.nodeInfo.kubeletVersion}"); got != want {
		u.t.Errorf("the kubelet has version %s, want %s", got, want)
	}
	if _, server, _ := strings.Cut(u.kubectl("version", "-o", "json"), "serverVersion"); !strings.Contains(server, `"gitVersion": "`+want+`"`) {
		u.t.Errorf("the API server: %s, want version %s", server, want)
	}
	for _, program := range []string{"etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy"} {
		if got := u.inside("tr '\\0' '\\n' < /proc/$(pidof " + program + ")/cmdline | head -1"); got != "/opt/capstan/kubernetes/"+want+"/"+program {
			u.t.Errorf("%s runs from %s", program, got)
		}
	}
}

// hasLimits checks the limits of the running machine, as the kernel and the kubelet see them.
func (u *updated) hasLimits() {
	u.t.Helper()
	group := "/capstan/" + hostID(u.t, u.capstand) + "/" + u.spec.Id
	memory := host(u.t, "cat /sys/fs/cgroup/memory"+group+"/memory.limit_in_bytes /sys/fs/cgroup"+group+"/memory.max 2>/dev/null || true")
	if strings.TrimSpace(memory) != fmt.Sprint(u.spec.MemoryBytes) {
		u.t.Errorf("the cgroup has a memory limit of %s, want %d", memory, u.spec.MemoryBytes)
	}
	got, err := resource.ParseQuantity(u.kubectl("get", "node", "-o", "jsonpath={.items[*].status.capacity.memory}"))
	if err != nil || got.Value() != u.spec.MemoryBytes {
		u.t.Errorf("the Node has %s of memory (%v), want %d bytes", got.String(), err, u.spec.MemoryBytes)
	}
	// The sandbox of the pod is a process pause as well. It keeps the size of the host.
	sees := u.inside("for p in $(pidof pause); do grep MemTotal /proc/$p/root/proc/meminfo; done")
	if want := fmt.Sprintf(" %d kB", u.spec.MemoryBytes>>10); !strings.Contains(sees, want) {
		u.t.Errorf("the processes of the pod see %q, want%s", sees, want)
	}
	var kib int64
	_, err = fmt.Sscan(u.inside("df --output=size -k / | tail -1"), &kib)
	if want := u.spec.DiskBytes >> 10; err != nil || kib > want || kib < want*85/100 {
		u.t.Errorf("the disk has %d KiB (%v), want about %d", kib, err, want)
	}
}

// authorities are the files that the control plane provider creates for a cluster.
func authorities(t *testing.T) map[string][]byte {
	t.Helper()
	files := map[string][]byte{}
	for name, file := range map[string]string{"kubernetes": "ca", "etcd": "etcd/ca", "front-proxy": "front-proxy-ca"} {
		private, err := pki.NewKey()
		expect.NoError(t, err)
		ca, err := pki.NewAuthority(name, private, time.Now())
		expect.NoError(t, err)
		files[nodeconfig.PKIDir+"/"+file+".crt"] = pki.EncodeCert(ca.Cert)
		files[nodeconfig.PKIDir+"/"+file+".key"], err = pki.EncodeKey(private)
		expect.NoError(t, err)
	}
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	expect.NoError(t, err)
	files[nodeconfig.PKIDir+"/sa.key"], err = keyutil.MarshalPrivateKeyToPEM(private)
	expect.NoError(t, err)
	public, err := x509.MarshalPKIXPublicKey(&private.PublicKey)
	expect.NoError(t, err)
	files[nodeconfig.PKIDir+"/sa.pub"] = pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: public})
	return files
}

func cloudConfig(t *testing.T, files map[string][]byte, commands ...string) []byte {
	t.Helper()
	var write []any
	for path, content := range files {
		write = append(write, map[string]any{"path": path, "permissions": "0600", "encoding": "b64", "content": base64.StdEncoding.EncodeToString(content)})
	}
	out, err := yaml.Marshal(map[string]any{"write_files": write, "runcmd": commands})
	expect.NoError(t, err)
	return append([]byte("#cloud-config\n"), out...)
}
