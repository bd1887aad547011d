package controlplane

import (
	"context"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	etcdv1 "capstan.dev/capstan/api/etcd/v1beta2"
	"capstan.dev/capstan/internal/bootstrap/testcluster"
)

// TestRestoreSameCluster: nothing happens as long as the keys do not fit; then every machine of before goes before the first of
// the restored cluster is made, and the others join it. It is done once.
func TestRestoreSameCluster(t *testing.T) {
	w, cp, _ := connected(t, func(cp *controlplanev1.CapstanControlPlane) {
		cp.Spec.Backup = controlplanev1.BackupSpec{Store: inDirectory()}
	})
	scaleTo(w, cp, 3)
	w.until("three", w.settled(cp, 3))
	demand(w, cp, "one")
	b := w.backupWith(etcdv1.BackupOnDemand, "one")
	w.ends(b, etcdv1.BackupSucceeded, "")
	w.until("there is a backup", func() bool { return w.cluster.Get(cp) == nil && len(cp.Status.Backups) == 1 })

	before := namesOfMachines(t, w)
	keys := slices.Clone(cp.Status.Backups[0].Keys)
	wrong := slices.Clone(keys)
	for n := range wrong {
		if wrong[n].Name == etcdv1.KeyEncryption {
			wrong[n].SHA256 = keys[(n+1)%len(keys)].SHA256
		}
	}
	w.cluster.Change(cp, func() { cp.Spec.Restore = controlplanev1.RestoreSpec{Name: b.Name, Keys: wrong} })
	w.until("another encryption key is told", func() bool {
		return w.cluster.Get(cp) == nil && has(cp, controlplanev1.RestoredCondition, metav1.ConditionFalse, "it needs the key encryption")
	})
	if now := namesOfMachines(t, w); !slices.Equal(now, before) {
		t.Fatalf("%v became %v, although the backup cannot be used", before, now)
	}

	w.restoring = true
	w.cluster.Change(cp, func() { cp.Spec.Restore.Keys = nil })
	w.until("all machines of before are gone, and another one is made", func() bool {
		now := namesOfMachines(t, w)
		old := slices.ContainsFunc(now, func(name string) bool { return slices.Contains(before, name) })
		if old && len(now) > 3 {
			t.Fatalf("one of before and one of now at the same time: %v", now)
		}
		return len(now) == 1 && !old
	})
	first := namesOfMachines(t, w)[0]
	config := &bootstrapv1.CapstanConfig{}
	if err := env.Client.Get(t.Context(), client.ObjectKey{Namespace: w.cluster.Namespace, Name: first}, config); err != nil {
		t.Fatal(err)
	}
	if r := config.Spec.Restore; config.Spec.Role != bootstrapv1.RoleInit || r.Name != b.Name || r.SHA256 != b.Status.SHA256 || r.Folder != w.cluster.Namespace+"/demo" || len(r.Keys) != 3 || r.Store.Directory.Path == "" {
		t.Errorf("%+v", config.Spec)
	}
	w.until("restored", func() bool {
		return w.cluster.Get(cp) == nil && has(cp, controlplanev1.RestoredCondition, metav1.ConditionTrue, "") && cp.Annotations[controlplanev1.RestoredAnnotation] == b.Name
	})
	w.until("three again", w.settled(cp, 3))
	after := namesOfMachines(t, w)
	if after[0] != first || len(w.made) != 6 {
		t.Errorf("%v were made, %v are there", w.made, after)
	}

	// A management cluster that was taken back itself has lost its notes. The cluster still knows.
	w.restoring = false
	w.cluster.Change(cp, func() { delete(cp.Annotations, controlplanev1.RestoredAnnotation) })
	w.until("it is written down again", func() bool {
		return w.cluster.Get(cp) == nil && cp.Annotations[controlplanev1.RestoredAnnotation] == b.Name
	})
	w.still("nothing is restored twice", func() bool { return slices.Equal(namesOfMachines(t, w), after) })
	t.Cleanup(func() { _ = env.Client.Delete(context.WithoutCancel(t.Context()), marker()) })
}

