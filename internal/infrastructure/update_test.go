package infrastructure_test

import (
	"bytes"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	hooks "sigs.k8s.io/cluster-api/api/runtime/hooks/v1alpha1"
	runtimev1 "sigs.k8s.io/cluster-api/api/runtime/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/refusal"
	"capstan.dev/capstan/internal/testenv"
)

// updated is a machine that is updated in place. The test acts as its owner and as the bootstrap provider.
type updated struct {
	*box
	machine *clusterv1.Machine
	m       *infrav1.CapstanMachine
	config  *bootstrapv1.CapstanConfig
	secret  *corev1.Secret
}

// updatable returns a running machine with 1Gi of memory and version v1.35.0.
func updatable(b *box, ownerKind string) *updated {
	b.t.Helper()
	u := &updated{box: b}
	u.machine, u.m = b.addMachine(func(m *clusterv1.Machine) {
		m.Spec.Version = "v1.35.0"
		m.Spec.Bootstrap.ConfigRef = clusterv1.ContractVersionedObjectReference{APIGroup: bootstrapv1.GroupVersion.Group, Kind: "CapstanConfig", Name: m.Name}
		m.OwnerReferences = []metav1.OwnerReference{{APIVersion: clusterv1.GroupVersion.String(), Kind: ownerKind, Name: "owner", UID: "1", Controller: ptr.To(true)}}
	}, func(m *infrav1.CapstanMachine) {
		m.Spec.Memory, m.Spec.CPUs, m.Spec.Disk.Size = ptr.To(resource.MustParse("1Gi")), 2, ptr.To(resource.MustParse("20Gi"))
	})
	u.config = &bootstrapv1.CapstanConfig{ObjectMeta: metav1.ObjectMeta{Namespace: b.namespace, Name: u.m.Name}}
	b.create(u.config)
	b.running(u.m)
	return u
}

// mark sets the annotation of an update on the objects.
func (u *updated) mark(objs ...client.Object) {
	u.t.Helper()
	for _, o := range objs {
		update(u.box, o, func(o client.Object) {
			o.SetAnnotations(map[string]string{clusterv1.UpdateInProgressAnnotation: ""})
		})
	}
}

// publish writes the data of the update as the bootstrap provider does.
func (u *updated) publish(id, version string) {
	u.t.Helper()
	u.get(u.config)
	secret := &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: u.namespace, Name: bootstrapv1.UpdateSecretName(*u.machine.Spec.Bootstrap.DataSecretName),
			Labels: map[string]string{clusterv1.ClusterNameLabel: u.cluster.Name},
			Annotations: map[string]string{
				bootstrapv1.UpdateIDAnnotation: id, bootstrapv1.KubernetesVersionAnnotation: version,
				bootstrapv1.ConfigGenerationAnnotation: strconv.FormatInt(u.config.Generation, 10),
			},
			OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(u.config, bootstrapv1.GroupVersion.WithKind("CapstanConfig"))},
		},
		Type: clusterv1.ClusterSecretType, Data: map[string][]byte{"value": []byte("#cloud-config " + id)},
	}
	if u.secret == nil {
		u.create(secret)
	} else {
		update(u.box, u.secret, func(s *corev1.Secret) { s.Annotations, s.Data = secret.Annotations, secret.Data })
	}
	u.secret = secret
	before := u.config.DeepCopy()
	u.config.Status.Update = bootstrapv1.ConfigUpdateStatus{ID: id, DataSecretName: secret.Name, KubernetesVersion: version, ObservedGeneration: u.config.Generation}
	u.Expect(env.Client.Status().Patch(ctx, u.config, client.MergeFrom(before))).To(Succeed())
}

// onHost returns the machine of the host.
func (u *updated) onHost() *hostpb.Machine {
	m, _ := u.fake.Machine(u.m.Spec.ID)
	return m
}

