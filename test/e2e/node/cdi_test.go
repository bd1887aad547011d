//go:build e2e

package node

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"capstan.dev/capstan/internal/host/devices"
	"capstan.dev/capstan/internal/machineapi"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/test/e2e/harness"
)

// testCDI: a pod that requests a device of the machine gets the device node and the variables by the CDI name of the device. capstand
// gives the machine the device and its description; this test does so in its place.
func testCDI(t *testing.T, cp, worker *host) {
	dir := t.TempDir()
	expect.NoError(t, os.WriteFile(filepath.Join(dir, "sample.json"), []byte(`{"cdiVersion": "0.6.0", "kind": "example.com/sample", "containerEdits": {"env": ["SAMPLE_DRIVER=1"]},
		"devices": [{"name": "0", "containerEdits": {"deviceNodes": [{"path": "/dev/sample0", "hostPath": "/dev/zero"}]}}]}`), 0o600))
	cdi, err := devices.NewCDI(dir)
	expect.NoError(t, err)
	specs, err := cdi.MachineSpecs([]string{"example.com/sample=0"}, true)
	expect.NoError(t, err)
	expect.NoError(t, os.Mkdir(filepath.Join(worker.run, machineapi.CDIFolder), 0o755))
	for name, content := range specs {
		expect.NoError(t, os.WriteFile(filepath.Join(worker.run, machineapi.CDIFolder, name), content, 0o644))
	}
	_, err = worker.exec("/bin/sh", "-c", "test -e /dev/sample0 || mknod /dev/sample0 c 1 5")
	expect.NoError(t, err)

	harness.ServeDevicePlugin(t, worker.root, "example.com/sample", "example.com/sample=0")
	harness.Wait(t, "the node offers the device", time.Minute, func() error {
		out, err := cp.kubectl("get", "node", "worker", "-o", `jsonpath={.status.allocatable.example\.com/sample}`)
		if err == nil && out != "1" {
			err = fmt.Errorf("the node offers %q devices", out)
		}
		return err
	})
	// The pause image was pulled with credentials by another name before, so the kubelet refuses it to pods without a pull.
	pod := strings.Replace(pullPod("sample", "worker", "registry.capstan.dev/echo:v1"), "Always", "Never", 1)
	cp.apply(strings.Replace(pod, "name: pause,", "name: pause, resources: {limits: {example.com/sample: 1}},", 1))
	cp.mustKubectl("wait", "--for=condition=Ready", "pod/sample", "--timeout=1m")
	out, err := worker.exec("/bin/sh", "-c", `for p in $(grep -ls SAMPLE_DRIVER=1 /proc/[0-9]*/environ); do stat -L -c '%t:%T %F' "${p%environ}root/dev/sample0"; done`)
	if err != nil || out != "1:5 character special file\n" {
		t.Errorf("the pod has %q, %v", out, err)
	}
	cp.mustKubectl("delete", "pod", "--wait", "--grace-period=1", "sample")
}
