package infrastructure_test

import (
	"slices"
	"strings"
	"testing"

	. "github.com/onsi/gomega"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	clusterctlv1 "sigs.k8s.io/cluster-api/cmd/clusterctl/api/v1alpha3"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
)

// addDeployment adds a MachineDeployment, which nobody reconciles.
func (b *box) addDeployment(replicas int32) *clusterv1.MachineDeployment {
	b.t.Helper()
	labels := map[string]string{"db": ""}
	d := &clusterv1.MachineDeployment{
		ObjectMeta: metav1.ObjectMeta{Namespace: b.namespace, Name: unique("md")},
		Spec: clusterv1.MachineDeploymentSpec{
			ClusterName: b.cluster.Name, Replicas: ptr.To(replicas), Selector: metav1.LabelSelector{MatchLabels: labels},
			Template: clusterv1.MachineTemplateSpec{ObjectMeta: clusterv1.ObjectMeta{Labels: labels}, Spec: clusterv1.MachineSpec{
				ClusterName: b.cluster.Name, Bootstrap: clusterv1.Bootstrap{DataSecretName: ptr.To("data")},
				InfrastructureRef: clusterv1.ContractVersionedObjectReference{APIGroup: infrav1.GroupVersion.Group, Kind: "CapstanMachineTemplate", Name: "t"},
			}},
		},
	}
	b.create(d)
	return d
}

// addMember adds a machine of a MachineDeployment with the volume data at /srv/data.
func (b *box) addMember(d *clusterv1.MachineDeployment, change ...func(*infrav1.MachineVolume)) *infrav1.CapstanMachine {
	b.t.Helper()
	v := infrav1.MachineVolume{Name: "data", Path: "/srv/data", SizeGiB: 1}
	for _, f := range change {
		f(&v)
	}
	_, m := b.addMachine(func(m *clusterv1.Machine) { m.Labels[clusterv1.MachineDeploymentNameLabel] = d.Name },
		func(m *infrav1.CapstanMachine) { m.Spec.Volumes = []infrav1.MachineVolume{v} })
	return m
}

func (b *box) volumes() []infrav1.CapstanVolume {
	b.t.Helper()
	list := &infrav1.CapstanVolumeList{}
	b.Expect(env.Client.List(ctx, list, client.InNamespace(b.namespace))).To(Succeed())
	return list.Items
}

// volumeOf returns the volume of a machine that runs.
func (b *box) volumeOf(m *infrav1.CapstanMachine) *infrav1.CapstanVolume {
	b.t.Helper()
	all := b.volumes()
	i := slices.IndexFunc(all, func(v infrav1.CapstanVolume) bool { return v.Spec.MachineName == m.Name })
	b.Expect(i).To(BeNumerically(">=", 0), "the volume of %s in %+v", m.Name, all)
	return &all[i]
}

// runningMember adds a machine like addMember, waits until it runs, and returns its volume as well.
func (b *box) runningMember(d *clusterv1.MachineDeployment) (*infrav1.CapstanMachine, *infrav1.CapstanVolume) {
	b.t.Helper()
	m := b.addMember(d)
	b.running(m)
	return m, b.volumeOf(m)
}

// removeMachine deletes a CapstanMachine and waits until it is gone.
func (b *box) removeMachine(m *infrav1.CapstanMachine) {
	b.t.Helper()
	b.delete(m)
	b.gone(m)
}

// leftVolume returns the free volume of a machine that is gone.
func (b *box) leftVolume(d *clusterv1.MachineDeployment) *infrav1.CapstanVolume {
	b.t.Helper()
	m, v := b.runningMember(d)
	b.removeMachine(m)
	return v
}