// Row ALL-17: the host updates a machine after its owner has written all objects. The status shows the update, and each state is
// requested once.
func TestUpdateInPlace_ALL17(t *testing.T) {
	t.Parallel()
	u := updatable(newBox(t).provisioned(), "MachineSet")
	calls := func() int { return u.fake.Calls("UpdateMachine") }
	u.fake.Hold(true)

	// In the order of Cluster API's MachineSets: Machine, CapstanMachine, CapstanConfig, Machine, hook.
	u.mark(u.machine)
	update(u.box, u.m, func(m *infrav1.CapstanMachine) {
		m.Annotations = map[string]string{clusterv1.UpdateInProgressAnnotation: ""}
		m.Spec.Memory, m.Spec.Disk.Size = ptr.To(resource.MustParse("2Gi")), ptr.To(resource.MustParse("30Gi"))
	})
	u.condition(u.m, infrav1.UpdatingCondition, metav1.ConditionTrue, infrav1.WaitingForUpdateReason)
	u.mark(u.config)
	update(u.box, u.machine, func(m *clusterv1.Machine) { m.Spec.Version = "v1.36.3" })
	u.publish("one", "v1.36.3")
	u.Consistently(calls).Should(BeZero(), "before the hook is pending")
	update(u.box, u.machine, func(m *clusterv1.Machine) { m.Annotations[runtimev1.PendingHooksAnnotation] = "Other,UpdateMachine" })
	u.condition(u.m, infrav1.UpdatingCondition, metav1.ConditionTrue, infrav1.UpdateRunningReason)
	spec := u.onHost().GetSpec()
	u.Expect(spec.GetMemoryBytes()).To(Equal(int64(2 << 30)))
	u.Expect(spec.GetDiskBytes()).To(Equal(int64(30 << 30)))
	u.Expect(spec.GetCpus()).To(Equal(int32(2)))
	u.Expect(spec.GetKubernetesVersion()).To(Equal("v1.36.3"))
	u.Expect(string(u.fake.UpdateData(u.m.Spec.ID))).To(Equal("#cloud-config one"))

	u.fake.Update(u.m.Spec.ID, func(s *hostpb.MachineStatus) { s.Update.Step, s.Update.Message = "kubelet", "starts" })
	u.Eventually(func() string {
		return u.condition(u.m, infrav1.UpdatingCondition, metav1.ConditionTrue, infrav1.UpdateRunningReason)
	}).Should(Equal("kubelet: starts"))
	u.Expect(u.m.Status.Update.Phase).To(BeElementOf(infrav1.UpdatePending, infrav1.UpdateRunning))
	u.fake.EndUpdate(u.m.Spec.ID, hostpb.UpdateStatus_SUCCEEDED, "")
	u.condition(u.m, infrav1.UpdatingCondition, metav1.ConditionFalse, infrav1.UpdateSucceededReason)
	done := u.m.Status.Update
	u.Expect(done.Phase).To(Equal(infrav1.UpdateSucceeded))
	u.Expect(done.KubernetesVersion).To(Equal("v1.36.3"))
	u.Expect(done.ConfigUpdateID).To(Equal("one"))
	u.Expect(done.ObservedGeneration).To(Equal(u.m.Generation))
	u.Expect(done.CompletionTime.IsZero() || done.StartTime.IsZero()).To(BeFalse())
	u.Expect(calls()).To(Equal(1))

	for _, o := range []client.Object{u.machine, u.m, u.config} {
		update(u.box, o, func(o client.Object) { o.SetAnnotations(nil) })
	}
	u.condition(u.m, infrav1.UpdatingCondition, metav1.ConditionFalse, infrav1.NotUpdatingReason)
	u.Expect(u.m.Status.Update.ID).To(Equal(done.ID))
	u.Consistently(calls).Should(Equal(1))
}

// begin starts an update of a machine whose owner is not a MachineSet. The annotations are further ones of the Machine.
func (u *updated) begin(id, version string, change func(*infrav1.CapstanMachine), annotations ...string) {
	u.t.Helper()
	update(u.box, u.machine, func(m *clusterv1.Machine) {
		m.Annotations = map[string]string{clusterv1.UpdateInProgressAnnotation: ""}
		for _, a := range annotations {
			m.Annotations[a] = ""
		}
		m.Spec.Version = version
	})
	update(u.box, u.m, func(m *infrav1.CapstanMachine) {
		m.Annotations = map[string]string{clusterv1.UpdateInProgressAnnotation: ""}
		if change != nil {
			change(m)
		}
	})
	u.mark(u.config)
	u.publish(id, version)
}

