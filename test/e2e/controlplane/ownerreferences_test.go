//go:build e2e

package controlplane

import (
	"context"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"capstan.dev/capstan/test/e2e/harness"
)

// ownedKinds are the kinds of objects that belong to a cluster with one control plane.
var ownedKinds = []schema.GroupVersionKind{
	{Version: "v1", Kind: "Secret"},
	{Group: "cluster.x-k8s.io", Version: "v1beta2", Kind: "Machine"},
	{Group: "bootstrap.capstan.dev", Version: "v1beta2", Kind: "CapstanConfig"},
	{Group: "controlplane.capstan.dev", Version: "v1beta2", Kind: "CapstanControlPlane"},
	{Group: "infrastructure.capstan.dev", Version: "v1beta2", Kind: "CapstanCluster"},
	{Group: "infrastructure.capstan.dev", Version: "v1beta2", Kind: "CapstanMachine"},
	{Group: "infrastructure.capstan.dev", Version: "v1beta2", Kind: "CapstanMachineTemplate"},
}

// objects returns all objects of the cluster that have an owner at the start.
func (s *subject) objects(ctx context.Context) (out []unstructured.Unstructured, err error) {
	for _, gvk := range ownedKinds {
		list := &unstructured.UnstructuredList{}
		list.SetGroupVersionKind(gvk.GroupVersion().WithKind(gvk.Kind + "List"))
		if err := plane.Client.List(ctx, list, client.InNamespace(s.Namespace)); err != nil {
			return nil, err
		}
		for _, o := range list.Items {
			if o.GetLabels()[clusterv1.ClusterNameLabel] == s.Name || o.GetName() == s.Name || strings.HasPrefix(o.GetName(), s.Name+"-") {
				out = append(out, o)
			}
		}
	}
	return out, nil
}

// owners returns the owner references of the cluster's objects.
func (s *subject) owners(ctx context.Context) (map[string]string, error) {
	objects, err := s.objects(ctx)
	out := map[string]string{}
	for _, o := range objects {
		for _, ref := range o.GetOwnerReferences() {
			out[o.GetKind()+"/"+o.GetName()] += fmt.Sprintf("%s %s %s %s %v;", ref.APIVersion, ref.Kind, ref.Name, ref.UID, ptr.Deref(ref.Controller, false))
		}
	}
	return out, err
}

// dropOwners removes the owner references of all objects while the Cluster is paused, like a restore with a backup tool. The manager, which
// serves the webhooks, may have been killed just before.
func (s *subject) dropOwners(t *testing.T) {
	t.Helper()
	pause := func(ctx context.Context, paused bool) error {
		cluster := &clusterv1.Cluster{}
		cluster.Namespace, cluster.Name = s.Namespace, s.Name
		return plane.Client.Patch(ctx, cluster, client.RawPatch("application/merge-patch+json", fmt.Appendf(nil, `{"spec":{"paused":%v}}`, paused)))
	}
	harness.Eventually(t, "no object has an owner", limit, func(ctx context.Context) error {
		if err := pause(ctx, true); err != nil {
			return err
		}
		objects, err := s.objects(ctx)
		if err != nil {
			return err
		}
		for _, o := range objects {
			if len(o.GetOwnerReferences()) == 0 {
				continue
			}
			before := o.DeepCopy()
			o.SetOwnerReferences(nil)
			if err := plane.Client.Patch(ctx, &o, client.MergeFrom(before)); client.IgnoreNotFound(err) != nil {
				return err
			}
		}
		return pause(ctx, false)
	})
}

// lostOwners (ALL-11, and C1 of the hostile tenants): each object of a cluster gets its lost owner reference back. Its
// machines and etcd do not change.
func lostOwners(t *testing.T, s *subject) {
	before, err := s.owners(t.Context())
	if err != nil || len(before) < 15 {
		t.Fatalf("%d objects with owners, %v", len(before), err)
	}
	machines := s.mustMachines(t)
	s.dropOwners(t)
	harness.Eventually(t, "all owner references", limit, func(ctx context.Context) error {
		after, err := s.owners(ctx)
		if err != nil {
			return err
		}
		for name, refs := range before {
			if after[name] != refs {
				return fmt.Errorf("%s has %q instead of %q", name, after[name], refs)
			}
		}
		return nil
	})
	s.settled(t, len(machines))
	for name, m := range s.mustMachines(t) {
		if m.UID != machines[name].UID {
			t.Errorf("Machine %s was replaced", name)
		}
	}
}

// goneWithoutOwners: a cluster is deleted right after its objects have lost their owners. None of its Secrets is left.
func goneWithoutOwners(t *testing.T, s *subject) {
	s.dropOwners(t)
	s.Delete(t)
	harness.Eventually(t, "no Secret is left", limit, func(ctx context.Context) error {
		list := &corev1.SecretList{}
		if err := plane.Client.List(ctx, list, client.InNamespace(s.Namespace), client.MatchingLabels{clusterv1.ClusterNameLabel: s.Name}); err != nil {
			return err
		}
		for _, left := range list.Items {
			return fmt.Errorf("the secret %s remains", left.Name)
		}
		return nil
	})
}
