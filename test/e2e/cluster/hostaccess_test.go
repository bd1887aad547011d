//go:build e2e

package cluster

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/node/initapi"
	"capstan.dev/capstan/internal/testenv"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/test/e2e/harness"
)

// fuse is a kind of CDI devices. Its device has the numbers of /dev/fuse, which a pod cannot open by default.
const fuse = "example.com/fuse"

// loopControl is the device for block volumes, and blockVolume is the name of one.
const (
	loopControl = "/dev/loop-control"
	blockVolume = "pvc-89abcdef-0123-4567-89ab-cdef01234567"
)

// checkHostAccess adds a worker with a folder and a CDI device of the host. It waits until the host allows them. Then a pod without
// privileges reads the folder, and opens the device that it requests by a device plugin; another pod cannot. The worker also has
// the device for block volumes.
func checkHostAccess(t *testing.T, c *harness.Cluster) {
	ctx := t.Context()
	folder := describeDevice(t)
	addWorker(t, c, "access", func(spec *infrav1.CapstanMachineSpec) {
		spec.HostMounts = []infrav1.HostMount{{Source: folder, Path: "/mnt/models"}}
		spec.Devices = []infrav1.MachineDevice{{Name: fuse}, {Name: loopControl}}
	})
	machine := machineOf(t, c, "access")
	for _, allowed := range []struct {
		message string
		next    func(*infrav1.CapstanHostSpec, infrav1.AllowedNamespaces)
	}{
		{"does not allow namespace " + c.Namespace + " to mount " + folder, func(spec *infrav1.CapstanHostSpec, names infrav1.AllowedNamespaces) {
			spec.AllowedMounts = []infrav1.AllowedMount{{Path: filepath.Dir(folder), AllowedNamespaces: names}}
		}},
		{"does not allow namespace " + c.Namespace + " to have the device " + fuse, func(spec *infrav1.CapstanHostSpec, names infrav1.AllowedNamespaces) {
			spec.AllowedDevices = []infrav1.AllowedDevice{{Name: fuse, AllowedNamespaces: names}, {Name: loopControl, AllowedNamespaces: names}}
		}},
	} {
		waitsFor(t, machine, allowed.message)
		changeHost(t, func(h *infrav1.CapstanHost) {
			allowed.next(&h.Spec, infrav1.AllowedNamespaces{Names: []string{c.Namespace}})
		})
	}
	harness.Eventually(t, "four Nodes Ready", time.Minute, func(ctx context.Context) error { return c.NodesReady(ctx, 4) })

	template := &infrav1.CapstanMachineTemplate{}
	expect.NoError(t, plane.Client.Get(ctx, client.ObjectKey{Namespace: c.Namespace, Name: c.Name + "-access"}, template))
	if got := template.Status.Capacity[fuse]; got.Cmp(resource.MustParse("1")) != 0 {
		t.Errorf("status.capacity of the template: %v", template.Status.Capacity)
	}
	if out := inMachine(t, machine.Name, "sh", "-c", "cat /mnt/models/weights; touch /mnt/models/new 2>&1; test -c /dev/sample0 && : <>/dev/sample0 && echo opened"); out != "of the model\ntouch: cannot touch '/mnt/models/new': Read-only file system\nopened\n" {
		t.Errorf("the machine sees %q", out)
	}

	expect.NoError(t, plane.Client.Get(ctx, client.ObjectKeyFromObject(machine), machine))
	harness.ServeDevicePlugin(t, filepath.Join(plane.Root, "hosts", "local", "machines", machine.Spec.ID, "rootfs"), fuse, fuse+"=0")
	c.Plane.Must(t, "load", "image", filepath.Join(harness.Bin(), "images", "echo.tar"), "--cluster", c.Name, "--namespace", c.Namespace)
	// Each pod makes a node of its own with the numbers of the device, because only the rules of its cgroup may decide.
	const script = "exec 2>/dev/null; cat /out/weights; echo variable $FUSE_DRIVER; mknod /dev/own c 10 229 && echo made; (: </dev/own) && echo opened; (: </dev/sample0) && echo the device opened; true"
	for name, pod := range map[string]struct{ limits, want string }{
		"with-device":    {`resources: {limits: {` + fuse + `: 1}}`, "of the model\nvariable yes\nmade\nopened\nthe device opened\n"},
		"without-device": {``, "of the model\nvariable\nmade\n"},
	} {
		c.Apply(t, strings.Replace(harness.ShellPod(name, "", "/mnt/models", 1, script, pod.limits), `nodeName: ""`,
			"restartPolicy: Never\n  nodeSelector: {kubernetes.io/hostname: "+machine.Name+"}", 1))
		if out := finished(t, c, name); out != pod.want {
			t.Errorf("the pod %s says %q, want %q", name, out, pod.want)
		}
	}
	checkKernelAccess(t, c, machine)
	checkLoopDevice(t, machine)
}