func withMemory(size string) func(*infrav1.CapstanMachine) {
	return func(m *infrav1.CapstanMachine) { m.Spec.Memory = ptr.To(resource.MustParse(size)) }
}

// A host without enough memory does not start the update, and a condition reports this. The update starts when memory is free. New
// machines do not get the memory of an update.
func TestUpdateWaitsForCapacity(t *testing.T) {
	t.Parallel()
	b := newBox(t).provisioned()
	b.fake.SetInfo(func(i *hostpb.HostInfo) { i.MemoryBytes = 3 << 30 })
	_, other := b.addMachine(nil, withMemory("1Gi"))
	b.running(other)
	u := updatable(b, "CapstanControlPlane")
	u.begin("grow", "v1.35.0", withMemory("2560Mi"))
	u.Expect(u.condition(u.m, infrav1.UpdatingCondition, metav1.ConditionFalse, infrav1.NoCapacityReason)).To(ContainSubstring("memory: host " + u.host.Name))
	u.Consistently(func() int { return u.fake.Calls("UpdateMachine") }).Should(BeZero())
	u.Expect(u.onHost().GetSpec().GetMemoryBytes()).To(Equal(int64(1 << 30)))
	u.fake.Before("UpdateMachine", func() { u.fake.Hold(true) })
	b.delete(other)
	u.condition(u.m, infrav1.UpdatingCondition, metav1.ConditionTrue, infrav1.UpdateRunningReason)
	_, late := b.addMachine(nil, withMemory("1Gi"))
	b.Expect(b.condition(late, "HostAssigned", metav1.ConditionFalse, "NoHost")).To(ContainSubstring("512Mi of memory left"))

	// An update that is rolled back gives the memory back.
	u.fake.EndUpdate(u.m.Spec.ID, hostpb.UpdateStatus_ROLLED_BACK, "kubelet was not ready")
	u.Expect(u.condition(u.m, infrav1.UpdatingCondition, metav1.ConditionFalse, infrav1.UpdateFailedReason)).To(ContainSubstring("rolled back"))
	u.Expect(u.m.Status.Update.Phase).To(Equal(infrav1.UpdateRolledBack))
	u.fake.Hold(false)
	b.running(late)
}

// An update that the control plane holds begins when the hold ends, although its host has room.
func TestUpdateIsHeld(t *testing.T) {
	t.Parallel()
	u := updatable(newBox(t).provisioned(), "CapstanControlPlane")
	update(u.box, u.machine, func(m *clusterv1.Machine) { m.Labels[clusterv1.MachineControlPlaneLabel] = "" })
	u.begin("held", "v1.35.0", withMemory("2Gi"), controlplanev1.UpdateHeldAnnotation)
	u.Expect(u.condition(u.m, infrav1.UpdatingCondition, metav1.ConditionTrue, infrav1.UpdateHeldReason)).To(ContainSubstring("etcd has a quorum without this machine"))
	u.Consistently(func() int { return u.fake.Calls("UpdateMachine") }).Should(BeZero())
	update(u.box, u.machine, func(m *clusterv1.Machine) { delete(m.Annotations, controlplanev1.UpdateHeldAnnotation) })
	u.condition(u.m, infrav1.UpdatingCondition, metav1.ConditionFalse, infrav1.UpdateSucceededReason)
}

// A failed update is repeated only after the user requests another attempt.
func TestUpdateFails(t *testing.T) {
	t.Parallel()
	u := updatable(newBox(t).provisioned(), "CapstanControlPlane")
	u.fake.Hold(true)
	u.begin("fails", "v1.36.3", nil)
	u.condition(u.m, infrav1.UpdatingCondition, metav1.ConditionTrue, infrav1.UpdateRunningReason)
	u.fake.EndUpdate(u.m.Spec.ID, hostpb.UpdateStatus_FAILED, "etcd is not healthy")
	u.Expect(u.condition(u.m, infrav1.UpdatingCondition, metav1.ConditionFalse, infrav1.UpdateFailedReason)).To(ContainSubstring("etcd is not healthy"))
	u.Consistently(func() int { return u.fake.Calls("UpdateMachine") }).Should(Equal(1))
	u.fake.Hold(false)
	update(u.box, u.m, func(m *infrav1.CapstanMachine) { m.Annotations[infrav1.MachineUpdateAttemptAnnotation] = "2" })
	u.condition(u.m, infrav1.UpdatingCondition, metav1.ConditionFalse, infrav1.UpdateSucceededReason)
	u.Expect(u.onHost().GetSpec().GetKubernetesVersion()).To(Equal("v1.36.3"))
}

