package controlplane

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/collections"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/cluster-api/util/secret"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	etcdv1 "capstan.dev/capstan/api/etcd/v1beta2"
	"capstan.dev/capstan/internal/controlplane/model"
	"capstan.dev/capstan/internal/node/nodeconfig"
	"capstan.dev/capstan/internal/reconciling"
	"capstan.dev/capstan/internal/testenv"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/internal/testenv/testcluster"
)

// checkFor waits until a machine is requested to examine a backup.
func (w *simulation) checkFor(backup string) *etcdv1.EtcdBackupCheck {
	w.t.Helper()
	var found *etcdv1.EtcdBackupCheck
	w.until("an EtcdBackupCheck of "+backup, func() bool {
		list := &etcdv1.EtcdBackupCheckList{}
		if err := env.Client.List(context.Background(), list); err != nil {
			w.t.Fatal(err)
		}
		for i := range list.Items {
			if c := &list.Items[i]; len(list.Items) == 1 && c.Spec.Backup == backup && c.Status.Phase == "" {
				found = c
			}
		}
		return found != nil
	})
	return found
}

// finds simulates the machine that has examined a backup.
func (w *simulation) finds(c *etcdv1.EtcdBackupCheck, status etcdv1.EtcdBackupCheckStatus) {
	w.t.Helper()
	before := c.DeepCopy()
	c.Status = status
	if err := env.Client.Status().Patch(context.Background(), c, client.MergeFrom(before)); err != nil {
		w.t.Fatal(err)
	}
}

// sameCluster is a cluster of three machines with a backup. Its machines are those from before the restore.
type sameCluster struct {
	*simulation
	cp     *controlplanev1.CapstanControlPlane
	backup *etcdv1.EtcdBackup
	// keys are those of the backup. In wrong, the encryption key is another one.
	keys, wrong []etcdv1.BackupKey
	machines    []string
}

// TestRestoreSameCluster: no Machine changes if the keys do not match, or if a machine finds that the backup is unusable. In a
// restore, all existing machines are removed before the first machine of the restored cluster is created, and the others join
// it. The restore is done once.
func TestRestoreSameCluster(t *testing.T) {
	r := newSameCluster(t)
	r.refusesOtherKeys()
	check := r.refusesUnusableBackups()
	first := r.replacesMachines()
	r.completes(check, first)
	r.recordsRestoreAgain()
	t.Cleanup(func() { _ = env.Client.Delete(context.WithoutCancel(t.Context()), marker()) })
}

func newSameCluster(t *testing.T) *sameCluster {
	t.Helper()
	w, cp, _ := connected(t, func(cp *controlplanev1.CapstanControlPlane) {
		cp.Spec.Backup = controlplanev1.BackupSpec{Store: inDirectory()}
	})
	scaleTo(w, cp, 3)
	w.until("three", w.settled(cp, 3))
	demand(w, cp, "one")
	b := w.backupWith(etcdv1.BackupOnDemand, "one")
	w.ends(b, etcdv1.BackupSucceeded, "")
	w.until("the status contains a backup", func() bool { return w.cluster.Get(cp) == nil && len(cp.Status.Backups) == 1 })
	keys := slices.Clone(cp.Status.Backups[0].Keys)
	wrong := slices.Clone(keys)
	for n := range wrong {
		if wrong[n].Name == etcdv1.KeyEncryption {
			wrong[n].SHA256 = keys[(n+1)%len(keys)].SHA256
		}
	}
	return &sameCluster{simulation: w, cp: cp, backup: b, keys: keys, wrong: wrong, machines: namesOfMachines(t, w)}
}

// names returns the current Machines.
func (r *sameCluster) names() []string {
	r.t.Helper()
	return namesOfMachines(r.t, r.simulation)
}

// restores changes the restore of the control plane.
func (r *sameCluster) restores(change func(*controlplanev1.RestoreSpec)) {
	r.t.Helper()
	r.cluster.Change(r.cp, func() { change(&r.cp.Spec.Restore) })
}

func (r *sameCluster) restored(status metav1.ConditionStatus, message string) bool {
	return r.cluster.Get(r.cp) == nil && testcluster.Has(r.cp, controlplanev1.RestoredCondition, status, message)
}