// checkLoopDevice: the machine has a block volume on its disk, and its kubelet finds the program that holds devices. The machine is
// deleted with the volume.
func checkLoopDevice(t *testing.T, machine *infrav1.CapstanMachine) {
	t.Helper()
	init := initapi.NewClient(filepath.Join(plane.Root, "hosts", "local", "run", machine.Spec.ID, "init.sock"))
	expect.NoError(t, init.ProvideDevice(t.Context(), blockVolume, 16<<20))
	const script = "path=/run/block-volumes/" + blockVolume + `; echo precious | dd of=$path conv=fsync 2>/dev/null; head -c 8 $path; readlink $(PATH=/run/programs:$PATH which losetup)`
	if out := inMachine(t, machine.Name, "sh", "-c", script); out != "precious/opt/capstan/capstan-init\n" {
		t.Errorf("the machine says %q", out)
	}
	if got := blockVolumes(t); len(got) != 1 {
		t.Errorf("loop devices of the host have %v, want the block volume", got)
	}
}

// blockVolumes returns the files of loop devices of the host that belong to the block volume.
func blockVolumes(t *testing.T) (files []string) {
	t.Helper()
	paths, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	expect.NoError(t, err)
	for _, path := range paths {
		if file, err := os.ReadFile(path); err == nil && strings.Contains(string(file), blockVolume) {
			files = append(files, string(file))
		}
	}
	return files
}

// kernelAccess does what Calico and Cilium do in a privileged pod: it mounts the file system of BPF, creates a map and loads a program,
// pins both, mounts cgroup2, changes a sysctl of the network, and creates a set of nftables. The numbers of the system call are those
// of x86-64 and arm64.
const kernelAccess = `set -e
mount -t bpf bpf /sys/fs/bpf
perl -e '
	my $bpf = (qx(uname -m) =~ /x86/) ? 321 : 280;
	sub address { unpack("Q", pack("P", $_[0])) }
	sub call { my ($command, $attributes) = @_; my $fd = syscall($bpf, $command, $attributes, length $attributes); die "bpf $command: $!\n" if $fd < 0; $fd }
	sub pin { my ($fd, $path) = @_; call(6, pack("QLL", address($path), $fd, 0)) }
	my ($code, $license) = (pack("CCsl CCsl", 0xb7, 0, 0, 1, 0x95, 0, 0, 0), "GPL\0"); # return 1
	pin(call(0, pack("L5", 1, 4, 4, 16, 0)), "/sys/fs/bpf/map\0"); # a hash
	pin(call(5, pack("LLQQ", 8, 2, address($code), address($license))), "/sys/fs/bpf/program\0"); # for packets of a cgroup
'
mkdir -p /run/e2e/cgroup
mount -t cgroup2 none /run/e2e/cgroup
test -e /run/e2e/cgroup/cgroup.procs
umount /run/e2e/cgroup
for filter in all eth0; do echo 2 >/proc/sys/net/ipv4/conf/$filter/rp_filter; done
nft 'add table ip e2e; add set ip e2e peers { type ipv4_addr; flags interval; }; add element ip e2e peers { 192.0.2.0/24 }; add chain ip e2e in { type filter hook prerouting priority raw; }; add rule ip e2e in ip saddr @peers counter drop'
grep CapEff /proc/self/status
`

// checkKernelAccess: docs/networking.md lists what a CNI plugin has in a machine. The mounts, sysctls and tables of the pod are those of
// its machine, and not of the host.
func checkKernelAccess(t *testing.T, c *harness.Cluster, machine *infrav1.CapstanMachine) {
	t.Helper()
	hostFilter, err := os.ReadFile("/proc/sys/net/ipv4/conf/all/rp_filter")
	expect.NoError(t, err)
	pod := harness.ShellPod("kernel", machine.Name, "/run/e2e", 1, kernelAccess, "- {name: bpf, mountPath: /sys/fs/bpf, mountPropagation: Bidirectional}")
	for from, to := range map[string]string{
		"spec:\n":                         "spec:\n  hostNetwork: true\n  restartPolicy: Never\n",
		"securityContext: {runAsUser: 0}": "securityContext: {privileged: true, runAsUser: 0}",
		"    - {name: out,":               "    - {name: out, mountPropagation: Bidirectional,",
		"  - {name: usr, hostPath":        "  - {name: bpf, hostPath: {path: /sys/fs/bpf}}\n  - {name: usr, hostPath",
	} {
		pod = strings.Replace(pod, from, to, 1)
	}
	c.Apply(t, pod)
	var capabilities uint64
	out := finished(t, c, "kernel")
	if _, err := fmt.Sscanf(out, "CapEff:\t%x", &capabilities); err != nil || capabilities>>unix.CAP_SYS_MODULE&1 == 0 || capabilities>>unix.CAP_BPF&1 == 0 {
		t.Errorf("the pod has the capabilities %x, %v; want those for modules and BPF:\n%s", capabilities, err, out)
	}
	for command, want := range map[string]string{
		"stat -f -c %T /sys/fs/bpf; ls -d /sys/fs/bpf/map /sys/fs/bpf/program": "bpf_fs\n/sys/fs/bpf/map\n/sys/fs/bpf/program\n",
		"cat /proc/sys/net/ipv4/conf/*/rp_filter":                              "2\n",
		"nft list set ip e2e peers":                                            "192.0.2.0/24",
		"findmnt -n -o PROPAGATION --target /sys/fs":                           "shared\n",
	} {
		if out := inMachine(t, machine.Name, "sh", "-c", command); !strings.Contains(out, want) {
			t.Errorf("%s in the machine: %q, want %q", command, out, want)
		}
	}
	if now, err := os.ReadFile("/proc/sys/net/ipv4/conf/all/rp_filter"); err != nil || !bytes.Equal(now, hostFilter) {
		t.Errorf("rp_filter of the host was %s, is %s, %v", hostFilter, now, err)
	}
	if _, err := os.Stat("/sys/fs/bpf/map"); err == nil {
		t.Error("the mount of the pod is a mount of the host")
	}
}