// A tenant who sets the annotation can request only changes that an update in place supports.
func TestUpdateIsRefused_ALL17(t *testing.T) {
	t.Parallel()
	b := newBox(t).provisioned()
	u := updatable(b, "CapstanControlPlane")
	update(b, u.machine, func(m *clusterv1.Machine) { m.Spec.Version = "v1.36.3" })
	u.begin("up", "v1.36.3", nil)
	u.condition(u.m, infrav1.UpdatingCondition, metav1.ConditionFalse, infrav1.UpdateSucceededReason)
	for _, test := range []struct{ version, why string }{
		{"v1.35.0", "cannot go back"},
		{"v1.38.0", "one minor version at a time"},
		{"latest", "is not a version"},
	} {
		u.begin("refused", test.version, nil)
		u.Eventually(func() string {
			return u.condition(u.m, infrav1.UpdatingCondition, metav1.ConditionFalse, infrav1.UpdateRefusedReason)
		}).Should(ContainSubstring(test.why))
	}
	u.Expect(u.fake.Calls("UpdateMachine")).To(Equal(1))
	u.Expect(u.onHost().GetSpec().GetKubernetesVersion()).To(Equal("v1.36.3"))

	for change, spec := range map[string]func(*infrav1.CapstanMachine){
		"image":              func(m *infrav1.CapstanMachine) { m.Spec.Image = "other" },
		"hostSelector":       func(m *infrav1.CapstanMachine) { m.Spec.HostSelector = &metav1.LabelSelector{} },
		"disk cannot shrink": func(m *infrav1.CapstanMachine) { m.Spec.Disk.Size = ptr.To(resource.MustParse("10Gi")) },
		"memory must be":     withMemory("1e9"),
	} {
		b.Expect(testenv.Change(ctx, env.Client, u.m, spec)).To(MatchError(ContainSubstring(change)))
	}
	update(b, u.m, func(m *infrav1.CapstanMachine) { delete(m.Annotations, clusterv1.UpdateInProgressAnnotation) })
	b.Expect(testenv.Change(ctx, env.Client, u.m, withMemory("2Gi"))).To(MatchError(ContainSubstring("spec.memory")), "without an update")
}

