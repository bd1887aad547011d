//go:build e2e

package cluster

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/test/e2e/harness"
)

// runImages adds workers whose root file systems are images of an administrator: a folder and an OCI archive, with a few programs
// and their libraries. The machines have nothing of the host's /usr. A machine that ends starts from its image again. Another worker
// has a folder and a device of the host. The cluster has a control plane only, and four Nodes in the end.
func runImages(t *testing.T, c *harness.Cluster) {
	hosts, err := filepath.Glob(filepath.Join(plane.Root, "hosts", "*"))
	expect.NoError(t, err)
	if len(hosts) != 1 {
		t.Fatalf("hosts: %v", hosts)
	}
	images := filepath.Join(hosts[0], "images")
	makeImage(t, filepath.Join(images, ".folder"), "folder")
	expect.NoError(t, os.Rename(filepath.Join(images, ".folder"), filepath.Join(images, "folder")))
	source := filepath.Join(t.TempDir(), "source")
	makeImage(t, source, "archive")
	expect.NoError(t, os.WriteFile(filepath.Join(images, ".archive.tar"), ociArchive(t, source), 0o600))
	expect.NoError(t, os.Rename(filepath.Join(images, ".archive.tar"), filepath.Join(images, "archive.tar")))
	expect.NoError(t, os.Mkdir(filepath.Join(images, "empty"), 0o755))
	checkStatus(t)

	for _, name := range []string{"folder", "archive"} {
		addWorker(t, c, name, func(spec *infrav1.CapstanMachineSpec) { spec.Image = name })
	}
	harness.Eventually(t, "three Nodes Ready", 3*time.Minute, func(ctx context.Context) error { return c.NodesReady(ctx, 3) })
	for _, m := range c.Machines(t) {
		if m.Spec.Image != "" {
			checkImage(t, c, &m)
		}
	}
	t.Run("a folder and a device of the host", func(t *testing.T) { checkHostAccess(t, c) })
}

// makeImage fills a folder with programs of this system and their libraries.
func makeImage(t *testing.T, dir, name string) {
	t.Helper()
	out, err := exec.Command("/bin/sh", "-euc", `
		mkdir -p "$1/usr/bin" "$1/usr/share" "$1/usr/lib" "$1/etc"
		cp -L /bin/sh "$1/usr/bin/sh"
		for library in $(ldd /bin/sh | grep -o '/[^ ]*'); do cp -L --parents "$library" "$1"; done
		for name in mount umount nft conntrack ls cat; do
			program=$(command -v $name)
			cp -L --parents "$program" "$1"
			for library in $(ldd "$program" | grep -o '/[^ ]*'); do cp -L --parents "$library" "$1"; done
		done
		ln -s usr/bin "$1/bin"
		echo "PRETTY_NAME=\"Image $2 of the test\"" >"$1/usr/lib/os-release"
		ln -s ../usr/lib/os-release "$1/etc/os-release"
		chmod u+s "$1$(command -v mount)"
		echo $2 >"$1/usr/share/image"`, "sh", dir, name).CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
}

// ociArchive returns an OCI archive with a folder as its only layer.
func ociArchive(t *testing.T, dir string) []byte {
	t.Helper()
	layer, err := exec.Command("tar", "-C", dir, "-cz", ".").Output()
	expect.NoError(t, err)
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	add := func(name string, data []byte) {
		expect.NoError(t, w.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(data))}))
		_, err := w.Write(data)
		expect.NoError(t, err)
	}
	blob := func(data []byte, kind string) v1.Descriptor {
		d := v1.Descriptor{MediaType: kind, Digest: digest.FromBytes(data), Size: int64(len(data))}
		add("blobs/sha256/"+d.Digest.Encoded(), data)
		return d
	}
	manifest, err := json.Marshal(v1.Manifest{MediaType: v1.MediaTypeImageManifest, Layers: []v1.Descriptor{blob(layer, v1.MediaTypeImageLayerGzip)}})
	expect.NoError(t, err)
	index, err := json.Marshal(v1.Index{Manifests: []v1.Descriptor{blob(manifest, v1.MediaTypeImageManifest)}})
	expect.NoError(t, err)
	add(v1.ImageIndexFile, index)
	expect.NoError(t, w.Close())
	return out.Bytes()
}

// checkStatus expects the images in the status of the host.
func checkStatus(t *testing.T) {
	t.Helper()
	harness.Eventually(t, "the images of the host", time.Minute, func(ctx context.Context) error {
		list := &infrav1.CapstanHostList{}
		if err := plane.Client.List(ctx, list); err != nil {
			return err
		}
		found := map[string]infrav1.HostImage{}
		for _, i := range list.Items[0].Status.Images {
			found[i.Name] = i
		}
		if len(found) != 3 || found["folder"].Digest == "" || found["archive"].Digest == "" || !strings.Contains(found["empty"].Problem, "expected a root file system") {
			return fmt.Errorf("%+v", found)
		}
		return nil
	})
}

