//go:build e2e

package node

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/test/e2e/harness"
)

const blockFolder = "/var/lib/capstan/block-volumes/"

// blockClaim and its pod, with a name and a Node. The pod runs as an ordinary user.
func blockClaim(name, node string) string {
	pod := harness.ShellPod(name, node, "/var/out", 1, "exec sleep infinity", "volumeDevices: [{name: data, devicePath: /dev/data}]")
	return strings.NewReplacer(
		fmt.Sprintf("nodeName: %q", node), "nodeSelector: {kubernetes.io/hostname: "+node+"}",
		"  volumes:\n", "  volumes:\n  - {name: data, persistentVolumeClaim: {claimName: "+name+"}}\n",
		"runAsUser: 0", "runAsUser: 1000",
	).Replace(pod) + fmt.Sprintf(`---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: %s}
spec: {storageClassName: capstan-local, volumeMode: Block, accessModes: [ReadWriteOnce], resources: {requests: {storage: 16Mi}}}
`, name)
}

// testBlockVolumes: the data of a block volume outlives its pod. A machine without loop devices refuses the claim. The pod stays for
// the tests of killed services and of restarts.
func testBlockVolumes(t *testing.T, cp, _ *host) {
	cp.apply(blockClaim("block", "worker") + blockClaim("refused", "cp"))
	cp.mustKubectl("wait", "--for=condition=Ready", "pod/block", "--timeout=2m")
	inPod(t, cp, "printf precious | dd of=/dev/data conv=fsync && test $(dd if=/dev/data bs=1M | wc -c) = 16777216")
	volume := volumeOf(cp, "block")
	// Programs of the host ignore the device by this path.
	if got := loopFiles(t, volume); len(got) != 2 || got[0] != blockFolder+volume+"/disk" && got[1] != blockFolder+volume+"/disk" {
		t.Errorf("the host has loop devices with %q, want the file of the volume and the device that the kubelet holds", got)
	}
	cp.mustKubectl("delete", "pod", "block")
	harness.Wait(t, "the pod leaves its loop device", time.Minute, func() error { return loops(t, volume, 1) })
	cp.apply(blockClaim("block", "worker"))
	harness.Wait(t, "the pod reads its data again", 2*time.Minute, func() error { return precious(cp) })

	harness.Wait(t, "the event of the refused claim", time.Minute, func() error {
		return told(cp, "PersistentVolumeClaim", "refused", "ProvisioningFailed", "name it in spec.devices of the CapstanMachine")
	})
	// The refused volume has a record, until its claim goes, and no data.
	_, err := cp.exec("sh", "-c", "! ls -d "+blockFolder+"*/ && ! test -e /run/programs/losetup")
	expect.NoError(t, err)
	cp.mustKubectl("delete", "pod/refused", "pvc/refused")
	harness.Wait(t, "the refused volume is removed", time.Minute, func() error {
		_, err := cp.exec("sh", "-c", "test -z \"$(ls "+blockFolder+")\"")
		return err
	})
}

// testBlockVolumeAfterRestart: the data outlives the machine's processes. A volume stays as long as a container can have its device, and
// nothing stays afterwards.
func testBlockVolumeAfterRestart(t *testing.T, cp, worker *host) {
	harness.Wait(t, "the pod reads its data after the restart", 2*time.Minute, func() error { return precious(cp) })
	volume := volumeOf(cp, "block")
	expect.NoError(t, loops(t, volume, 2))
	kubelet := func(action string) {
		_, err := worker.exec("/opt/capstan/capstan-init", "service", action, "kubelet")
		expect.NoError(t, err)
	}
	kubelet("stop")
	cp.mustKubectl("delete", "pod/block", "--force", "--grace-period=0")
	cp.mustKubectl("delete", "pvc/block")
	harness.Wait(t, "the event of the volume that the kubelet holds", time.Minute, func() error { return told(cp, "PersistentVolume", volume, "DeletionFailed", "the kubelet holds it") })
	expect.NoError(t, loops(t, volume, 2))
	kubelet("start")
	harness.Wait(t, "the volume is removed", 2*time.Minute, func() error { return volumeIsGone(cp, volume) })
	expect.NoError(t, loops(t, volume, 0))
	_, err := worker.exec("sh", "-c", "test -z \"$(ls "+blockFolder+" /run/block-volumes | grep pvc-)\"")
	expect.NoError(t, err)
}

func volumeOf(cp *host, claim string) string {
	return cp.mustKubectl("get", "pvc", claim, "-o", "jsonpath={.spec.volumeName}")
}

func inPod(t *testing.T, cp *host, script string) {
	t.Helper()
	_, err := cp.kubectl("exec", "block", "--", "/usr/bin/sh", "-ec", script)
	expect.NoError(t, err)
}

func precious(cp *host) error {
	out, err := cp.kubectl("exec", "block", "--", "/usr/bin/head", "-c", "8", "/dev/data")
	if err == nil && out != "precious" {
		err = fmt.Errorf("the block volume has %q", out)
	}
	return err
}

// loopFiles returns the files of the loop devices of the host that belong to a volume.
func loopFiles(t *testing.T, volume string) (files []string) {
	t.Helper()
	paths, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	expect.NoError(t, err)
	for _, path := range paths {
		if file, err := os.ReadFile(path); err == nil && strings.Contains(string(file), volume) {
			files = append(files, strings.TrimSpace(string(file)))
		}
	}
	return files
}

func loops(t *testing.T, volume string, want int) error {
	t.Helper()
	if got := loopFiles(t, volume); len(got) != want {
		return fmt.Errorf("the host has loop devices with %q, want %d", got, want)
	}
	return nil
}