// A machine of a MachineDeployment with the policy Only shows which change stops the rollout, and the MachineDeployment gets an
// event. The policy Prefer, or a change that can be made in place, has no condition.
func TestRolloutStopped_ALL17(t *testing.T) {
	t.Parallel()
	b := newBox(t).provisioned()
	u := updatable(b, "MachineSet")
	meta := func(name string) metav1.ObjectMeta { return metav1.ObjectMeta{Namespace: b.namespace, Name: name} }
	template := func(name string, change func(*infrav1.CapstanMachineSpec, *bootstrapv1.CapstanConfigSpec)) {
		machine, config := &infrav1.CapstanMachineTemplate{ObjectMeta: meta(name)}, &bootstrapv1.CapstanConfigTemplate{ObjectMeta: meta(name)}
		machine.Spec.Template.Spec = *u.m.Spec.DeepCopy()
		machine.Spec.Template.Spec.ID, machine.Spec.Template.Spec.ProviderID, machine.Spec.Template.Spec.HostName, machine.Spec.Template.Spec.HostID = "", "", "", ""
		machine.Spec.Template.Spec.Network.Addresses = nil
		config.Spec.Template.ObjectMeta.Labels = map[string]string{clusterv1.ClusterNameLabel: u.cluster.Name}
		change(&machine.Spec.Template.Spec, &config.Spec.Template.Spec)
		b.create(machine)
		b.create(config)
	}
	template("same", func(*infrav1.CapstanMachineSpec, *bootstrapv1.CapstanConfigSpec) {})
	template("other", func(m *infrav1.CapstanMachineSpec, c *bootstrapv1.CapstanConfigSpec) {
		m.Image, c.PreCommands = "other", []string{"true"}
	})
	use := func(md *clusterv1.MachineDeployment, name string) {
		md.Spec.Template.Spec.InfrastructureRef = clusterv1.ContractVersionedObjectReference{APIGroup: infrav1.GroupVersion.Group, Kind: "CapstanMachineTemplate", Name: name}
		md.Spec.Template.Spec.Bootstrap.ConfigRef = clusterv1.ContractVersionedObjectReference{APIGroup: bootstrapv1.GroupVersion.Group, Kind: "CapstanConfigTemplate", Name: name}
	}
	md := &clusterv1.MachineDeployment{ObjectMeta: meta("md")}
	md.Annotations = map[string]string{infrav1.InPlaceAnnotation: "Only"}
	md.Spec.Selector.MatchLabels = map[string]string{"a": "b"}
	md.Spec.Template.Labels = md.Spec.Selector.MatchLabels
	md.Spec.ClusterName, md.Spec.Template.Spec.ClusterName, md.Spec.Template.Spec.Version = u.cluster.Name, u.cluster.Name, "v1.36.3"
	use(md, "other")
	b.create(md)
	update(b, u.machine, func(m *clusterv1.Machine) { m.Labels[clusterv1.MachineDeploymentNameLabel] = md.Name })
	outdated := func(message string) { // As core does after each change of the MachineDeployment.
		b.Expect(testenv.ChangeStatus(ctx, env.Client, u.machine, func(m *clusterv1.Machine) {
			conditions.Set(m, metav1.Condition{Type: clusterv1.MachineUpToDateCondition, Status: metav1.ConditionFalse, Reason: "NotUpToDate", Message: message})
		})).To(Succeed())
	}
	outdated("one")
	message := u.condition(u.m, infrav1.UpdatingCondition, metav1.ConditionFalse, infrav1.CannotUpdateInPlaceReason)
	b.Expect(message).To(And(ContainSubstring("MachineDeployment md is Only"), ContainSubstring("image: "), ContainSubstring("preCommands: "), Not(ContainSubstring("version"))))
	b.Eventually(func() (notes []string) {
		list := &eventsv1.EventList{}
		b.Expect(env.Client.List(ctx, list, client.InNamespace(b.namespace))).To(Succeed())
		for _, e := range list.Items {
			if e.Regarding.UID == md.UID {
				notes = append(notes, e.Note)
			}
		}
		return notes
	}).Should(ConsistOf(message))

	update(b, md, func(md *clusterv1.MachineDeployment) { use(md, "same") })
	outdated("two")
	u.condition(u.m, infrav1.UpdatingCondition, metav1.ConditionFalse, infrav1.NotUpdatingReason)
	update(b, md, func(md *clusterv1.MachineDeployment) {
		use(md, "other")
		md.Annotations[infrav1.InPlaceAnnotation] = "Prefer"
	})
	outdated("three")
	b.Consistently(func() string {
		return u.condition(u.m, infrav1.UpdatingCondition, metav1.ConditionFalse, infrav1.NotUpdatingReason)
	}).Should(BeEmpty())
}

