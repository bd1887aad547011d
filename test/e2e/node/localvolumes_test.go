//go:build e2e

package node

import (
	"fmt"
	"path"
	"strings"
	"testing"
	"time"

	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/test/e2e/harness"
)

const (
	database = `
apiVersion: v1
kind: Service
metadata: {name: db}
spec: {clusterIP: None, selector: {app: db}}
---
apiVersion: apps/v1
kind: StatefulSet
metadata: {name: db}
spec:
  serviceName: db
  selector: {matchLabels: {app: db}}
  template:
    metadata: {labels: {app: db}}
    spec:
      terminationGracePeriodSeconds: 1
      securityContext: {runAsUser: 1000}
      containers:
      - {name: db, image: "registry.capstan.dev/echo:v1", args: [serve, -data, /data], volumeMounts: [{name: data, mountPath: /data}],
         readinessProbe: {httpGet: {path: /healthz, port: 8080}}}
  volumeClaimTemplates:
  - metadata: {name: data}
    spec: {storageClassName: capstan-local, accessModes: [ReadWriteOnce], resources: {requests: {storage: 16Mi}}}
`
	// The claim and its pod, with a name and a size. The class is the default one.
	claimAndPod = `
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: %[1]s}
spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: %[2]s}}}
---
apiVersion: v1
kind: Pod
metadata: {name: %[1]s}
spec:
  terminationGracePeriodSeconds: 1
  containers: [{name: echo, image: "registry.capstan.dev/echo:v1", volumeMounts: [{name: data, mountPath: /data}]}]
  volumes: [{name: data, persistentVolumeClaim: {claimName: %[1]s}}]
`
	// A volume with a name, a path, a node and a UID of its claim.
	volumeOfAgent = `
apiVersion: v1
kind: PersistentVolume
metadata: {name: %[1]q, annotations: {pv.kubernetes.io/provisioned-by: capstan.dev/local-volumes}}
spec:
  storageClassName: capstan-local
  persistentVolumeReclaimPolicy: Delete
  accessModes: [ReadWriteOnce]
  capacity: {storage: 1Gi}
  local: {path: %[2]q}
  claimRef: {apiVersion: v1, kind: PersistentVolumeClaim, namespace: default, name: gone, uid: %[4]q}
  nodeAffinity: {required: {nodeSelectorTerms: [{matchExpressions: [{key: kubernetes.io/hostname, operator: In, values: [%[3]q]}]}]}}
`
	volumesFolder = "/var/lib/capstan/volumes/"
	foreignUID    = "01234567-89ab-cdef-0123-456789abcdef"
)

// testLocalVolumes: data outlives its pod and ends with its claim. A claim that is too large is refused. The agent of a worker can
// only create volumes of its own node, and removes nothing else. What it did not do while it was stopped, it does afterwards.
func testLocalVolumes(t *testing.T, cp, worker *host) {
	cp.apply(database)
	cp.mustKubectl("rollout", "status", "statefulset/db", "--timeout=3m")
	expect.NoError(t, post(cp, worker, "precious"))
	cp.mustKubectl("delete", "pod", "db-0")
	cp.mustKubectl("rollout", "status", "statefulset/db", "--timeout=3m")
	harness.Wait(t, "the database has its line again", time.Minute, func() error { return linesContain(cp, "precious") })

	testLargeClaim(t, cp)
	testHostileVolumes(t, cp, worker)
	testStoppedAgent(t, cp, worker)
	testLostVolume(t, cp)
}

func post(cp, worker *host, line string) error {
	request := fmt.Sprintf(`POST /lines HTTP/1.0\r\nContent-Length: %d\r\n\r\n%s`, len(line), line)
	answer, err := worker.exec("bash", "-c", fmt.Sprintf(`exec 3<>/dev/tcp/%s/8080; printf '%s' >&3; cat <&3`, podIP(cp, "db-0"), request))
	if err == nil && !strings.Contains(answer, " 200 ") {
		err = fmt.Errorf("the pod does not store the line: %s", answer)
	}
	return err
}

