package integration

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"
	clusterctlv1 "sigs.k8s.io/cluster-api/cmd/clusterctl/api/v1alpha3"
	"sigs.k8s.io/controller-runtime/pkg/client"

	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
	"capstan.dev/capstan/internal/testenv"
	"capstan.dev/capstan/internal/testenv/expect"
)

// IPAM-06: the test moves objects to a second API server in the steps of clusterctl. It pauses the Cluster. It creates
// owners before the objects that they own, without status and with new UIDs. At the source, it marks all objects,
// deletes them and removes their finalizers in the reverse order. Then it unpauses the Cluster. Managers run on both
// sides all the time. A claim without a Cluster is moved as well. New claims do not get an address that is still to
// arrive.
func TestMove(t *testing.T) {
	target := moveTarget(t)
	startManager(t, env.Config, options())
	ns := env.Namespace(t)
	expect.NoError(t, target.Client.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: ns}}))
	startManager(t, target.Config, options())

	cluster := newCluster(ns, "c", false)
	pool := newPool(ns, "p", subnet("10.3.0.0/24"))
	global := newGlobal("move-"+ns, subnet("10.4.0.0/24"))
	create(t, cluster, pool, global)
	first := newClaimOf(cluster, "first", pool)
	create(t, first)
	hole := addressOf(t, first).Spec.Address
	var claims []*capiipamv1.IPAddressClaim
	for _, c := range []*capiipamv1.IPAddressClaim{newClaimOf(cluster, "in-pool", pool), newClaimOf(cluster, "in-global", global), newClaim(ns, "no-cluster", pool), newClaim(ns, "no-cluster-global", global)} {
		create(t, c)
		claims = append(claims, c)
	}
	var ips []*capiipamv1.IPAddress
	before := map[string]capiipamv1.IPAddressSpec{}
	for _, c := range claims {
		ip := addressOf(t, c)
		before[c.Name] = ip.Spec
		ips = append(ips, ip)
		if _, labelled := c.Labels[clusterctlv1.ClusterctlMoveLabel]; !labelled {
			t.Errorf("claim %s is not labelled for move", c.Name)
		}
	}
	// A free address below the others. A new claim would get it if it were served too early.
	expect.NoError(t, env.Client.Delete(ctx, first))
	wantGone(t, first)

	update(t, cluster, func(c *clusterv1.Cluster) { c.Spec.Paused = ptr.To(true) })
	m := &mover{t: t, to: target.Client, uids: map[types.UID]types.UID{}}
	m.create(cluster, pool, global)
	early := newClaim(ns, "early", pool) // a new claim at the target
	expect.NoError(t, target.Client.Create(ctx, early))
	for _, c := range claims {
		m.create(c)
	}
	for _, ip := range ips {
		m.create(ip)
	}
	for _, o := range objects(ips, claims) {
		m.remove(o)
	}
	m.remove(pool)
	m.remove(cluster)
	moved := newCluster(ns, "c", false)
	expect.NoError(t, testenv.Change(ctx, target.Client, moved, func(c *clusterv1.Cluster) { c.Spec.Paused = nil }))

	for _, c := range claims {
		m.wantAddress(c, before[c.Name].Address)
	}
	m.wantAddress(early, hole) // The address is free.
	for _, ip := range ips {
		wantGone(t, ip)
	}
	// The moved claims still work: the target releases them.
	for _, c := range claims {
		expect.NoError(t, client.IgnoreNotFound(target.Client.Delete(ctx, newClaim(ns, c.Name, pool))))
	}
	expect.Eventually(t, "the moved claims to be removed", func() error {
		list := &capiipamv1.IPAddressList{}
		if err := target.Client.List(ctx, list, client.InNamespace(ns)); err != nil || len(list.Items) > 1 {
			return errOr(err, "%d IPAddresses remain", len(list.Items))
		}
		return nil
	})
}

func objects(ips []*capiipamv1.IPAddress, claims []*capiipamv1.IPAddressClaim) []client.Object {
	var out []client.Object
	for _, ip := range ips {
		out = append(out, ip)
	}
	for _, c := range claims {
		out = append(out, c)
	}
	return out
}

func newClaimOf(cluster *clusterv1.Cluster, name string, pool ipamv1.Pool) *capiipamv1.IPAddressClaim {
	c := newClaim(cluster.Namespace, name, pool)
	c.Spec.ClusterName = cluster.Name
	c.OwnerReferences = []metav1.OwnerReference{*metav1.NewControllerRef(cluster, clusterv1.GroupVersion.WithKind("Cluster"))}
	return c
}

// mover does the steps of clusterctl's mover.go.
type mover struct {
	t    *testing.T
	to   client.Client
	uids map[types.UID]types.UID
}

func (m *mover) create(objs ...client.Object) {
	m.t.Helper()
	for _, o := range objs {
		expect.NoError(m.t, env.Client.Get(ctx, client.ObjectKeyFromObject(o), o))
		moved := o.DeepCopyObject().(client.Object) //nolint:forcetypeassert // a copy.
		moved.SetResourceVersion("")
		moved.SetUID("")
		refs := moved.GetOwnerReferences()
		for i := range refs {
			refs[i].UID = m.uids[refs[i].UID]
		}
		moved.SetOwnerReferences(refs)
		expect.NoError(m.t, m.to.Create(ctx, moved)) // A create request drops the status of kinds with a status subresource.
		m.uids[o.GetUID()] = moved.GetUID()
	}
}

func (m *mover) remove(o client.Object) {
	m.t.Helper()
	mark := client.RawPatch(types.JSONPatchType, []byte(`[{"op":"add","path":"/metadata/annotations","value":{"`+clusterctlv1.DeleteForMoveAnnotation+`":""}}]`))
	expect.NoError(m.t, env.Client.Patch(ctx, o, mark))
	expect.NoError(m.t, env.Client.Delete(ctx, o))
	strip := client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":[]}}`))
	expect.NoError(m.t, client.IgnoreNotFound(env.Client.Patch(ctx, o, strip)))
}

func (m *mover) wantAddress(claim *capiipamv1.IPAddressClaim, address string) {
	m.t.Helper()
	expect.Eventually(m.t, "claim "+claim.Name+" at the target", func() error {
		c, ip := &capiipamv1.IPAddressClaim{}, &capiipamv1.IPAddress{}
		if err := m.to.Get(ctx, client.ObjectKeyFromObject(claim), c); err != nil || c.Status.AddressRef.Name == "" {
			return errOr(err, "no addressRef: %v", c.Status.Conditions)
		}
		if err := m.to.Get(ctx, client.ObjectKey{Namespace: c.Namespace, Name: c.Status.AddressRef.Name}, ip); err != nil {
			return err
		}
		if ip.Spec.Address != address || !metav1.IsControlledBy(ip, c) {
			m.t.Fatalf("claim %s: want %s, got %s of %v", c.Name, address, ip.Spec.Address, ip.OwnerReferences)
		}
		return nil
	})
}
