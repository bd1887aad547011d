package integration

import (
	"fmt"
	"strings"
	"testing"

	"k8s.io/utils/ptr"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"

	"capstan.dev/capstan/internal/infrastructure/addresses"
	"capstan.dev/capstan/internal/testenv/expect"
)

// IPAM-07: an infrastructure provider uses the helper. A Cluster stands for the machine that owns the claim.
func TestInfrastructureHelper(t *testing.T) {
	stop := startManager(t, env.Config, options())
	ns := env.Namespace(t)
	owner := newCluster(ns, "m", false)
	pool := newPool(ns, "p", subnet("10.5.0.0/24", "10.5.0.10"))
	create(t, owner, pool)
	name := addresses.Name(owner.Name, 0)
	claim, err := addresses.EnsureClaim(ctx, env.Client, owner, "m", refTo(pool), name)
	expect.NoError(t, err)
	ref := claim.OwnerReferences[0]
	if ref.UID != owner.UID || !ptr.Deref(ref.Controller, false) || !ptr.Deref(ref.BlockOwnerDeletion, false) || claim.Spec.ClusterName != "m" || claim.Name != "m-0" {
		t.Errorf("IPAM-07: the claim is %+v", claim)
	}
	served := func() error {
		claim, err = addresses.EnsureClaim(ctx, env.Client, owner, "m", refTo(pool), name) // A second call returns the same claim.
		if err != nil {
			return err
		}
		ip, waiting, err := addresses.FetchAddress(ctx, env.Client, claim)
		if err != nil || ip == nil {
			return errOr(err, "waiting: %s", waiting)
		}
		if ip.Spec.Address != "10.5.0.10" {
			return fmt.Errorf("got %s", ip.Spec.Address)
		}
		return nil
	}
	expect.Eventually(t, "the address", served)
	// A user deletes the claim while the IPAM provider does not run. The claim still has its address, but the helper
	// must not return it.
	stop()
	expect.NoError(t, env.Client.Delete(ctx, claim))
	if err := served(); err == nil || !strings.Contains(err.Error(), "is being deleted") {
		t.Errorf("the helper returned the address of a claim that is being deleted: %v", err)
	}
	startManager(t, env.Config, options())
	wantGone(t, claim)
	expect.Eventually(t, "the address of the new claim", served)
	other := refTo(newPool(ns, "q"))
	if _, err := addresses.EnsureClaim(ctx, env.Client, owner, "m", other, name); err == nil || !strings.Contains(err.Error(), "cannot be changed") {
		t.Errorf("the pool was changed: %v", err)
	}
	expect.Eventually(t, "the claims to be removed", func() error {
		gone, err := addresses.ClaimsGone(ctx, env.Client, owner, "m", name, "never-made")
		if err != nil || !gone {
			return errOr(err, "not yet")
		}
		return nil
	})
	wantGone(t, &capiipamv1.IPAddress{ObjectMeta: claim.ObjectMeta})
}