func (r *sameCluster) refusesOtherKeys() {
	r.t.Helper()
	r.restores(func(s *controlplanev1.RestoreSpec) { s.Name, s.Keys = r.backup.Name, r.wrong })
	r.until("a condition names the other encryption key", func() bool { return r.restored(metav1.ConditionFalse, "it needs the key encryption") })
	if now := r.names(); !slices.Equal(now, r.machines) {
		r.t.Fatalf("Machines %v became %v, although the backup is unusable", r.machines, now)
	}
}

// refusesUnusableBackups returns the first check of the backup.
func (r *sameCluster) refusesUnusableBackups() *etcdv1.EtcdBackupCheck {
	r.t.Helper()
	r.restores(func(s *controlplanev1.RestoreSpec) { s.Keys = nil })
	check := r.checkFor(r.backup.Name)
	if c := check.Spec; !slices.Contains(r.machines, c.Member) || c.SHA256 != r.backup.Status.SHA256 || c.Folder != r.cluster.Namespace+"/demo" || c.Store.Directory.Path == "" {
		r.t.Errorf("%+v", c)
	}
	r.untouched("the machine of the etcd member " + check.Spec.Member)
	r.finds(check, etcdv1.EtcdBackupCheckStatus{Phase: etcdv1.CheckBegun})
	r.untouched("checks the backup " + r.backup.Name)
	r.finds(check, etcdv1.EtcdBackupCheckStatus{Phase: etcdv1.CheckFailed, Message: "there is no backup at s3://x"})
	r.untouched("the machine of the etcd member " + check.Spec.Member + " examined it: there is no backup at s3://x. Nothing was changed")
	r.restores(func(s *controlplanev1.RestoreSpec) { s.Attempt = "2" })
	r.finds(r.checkFor(r.backup.Name), etcdv1.EtcdBackupCheckStatus{Phase: etcdv1.CheckSucceeded, KubernetesVersion: "v1.36.3", Keys: r.wrong})
	r.untouched("it needs the key encryption")
	return check
}

// untouched waits for a text in the condition, and checks that no Machine is removed.
func (r *sameCluster) untouched(what string) {
	r.t.Helper()
	r.until("a condition contains: "+what, func() bool { return r.restored(metav1.ConditionFalse, what) })
	r.still("no Machine is removed", func() bool { return slices.Equal(r.names(), r.machines) })
}

// replacesMachines restores the backup with the correct keys, and returns the first machine of the restored cluster.
func (r *sameCluster) replacesMachines() (first string) {
	r.t.Helper()
	r.restoring = true
	r.restores(func(s *controlplanev1.RestoreSpec) { s.Attempt = "3" })
	r.stubborn[r.machines[0]] = true
	r.finds(r.checkFor(r.backup.Name), etcdv1.EtcdBackupCheckStatus{Phase: etcdv1.CheckSucceeded, KubernetesVersion: "v1.36.3", Keys: r.keys})
	r.until("the restore begins", func() bool {
		return r.cluster.Get(r.cp) == nil && r.cp.Annotations[controlplanev1.RestoreAnnotation] == r.backup.Name+"#3"
	})
	// The restore brings back the object of a backup that was removed from the store since.
	former := &etcdv1.EtcdBackup{ObjectMeta: metav1.ObjectMeta{Name: "etcd-former"}, Spec: r.backup.Spec}
	r.cluster.Create(former)
	r.ends(former, etcdv1.BackupSucceeded, "")
	r.until("the condition names the Machine that remains", func() bool { return r.restored(metav1.ConditionFalse, "are being deleted: "+r.machines[0]) })
	r.stubborn[r.machines[0]] = false
	r.until("all former machines are removed, and another one is created", func() bool {
		now := r.names()
		old := slices.ContainsFunc(now, func(name string) bool { return slices.Contains(r.machines, name) })
		if old && len(now) > 3 {
			r.t.Fatalf("a Machine from before the restore exists beside a restored one: %v", now)
		}
		return len(now) == 1 && !old
	})
	first = r.names()[0]
	config := &bootstrapv1.CapstanConfig{}
	expect.NoError(r.t, env.Client.Get(r.t.Context(), client.ObjectKey{Namespace: r.cluster.Namespace, Name: first}, config))
	if s := config.Spec.Restore; config.Spec.Role != bootstrapv1.RoleInit || s.Name != r.backup.Name || s.SHA256 != r.backup.Status.SHA256 || s.Folder != r.cluster.Namespace+"/demo" || len(s.Keys) != 3 || s.Store.Directory.Path == "" {
		r.t.Errorf("%+v", config.Spec)
	}
	r.until("restored", func() bool {
		return r.restored(metav1.ConditionTrue, "") && r.cp.Annotations[controlplanev1.RestoredAnnotation] == r.backup.Name+"#3"
	})
	if err := env.Client.Get(r.t.Context(), client.ObjectKeyFromObject(former), former); !apierrors.IsNotFound(err) {
		r.t.Errorf("an EtcdBackup from before the restore remains: %v", err)
	}
	return first
}