// A successor waits for the volume of its predecessor, follows it to its host, and has its data. Nothing else deletes the data than the
// deletion of the CapstanVolume, which waits for the machine.
func TestVolumeOutlivesMachine(t *testing.T) {
	b := newBox(t).provisioned()
	d := b.addDeployment(1)
	first, v := b.runningMember(d)
	b.condition(v, clusterv1.ReadyCondition, metav1.ConditionTrue, infrav1.VolumeInUseReason)
	b.Expect(v.Spec.Owner).To(Equal("MachineDeployment/" + d.Name))
	b.Expect(v.OwnerReferences).To(BeEmpty(), "a retained volume has no owner that takes it along")
	b.Expect(b.fake.Volume(v.Spec.ID).GetSizeBytes()).To(BeEquivalentTo(1 << 30))
	m, _ := b.fake.Machine(first.Spec.ID)
	b.Expect(m.GetSpec().GetVolumes()).To(HaveLen(1))
	b.Expect(m.GetSpec().GetVolumes()[0].GetId() + m.GetSpec().GetVolumes()[0].GetPath()).To(Equal(v.Spec.ID + "/srv/data"))

	// A host that would be better does not get the successor.
	b.addHost(nil)
	second := b.addMember(d)
	why := b.condition(second, infrav1.HostAssignedCondition, metav1.ConditionFalse, infrav1.WaitingForVolumeReason)
	b.Expect(why).To(And(ContainSubstring(v.Name+" belongs to machine "+first.Name), ContainSubstring("maxSurge 0")))
	b.removeMachine(first)
	b.running(second)
	b.Expect(second.Spec.HostName).To(Equal(v.Spec.HostName))
	b.Expect(b.volumeOf(second).Spec.ID).To(Equal(v.Spec.ID))
	b.Expect(b.volumes()).To(HaveLen(1))

	b.delete(v)
	why = b.condition(v, clusterv1.DeletingCondition, metav1.ConditionTrue, infrav1.DeletionBlockedReason)
	b.Expect(why).To(ContainSubstring(second.Name))
	b.condition(v, clusterv1.ReadyCondition, metav1.ConditionFalse, infrav1.DeletionBlockedReason) // ALL-09
	b.Expect(b.fake.Volume(v.Spec.ID)).NotTo(BeNil())
	b.removeMachine(second)
	b.gone(v)
	b.Expect(b.fake.Volume(v.Spec.ID)).To(BeNil())
}

// Machines that are made at once get volumes of their own, and so do their successors.
func TestVolumesOfTwoMachines(t *testing.T) {
	t.Parallel()
	b := newBox(t).provisioned()
	d := b.addDeployment(2)
	ids := func(machines ...*infrav1.CapstanMachine) (out []string) {
		for _, m := range machines {
			b.running(m)
			out = append(out, b.volumeOf(m).Spec.ID)
		}
		slices.Sort(out)
		return slices.Compact(out)
	}
	one, two := b.addMember(d), b.addMember(d)
	before := ids(one, two)
	b.Expect(before).To(HaveLen(2))
	b.delete(one)
	b.delete(two)
	b.gone(one)
	b.gone(two)
	b.Expect(ids(b.addMember(d), b.addMember(d))).To(Equal(before))
	b.Expect(b.volumes()).To(HaveLen(2))
}

// A host that has not made the volume of one machine yet has no space for that of another one.
func TestVolumesOfOneSpace(t *testing.T) {
	b := newBox(t).provisioned()
	b.fake.SetInfo(func(i *hostpb.HostInfo) { i.DiskBytes = 100 << 30 })
	b.fake.Refuse("EnsureVolume", status.Error(codes.Unavailable, "wait"))
	d := b.addDeployment(2)
	large := func(v *infrav1.MachineVolume) { v.SizeGiB = 60 }
	one := b.addMember(d, large)
	b.condition(one, infrav1.MachineRunningCondition, metav1.ConditionFalse, infrav1.WaitingForVolumeReason)
	two := b.addMember(d, large)
	why := b.condition(two, infrav1.HostAssignedCondition, metav1.ConditionFalse, infrav1.NoHostReason)
	b.Expect(why).To(ContainSubstring("has 40Gi of disk left for volumes, 60Gi are needed"))
	b.fake.Refuse("EnsureVolume", nil)
	b.running(one)
	b.fake.SetInfo(func(i *hostpb.HostInfo) { i.DiskBytes = 200 << 30 })
	b.running(two)
}

// A namespace can write a CapstanVolume that names any host. It takes no space of a host that does not admit the namespace (ALL-18).
func TestVolumeThatNamesTheHostOfOthers_ALL18(t *testing.T) {
	t.Parallel()
	b := newBox(t).provisioned()
	b.fake.SetInfo(func(i *hostpb.HostInfo) { i.DiskBytes = 100 << 30 })
	other := newNamespace(t)
	other.create(&infrav1.CapstanVolume{
		ObjectMeta: metav1.ObjectMeta{Namespace: other.namespace, Name: "data"},
		Spec: infrav1.CapstanVolumeSpec{
			ID: "made-by-a-tenant", HostName: b.host.Name, ClusterName: "c", Owner: "MachineDeployment/db", VolumeName: "data", SizeGiB: 16384,
		},
	})
	b.running(b.addMember(b.addDeployment(1)))
}

