package infrastructure_test

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
)

// The status of a host lists its container images. A host that reports nonsense does not fill the status, and does not prevent it.
func TestContainerImagesOfAHost(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	status := func() []infrav1.HostContainerImages {
		b.get(b.host)
		return b.host.Status.ContainerImages
	}
	b.fake.SetInfo(func(i *hostpb.HostInfo) {
		i.ContainerArchives = []*hostpb.ContainerArchive{{Name: "a.tar", Images: []string{"registry.example.org/a:v1", "registry.example.org/a:v2"}}, {Name: "b.tar", Problem: "no archive"}}
	})
	b.Eventually(status).Should(Equal([]infrav1.HostContainerImages{
		{Archive: "a.tar", Names: []string{"registry.example.org/a:v1", "registry.example.org/a:v2"}}, {Archive: "b.tar", Problem: "no archive"},
	}))
	b.fake.SetInfo(func(i *hostpb.HostInfo) {
		long := strings.Repeat("x", 2000)
		i.ContainerArchives = []*hostpb.ContainerArchive{{Name: ""}, {Name: long}, {Name: "a\x1b[31m.tar"}, {Name: "same", Problem: long}, {Name: "same"}, {Name: "images", Images: []string{"", long, "a b", "a\nb", "good"}}}
		for n := range 70 { // Below the limit of an answer.
			archive := &hostpb.ContainerArchive{Name: fmt.Sprintf("%04d-%s", n, strings.Repeat("x", 250)), Problem: long}
			for n := range 40 {
				archive.Images = append(archive.Images, fmt.Sprintf("%03d-%s", n, strings.Repeat("x", 252)))
			}
			i.ContainerArchives = append(i.ContainerArchives, archive)
		}
	})
	b.Eventually(func() int { return len(status()) }).Should(Equal(64))
	got := status()
	b.Expect(got[0]).To(Equal(infrav1.HostContainerImages{Archive: "same", Problem: strings.Repeat("x", 256)}))
	b.Expect(got[1]).To(Equal(infrav1.HostContainerImages{Archive: "images", Names: []string{"good"}}))
	names := 0
	for _, archive := range got {
		names += len(archive.Names)
	}
	b.Expect(names).To(Equal(64))
	stored, err := json.Marshal(got)
	b.Expect(err).NotTo(HaveOccurred())
	b.Expect(len(stored)).To(BeNumerically("<", 60_000))
	b.fake.SetInfo(func(i *hostpb.HostInfo) { i.ContainerArchives = nil })
	b.Eventually(status).Should(BeEmpty())
}

// Values that the API does not accept, from a hostile host or a newer capstand, prevent no other part of the status.
func TestOddReportOfAHost(t *testing.T) {
	t.Parallel()
	b, long := newBox(t), strings.Repeat("x", 100)
	b.fake.SetInfo(func(i *hostpb.HostInfo) {
		i.KubernetesVersions = append([]string{"", long}, slices.Repeat([]string{"v1.36.3"}, 101)...)
		i.Architecture, i.OperatingSystem, i.BoxId, i.OverlayPublicKey = long, long, long, "no key"
		i.Machines, i.DiskBackend, i.LocalVolumeSizes = -1, "Newer", "Newer"
		i.MemoryBytes = 5 << 30
	})
	b.Eventually(func() int64 {
		b.get(b.host)
		return b.host.Status.Capacity.Memory().Value()
	}).Should(BeEquivalentTo(5 << 30))
	got, word := b.host.Status, long[:64]
	b.Expect(got.Versions).To(Equal(slices.Repeat([]string{"v1.36.3"}, 100)))
	b.Expect(got.NodeInfo).To(Equal(infrav1.NodeInfo{Architecture: word, OperatingSystem: word}))
	b.Expect(got.BoxID).To(Equal(word))
	b.Expect(got.Machines).To(HaveValue(BeZero()))
	b.Expect([]string{string(got.DiskBackend), string(got.LocalVolumeSizes), got.OverlayPublicKey}).To(HaveEach(BeEmpty()))
}

// A machine waits until a host has its image. The status of the host lists the images that the API accepts.
func TestMachineWaitsForItsImage(t *testing.T) {
	t.Parallel()
	b := newBox(t).provisioned()
	_, m := b.addMachine(nil, func(m *infrav1.CapstanMachine) { m.Spec.Image = "debian-13" })
	b.Expect(b.condition(m, "HostAssigned", metav1.ConditionFalse, "NoHost")).To(ContainSubstring("has no image debian-13 (it has host)"))
	bad := &hostpb.MachineImage{Name: "debian-13", Problem: "expected the program nft " + strings.Repeat("x", 300)}
	b.fake.SetInfo(func(i *hostpb.HostInfo) {
		i.MachineImages = []*hostpb.MachineImage{bad, bad, {Name: "../etc"}, {Name: strings.Repeat("a", 64)}, {Name: "long", Digest: strings.Repeat("a", 72)}}
	})
	b.Eventually(func() []infrav1.HostImage {
		b.get(b.host)
		return b.host.Status.Images
	}).Should(ConsistOf(infrav1.HostImage{Name: "debian-13", Problem: bad.Problem[:256]}))
	b.Eventually(func() string { return b.condition(m, "HostAssigned", metav1.ConditionFalse, "NoHost") }).
		Should(ContainSubstring("cannot use its image debian-13: see status.images of the CapstanHost"))
	digest := "sha256:" + strings.Repeat("0", 64)
	b.fake.SetInfo(func(i *hostpb.HostInfo) {
		i.Images, i.MachineImages = []string{"host", "debian-13"}, []*hostpb.MachineImage{{Name: "debian-13", Digest: digest}}
	})
	b.running(m)
	made, _ := b.fake.Machine(m.Spec.ID)
	b.Expect(made.GetSpec().GetImage()).To(Equal("debian-13"))
	b.Eventually(func() []infrav1.HostImage {
		b.get(b.host)
		return b.host.Status.Images
	}).Should(ConsistOf(infrav1.HostImage{Name: "debian-13", Digest: digest}))
}