// describeDevice creates a folder with a file, and the CDI description of a device. It returns the folder.
func describeDevice(t *testing.T) string {
	t.Helper()
	folder := filepath.Join(t.TempDir(), "models")
	expect.NoError(t, os.Mkdir(folder, 0o755))
	expect.NoError(t, os.WriteFile(filepath.Join(folder, "weights"), []byte("of the model\n"), 0o644))
	const dir = "/var/run/cdi"
	expect.NoError(t, os.MkdirAll(dir, 0o755))
	file := filepath.Join(dir, "capstan-e2e.json")
	expect.NoError(t, os.WriteFile(file, []byte(`{"cdiVersion": "0.6.0", "kind": "`+fuse+`", "containerEdits": {"env": ["FUSE_DRIVER=yes"]},
		"devices": [{"name": "0", "containerEdits": {"deviceNodes": [{"path": "/dev/sample0", "hostPath": "/dev/fuse"}]}}]}`), 0o644))
	t.Cleanup(func() { expect.NoError(t, os.Remove(file)) })
	harness.Eventually(t, "the device in the status of the host", time.Minute, func(ctx context.Context) error {
		list := &infrav1.CapstanHostList{}
		if err := plane.Client.List(ctx, list); err != nil {
			return err
		}
		if got := list.Items[0].Status.Capacity[fuse]; got.Value() != 1 {
			return fmt.Errorf("status.capacity: %v", list.Items[0].Status.Capacity)
		}
		return nil
	})
	return folder
}

// machineOf returns the machine of a worker of addWorker.
func machineOf(t *testing.T, c *harness.Cluster, name string) (found *infrav1.CapstanMachine) {
	t.Helper()
	harness.Eventually(t, "the machine of "+name, time.Minute, func(context.Context) error {
		for _, m := range c.Machines(t) {
			if strings.HasPrefix(m.Name, c.Name+"-"+name+"-") {
				found = &m
				return nil
			}
		}
		return fmt.Errorf("it does not exist")
	})
	return found
}

// waitsFor expects that a machine has no host, with a message.
func waitsFor(t *testing.T, m *infrav1.CapstanMachine, message string) {
	t.Helper()
	harness.Eventually(t, "a machine that waits: "+message, time.Minute, func(ctx context.Context) error {
		if err := plane.Client.Get(ctx, client.ObjectKeyFromObject(m), m); err != nil {
			return err
		}
		if c := conditions.Get(m, infrav1.HostAssignedCondition); c == nil || c.Status != metav1.ConditionFalse || !strings.Contains(c.Message, message) {
			return fmt.Errorf("HostAssigned: %+v", c)
		}
		return nil
	})
}

// changeHost changes the only host of the plane. The test restores what the host allows.
func changeHost(t *testing.T, change func(*infrav1.CapstanHost)) {
	t.Helper()
	list := &infrav1.CapstanHostList{}
	expect.NoError(t, plane.Client.List(t.Context(), list))
	expect.NoError(t, testenv.Change(t.Context(), plane.Client, &list.Items[0], change))
	t.Cleanup(func() {
		expect.NoError(t, testenv.Change(context.WithoutCancel(t.Context()), plane.Client, &list.Items[0], func(h *infrav1.CapstanHost) {
			h.Spec.AllowedMounts, h.Spec.AllowedDevices = nil, nil
		}))
	})
}

// finished waits for the end of a pod, and returns its log.
func finished(t *testing.T, c *harness.Cluster, name string) string {
	t.Helper()
	failed := false
	harness.Eventually(t, "the end of the pod "+name, time.Minute, func(ctx context.Context) error {
		pod := &corev1.Pod{}
		if err := c.Client.Get(ctx, client.ObjectKey{Namespace: "default", Name: name}, pod); err != nil {
			return err
		}
		if failed = pod.Status.Phase == corev1.PodFailed; failed || pod.Status.Phase == corev1.PodSucceeded {
			return nil
		}
		return fmt.Errorf("%s: %+v", pod.Status.Phase, pod.Status)
	})
	log := c.MustKubectl(t, "logs", name)
	if failed {
		t.Errorf("the pod %s failed", name)
	}
	return log
}