// addWorker creates a MachineDeployment of one machine.
func addWorker(t *testing.T, c *harness.Cluster, name string, change func(*infrav1.CapstanMachineSpec)) {
	t.Helper()
	meta := metav1.ObjectMeta{Namespace: c.Namespace, Name: c.Name + "-" + name}
	infra, config := &infrav1.CapstanMachineTemplate{ObjectMeta: meta}, &bootstrapv1.CapstanConfigTemplate{ObjectMeta: meta}
	infra.Spec.Template.Spec = infrav1.CapstanMachineSpec{CPUs: 1, Memory: ptr.To(resource.MustParse("768Mi"))}
	change(&infra.Spec.Template.Spec)
	config.Spec.Template.ObjectMeta.Labels = map[string]string{clusterv1.ClusterNameLabel: c.Name}
	spec := clusterv1.MachineSpec{ClusterName: c.Name, Version: harness.KubernetesVersion}
	spec.Bootstrap.ConfigRef = clusterv1.ContractVersionedObjectReference{APIGroup: bootstrapv1.GroupVersion.Group, Kind: "CapstanConfigTemplate", Name: meta.Name}
	spec.InfrastructureRef = clusterv1.ContractVersionedObjectReference{APIGroup: infrav1.GroupVersion.Group, Kind: "CapstanMachineTemplate", Name: meta.Name}
	md := &clusterv1.MachineDeployment{ObjectMeta: meta, Spec: clusterv1.MachineDeploymentSpec{
		ClusterName: c.Name, Replicas: ptr.To[int32](1), Template: clusterv1.MachineTemplateSpec{Spec: spec},
	}}
	for _, o := range []client.Object{infra, config, md} {
		expect.NoError(t, plane.Client.Create(t.Context(), o))
	}
}

// checkImage expects that a machine has the programs of its image and no others, without their privileges, that its kubelet mounts
// volumes with them, and that all this is so after the machine has ended.
func checkImage(t *testing.T, c *harness.Cluster, m *infrav1.CapstanMachine) {
	t.Helper()
	checkRoot(t, m)
	node := &corev1.Node{}
	expect.NoError(t, c.Client.Get(t.Context(), client.ObjectKey{Name: m.Name}, node))
	if want := "Image " + m.Spec.Image + " of the test"; node.Status.NodeInfo.OSImage != want {
		t.Errorf("Node %s has the system %q, want %q", m.Name, node.Status.NodeInfo.OSImage, want)
	}
	runPod(t, c, m.Name)
	endMachine(t, m)
	harness.Eventually(t, "three Nodes Ready", time.Minute, func(ctx context.Context) error { return c.NodesReady(ctx, 3) })
	checkRoot(t, m)
}

// checkRoot looks at the root file system of a machine.
func checkRoot(t *testing.T, m *infrav1.CapstanMachine) {
	t.Helper()
	out, err := harness.Command(t.Context(), nil, filepath.Join(harness.Bin(), "capstan"), "shell", m.Name, "--root", plane.Root, "--namespace", m.Namespace,
		"--", "/bin/sh", "-c", "cat /usr/share/image; ls /usr/bin; cat /proc/self/mountinfo")
	expect.NoError(t, err)
	if !strings.HasPrefix(out, m.Spec.Image+"\n") || strings.Contains(out, "dpkg") {
		t.Errorf("%s has another root file system: %s", m.Name, out)
	}
	mounted := false
	for line := range strings.Lines(out) {
		if fields := strings.Fields(line); len(fields) > 5 && fields[4] == "/usr" {
			mounted = true
			if options := strings.Split(fields[5], ","); !slices.Contains(options, "ro") || !slices.Contains(options, "nosuid") || !slices.Contains(options, "nodev") {
				t.Errorf("%s: /usr is mounted with %s", m.Name, options)
			}
		}
	}
	if !mounted {
		t.Errorf("%s has no /usr: %s", m.Name, out)
	}
}

// runPod runs a pod with a volume in memory on a Node, which the kubelet mounts with the program of the image.
func runPod(t *testing.T, c *harness.Cluster, node string) {
	t.Helper()
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "on-" + node}, Spec: corev1.PodSpec{
		NodeName:   node,
		Containers: []corev1.Container{{Name: "pause", Image: "registry.capstan.dev/pause:v1", VolumeMounts: []corev1.VolumeMount{{Name: "memory", MountPath: "/memory"}}}},
		Volumes:    []corev1.Volume{{Name: "memory", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{Medium: corev1.StorageMediumMemory}}}},
	}}
	expect.NoError(t, c.Client.Create(t.Context(), pod))
	harness.Eventually(t, "pod "+pod.Name, time.Minute, func(ctx context.Context) error {
		if err := c.Client.Get(ctx, client.ObjectKeyFromObject(pod), pod); err != nil {
			return err
		}
		if pod.Status.Phase != corev1.PodRunning {
			return fmt.Errorf("%+v", pod.Status)
		}
		return nil
	})
}
