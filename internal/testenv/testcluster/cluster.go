// Package testcluster simulates Cluster API core and the infrastructure in the integration tests of the bootstrap and control
// plane providers.
package testcluster

import (
	"context"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/controller-runtime/pkg/client"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/testenv"
	"capstan.dev/capstan/internal/testenv/expect"
)

// Cluster is a Cluster with its infrastructure and its control plane. The references between them are those that core
// writes.
type Cluster struct {
	*clusterv1.Cluster
	t *testing.T
	c client.Client
}

// New creates the Cluster `demo` in a new namespace, and its CapstanCluster. change may modify the Cluster before it is
// created. The Cluster is paused at the end of the test: the manager of the other tests would read its state every few seconds.
func New(t *testing.T, env *testenv.Env, change func(*clusterv1.Cluster)) *Cluster {
	t.Helper()
	out := &Cluster{t: t, c: env.Client, Cluster: &clusterv1.Cluster{
		ObjectMeta: metav1.ObjectMeta{Namespace: env.Namespace(t), Name: "demo"},
		Spec: clusterv1.ClusterSpec{
			InfrastructureRef: clusterv1.ContractVersionedObjectReference{APIGroup: infrav1.GroupVersion.Group, Kind: infrav1.ClusterKind, Name: "demo"},
			ControlPlaneRef:   clusterv1.ContractVersionedObjectReference{APIGroup: controlplanev1.GroupVersion.Group, Kind: controlplanev1.ControlPlaneKind, Name: "demo"},
		},
	}}
	if change != nil {
		change(out.Cluster)
	}
	out.Create(out.Cluster)
	t.Cleanup(out.pause)
	infra := &infrav1.CapstanCluster{ObjectMeta: out.Meta("demo")}
	infra.OwnerReferences = []metav1.OwnerReference{out.OwnerRef()}
	out.Create(infra)
	out.MachineTemplate("demo")
	return out
}

func (c *Cluster) pause() {
	paused := client.RawPatch(types.MergePatchType, []byte(`{"spec":{"paused":true}}`))
	if err := c.c.Patch(context.Background(), c.Cluster, paused); client.IgnoreNotFound(err) != nil {
		c.t.Errorf("cannot pause the Cluster at the end of the test: %v", err)
	}
}

// MachineTemplate creates a template of infrastructure machines.
func (c *Cluster) MachineTemplate(name string) {
	c.t.Helper()
	template := &infrav1.CapstanMachineTemplate{ObjectMeta: c.Meta(name)}
	template.Spec.Template.Spec.CPUs = 1
	c.Create(template)
}

// Meta returns the metadata of an object of the cluster.
func (c *Cluster) Meta(name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: c.Namespace, Name: name, Labels: map[string]string{clusterv1.ClusterNameLabel: c.Name}}
}

// OwnerRef returns the owner reference to the Cluster.
func (c *Cluster) OwnerRef() metav1.OwnerReference {
	return metav1.OwnerReference{APIVersion: clusterv1.GroupVersion.String(), Kind: "Cluster", Name: c.Name, UID: c.UID, Controller: ptr.To(true), BlockOwnerDeletion: ptr.To(true)}
}

// ControlPlane creates the CapstanControlPlane. change may modify it before.
func (c *Cluster) ControlPlane(change func(*controlplanev1.CapstanControlPlane)) *controlplanev1.CapstanControlPlane {
	c.t.Helper()
	out := &controlplanev1.CapstanControlPlane{ObjectMeta: c.Meta("demo")}
	out.OwnerReferences = []metav1.OwnerReference{c.OwnerRef()}
	out.Spec.Version = "v1.36.3"
	out.Spec.MachineTemplate.Spec.InfrastructureRef = clusterv1.ContractVersionedObjectReference{
		APIGroup: infrav1.GroupVersion.Group, Kind: infrav1.MachineTemplateKind, Name: "demo",
	}
	if change != nil {
		change(out)
	}
	c.Create(out)
	return out
}