func linesContain(cp *host, line string) error {
	out, err := cp.kubectl("exec", "db-0", "--", "/echo", "get", "http://127.0.0.1:8080/lines")
	if err == nil && !strings.Contains(out, line) {
		err = fmt.Errorf("the lines of the volume are %q, want %q", out, line)
	}
	return err
}

func podIP(cp *host, pod string) string {
	return cp.mustKubectl("get", "pod", pod, "-o", "jsonpath={.status.podIP}")
}

func testLargeClaim(t *testing.T, cp *host) {
	cp.apply(fmt.Sprintf(claimAndPod, "large", "100Ti"))
	harness.Wait(t, "the event of the large claim", time.Minute, func() error {
		return told(cp, "PersistentVolumeClaim", "large", "ProvisioningFailed", "found a request for 100Ti")
	})
	cp.mustKubectl("delete", "pod/large", "pvc/large")
}

// testHostileVolumes acts with the credential of the worker's agent, and as an administrator who names another folder.
func testHostileVolumes(t *testing.T, cp, worker *host) {
	name := "pvc-" + foreignUID
	other := "pvc-11234567-89ab-cdef-0123-456789abcdef"
	asAgent := func(manifest string) (string, error) {
		return worker.execInput(manifest, kubectl, "--kubeconfig=/etc/kubernetes/node-agent.conf", "create", "--validate=false", "-f", "-")
	}
	for _, c := range []struct{ what, name, path, node, message string }{
		{"another node", name, volumesFolder + name, "cp", "of its own node"},
		{"another path", name, "/etc", "worker", "in /var/lib/capstan/volumes"},
		{"the path of a block volume", name, "/run/block-volumes/" + name, "worker", "in /var/lib/capstan/volumes"},
		{"the path of another volume", name, volumesFolder + other, "worker", "in /var/lib/capstan/volumes"},
		{"another name", "mine", volumesFolder + "mine", "worker", "named pvc-UID"},
		{"the name of another claim", other, volumesFolder + other, "worker", "not that of its claim"},
	} {
		_, err := asAgent(fmt.Sprintf(volumeOfAgent, c.name, c.path, c.node, foreignUID))
		if err == nil || !strings.Contains(err.Error(), c.message) {
			t.Errorf("%s: %v, want a refusal with %q", c.what, err, c.message)
		}
	}
	bound := cp.mustKubectl("get", "pvc", "data-db-0", "-o", "jsonpath={.spec.volumeName}")
	_, err := worker.exec(kubectl, "--kubeconfig=/etc/kubernetes/node-agent.conf", "delete", "--wait=false", "pv", bound)
	if err == nil || !strings.Contains(err.Error(), "whose claim is gone") {
		t.Errorf("the agent deletes a volume with a claim: %v", err)
	}
	cp.apply(fmt.Sprintf(volumeOfAgent, name, "/etc/capstan", "worker", foreignUID))
	harness.Wait(t, "the claim has released "+name, time.Minute, func() error { return phase(cp, name, "Released") })
	_, err = worker.exec("ln", "-s", "/etc/capstan", volumesFolder+bound+"/escape")
	expect.NoError(t, err)
}

func phase(cp *host, volume, want string) error {
	got, err := cp.kubectl("get", "pv", volume, "-o", "jsonpath={.status.phase}")
	if err == nil && got != want {
		err = fmt.Errorf("the volume %s is %s, want %s", volume, got, want)
	}
	return err
}