// A condition contains the refusal of the host, and the remedy for a disk that cannot grow: its former size needs another machine too.
func TestUpdateRefusedByHost(t *testing.T) {
	t.Parallel()
	u := updatable(newBox(t).provisioned(), "CapstanControlPlane")
	u.fake.Refuse("UpdateMachine", refusal.Errorf(hostpb.Refusal_INVALID, "no such field"))
	u.begin("x", "v1.36.3", nil)
	remedy := ContainSubstring("a return to the former disk.size needs another machine too")
	u.Expect(u.condition(u.m, infrav1.UpdatingCondition, metav1.ConditionFalse, infrav1.UpdateRefusedReason)).To(And(ContainSubstring("no such field"), Not(remedy)))
	u.fake.Refuse("UpdateMachine", refusal.Errorf(hostpb.Refusal_UNSUPPORTED, "capstand does not have CAP_SYS_RESOURCE"))
	u.begin("grow", "v1.36.3", func(m *infrav1.CapstanMachine) { m.Spec.Disk.Size = ptr.To(resource.MustParse("30Gi")) })
	u.Eventually(func() string {
		return u.condition(u.m, infrav1.UpdatingCondition, metav1.ConditionFalse, infrav1.UpdateRefusedReason)
	}).Should(And(ContainSubstring("CAP_SYS_RESOURCE"), remedy))
	u.fake.Refuse("UpdateMachine", refusal.Errorf(hostpb.Refusal_NO_DISK_SPACE, "the disk is full"))
	u.begin("y", "v1.36.3", nil)
	u.Expect(u.condition(u.m, infrav1.UpdatingCondition, metav1.ConditionFalse, infrav1.NoCapacityReason)).To(And(ContainSubstring("the disk is full"), remedy))
	u.fake.Refuse("UpdateMachine", nil)
	u.condition(u.m, infrav1.UpdatingCondition, metav1.ConditionFalse, infrav1.UpdateSucceededReason)
}

// Data of another generation of the CapstanConfig, of another version, or of another owner is not used.
func TestUpdateDataIsStale(t *testing.T) {
	t.Parallel()
	u := updatable(newBox(t).provisioned(), "CapstanControlPlane")
	u.begin("early", "v1.35.0", nil)
	u.condition(u.m, infrav1.UpdatingCondition, metav1.ConditionFalse, infrav1.UpdateSucceededReason)
	update(u.box, u.config, func(c *bootstrapv1.CapstanConfig) { c.Spec.UpdateCommands = []string{"true"} })
	update(u.box, u.machine, func(m *clusterv1.Machine) { m.Spec.Version = "v1.36.3" })
	u.condition(u.m, infrav1.UpdatingCondition, metav1.ConditionTrue, infrav1.WaitingForUpdateReason)
	update(u.box, u.secret, func(s *corev1.Secret) { s.Annotations[bootstrapv1.KubernetesVersionAnnotation] = "v1.36.3" })
	u.Consistently(func() int { return u.fake.Calls("UpdateMachine") }).Should(Equal(1), "the data has the former generation")
	u.publish("late", "v1.36.3")
	u.condition(u.m, infrav1.UpdatingCondition, metav1.ConditionFalse, infrav1.UpdateSucceededReason)
	u.Expect(u.m.Status.Update.ConfigUpdateID).To(Equal("late"))
}

// The status follows the update that the host carries out, also while the data of the next one is missing. The owner waits for its end.
func TestUpdateIsFollowed(t *testing.T) {
	t.Parallel()
	u := updatable(newBox(t).provisioned(), "CapstanControlPlane")
	u.fake.Hold(true)
	u.begin("one", "v1.36.3", nil)
	u.condition(u.m, infrav1.UpdatingCondition, metav1.ConditionTrue, infrav1.UpdateRunningReason)
	one := u.m.Status.Update
	update(u.box, u.config, func(c *bootstrapv1.CapstanConfig) { c.Spec.UpdateCommands = []string{"true"} })
	update(u.box, u.machine, func(m *clusterv1.Machine) { m.Spec.Version = "v1.36.4" })
	u.condition(u.m, infrav1.UpdatingCondition, metav1.ConditionTrue, infrav1.WaitingForUpdateReason)
	u.fake.EndUpdate(u.m.Spec.ID, hostpb.UpdateStatus_SUCCEEDED, "")
	u.Eventually(func() infrav1.UpdatePhase {
		u.get(u.m)
		return u.m.Status.Update.Phase
	}).Should(Equal(infrav1.UpdateSucceeded))
	u.Expect(u.m.Status.Update.ID).To(Equal(one.ID))
	u.Expect(u.m.Status.Update.KubernetesVersion).To(Equal("v1.36.3"))
	u.condition(u.m, infrav1.UpdatingCondition, metav1.ConditionTrue, infrav1.WaitingForUpdateReason)
}