// Machine creates a Machine with a CapstanConfig of the same name and the owner references that core writes.
func (c *Cluster) Machine(name string, changeMachine func(*clusterv1.Machine), changeConfig func(*bootstrapv1.CapstanConfig)) (*clusterv1.Machine, *bootstrapv1.CapstanConfig) {
	c.t.Helper()
	machine := &clusterv1.Machine{ObjectMeta: c.Meta(name), Spec: clusterv1.MachineSpec{
		ClusterName: c.Name, Version: "v1.36.3",
		Bootstrap: clusterv1.Bootstrap{ConfigRef: clusterv1.ContractVersionedObjectReference{APIGroup: bootstrapv1.GroupVersion.Group, Kind: bootstrapv1.ConfigKind, Name: name}},
		InfrastructureRef: clusterv1.ContractVersionedObjectReference{
			APIGroup: infrav1.GroupVersion.Group, Kind: infrav1.MachineKind, Name: name,
		},
	}}
	if changeMachine != nil {
		changeMachine(machine)
	}
	c.Create(machine)
	config := &bootstrapv1.CapstanConfig{ObjectMeta: c.Meta(name)}
	config.OwnerReferences = []metav1.OwnerReference{*metav1.NewControllerRef(machine, clusterv1.GroupVersion.WithKind("Machine"))}
	if changeConfig != nil {
		changeConfig(config)
	}
	c.Create(config)
	return machine, config
}

// SetInfraEndpoint writes the endpoint as the infrastructure provider does. It reports no failure domains.
func (c *Cluster) SetInfraEndpoint(endpoint clusterv1.APIEndpoint) {
	c.t.Helper()
	infra := &infrav1.CapstanCluster{}
	infra.Namespace, infra.Name = c.Namespace, "demo"
	c.Change(infra, func() { infra.Spec.ControlPlaneEndpoint = endpoint })
	c.ChangeStatus(infra, func() { infra.Status.Initialization.Provisioned = ptr.To(true) })
}

// SetEndpoint writes the fields that core writes when the infrastructure is provisioned.
func (c *Cluster) SetEndpoint(endpoint clusterv1.APIEndpoint) {
	c.t.Helper()
	c.Change(c.Cluster, func() { c.Spec.ControlPlaneEndpoint = endpoint })
	c.ChangeStatus(c.Cluster, func() { c.Status.Initialization.InfrastructureProvisioned = ptr.To(true) })
}

// Create creates an object.
func (c *Cluster) Create(obj client.Object) {
	c.t.Helper()
	if err := c.c.Create(context.Background(), obj); err != nil {
		c.t.Fatalf("cannot create %T %s: %v", obj, obj.GetName(), err)
	}
}

// Get reads the current state of an object.
func (c *Cluster) Get(obj client.Object) error {
	return c.c.Get(context.Background(), client.ObjectKeyFromObject(obj), obj)
}

// Change reads, modifies and updates an object. It repeats that after a conflict.
func (c *Cluster) Change(obj client.Object, change func()) {
	c.t.Helper()
	if err := testenv.Change(context.Background(), c.c, obj, func(client.Object) { change() }); err != nil {
		c.t.Fatalf("cannot change %T %s: %v", obj, obj.GetName(), err)
	}
}

// ChangeStatus is Change for the status.
func (c *Cluster) ChangeStatus(obj client.Object, change func()) {
	c.t.Helper()
	if err := testenv.ChangeStatus(context.Background(), c.c, obj, func(client.Object) { change() }); err != nil {
		c.t.Fatalf("cannot change the status of %T %s: %v", obj, obj.GetName(), err)
	}
}

// Becomes reads an object until a condition holds.
func (c *Cluster) Becomes(t *testing.T, obj client.Object, what string, holds func() bool) {
	t.Helper()
	expect.True(t, what, func() bool { return c.Get(obj) == nil && holds() })
}

// Has reports whether an object has a condition with a status and with a text in its message.
func Has(obj conditions.Getter, kind string, status metav1.ConditionStatus, message string) bool {
	c := conditions.Get(obj, kind)
	return c != nil && c.Status == status && strings.Contains(c.Message, message)
}

// Secret returns a secret of the cluster, or nil if it does not exist.
func (c *Cluster) Secret(name string) *corev1.Secret {
	out := &corev1.Secret{}
	if err := c.c.Get(context.Background(), client.ObjectKey{Namespace: c.Namespace, Name: name}, out); err != nil {
		return nil
	}
	return out
}