// A retained volume stays after its Cluster and keeps its host. It is deleted with its CapstanVolume.
func TestVolumeOutlivesCluster(t *testing.T) {
	t.Parallel()
	b := newBox(t).provisioned()
	d := b.addDeployment(1)
	v := b.leftVolume(d)
	b.delete(d)
	b.delete(b.capstan)
	b.gone(b.capstan)
	b.delete(b.cluster)
	b.gone(b.cluster)
	b.condition(v, clusterv1.ReadyCondition, metav1.ConditionTrue, infrav1.VolumeFreeReason)
	b.Expect(b.fake.Volume(v.Spec.ID)).NotTo(BeNil())

	b.delete(b.host)
	b.Expect(b.condition(b.host, clusterv1.DeletingCondition, metav1.ConditionTrue, infrav1.HostDeletingInUseReason)).To(Equal("The host has 1 CapstanVolumes, whose data would be lost: delete them first. If the host is permanently lost, annotate it with infrastructure.capstan.dev/abandoned"))
	b.delete(v)
	b.gone(v)
	b.Expect(b.fake.Volume(v.Spec.ID)).To(BeNil())
	b.gone(b.host)
}

// A machine whose volume is on a host that accepts nothing waits, and starts with an empty volume after the old one was deleted.
func TestVolumeOnUnavailableHost(t *testing.T) {
	t.Parallel()
	b := newBox(t).provisioned()
	d := b.addDeployment(1)
	first, v := b.runningMember(d)
	update(b, b.host, func(h *infrav1.CapstanHost) { h.Spec.Unschedulable = ptr.To(true) })
	other, fake := b.addHost(nil)
	b.removeMachine(first)

	second := b.addMember(d)
	why := b.condition(second, infrav1.HostAssignedCondition, metav1.ConditionFalse, infrav1.WaitingForVolumeReason)
	for _, part := range []string{v.Name, b.host.Name + " is unschedulable", other.Name + " does not have the machine's volume", "delete the CapstanVolume"} {
		b.Expect(why).To(ContainSubstring(part))
	}
	b.delete(v)
	b.gone(v)
	b.running(second)
	b.Expect(second.Spec.HostName).To(Equal(other.Name))
	b.Expect(fake.Volume(b.volumeOf(second).Spec.ID)).NotTo(BeNil())
}

// A machine that waited for the host of its volume gives the volume back, also if its spec does not name the volume any more.
func TestVolumeOfChangedMachine(t *testing.T) {
	t.Parallel()
	b := newBox(t).provisioned()
	d := b.addDeployment(1)
	v := b.leftVolume(d)
	update(b, b.host, func(h *infrav1.CapstanHost) { h.Spec.Unschedulable = ptr.To(true) })
	second := b.addMember(d)
	b.Eventually(func() string { b.get(v); return v.Spec.MachineName }).Should(Equal(second.Name))
	update(b, second, func(m *infrav1.CapstanMachine) { m.Spec.Volumes = nil })
	b.removeMachine(second)
	b.get(v)
	b.Expect(v.Spec.MachineName).To(BeEmpty())
}

// A volume that the host has lost is never replaced by an empty one.
func TestVolumeLost(t *testing.T) {
	t.Parallel()
	b := newBox(t).provisioned()
	d := b.addDeployment(1)
	v := b.leftVolume(d)
	b.fake.LoseVolume(v.Spec.ID)
	second := b.addMember(d)
	b.Expect(b.condition(second, infrav1.MachineRunningCondition, metav1.ConditionFalse, infrav1.MachineRefusedReason)).To(ContainSubstring("its data is lost"))
	b.Expect(b.fake.Volume(v.Spec.ID)).To(BeNil())
}

// A CapstanMachine that lost its finalizer does not give up its volume. The volume becomes free when its host has no such machine any more.
func TestVolumeOfMachineWithoutFinalizer(t *testing.T) {
	t.Parallel()
	b := newBox(t).provisioned()
	d := b.addDeployment(1)
	first, v := b.runningMember(d)
	b.forgets(first)

	second := b.addMember(d)
	why := b.condition(second, infrav1.HostAssignedCondition, metav1.ConditionFalse, infrav1.WaitingForVolumeReason)
	b.Expect(why).To(ContainSubstring(v.Name + " belongs to machine " + first.Name))
	b.fake.Lose(first.Spec.ID)
	b.running(second)
	b.Expect(b.volumeOf(second).Spec.ID).To(Equal(v.Spec.ID))

	// The third machine has the volume, and no host.
	update(b, b.host, func(h *infrav1.CapstanHost) { h.Spec.Unschedulable = ptr.To(true) })
	b.removeMachine(second)
	third := b.addMember(d)
	b.condition(third, infrav1.HostAssignedCondition, metav1.ConditionFalse, infrav1.WaitingForVolumeReason)
	b.Expect(b.volumeOf(third).Spec.ID).To(Equal(v.Spec.ID))
	b.forgets(third)
	fourth := b.addMember(d)
	update(b, b.host, func(h *infrav1.CapstanHost) { h.Spec.Unschedulable = nil })
	b.running(fourth)
	b.Expect(b.volumeOf(fourth).Spec.ID).To(Equal(v.Spec.ID))
}

