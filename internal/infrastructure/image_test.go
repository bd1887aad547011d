package infrastructure_test

import (
	"strings"
	"testing"

	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
)

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
