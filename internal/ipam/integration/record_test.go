package integration

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
	"capstan.dev/capstan/internal/testenv"
	"capstan.dev/capstan/internal/testenv/expect"
)

// protectRecord installs the admission policy of IPAddresses, as the provider is installed.
func protectRecord(c client.Client) error {
	data, err := os.ReadFile(filepath.Join(testenv.Root(), "config", "ipam", "webhook", "addresses.yaml"))
	if err != nil {
		return err
	}
	for _, text := range bytes.Split(data, []byte("\n---\n")) {
		o := &unstructured.Unstructured{}
		if err := errors.Join(yaml.Unmarshal(text, o), c.Create(ctx, o)); err != nil {
			return err
		}
	}
	return nil
}

// tenantOf returns a client with all rights for claims, IPAddresses and pools of some namespaces.
func tenantOf(t *testing.T, namespaces ...string) client.Client {
	t.Helper()
	const user = "tenant"
	for _, ns := range namespaces {
		create(t, &rbacv1.Role{
			ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: user},
			Rules: []rbacv1.PolicyRule{{
				APIGroups: []string{ipamv1.GroupVersion.Group, capiipamv1.GroupVersion.Group}, Resources: []string{"*"}, Verbs: []string{"*"},
			}},
		}, &rbacv1.RoleBinding{
			ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: user},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: user},
			Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: user}},
		})
	}
	config := rest.CopyConfig(env.Config)
	config.Impersonate.UserName = user
	c, err := client.New(config, client.Options{Scheme: env.Scheme})
	expect.NoError(t, err)
	return c
}

// newAddress returns an IPAddress that somebody writes by hand.
func newAddress(ns, name string, p ipamv1.Pool, address string) *capiipamv1.IPAddress {
	return &capiipamv1.IPAddress{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name},
		Spec: capiipamv1.IPAddressSpec{
			ClaimRef: capiipamv1.IPAddressClaimReference{Name: name}, PoolRef: refTo(p), Address: address, Prefix: ptr.To[int32](24),
		},
	}
}

// controlledBy makes a claim the controller of an IPAddress.
func controlledBy(ip *capiipamv1.IPAddress, claim *capiipamv1.IPAddressClaim) *capiipamv1.IPAddress {
	ip.OwnerReferences = []metav1.OwnerReference{*metav1.NewControllerRef(claim, capiipamv1.GroupVersion.WithKind("IPAddressClaim"))}
	return ip
}

