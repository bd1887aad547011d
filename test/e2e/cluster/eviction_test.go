//go:build e2e

package cluster

import (
	"context"
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"capstan.dev/capstan/test/e2e/harness"
)

// evictFromFullDisk: a pod that fills the disk of its machine is evicted. The other machines have no disk pressure, and
// their pods are not evicted, although the disks of all machines are on one disk of the host. The Node of the full
// machine keeps the condition for some minutes, and can lose other pods until the space is free again. This part of the
// test is therefore the last one.
func evictFromFullDisk(t *testing.T, c *harness.Cluster) {
	full := c.Worker(t).Name
	// The kubelet measures volumes once a minute, so it may not yet have found the pod that has filled the disk. The
	// priority then decides.
	first := &schedulingv1.PriorityClass{ObjectMeta: metav1.ObjectMeta{Name: "evicted-first"}, Value: -1}
	pod := filler(full)
	pod.Spec.PriorityClassName = first.Name
	for _, object := range []client.Object{first, pod} {
		if err := c.Client.Create(t.Context(), object); err != nil {
			t.Fatal(err)
		}
	}
	harness.Eventually(t, "the pod is evicted", 2*time.Minute, func(ctx context.Context) error {
		if err := c.Client.Get(ctx, client.ObjectKeyFromObject(pod), pod); err != nil {
			return err
		}
		if pod.Status.Phase != corev1.PodFailed || pod.Status.Reason != "Evicted" {
			return fmt.Errorf("phase %s, reason %q: %s", pod.Status.Phase, pod.Status.Reason, pod.Status.Message)
		}
		return nil
	})
	t.Log(pod.Status.Message)
	nodes := &corev1.NodeList{}
	if err := c.Client.List(t.Context(), nodes); err != nil {
		t.Fatal(err)
	}
	for _, node := range nodes.Items {
		for _, condition := range node.Status.Conditions {
			if condition.Type == corev1.NodeDiskPressure && condition.Status == corev1.ConditionTrue && node.Name != full {
				t.Errorf("%s has no full disk, and the condition %v", node.Name, condition)
			}
		}
	}
	pods := &corev1.PodList{}
	if err := c.Client.List(t.Context(), pods); err != nil {
		t.Fatal(err)
	}
	for _, p := range pods.Items {
		if p.Status.Reason == "Evicted" && p.Spec.NodeName != full {
			t.Errorf("pod %s on %s is evicted: %s", p.Name, p.Spec.NodeName, p.Status.Message)
		}
	}
	if err := c.Client.Delete(t.Context(), pod); err != nil {
		t.Fatal(err)
	}
}

// filler returns a pod that uses the disk of a Node except for 100 MB. Allocated blocks that are not written use no
// space of the host.
func filler(node string) *corev1.Pod {
	system := func(name, from, to string) (corev1.Volume, corev1.VolumeMount) {
		return corev1.Volume{Name: name, VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: from}}},
			corev1.VolumeMount{Name: name, MountPath: to, ReadOnly: true}
	}
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: "filler"},
		Spec: corev1.PodSpec{
			NodeName: node, RestartPolicy: corev1.RestartPolicyNever, TerminationGracePeriodSeconds: ptr.To[int64](0),
			Containers: []corev1.Container{{
				Name: "filler", Image: "registry.capstan.dev/echo:v1",
				Command: []string{"/usr/bin/sh", "-c", `set -- $(/usr/bin/stat -f -c '%a %S' /fill)
/usr/bin/fallocate -l $(($1 * $2 - 100000000)) /fill/file && exec /usr/bin/sleep 100000`},
				VolumeMounts: []corev1.VolumeMount{{Name: "fill", MountPath: "/fill"}},
			}},
			Volumes: []corev1.Volume{{Name: "fill", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}},
		},
	}
	// The image of the test contains one program. The others come from the machine.
	for name, paths := range map[string][2]string{"usr": {"/usr", "/usr"}, "lib": {"/usr/lib", "/lib"}, "lib64": {"/usr/lib64", "/lib64"}} {
		volume, mount := system(name, paths[0], paths[1])
		pod.Spec.Volumes = append(pod.Spec.Volumes, volume)
		pod.Spec.Containers[0].VolumeMounts = append(pod.Spec.Containers[0].VolumeMounts, mount)
	}
	return pod
}
