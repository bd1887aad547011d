package integration

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/controller-runtime/pkg/client"

	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
	"capstan.dev/capstan/internal/testenv"
	"capstan.dev/capstan/internal/testenv/expect"
)

// IPAM-06: the clusterctl program moves a namespace to a second API server. Pools, claims and IPAddresses arrive with
// the same addresses, also those without a Cluster. The source keeps only the global pool. TestMove does the same step
// by step, with claims that are created between the steps.
func TestClusterctlMove(t *testing.T) {
	target := moveTarget(t)
	startManager(t, env.Config, options())
	opts := options()
	opts.MoveSettle = 15 * time.Second // On a busy machine, clusterctl can pause for seconds between two objects.
	startManager(t, target.Config, opts)

	ns := env.Namespace(t)
	cluster := provisionedCluster(t, ns)
	pool := newPool(ns, "p", subnet("10.5.0.0/24"))
	pool.Spec.RestSeconds = ptr.To[int32](3600)
	six := newPool(ns, "six", subnet("fd00:5::/64"))
	global := newGlobal("clusterctl-"+ns, subnet("10.6.0.0/24"))
	create(t, pool, six, global)
	hole := newClaimOf(cluster, "hole", pool)
	create(t, hole)
	addressOf(t, hole)
	claims := []*capiipamv1.IPAddressClaim{
		newClaimOf(cluster, "in-pool", pool), newClaimOf(cluster, "in-six", six), newClaimOf(cluster, "in-global", global),
		newClaim(ns, "no-cluster", pool), newClaim(ns, "no-cluster-global", global),
	}
	before := map[string]string{}
	for _, c := range claims {
		create(t, c)
		before[c.Name] = addressOf(t, c).Spec.Address
	}
	expect.NoError(t, env.Client.Delete(ctx, hole))
	wantGone(t, hole)

	source, err := get(pool.DeepCopy())
	expect.NoError(t, err)
	rests := source.Status.Allocator.Resting
	clusterctlMove(t, ns, env, target)

	m := &mover{t: t, to: target.Client}
	for _, c := range claims {
		m.wantAddress(c, before[c.Name])
	}
	wantMovedPools(t, target.Client, pool, six, global)
	for _, o := range []client.Object{cluster, pool, six} {
		wantGone(t, o)
	}
	for _, c := range claims {
		wantGone(t, c)
		wantGone(t, &capiipamv1.IPAddress{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: c.Name}})
	}
	_, err = get(global) // Cluster-scoped objects stay, as docs/ipam.md explains.
	expect.NoError(t, err)
	newcomer := newClaim(ns, "newcomer", pool)
	expect.NoError(t, target.Client.Create(ctx, newcomer))
	m.wantAddress(newcomer, "10.5.0.4") // ALL-12: the released address 10.5.0.1 still rests.
	moved := &ipamv1.CapstanIPPool{}
	expect.Eventually(t, "the moved resting address", func() error {
		if err := target.Client.Get(ctx, client.ObjectKeyFromObject(pool), moved); err != nil {
			return err
		}
		record := moved.Status.Allocator.Resting
		if moved.Status.Addresses.Resting != 1 || len(record) != 1 || !record[0].Until.Equal(&rests[0].Until) {
			return errOr(nil, "%+v rest, %+v at the source", record, rests)
		}
		return nil
	})
}

// provisionedCluster creates a Cluster that clusterctl accepts for a move.
func provisionedCluster(t *testing.T, ns string) *clusterv1.Cluster {
	t.Helper()
	cluster := newCluster(ns, "c", false)
	create(t, cluster)
	cluster.Status.Initialization = clusterv1.ClusterInitializationStatus{
		InfrastructureProvisioned: ptr.To(true), ControlPlaneInitialized: ptr.To(true),
	}
	conditions.Set(cluster, metav1.Condition{Type: clusterv1.ClusterControlPlaneInitializedCondition, Status: metav1.ConditionTrue, Reason: "Initialized"})
	expect.NoError(t, env.Client.Status().Update(ctx, cluster))
	return cluster
}

// clusterctlMove runs the clusterctl that make build-capi builds.
func clusterctlMove(t *testing.T, ns string, from, to *testenv.Env) {
	t.Helper()
	dir := t.TempDir()
	args := []string{"move", "--namespace", ns}
	for flag, e := range map[string]*testenv.Env{"--kubeconfig": from, "--to-kubeconfig": to} {
		file := filepath.Join(dir, strings.Trim(flag, "-"))
		expect.NoError(t, os.WriteFile(file, e.Kubeconfig, 0o600))
		args = append(args, flag, file)
	}
	limited, cancel := context.WithTimeout(ctx, 10*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(limited, filepath.Join(testenv.Root(), "bin", "clusterctl"), args...)
	cmd.Env = append(os.Environ(), "HOME="+dir, "XDG_CONFIG_HOME="+dir, "CLUSTERCTL_DISABLE_VERSIONCHECK=true")
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", cmd, err, out)
	}
}

// wantMovedPools checks that the pools at the target count the addresses that have arrived, and allocate new ones.
func wantMovedPools(t *testing.T, c client.Client, pools ...ipamv1.Pool) {
	t.Helper()
	for _, source := range pools {
		used := map[string]int64{"p": 2, "six": 1}[source.GetName()]
		if source.GetNamespace() == corev1.NamespaceAll {
			used = 2
		}
		expect.Eventually(t, "pool "+source.GetName()+" at the target", func() error {
			pool := source.DeepCopyObject().(ipamv1.Pool) //nolint:forcetypeassert // a copy.
			if err := c.Get(ctx, client.ObjectKeyFromObject(source), pool); err != nil {
				return err
			}
			status := pool.PoolStatus()
			if status.Addresses == nil || status.Addresses.Used != used || !conditions.IsTrue(pool.(conditions.Getter), ipamv1.ReadyCondition) {
				return errOr(nil, "status is %+v, %v", status.Addresses, pool.GetConditions())
			}
			return nil
		})
	}
}