// ALL-18: a tenant takes no address of a global pool without a claim that the pool serves. IPAddresses by hand would take a whole pool,
// or an address for a namespace that the pool does not allow. The record of pools of the own namespace belongs to the tenant.
func TestRecordOfGlobalPools_ALL18(t *testing.T) {
	startManager(t, env.Config, options())
	allowed, foreign := env.Namespace(t), env.Namespace(t)
	pool, own := newGlobal("record-"+allowed, subnet("10.6.77.0/24")), newPool(allowed, "own", subnet("10.6.78.0/24"))
	pool.Spec.AllowedNamespaces = &ipamv1.AllowedNamespaces{Names: []string{allowed}}
	create(t, pool, own)
	tenant := tenantOf(t, allowed, foreign)
	refused := func(what string, err error) {
		t.Helper()
		if !apierrors.IsForbidden(err) || !strings.Contains(fmt.Sprint(err), "create an IPAddressClaim") {
			t.Errorf("%s: %v", what, err)
		}
	}

	theirs := newClaim(foreign, "theirs", pool)
	expect.NoError(t, tenant.Create(ctx, theirs))
	wantReason(t, theirs, capiipamv1.IPAddressClaimReadyAllocationFailedReason)
	whole := newAddress(allowed, "whole", pool, "10.6.77.0")
	whole.Spec.Prefix = ptr.To[int32](0)
	expect.Eventually(t, "the policy, which the API server reads after its creation", func() error {
		if err := tenant.Create(ctx, whole.DeepCopy(), client.DryRunAll); !apierrors.IsForbidden(err) {
			return errOr(err, "a whole pool is accepted")
		}
		return nil
	})
	refused("a whole pool", tenant.Create(ctx, whole))
	refused("an address with a controller", tenant.Create(ctx, controlledBy(newAddress(foreign, "theirs", pool, "10.6.77.9"), theirs)))
	expect.NoError(t, tenant.Create(ctx, newAddress(allowed, "of-own", own, "10.6.78.9")))
	lying := theirs.DeepCopy()
	lying.Status.AddressRef.Name = theirs.Name
	expect.NoError(t, tenant.Status().Patch(ctx, lying, client.MergeFrom(theirs)))
	update(t, theirs, func(c *capiipamv1.IPAddressClaim) { c.Annotations[ipamv1.AddressAnnotation] = "10.6.77.200" })

	mine := newClaim(allowed, "mine", pool)
	expect.NoError(t, tenant.Create(ctx, mine))
	ip := wantAddress(t, mine, "10.6.77.1")
	changed := ip.DeepCopy()
	changed.Labels["team"] = "a"
	expect.NoError(t, tenant.Patch(ctx, changed, client.MergeFrom(ip)))
	other := newClaim(allowed, "other", own)
	expect.NoError(t, tenant.Create(ctx, other))
	refused("another controller", tenant.Patch(ctx, controlledBy(changed.DeepCopy(), other), client.MergeFrom(changed)))
	for what, change := range map[string]func(*metav1.OwnerReference){
		"no controller":            func(o *metav1.OwnerReference) { o.Controller = ptr.To(false) },
		"a controller's kind":      func(o *metav1.OwnerReference) { o.Kind = "Other" },
		"a controller's name":      func(o *metav1.OwnerReference) { o.Name = "other" },
		"a controller's API group": func(o *metav1.OwnerReference) { o.APIVersion = "example.com/v1" },
	} {
		detached := changed.DeepCopy()
		change(controllerOf(t, detached))
		refused(what, tenant.Patch(ctx, detached, client.MergeFrom(changed)))
	}
	without := changed.DeepCopy()
	without.OwnerReferences = nil
	refused("no owner", tenant.Patch(ctx, without.DeepCopy(), client.MergeFrom(changed)))
	expect.NoError(t, garbageCollector(t).Patch(ctx, without.DeepCopy(), client.MergeFrom(changed), client.DryRunAll))
	freed := changed.DeepCopy()
	freed.Finalizers = nil
	refused("no finalizer", tenant.Patch(ctx, freed, client.MergeFrom(changed)))
	wantReason(t, theirs, capiipamv1.IPAddressClaimReadyAllocationFailedReason)
	wantGone(t, &capiipamv1.IPAddress{ObjectMeta: metav1.ObjectMeta{Namespace: foreign, Name: theirs.Name}})

	create(t, newAddress(allowed, "kept", pool, "10.6.77.3"))
	kept := newClaim(allowed, "kept", pool)
	expect.NoError(t, tenant.Create(ctx, kept))
	wantAddress(t, kept, "10.6.77.3")
	expect.NoError(t, tenant.Delete(ctx, mine))
	wantGone(t, mine)
}

// controllerOf returns the controlling owner reference of an IPAddress.
func controllerOf(t *testing.T, ip *capiipamv1.IPAddress) *metav1.OwnerReference {
	t.Helper()
	for i := range ip.OwnerReferences {
		if o := &ip.OwnerReferences[i]; ptr.Deref(o.Controller, false) {
			return o
		}
	}
	t.Fatalf("IPAddress %s has no controller: %v", ip.Name, ip.OwnerReferences)
	return nil
}

// The policy does not concern IPAddresses of other pools. Older API versions allow a reference to a pool without an API group.
func TestAddressWithoutGroup(t *testing.T) {
	ns := env.Namespace(t)
	ip := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "ipam.cluster.x-k8s.io/v1beta1", "kind": "IPAddress",
		"metadata": map[string]any{"namespace": ns, "name": "a", "finalizers": []any{"test/keeps"}},
		"spec": map[string]any{
			"claimRef": map[string]any{"name": "a"}, "poolRef": map[string]any{"kind": ipamv1.GlobalCapstanIPPoolKind, "name": "p"},
			"address": "10.6.79.1", "prefix": int64(24),
		},
	}}
	create(t, ip)
	expect.NoError(t, env.Client.Delete(ctx, ip))
	strip(t, ip)
	wantGone(t, ip)
}