// completes waits until two machines have joined the first one, and checks that the check of the backup was deleted.
func (r *sameCluster) completes(check *etcdv1.EtcdBackupCheck, first string) {
	r.t.Helper()
	r.until("three again", r.settled(r.cp, 3))
	if n := len(r.cp.Status.Backups); n != 1 {
		r.t.Errorf("the status lists %d backups after the restore", n)
	}
	if err := env.Client.Get(r.t.Context(), client.ObjectKeyFromObject(check), check); !apierrors.IsNotFound(err) {
		r.t.Errorf("an EtcdBackupCheck remains: %v", err)
	}
	if after := r.names(); !slices.Contains(after, first) || len(r.made) != 6 { // Creation times have whole seconds.
		r.t.Errorf("%v were created, %v exist", r.made, after)
	}
}

// recordsRestoreAgain: a management cluster that was itself restored has lost the record of the restore. The workload cluster
// still has it.
func (r *sameCluster) recordsRestoreAgain() {
	r.t.Helper()
	after := r.names()
	r.restoring = false
	r.cluster.Change(r.cp, func() { delete(r.cp.Annotations, controlplanev1.RestoredAnnotation) })
	r.until("the restore is recorded again", func() bool {
		return r.cluster.Get(r.cp) == nil && r.cp.Annotations[controlplanev1.RestoredAnnotation] == r.backup.Name+"#3"
	})
	r.still("the restore is not repeated", func() bool { return slices.Equal(r.names(), after) })
}

// TestRestoreUnchecked: if a cluster does not answer, the restore waits before it removes machines. A condition states that the
// backup was not examined.
func TestRestoreUnchecked(t *testing.T) {
	w, cp, endpoint := connected(t, func(cp *controlplanev1.CapstanControlPlane) {
		cp.Spec.Backup = controlplanev1.BackupSpec{Store: inDirectory()}
	})
	before := namesOfMachines(t, w)
	endpoint.Close()
	w.cluster.Change(cp, func() { cp.Spec.Restore = controlplanev1.RestoreSpec{Name: "etcd-1"} })
	told := func(reason, message string) {
		t.Helper()
		w.until("a condition contains: "+message, func() bool {
			return w.cluster.Get(cp) == nil && testcluster.Has(cp, controlplanev1.RestoredCondition, metav1.ConditionFalse, message) &&
				conditions.GetReason(cp, controlplanev1.RestoredCondition) == reason
		})
	}
	told(controlplanev1.CheckingReason, "the API server does not answer through the endpoint. If this lasts 2m0s, the restore starts without a check")
	w.still("no Machine is removed", func() bool { return slices.Equal(namesOfMachines(t, w), before) })

	w.restoring = true
	m := &clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{Namespace: w.cluster.Namespace, Name: before[0]}}
	if err := testenv.ChangeStatus(t.Context(), env.Client, m, func(m *clusterv1.Machine) {
		conditions.Set(m, metav1.Condition{Type: clusterv1.InfrastructureReadyCondition, Status: metav1.ConditionFalse, Reason: "Gone"})
	}); err != nil {
		t.Fatal(err)
	}
	told(controlplanev1.RestoreImpossibleReason, "copy the keys from etcd-1.json in the store into spec.restore.keys")
	w.cluster.Change(cp, func() {
		cp.Spec.Restore.Keys = []etcdv1.BackupKey{{Name: etcdv1.KeyCA, SHA256: strings.Repeat("0", 64)}}
		cp.Spec.Restore.OtherAuthorities = ptr.To(true)
	})
	told(controlplanev1.RestoringUncheckedReason, "No machine could check the backup before")
	w.until("another machine is created", func() bool {
		now := namesOfMachines(t, w)
		return len(now) == 1 && now[0] != before[0]
	})
	told(controlplanev1.RestoringUncheckedReason, "begins with the backup etcd-1. No machine could check the backup before the restore began")
}