// forgets deletes a CapstanMachine without its finalizer. A paused object is not reconciled, so its finalizer stays away.
func (b *box) forgets(m *infrav1.CapstanMachine) {
	b.t.Helper()
	update(b, m, func(m *infrav1.CapstanMachine) { m.Annotations = map[string]string{clusterv1.PausedAnnotation: ""} })
	b.condition(m, clusterv1.PausedCondition, metav1.ConditionTrue, clusterv1.PausedReason)
	b.delete(m)
	update(b, m, func(m *infrav1.CapstanMachine) { m.Finalizers = nil })
	b.gone(m)
}

// clusterctl deletes the objects at the source of a move: the data stays, and belongs to the objects at the target.
func TestVolumeMoves(t *testing.T) {
	t.Parallel()
	b := newBox(t).provisioned()
	v := b.leftVolume(b.addDeployment(1))
	update(b, v, func(v *infrav1.CapstanVolume) {
		v.Annotations = map[string]string{clusterctlv1.DeleteForMoveAnnotation: ""}
	})
	b.delete(v)
	b.Consistently(func() int { return b.fake.Calls("DeleteVolume") }).Should(BeZero())
	update(b, v, func(v *infrav1.CapstanVolume) { v.Finalizers = nil })
	b.gone(v)
	b.Expect(b.fake.Volume(v.Spec.ID)).NotTo(BeNil())
}

// The deletion of a namespace is no decision about data with the policy Retain.
func TestVolumeOfDeletedNamespace(t *testing.T) {
	t.Parallel()
	b := newBox(t).provisioned()
	v := b.leftVolume(b.addDeployment(1))
	b.delete(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: v.Namespace}})
	b.delete(v) // Nothing in this API server deletes the objects of a namespace.
	b.Expect(b.condition(v, clusterv1.DeletingCondition, metav1.ConditionTrue, infrav1.DeletionBlockedReason)).To(ContainSubstring(infrav1.VolumeDeleteDataAnnotation))
	b.Expect(b.fake.Volume(v.Spec.ID)).NotTo(BeNil())
	update(b, v, func(v *infrav1.CapstanVolume) {
		v.Annotations = map[string]string{infrav1.VolumeDeleteDataAnnotation: ""}
	})
	b.gone(v)
	b.Expect(b.fake.Volume(v.Spec.ID)).To(BeNil())
}

// The owner of a volume with the policy Delete takes it along.
func TestVolumeWithPolicyDelete(t *testing.T) {
	t.Parallel()
	b := newBox(t).provisioned()
	d := b.addDeployment(1)
	m := b.addMember(d, func(v *infrav1.MachineVolume) { v.ReclaimPolicy = infrav1.VolumeDelete })
	b.running(m)
	owners := b.volumeOf(m).OwnerReferences
	b.Expect(owners).To(HaveLen(1))
	b.Expect(owners[0].Kind + "/" + string(owners[0].UID)).To(Equal("MachineDeployment/" + string(d.UID)))
}

// A host that cannot have volumes gets no machine with one.
func TestVolumeNeedsHostWithVolumes(t *testing.T) {
	t.Parallel()
	b := newNamespace(t)
	b.host, b.fake = b.addHost(nil)
	b.addCluster(nil, nil)
	b.provisioned()
	b.fake.SetInfo(func(i *hostpb.HostInfo) { i.Volumes = false })
	m := b.addMember(b.addDeployment(1))
	b.Expect(b.condition(m, infrav1.HostAssignedCondition, metav1.ConditionFalse, infrav1.NoHostReason)).To(ContainSubstring("cannot have volumes"))
	b.Expect(b.volumes()).To(BeEmpty())
}