// call sends a request to a hook of the manager, over TLS, as Cluster API core does.
func call[T any](b *box, path string, request any) (out T) {
	b.t.Helper()
	body, err := json.Marshal(request)
	b.Expect(err).NotTo(HaveOccurred())
	c := &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}}
	server := net.JoinHostPort(env.Webhooks.LocalServingHost, strconv.Itoa(env.Webhooks.LocalServingPort))
	response, err := c.Post("https://"+server+"/hooks.runtime.cluster.x-k8s.io/v1alpha1/"+path, "application/json", bytes.NewReader(body))
	b.Expect(err).NotTo(HaveOccurred())
	defer response.Body.Close()
	b.Expect(response.StatusCode).To(Equal(http.StatusOK))
	b.Expect(json.NewDecoder(response.Body).Decode(&out)).To(Succeed())
	return out
}

// Row ALL-17: the manager serves the hooks of updates in place. The answer to UpdateMachine follows the update. A former success
// does not count for a later update.
func TestExtension_ALL17(t *testing.T) {
	t.Parallel()
	u := updatable(newBox(t).provisioned(), "CapstanControlPlane")
	discovery := call[hooks.DiscoveryResponse](u.box, "discovery", hooks.DiscoveryRequest{})
	names := map[string]bool{}
	for _, handler := range discovery.Handlers {
		names[handler.RequestHook.Hook] = true
	}
	u.Expect(names).To(HaveKey("CanUpdateMachine"))
	u.Expect(names).To(HaveKey("CanUpdateMachineSet"))
	u.Expect(names).To(HaveKey("UpdateMachine"))

	ask := func() hooks.UpdateMachineResponse {
		raw := func(kind string, gv string) runtime.RawExtension {
			return runtime.RawExtension{Raw: fmt.Appendf(nil, `{"apiVersion":%q,"kind":%q,"metadata":{"namespace":%q,"name":%q}}`, gv, kind, u.namespace, u.m.Name)}
		}
		request := hooks.UpdateMachineRequest{}
		u.get(u.machine)
		request.Desired.Machine = *u.machine
		request.Desired.InfrastructureMachine = raw("CapstanMachine", infrav1.GroupVersion.String())
		request.Desired.BootstrapConfig = raw("CapstanConfig", bootstrapv1.GroupVersion.String())
		return call[hooks.UpdateMachineResponse](u.box, "updatemachine/update-machine", request)
	}
	running := func(r hooks.UpdateMachineResponse) bool {
		return r.Status == hooks.ResponseStatusSuccess && r.RetryAfterSeconds > 0
	}
	u.fake.Hold(true)
	u.begin("one", "v1.36.3", nil)
	u.Expect(running(ask())).To(BeTrue())
	u.condition(u.m, infrav1.UpdatingCondition, metav1.ConditionTrue, infrav1.UpdateRunningReason)
	u.Expect(running(ask())).To(BeTrue())
	u.fake.EndUpdate(u.m.Spec.ID, hostpb.UpdateStatus_SUCCEEDED, "")
	u.condition(u.m, infrav1.UpdatingCondition, metav1.ConditionFalse, infrav1.UpdateSucceededReason)
	if r := ask(); r.Status != hooks.ResponseStatusSuccess || r.RetryAfterSeconds != 0 {
		t.Errorf("after the update: %+v", r)
	}
	update(u.box, u.config, func(c *bootstrapv1.CapstanConfig) { c.Spec.UpdateCommands = []string{"true"} })
	u.Expect(running(ask())).To(BeTrue(), "the CapstanConfig has changed")
	u.publish("two", "v1.36.3")
	u.condition(u.m, infrav1.UpdatingCondition, metav1.ConditionTrue, infrav1.UpdateRunningReason)
	u.fake.EndUpdate(u.m.Spec.ID, hostpb.UpdateStatus_ROLLED_BACK, "the command failed")
	u.condition(u.m, infrav1.UpdatingCondition, metav1.ConditionFalse, infrav1.UpdateFailedReason)
	if r := ask(); r.Status != hooks.ResponseStatusFailure || r.Message == "" {
		t.Errorf("after the failure: %+v", r)
	}
}