// TestFormerBackups: a restore deletes the EtcdBackups that the status does not list. After the loss of the management cluster the status is
// empty, and all of them remain.
func TestFormerBackups(t *testing.T) {
	for name, c := range map[string]struct {
		known []controlplanev1.BackupStatus
		want  int
	}{
		"one is listed":          {known: []controlplanev1.BackupStatus{{Name: "etcd-1"}}, want: 1},
		"the status is new":      {want: 2},
		"another one was listed": {known: []controlplanev1.BackupStatus{{Name: "etcd-3"}}},
	} {
		w := newRotating(t)
		for _, name := range []string{"etcd-1", "etcd-2"} {
			b := &etcdv1.EtcdBackup{ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID(name)}, Status: etcdv1.EtcdBackupStatus{Phase: etcdv1.BackupSucceeded}}
			if err := w.management.Create(t.Context(), b); err != nil {
				t.Fatal(err)
			}
		}
		s := &scope{ControlPlane: &model.ControlPlane{Object: &controlplanev1.CapstanControlPlane{Status: controlplanev1.CapstanControlPlaneStatus{Backups: c.known}}}, client: w.management}
		if err := (&restores{}).removeFormerBackups(t.Context(), s); err != nil {
			t.Fatal(err)
		}
		list := &etcdv1.EtcdBackupList{}
		if err := w.management.List(t.Context(), list); err != nil || len(list.Items) != c.want {
			t.Errorf("%s: %d EtcdBackups remain, want %d; %v", name, len(list.Items), c.want, err)
		}
	}
}

// TestRestoreRemovesFormerAuthority: the backup is from before a rotation, or from its middle. The restored cluster does not keep the former
// authority, and no Node keeps the announcement of it.
func TestRestoreRemovesFormerAuthority(t *testing.T) {
	w := newRotating(t)
	r := newReconciler(w.management, nil, reconciling.Options{LiveClient: w.management, SecretCachingClient: w.management})
	s := w.scope()
	s.Object.Spec.Restore.Name = "etcd-1"
	bundle := string(s.Authority.Data[secret.TLSCrtDataName])
	published, node := &corev1.ConfigMap{}, &corev1.Node{}
	w.change(w.workload, metav1.NamespaceSystem, "extension-apiserver-authentication", published, func() { published.Data["client-ca-file"] = "former\n" + bundle })
	w.change(w.workload, "", "w", node, func() { node.Annotations = map[string]string{nodeconfig.AuthoritiesAnnotation: "former"} })
	if _, err := r.restores.restoreOn(t.Context(), s, model.RestoreFinish, nil); err != nil {
		t.Fatal(err)
	}
	w.get(w.workload, metav1.NamespaceSystem, "extension-apiserver-authentication", published)
	w.get(w.workload, "", "w", node)
	if _, announced := node.Annotations[nodeconfig.AuthoritiesAnnotation]; published.Data["client-ca-file"] != bundle || announced {
		t.Errorf("the former authority remains: %q, announced: %v", published.Data["client-ca-file"], announced)
	}
	if s.Object.Annotations[controlplanev1.RestoredAnnotation] != "etcd-1" {
		t.Error("the restore did not end")
	}
}

// TestRestoreWaitsForConnection: a condition reports that the end of the restore waits for Cluster API's connection to the cluster.
func TestRestoreWaitsForConnection(t *testing.T) {
	s := &scope{ControlPlane: &model.ControlPlane{Object: &controlplanev1.CapstanControlPlane{}}}
	s.Object.Spec.Restore.Name = "etcd-1"
	if out, err := (&restores{}).restoreOn(t.Context(), s, model.RestoreFinish, nil); err != nil || out.requeueAfter == 0 {
		t.Errorf("%+v, %v", out, err)
	}
	if !testcluster.Has(s.Object, controlplanev1.RestoredCondition, metav1.ConditionFalse, "waits for Cluster API's connection to the cluster") {
		t.Errorf("%v", s.Object.Status.Conditions)
	}
}