// testStoppedAgent: the folder of the new claim exists without its volume, as if the agent had been killed between the two.
func testStoppedAgent(t *testing.T, cp, worker *host) {
	service := func(action string) {
		_, err := worker.exec("/opt/capstan/capstan-init", "service", action, "node-agent")
		expect.NoError(t, err)
	}
	bound := cp.mustKubectl("get", "pvc", "data-db-0", "-o", "jsonpath={.spec.volumeName}")
	service("stop")
	cp.mustKubectl("delete", "statefulset/db", "service/db", "pvc/data-db-0")
	harness.Wait(t, "the claim has released "+bound, time.Minute, func() error { return phase(cp, bound, "Released") })
	cp.apply(fmt.Sprintf(claimAndPod, "late", "16Mi"))
	late := volumesFolder + "pvc-" + cp.mustKubectl("get", "pvc", "late", "-o", "jsonpath={.metadata.uid}")
	_, err := worker.exec("sh", "-c", "mkdir "+late+" && test -s "+volumesFolder+bound+"/lines")
	expect.NoError(t, err)
	service("start")

	cp.mustKubectl("wait", "--for=condition=Ready", "pod/late", "--timeout=2m")
	harness.Wait(t, "volume "+bound+" is removed", time.Minute, func() error { return volumeIsGone(cp, bound) })
	_, err = worker.exec("sh", "-c", "test ! -e "+volumesFolder+bound+" && test -s /etc/capstan/node.yaml")
	expect.NoError(t, err)
	cp.mustKubectl("delete", "pv", "pvc-"+foreignUID)
	testMountInVolume(t, cp, worker, late)
}

// testMountInVolume: a mount in the folder of a deleted claim has the data of something else.
func testMountInVolume(t *testing.T, cp, worker *host, folder string) {
	cp.mustKubectl("delete", "pod/late") // The kubelet's mount of the volume would have the same mount, and stay.
	_, err := worker.exec("sh", "-c", "mkdir "+folder+"/mount && mount --bind /etc/capstan "+folder+"/mount")
	expect.NoError(t, err)
	cp.mustKubectl("delete", "pvc/late")
	harness.Wait(t, "the event of the mount in the volume", time.Minute, func() error {
		return told(cp, "PersistentVolume", path.Base(folder), "DeletionFailed", "no mount in the volume")
	})
	_, err = worker.exec("sh", "-c", "test -s /etc/capstan/node.yaml && umount "+folder+"/mount")
	expect.NoError(t, err)
	harness.Wait(t, "the folder of the volume is removed", time.Minute, func() error { _, err := worker.exec("test", "!", "-e", folder); return err })
}

// testLostVolume: the users of a volume whose Node is gone are told. The volume goes with its claim.
func testLostVolume(t *testing.T, cp *host) {
	cp.apply(`
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: gone}
spec: {storageClassName: capstan-local, accessModes: [ReadWriteOnce], resources: {requests: {storage: 16Mi}}}
`)
	uid := cp.mustKubectl("get", "pvc", "gone", "-o", "jsonpath={.metadata.uid}")
	cp.apply(fmt.Sprintf(volumeOfAgent, "pvc-"+uid, volumesFolder+"pvc-"+uid, "gone-node", uid))
	harness.Wait(t, "the event of the lost volume", time.Minute, func() error { return told(cp, "PersistentVolumeClaim", "gone", "VolumeLost", "gone-node") })
	expect.NoError(t, phase(cp, "pvc-"+uid, "Bound"))
	cp.mustKubectl("delete", "pvc", "gone")
	harness.Wait(t, "the lost volume is removed", time.Minute, func() error { return volumeIsGone(cp, "pvc-"+uid) })
}

// told returns an error unless an object has an event with a reason and a part of the message.
func told(cp *host, kind, name, reason, part string) error {
	events, err := cp.kubectl("get", "events", "--field-selector", fmt.Sprintf("involvedObject.kind=%s,involvedObject.name=%s,reason=%s", kind, name, reason),
		"-o", "jsonpath={.items[*].message}")
	if err == nil && !strings.Contains(events, part) {
		err = fmt.Errorf("the events %s of %s %s are %q", reason, kind, name, events)
	}
	return err
}

func volumeIsGone(cp *host, name string) error {
	left, err := cp.kubectl("get", "pv", name, "--ignore-not-found", "-o", "name")
	if err == nil && left != "" {
		err = fmt.Errorf("the volume %s remains", name)
	}
	return err
}
