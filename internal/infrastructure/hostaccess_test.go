package infrastructure_test

import (
	"testing"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
)

// ALL-18: a machine waits with a clear message until its host allows its mounts and devices for its namespace. The host then gets
// them with the machine, and they cannot change. A machine that names its host and id itself gets nothing more.
func TestHostAccess_ALL18(t *testing.T) {
	t.Parallel()
	b := newBox(t).provisioned()
	b.fake.SetInfo(func(i *hostpb.HostInfo) {
		i.HostMounts, i.Devices = true, []*hostpb.DeviceKind{{Name: "example.com/gpu", Count: 1}, {Name: "not a resource", Count: 1}}
	})
	request := func(m *infrav1.CapstanMachine) {
		m.Spec.HostMounts = []infrav1.HostMount{{Source: "/srv/models/a", Path: "/mnt/models"}}
		m.Spec.Devices = []infrav1.MachineDevice{{Name: "example.com/gpu"}, {Name: "/dev/kvm"}}
	}
	_, m := b.addMachine(nil, request)
	b.Expect(b.condition(m, infrav1.HostAssignedCondition, metav1.ConditionFalse, infrav1.NoHostReason)).
		To(ContainSubstring("%s does not allow namespace %s to mount /srv/models/a", b.host.Name, b.namespace))
	_, forged := b.addMachine(nil, func(m *infrav1.CapstanMachine) {
		request(m)
		m.Spec.ID, m.Spec.HostName, m.Spec.HostID = "forged-"+m.Name, b.host.Name, ""
		m.Spec.Network.Addresses = []infrav1.InterfaceAddress{{Address: "10.200.8.77", Prefix: 21, Gateway: "10.200.8.1"}}
	})
	b.Expect(b.condition(forged, infrav1.HostAssignedCondition, metav1.ConditionFalse, infrav1.HostNotAllowedReason)).
		To(ContainSubstring("does not allow namespace %s to mount /srv/models/a", b.namespace))
	b.delete(forged)

	allowed := infrav1.AllowedNamespaces{Names: []string{b.namespace}}
	update(b, b.host, func(h *infrav1.CapstanHost) {
		h.Spec.AllowedMounts = []infrav1.AllowedMount{{Path: "/srv/models", AllowedNamespaces: allowed}}
		h.Spec.AllowedDevices = []infrav1.AllowedDevice{{Name: "example.com/gpu", AllowedNamespaces: allowed}, {Name: "/dev/kvm", AllowedNamespaces: infrav1.AllowedNamespaces{Names: []string{"others"}}}}
	})
	b.Eventually(func() string {
		return b.condition(m, infrav1.HostAssignedCondition, metav1.ConditionFalse, infrav1.NoHostReason)
	}).Should(ContainSubstring("to have the device /dev/kvm"))
	update(b, b.host, func(h *infrav1.CapstanHost) { h.Spec.AllowedDevices[1].AllowedNamespaces = allowed })
	b.running(m)
	made, _ := b.fake.Machine(m.Spec.ID)
	b.Expect(made.GetSpec().GetHostMounts()).To(HaveLen(1))
	b.Expect(made.GetSpec().GetHostMounts()[0].GetReadOnly()).To(BeTrue())
	b.Expect(made.GetSpec().GetDevices()).To(HaveLen(2))

	_, second := b.addMachine(nil, request)
	b.Eventually(func() string {
		return b.condition(second, infrav1.HostAssignedCondition, metav1.ConditionFalse, infrav1.NoHostReason)
	}).Should(ContainSubstring("has 0 free devices example.com/gpu, 1 are needed"))
	b.get(b.host)
	b.Expect(b.host.Status.Capacity).To(HaveKeyWithValue(corev1.ResourceName("example.com/gpu"), resource.MustParse("1")))
	b.Expect(b.host.Status.Capacity).NotTo(HaveKey(corev1.ResourceName("not a resource")))

	b.get(m)
	m.Spec.HostMounts[0].ReadOnly = ptr.To(false)
	b.Expect(env.Client.Update(ctx, m)).To(MatchError(ContainSubstring("hostMounts cannot be changed")))
	b.get(m)
	m.Spec.Devices = nil
	b.Expect(env.Client.Update(ctx, m)).To(MatchError(ContainSubstring("devices cannot be changed")))
}