// TestRestoreWithRefusedKubeconfig: a cluster that was not asked is not silent. The restore does not begin.
func TestRestoreWithRefusedKubeconfig(t *testing.T) {
	w := newRotating(t)
	r := newReconciler(w.management, nil, reconciling.Options{LiveClient: w.management, SecretCachingClient: w.management})
	cp, machine := &controlplanev1.CapstanControlPlane{}, &clusterv1.Machine{}
	w.get(w.management, "ns", "cp", cp)
	w.get(w.management, "ns", "a", machine)
	cp.Spec.Restore, cp.Spec.Backup.Store = controlplanev1.RestoreSpec{Name: "etcd-1"}, inDirectory()
	reconciling.SetCondition(cp, controlplanev1.KubeconfigAvailableCondition, metav1.ConditionFalse, controlplanev1.KubeconfigRefusedReason, "it runs a program")
	s := &scope{ControlPlane: &model.ControlPlane{
		Object: cp, Cluster: &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "demo"}},
		Machines: collections.FromMachines(machine), Workload: model.NotAsked(), Now: time.Now(),
	}}
	heard := func(now time.Time) time.Time {
		return r.health.answered.last(client.ObjectKeyFromObject(cp), cp.UID, now)
	}
	heard(s.Now.Add(-time.Hour))
	if _, err := r.health.reconcile(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	if at := heard(s.Now); !at.Equal(s.Now) {
		t.Errorf("the cluster is silent since %s", at)
	}
	if out, err := r.restores.begin(t.Context(), s); err != nil || out.stop || out.requeueAfter == 0 {
		t.Errorf("%+v, %v", out, err)
	}
	if !testcluster.Has(cp, controlplanev1.RestoredCondition, metav1.ConditionFalse, "cannot be restored: it runs a program") || conditions.GetReason(cp, controlplanev1.RestoredCondition) != controlplanev1.RestoreImpossibleReason {
		t.Errorf("%v", cp.Status.Conditions)
	}
	if cp.Annotations[controlplanev1.RestoreAnnotation] != "" {
		t.Error("the restore has begun")
	}
}

