//go:build e2e

package host_test

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/test/e2e/harness"
)

const containerdConfig = `version = 3
[plugins."io.containerd.cri.v1.runtime"]
  restrict_oom_score_adj = true
`

const kubeletConfig = `{"apiVersion":"kubelet.config.k8s.io/v1beta1","kind":"KubeletConfiguration",
 "failCgroupV1":false,"cgroupDriver":"cgroupfs","evictionHard":{},"volumePluginDir":"/var/lib/kubelet/plugins-exec","failSwapOn":false,"enableServer":true,
 "authentication":{"anonymous":{"enabled":true},"webhook":{"enabled":false}},"authorization":{"mode":"AlwaysAllow"},
 "containerRuntimeEndpoint":"unix:///run/containerd/containerd.sock"}`

// A real kubelet in a machine reports the size of the machine instead of the host's. Images are loaded into the
// machine's containerd, where the kubelet finds them.
func TestKubeletAndImages(t *testing.T) {
	leavesNothing(t)
	c := newCapstand(t)
	host(t, "rm -r "+c.assets+"/kubernetes "+c.assets+"/node && cd "+harness.Bin()+" && cp -a node kubernetes "+c.assets)
	spec := blue.machine(10)
	spec.MemoryBytes, spec.DiskBytes = 1<<30, 2<<30
	m := c.make(spec)
	address := blue.address(10)
	inside(t, address, "mkdir -p /etc/containerd && cat > /etc/containerd/config.toml <<'E'\n"+containerdConfig+"E\n"+
		"cat > /etc/kubelet.json <<'E'\n"+kubeletConfig+"\nE\n"+
		"setsid /opt/capstan/node/bin/containerd > /var/log/capstan/containerd.log 2>&1 &")
	eventually(t, "containerd", func() error {
		_, _, err := get(address, "/name")
		if out := inside(t, address, "test -S /run/containerd/containerd.sock && echo yes || true"); out != "yes" {
			err = fmt.Errorf("no socket")
		}
		return err
	})

	// PID 1 stays testinit. capstand starts the real capstan-init for the import.
	host(t, "cp "+harness.Bin()+"/capstan-init "+c.assets+"/real && mv "+c.assets+"/real "+c.assets+"/capstan-init")
	for _, name := range []string{"pause", "pause", "echo"} { // The second import finds the existing image.
		loaded, err := c.loadImage(filepath.Join(harness.Bin(), "images", name+".tar"), m.Spec.Id)
		expect.NoError(t, err)
		if want := []string{"registry.capstan.dev/" + name + ":v1"}; !slices.Equal(loaded, want) {
			t.Errorf("loading %s.tar returned %q, want %q", name, loaded, want)
		}
	}
	listed := strings.Fields(inside(t, address, "/opt/capstan/node/bin/ctr -n k8s.io images ls -q 2>/dev/null | grep -v ^sha256:")) // The CRI adds a name by digest.
	slices.Sort(listed)
	if want := []string{"registry.capstan.dev/echo:v1", "registry.capstan.dev/pause:v1"}; !slices.Equal(listed, want) {
		t.Errorf("containerd has %q, want %q", listed, want)
	}
	if names, err := c.loadImage("node_test.go", m.Spec.Id); err == nil || !strings.Contains(err.Error(), "expected a tar archive") {
		t.Errorf("loading an invalid archive: %q, %v", names, err)
	}

	inside(t, address, "setsid /opt/capstan/kubernetes/"+version+"/kubelet --config /etc/kubelet.json > /var/log/capstan/kubelet.log 2>&1 &")
	var metrics string
	eventually(t, "kubelet", func() (err error) {
		metrics = inside(t, address, "curl -ksS -m 2 https://127.0.0.1:10250/metrics/cadvisor | grep ^machine_ || tail -3 /var/log/capstan/kubelet.log")
		if !strings.Contains(metrics, "machine_memory_bytes") {
			err = fmt.Errorf("%s", metrics)
		}
		return err
	})
	for metric, want := range map[string]string{"machine_cpu_cores": "1", "machine_cpu_physical_cores": "1", "machine_memory_bytes": "1.073741824e+09"} {
		found := regexp.MustCompile(`(?m)^` + metric + `\{.*\} (\S+)$`).FindStringSubmatch(metrics)
		if len(found) != 2 || found[1] != want {
			t.Errorf("%s is %v, want %s", metric, found, want)
		}
	}
	if log := inside(t, address, "grep -i 'failed to set.*sysctl\\|read-only file system' /var/log/capstan/kubelet.log || true"); log != "" {
		t.Errorf("errors of the kubelet: %s", log)
	}
	c.deleteMachine(m.Spec)
}

// loadImage sends an archive to a machine.
func (c *capstand) loadImage(path, machine string) ([]string, error) {
	c.t.Helper()
	file, err := os.Open(path)
	expect.NoError(c.t, err)
	defer func() { _ = file.Close() }()
	stream, err := c.LoadImage(c.ctx())
	expect.NoError(c.t, err)
	expect.NoError(c.t, stream.Send(&hostpb.LoadImageRequest{Machine: machine}))
	buffer := make([]byte, 1<<20)
	for {
		n, err := file.Read(buffer)
		if err == io.EOF {
			break
		}
		expect.NoError(c.t, err)
		if stream.Send(&hostpb.LoadImageRequest{Chunk: buffer[:n]}) != nil {
			break // The response contains the cause.
		}
	}
	res, err := stream.CloseAndRecv()
	return res.GetImages(), err
}