// TestRestoreNewCluster: a new cluster begins with the backup of another one, and with its keys, which nobody makes anew.
func TestRestoreNewCluster(t *testing.T) {
	cluster := testcluster.New(t, env, nil)
	cp := cluster.ControlPlane(func(cp *controlplanev1.CapstanControlPlane) {
		cp.Spec.Restore = controlplanev1.RestoreSpec{Name: "etcd-1", Folder: "production/old", Store: s3()}
	})
	endpoint := testcluster.NewEndpoint(t)
	cluster.SetInfraEndpoint(endpoint.APIEndpoint)
	for _, name := range []string{"demo-ca", "demo-sa", "demo-encryption"} {
		becomes(t, cluster, cp, name+" is missed", func() bool {
			return has(cp, controlplanev1.CertificatesAvailableCondition, metav1.ConditionFalse, "the secret "+name+" does not exist: spec.restore needs the one")
		})
		if cluster.Secret(name) != nil {
			t.Errorf("%s was made", name)
		}
	}
	ca := newCA(t)
	cluster.Create(&corev1.Secret{ObjectMeta: cluster.Meta("demo-ca"), Type: clusterv1.ClusterSecretType, Data: map[string][]byte{"tls.crt": ca.Cert, "tls.key": ca.Key}})
	cluster.Create(&corev1.Secret{ObjectMeta: cluster.Meta("demo-sa"), Type: clusterv1.ClusterSecretType, Data: serviceAccountKeys(t)})
	cluster.Create(&corev1.Secret{ObjectMeta: cluster.Meta("demo-encryption"), Type: clusterv1.ClusterSecretType, Data: map[string][]byte{"value": make([]byte, 32)}})
	becomes(t, cluster, cp, "the store's Secret is missed", func() bool {
		return has(cp, controlplanev1.RestoredCondition, metav1.ConditionFalse, "the Secret store, which the backup store needs, does not exist")
	})
	if n := len(machinesOf(t, cluster)); n != 0 {
		t.Errorf("%d Machines without the backup", n)
	}
	cluster.Create(&corev1.Secret{ObjectMeta: cluster.Meta("store"), Data: map[string][]byte{etcdv1.S3AccessKeyID: []byte("me"), etcdv1.S3SecretAccessKey: []byte("x")}})
	testcluster.Eventually(t, "the first Machine", func() bool { return len(machinesOf(t, cluster)) == 1 })
	config := &bootstrapv1.CapstanConfig{}
	if err := env.Client.Get(t.Context(), client.ObjectKey{Namespace: cluster.Namespace, Name: machinesOf(t, cluster)[0].Name}, config); err != nil {
		t.Fatal(err)
	}
	if r := config.Spec.Restore; config.Spec.Role != bootstrapv1.RoleInit || r.Name != "etcd-1" || r.Folder != "production/old" || r.Store.S3.Bucket != "backups" {
		t.Errorf("%+v", config.Spec)
	}
	endpoint.Serve(t, cluster.Secret("demo-ca"), env.Config)
	w := newWorld(t, cluster)
	cluster.SetEndpoint(endpoint.APIEndpoint)
	cluster.ChangeStatus(cluster.Cluster, func() { cluster.Status.Initialization.ControlPlaneInitialized = ptr.To(true) })
	w.until("it is restored", func() bool {
		return cluster.Get(cp) == nil && has(cp, controlplanev1.RestoredCondition, metav1.ConditionTrue, "")
	})
	t.Cleanup(func() { _ = env.Client.Delete(context.WithoutCancel(t.Context()), marker()) })
	scaleTo(w, cp, 3)
	w.until("others join", w.settled(cp, 3))
	if len(w.made) != 3 {
		t.Errorf("%v were made", w.made)
	}
}

// serviceAccountKeys as Cluster API has them.
func serviceAccountKeys(t *testing.T) map[string][]byte {
	t.Helper()
	cluster := testcluster.New(t, env, nil)
	cluster.SetInfraEndpoint(somewhere)
	cluster.ControlPlane(nil)
	testcluster.Eventually(t, "keys of another cluster", func() bool { return cluster.Secret("demo-sa") != nil })
	return cluster.Secret("demo-sa").Data
}