// TestRestoreNewCluster: a new cluster starts from the backup and with the keys of another cluster. The keys are not created again.
func TestRestoreNewCluster(t *testing.T) {
	cluster := testcluster.New(t, env, nil)
	cp := cluster.ControlPlane(func(cp *controlplanev1.CapstanControlPlane) {
		cp.Spec.Restore = controlplanev1.RestoreSpec{Name: "etcd-1", Folder: "production/old", Store: s3()}
	})
	endpoint := testcluster.NewEndpoint(t)
	cluster.SetInfraEndpoint(endpoint.APIEndpoint)
	for _, name := range []string{"demo-ca", "demo-sa", "demo-encryption"} {
		cluster.Becomes(t, cp, "a condition names the missing "+name, func() bool {
			return testcluster.Has(cp, controlplanev1.CertificatesAvailableCondition, metav1.ConditionFalse, "the Secret "+name+" does not exist: spec.restore needs the one")
		})
		if cluster.Secret(name) != nil {
			t.Errorf("%s was made", name)
		}
	}
	ca := newCA(t)
	cluster.Create(&corev1.Secret{ObjectMeta: cluster.Meta("demo-ca"), Type: clusterv1.ClusterSecretType, Data: map[string][]byte{"tls.crt": ca.Cert, "tls.key": ca.Key}})
	cluster.Create(&corev1.Secret{ObjectMeta: cluster.Meta("demo-sa"), Type: clusterv1.ClusterSecretType, Data: serviceAccountKeys(t)})
	cluster.Create(&corev1.Secret{ObjectMeta: cluster.Meta("demo-encryption"), Type: clusterv1.ClusterSecretType, Data: map[string][]byte{"value": make([]byte, 32)}})
	cluster.Becomes(t, cp, "a condition names the missing Secret of the store", func() bool {
		return testcluster.Has(cp, controlplanev1.RestoredCondition, metav1.ConditionFalse, "the Secret store, which the backup store needs, does not exist")
	})
	if n := len(machinesOf(t, cluster)); n != 0 {
		t.Errorf("%d Machines exist without the backup", n)
	}
	cluster.Create(&corev1.Secret{ObjectMeta: cluster.Meta("store"), Data: map[string][]byte{etcdv1.S3AccessKeyID: []byte("me"), etcdv1.S3SecretAccessKey: []byte("x")}})
	expect.True(t, "the first Machine", func() bool { return len(machinesOf(t, cluster)) == 1 })
	config := &bootstrapv1.CapstanConfig{}
	if err := env.Client.Get(t.Context(), client.ObjectKey{Namespace: cluster.Namespace, Name: machinesOf(t, cluster)[0].Name}, config); err != nil {
		t.Fatal(err)
	}
	if r := config.Spec.Restore; config.Spec.Role != bootstrapv1.RoleInit || r.Name != "etcd-1" || r.Folder != "production/old" || r.Store.S3.Bucket != "backups" {
		t.Errorf("%+v", config.Spec)
	}
	endpoint.Serve(t, cluster.Secret("demo-ca"), env.Config)
	w := newSimulation(t, cluster)
	cluster.SetEndpoint(endpoint.APIEndpoint)
	cluster.ChangeStatus(cluster.Cluster, func() { cluster.Status.Initialization.ControlPlaneInitialized = ptr.To(true) })
	w.until("it is restored", func() bool {
		return cluster.Get(cp) == nil && testcluster.Has(cp, controlplanev1.RestoredCondition, metav1.ConditionTrue, "")
	})
	t.Cleanup(func() { _ = env.Client.Delete(context.WithoutCancel(t.Context()), marker()) })
	scaleTo(w, cp, 3)
	w.until("the other machines join", w.settled(cp, 3))
	if len(w.made) != 3 {
		t.Errorf("Machines %v were created", w.made)
	}
}

// serviceAccountKeys returns the Secret in the form of Cluster API.
func serviceAccountKeys(t *testing.T) map[string][]byte {
	t.Helper()
	cluster := testcluster.New(t, env, nil)
	cluster.SetInfraEndpoint(somewhere)
	cluster.ControlPlane(nil)
	expect.True(t, "keys of another cluster", func() bool { return cluster.Secret("demo-sa") != nil })
	return cluster.Secret("demo-sa").Data
}

// TestLateDiscard: a manager that has lost its leadership does not remove a Machine that has changed meanwhile, for example because it serves
// the restored cluster.
func TestLateDiscard(t *testing.T) {
	read := &clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "a", UID: "1", Annotations: map[string]string{controlplanev1.PreTerminateHookAnnotation: ""}}}
	c := fake.NewClientBuilder().WithScheme(env.Scheme).WithObjects(read).Build()
	r := newReconciler(c, nil, reconciling.Options{LiveClient: c}).restores
	s := &scope{ControlPlane: &model.ControlPlane{Object: &controlplanev1.CapstanControlPlane{}}}
	get := func(into *clusterv1.Machine) error { return c.Get(t.Context(), client.ObjectKeyFromObject(read), into) }
	current := &clusterv1.Machine{}
	if err := get(read); err != nil {
		t.Fatal(err)
	}
	read.DeepCopyInto(current)
	current.Labels = map[string]string{"changed": ""}
	if err := c.Update(t.Context(), current); err != nil {
		t.Fatal(err)
	}
	if err := r.discard(t.Context(), s, read); err != nil {
		t.Fatal(err)
	}
	err := get(current)
	if _, hook := current.Annotations[controlplanev1.PreTerminateHookAnnotation]; err != nil || !hook {
		t.Fatalf("the changed Machine has the annotations %v; %v", current.Annotations, err)
	}
	if err := r.discard(t.Context(), s, current); err != nil {
		t.Fatal(err)
	}
	if err := get(current); !apierrors.IsNotFound(err) {
		t.Errorf("the Machine exists: %v", err)
	}
}