func TestVolumesAreValidated(t *testing.T) {
	t.Parallel()
	b := newNamespace(t)
	valid := infrav1.MachineVolume{Name: "data", Path: "/srv/data", SizeGiB: 1}
	for name, test := range map[string]struct {
		change func(*infrav1.MachineVolume)
		want   string
	}{
		"a name that is no label":      {func(v *infrav1.MachineVolume) { v.Name = "Data" }, "spec.volumes[0].name"},
		"a system folder":              {func(v *infrav1.MachineVolume) { v.Path = "/etc" }, "must be a clean path"},
		"the root":                     {func(v *infrav1.MachineVolume) { v.Path = "/" }, "must be a clean path"},
		"a parent":                     {func(v *infrav1.MachineVolume) { v.Path = "/var/lib" }, "must be a clean path"},
		"a path with ..":               {func(v *infrav1.MachineVolume) { v.Path = "/srv/../etc" }, "must be a clean path"},
		"a path with a slash too many": {func(v *infrav1.MachineVolume) { v.Path = "/srv//data" }, "must be a clean path"},
		"the folder of the kubelet":    {func(v *infrav1.MachineVolume) { v.Path = "/var/lib/kubelet/pods" }, "own files"},
		"the folder of Capstan":        {func(v *infrav1.MachineVolume) { v.Path = "/opt/capstan" }, "own files"},
		"too small":                    {func(v *infrav1.MachineVolume) { v.SizeGiB = -1 }, "greater than or equal to 1"},
		"too large":                    {func(v *infrav1.MachineVolume) { v.SizeGiB = 16385 }, "less than or equal to 16384"},
		"an unknown policy":            {func(v *infrav1.MachineVolume) { v.ReclaimPolicy = "Recycle" }, "Unsupported value"},
	} {
		v := valid
		test.change(&v)
		m := &infrav1.CapstanMachine{ObjectMeta: metav1.ObjectMeta{Namespace: b.namespace, Name: unique("m")}, Spec: infrav1.CapstanMachineSpec{Volumes: []infrav1.MachineVolume{v}}}
		err := env.Client.Create(ctx, m, client.DryRunAll)
		if err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: got %v, want %q", name, err, test.want)
		}
	}
	inside := valid
	inside.Name, inside.Path = "more", "/srv/data/more"
	m := &infrav1.CapstanMachine{ObjectMeta: metav1.ObjectMeta{Namespace: b.namespace, Name: unique("m")}, Spec: infrav1.CapstanMachineSpec{Volumes: []infrav1.MachineVolume{valid, inside}}}
	b.Expect(env.Client.Create(ctx, m)).To(MatchError(ContainSubstring("or in it")))
	m.Spec.Volumes, m.Spec.ID = []infrav1.MachineVolume{valid}, "12345678"
	b.create(m)
	m.Spec.Volumes[0].Path = "/srv/other"
	b.Expect(env.Client.Update(ctx, m)).To(MatchError(ContainSubstring("volumes cannot be changed")))
}

// ALL-08: a paused CapstanVolume is not deleted. Its own annotation or its Cluster pauses it.
func TestPausedVolume_ALL08(t *testing.T) {
	t.Parallel()
	b := newBox(t).provisioned()
	v := b.leftVolume(b.addDeployment(1))
	update(b, v, func(v *infrav1.CapstanVolume) {
		metav1.SetMetaDataAnnotation(&v.ObjectMeta, clusterv1.PausedAnnotation, "")
	})
	b.condition(v, clusterv1.PausedCondition, metav1.ConditionTrue, clusterv1.PausedReason)
	b.deletePaused(v)
	b.Consistently(func() int { return b.fake.Calls("DeleteVolume") }).Should(BeZero())
	update(b, b.cluster, func(c *clusterv1.Cluster) { c.Spec.Paused = ptr.To(true) })
	b.condition(b.capstan, clusterv1.PausedCondition, metav1.ConditionTrue, clusterv1.PausedReason) // The manager has seen it.
	update(b, v, func(v *infrav1.CapstanVolume) { delete(v.Annotations, clusterv1.PausedAnnotation) })
	b.Eventually(func() string {
		return b.condition(v, clusterv1.PausedCondition, metav1.ConditionTrue, clusterv1.PausedReason)
	}).Should(Equal("Cluster spec.paused is set to true"), "reconciled without the annotation")
	b.Consistently(func() int { return b.fake.Calls("DeleteVolume") }).Should(BeZero())
	update(b, b.cluster, func(c *clusterv1.Cluster) { c.Spec.Paused = nil })
	b.gone(v)
}