// The CRDs refuse mounts and devices that no host gives.
func TestHostAccessValidation(t *testing.T) {
	t.Parallel()
	b := newNamespace(t)
	names := infrav1.AllowedNamespaces{Names: []string{b.namespace}}
	for source, why := range map[string]string{
		"/": "should be at least 2", "srv/a": "absolute path", "/srv/../etc": "absolute path", "/srv/a/": "absolute path", "/etc": "host's system", "/run/containerd": "host's system",
		"/var/lib": "host's system", "/var/lib/capstan/host": "host's system", "/proc/1": "host's system", "/srv/models": "", "/var/lib/models": "",
	} {
		h := &infrav1.CapstanHost{ObjectMeta: metav1.ObjectMeta{Name: unique("v")}, Spec: infrav1.CapstanHostSpec{
			Address: "unix:///nothing", AllowedNamespaces: &names, AllowedMounts: []infrav1.AllowedMount{{Path: source, AllowedNamespaces: names}},
		}}
		if err := env.Client.Create(ctx, h); why == "" {
			b.Expect(err).NotTo(HaveOccurred(), source)
			b.Expect(env.Client.Delete(ctx, h)).To(Succeed())
		} else {
			b.Expect(err).To(MatchError(ContainSubstring(why)), source)
		}
	}
	for name, tc := range map[string]struct {
		mounts  []infrav1.HostMount
		devices []infrav1.MachineDevice
		why     string
	}{
		"over the system":   {mounts: []infrav1.HostMount{{Source: "/srv/a", Path: "/usr/lib"}}, why: "path must be below"},
		"over Capstan":      {mounts: []infrav1.HostMount{{Source: "/srv/a", Path: "/opt/capstan/x"}}, why: "path must be below"},
		"with dots":         {mounts: []infrav1.HostMount{{Source: "/srv/a", Path: "/mnt/../etc"}}, why: "path must be below"},
		"twice":             {mounts: []infrav1.HostMount{{Source: "/srv/a", Path: "/mnt/a"}, {Source: "/srv/b", Path: "/mnt/a"}}, why: "Duplicate value"},
		"nested":            {mounts: []infrav1.HostMount{{Source: "/srv/a", Path: "/mnt/a"}, {Source: "/srv/b", Path: "/mnt/a/b"}}, why: "can be below another"},
		"no device":         {devices: []infrav1.MachineDevice{{Name: "/etc/passwd"}}, why: "name must be the path of a device node"},
		"a terminal":        {devices: []infrav1.MachineDevice{{Name: "/dev/pts/1"}}, why: "name must be the path of a device node"},
		"no kind":           {devices: []infrav1.MachineDevice{{Name: "gpu"}}, why: "or a CDI kind"},
		"two nodes":         {devices: []infrav1.MachineDevice{{Name: "/dev/kvm", Count: 2}}, why: "a device node has no count"},
		"too many":          {devices: []infrav1.MachineDevice{{Name: "example.com/gpu", Count: 65}}, why: "less than or equal to 64"},
		"mounts and device": {mounts: []infrav1.HostMount{{Source: "/srv/a", Path: "/mnt/a"}}, devices: []infrav1.MachineDevice{{Name: "example.com/gpu", Count: 2}}},
	} {
		m := &infrav1.CapstanMachine{ObjectMeta: metav1.ObjectMeta{Namespace: b.namespace, Name: unique("v")}}
		m.Spec.HostMounts, m.Spec.Devices = tc.mounts, tc.devices
		if err := env.Client.Create(ctx, m); tc.why == "" {
			b.Expect(err).NotTo(HaveOccurred(), name)
		} else {
			b.Expect(err).To(MatchError(ContainSubstring(tc.why)), name)
		}
	}
}

// IM-07: the capacity of a template contains its CDI devices, so that autoscalers scale from zero, and no device nodes.
func TestTemplateDevices_IM07(t *testing.T) {
	t.Parallel()
	b := newNamespace(t)
	template := b.template(func(t *infrav1.CapstanMachineTemplate) {
		t.Spec.Template.Spec.Devices = []infrav1.MachineDevice{{Name: "/dev/kvm"}, {Name: "example.com/gpu", Count: 2}, {Name: "example.com/nic"}}
	})
	b.create(template)
	b.Eventually(func() corev1.ResourceList { b.get(template); return template.Status.Capacity }).Should(And(
		HaveKeyWithValue(corev1.ResourceName("example.com/gpu"), resource.MustParse("2")),
		HaveKeyWithValue(corev1.ResourceName("example.com/nic"), resource.MustParse("1")),
		Not(HaveKey(corev1.ResourceName("/dev/kvm")))))
}
