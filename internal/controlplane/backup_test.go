package controlplane

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	etcdv1 "capstan.dev/capstan/api/etcd/v1beta2"
	"capstan.dev/capstan/internal/controlplane/model"
	"capstan.dev/capstan/internal/testenv"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/internal/testenv/testcluster"
)

func s3() etcdv1.BackupStore {
	return etcdv1.BackupStore{S3: etcdv1.S3Store{
		Endpoint: "https://s3.example.org", Bucket: "backups", CredentialsSecretRef: etcdv1.BackupSecretReference{Name: "store"},
	}}
}

func inDirectory() etcdv1.BackupStore {
	return etcdv1.BackupStore{Directory: etcdv1.DirectoryStore{Path: "/var/lib/capstan/backups"}}
}

// backups returns the EtcdBackups in the order of their names, which is the order of time.
func (w *simulation) backups() []etcdv1.EtcdBackup {
	w.t.Helper()
	list := &etcdv1.EtcdBackupList{}
	if err := env.Client.List(context.Background(), list); err != nil {
		w.t.Fatal(err)
	}
	return list.Items
}

// backupWith waits for a requested EtcdBackup.
func (w *simulation) backupWith(trigger etcdv1.BackupTrigger, request string) *etcdv1.EtcdBackup {
	w.t.Helper()
	var found *etcdv1.EtcdBackup
	w.until(fmt.Sprintf("a backup %s %s", trigger, request), func() bool {
		for _, b := range w.backups() {
			if b.Spec.Trigger == trigger && b.Spec.Request == request && b.Status.Phase == "" {
				found = &b
			}
		}
		return found != nil
	})
	return found
}

// ends simulates the machine that makes a backup.
func (w *simulation) ends(b *etcdv1.EtcdBackup, phase etcdv1.BackupPhase, message string) {
	w.t.Helper()
	before := b.DeepCopy()
	at := metav1.Now()
	b.Status = etcdv1.EtcdBackupStatus{Phase: phase, Message: message, Time: &at}
	if phase == etcdv1.BackupSucceeded {
		b.Status.Location, b.Status.SizeBytes, b.Status.Revision = "s3://s3.example.org/backups/"+b.Spec.Folder+"/"+b.Name+".db", 4096, 7
		b.Status.EtcdVersion, b.Status.SHA256, b.Status.Removed = "3.6.14", strings.Repeat("ab", 32), b.Spec.Remove
	}
	if err := env.Client.Status().Patch(context.Background(), b, client.MergeFrom(before)); err != nil {
		w.t.Fatal(err)
	}
}

func demand(w *simulation, cp *controlplanev1.CapstanControlPlane, value string) {
	w.t.Helper()
	w.cluster.Change(cp, func() {
		if cp.Annotations == nil {
			cp.Annotations = map[string]string{}
		}
		cp.Annotations[controlplanev1.BackupAnnotation] = value
	})
}

// TestBackups: each request makes one backup, the status lists the backups, and surplus backups are removed.
func TestBackups(t *testing.T) {
	w, cp, _ := connected(t, func(cp *controlplanev1.CapstanControlPlane) {
		cp.Spec.Backup = controlplanev1.BackupSpec{Store: s3(), Retention: ptr.To[int32](1), Schedule: "0 0 29 2 *"}
	})
	w.until("no backup is due", func() bool {
		return w.cluster.Get(cp) == nil && testcluster.Has(cp, controlplanev1.BackupSucceededCondition, metav1.ConditionUnknown, "No backup was due yet")
	})
	demand(w, cp, "one")
	w.until("a condition names the missing Secret", func() bool {
		return w.cluster.Get(cp) == nil && testcluster.Has(cp, controlplanev1.BackupSucceededCondition, metav1.ConditionFalse, "the Secret store, which the backup store needs, does not exist")
	})
	if n := len(w.backups()); n != 0 {
		t.Errorf("%d backups were requested without credentials", n)
	}
	w.cluster.Create(&corev1.Secret{ObjectMeta: w.cluster.Meta("store"), Data: map[string][]byte{etcdv1.S3AccessKeyID: []byte("me"), etcdv1.S3SecretAccessKey: []byte("x")}})
	b := w.backupWith(etcdv1.BackupOnDemand, "one") // The Secret has the cluster's label, so it is an event.
	if b.Spec.Folder != w.cluster.Namespace+"/demo" || b.Spec.Member != namesOfMachines(t, w)[0] || b.Spec.KubernetesVersion != "v1.36.3" || len(b.Spec.Remove) != 0 {
		t.Errorf("%+v", b.Spec)
	}
	var keys []string
	for _, k := range b.Spec.Keys {
		keys = append(keys, k.Name)
	}
	if got := strings.Join(keys, " "); got != "ca encryption sa" {
		t.Errorf("keys: %s", got)
	}
	given := &corev1.Secret{}
	if err := env.Client.Get(t.Context(), client.ObjectKey{Namespace: etcdv1.BackupSecretNamespace, Name: etcdv1.BackupSecretName}, given); err != nil || string(given.Data[etcdv1.S3AccessKeyID]) != "me" {
		t.Errorf("the workload cluster has no credentials: %v", err)
	}
	t.Cleanup(func() { _ = env.Client.Delete(context.WithoutCancel(t.Context()), given) })
	w.ends(b, etcdv1.BackupSucceeded, "")
	w.until("the status contains the first backup", func() bool {
		return w.cluster.Get(cp) == nil && len(cp.Status.Backups) == 1 && testcluster.Has(cp, controlplanev1.BackupSucceededCondition, metav1.ConditionTrue, "")
	})
	if got := cp.Status.Backups[0]; got.Name != b.Name || got.Request != "one" || got.SizeBytes != 4096 || got.Revision != 7 || got.EtcdVersion != "3.6.14" || len(got.Keys) != 3 || got.SHA256 == "" || !strings.HasPrefix(got.Location, "s3://") {
		t.Errorf("%+v", got)
	}

	demand(w, cp, "three")
	second := w.backupWith(etcdv1.BackupOnDemand, "three")
	if len(second.Spec.Remove) != 1 || second.Spec.Remove[0] != b.Name {
		t.Errorf("to remove: %v", second.Spec.Remove)
	}
	w.ends(second, etcdv1.BackupFailed, "nobody is there")
	w.until("a condition reports the failure", func() bool {
		return w.cluster.Get(cp) == nil && testcluster.Has(cp, controlplanev1.BackupSucceededCondition, metav1.ConditionFalse, "nobody is there") && len(cp.Status.Backups) == 1
	})
	demand(w, cp, "four")
	third := w.backupWith(etcdv1.BackupOnDemand, "four")
	w.ends(third, etcdv1.BackupSucceeded, "")
	w.until("one backup is kept", func() bool {
		return w.cluster.Get(cp) == nil && len(cp.Status.Backups) == 1 && cp.Status.Backups[0].Name == third.Name && len(w.backups()) == 1
	})
	demand(w, cp, strings.Repeat("x", 257))
	w.until("a condition reports that the value is too long", func() bool {
		return w.cluster.Get(cp) == nil && testcluster.Has(cp, controlplanev1.BackupSucceededCondition, metav1.ConditionFalse, "expected at most 256 characters in the annotation")
	})
	w.cluster.Change(cp, func() { cp.Spec.Backup = controlplanev1.BackupSpec{} })
	w.until("without backups, there is no condition", func() bool {
		return w.cluster.Get(cp) == nil && !testcluster.Has(cp, controlplanev1.BackupSucceededCondition, metav1.ConditionTrue, "") && len(cp.Status.Backups) == 1
	})
	w.until("the workload cluster has no credentials", func() bool {
		return apierrors.IsNotFound(env.Client.Get(t.Context(), client.ObjectKeyFromObject(given), given)) && w.cluster.Get(cp) == nil && !conditions.Has(cp, controlplanev1.BackupSucceededCondition)
	})
}

// TestBackupReports: in the workload cluster, an administrator can remove the limits of EtcdBackups. A report that the API server would
// refuse in the status of the control plane counts as a failed backup.
func TestBackupReports(t *testing.T) {
	cluster := testcluster.New(t, env, nil)
	cp := cluster.ControlPlane(func(cp *controlplanev1.CapstanControlPlane) {
		cp.Annotations = map[string]string{clusterv1.PausedAnnotation: ""}
	})
	text := func(n int) string { return strings.Repeat("ä", n) }
	key := func(name string) etcdv1.BackupKey { return etcdv1.BackupKey{Name: name, SHA256: text(64)} }
	for what, c := range map[string]struct {
		change func(b *etcdv1.EtcdBackup)
		valid  bool
	}{
		"the largest": {func(*etcdv1.EtcdBackup) {}, true},
		"name":        {change: func(b *etcdv1.EtcdBackup) { b.Name = text(254) }},
		"trigger":     {change: func(b *etcdv1.EtcdBackup) { b.Spec.Trigger = "Mood" }},
		"request":     {change: func(b *etcdv1.EtcdBackup) { b.Spec.Request = text(257) }},
		"Kubernetes":  {change: func(b *etcdv1.EtcdBackup) { b.Spec.KubernetesVersion = text(257) }},
		"location":    {change: func(b *etcdv1.EtcdBackup) { b.Status.Location = text(2049) }},
		"etcd":        {change: func(b *etcdv1.EtcdBackup) { b.Status.EtcdVersion = text(257) }},
		"checksum":    {change: func(b *etcdv1.EtcdBackup) { b.Status.SHA256 = text(65) }},
		"no time":     {change: func(b *etcdv1.EtcdBackup) { b.Status.Time = nil }},
		"year 10000": {change: func(b *etcdv1.EtcdBackup) {
			b.Status.Time = ptr.To(metav1.NewTime(time.Date(9999, 12, 31, 23, 59, 59, 0, time.FixedZone("", -3600))))
		}},
		"nine keys":           {change: func(b *etcdv1.EtcdBackup) { b.Spec.Keys = append(b.Spec.Keys, key("9")) }},
		"two keys of a name":  {change: func(b *etcdv1.EtcdBackup) { b.Spec.Keys[1].Name = b.Spec.Keys[0].Name }},
		"a key without name":  {change: func(b *etcdv1.EtcdBackup) { b.Spec.Keys[0].Name = "" }},
		"a key's name":        {change: func(b *etcdv1.EtcdBackup) { b.Spec.Keys[0].Name = text(64) }},
		"a key's fingerprint": {change: func(b *etcdv1.EtcdBackup) { b.Spec.Keys[0].SHA256 = text(63) }},
	} {
		b := etcdv1.EtcdBackup{ObjectMeta: metav1.ObjectMeta{Name: text(253)}}
		b.Spec = etcdv1.EtcdBackupSpec{Trigger: etcdv1.BackupOnDemand, Request: text(256), KubernetesVersion: text(256)}
		for n := range 8 {
			b.Spec.Keys = append(b.Spec.Keys, key(fmt.Sprint(n)+text(62)))
		}
		b.Status = etcdv1.EtcdBackupStatus{
			Phase: etcdv1.BackupSucceeded, Location: text(2048), EtcdVersion: text(256), SHA256: text(64),
			Time: ptr.To(metav1.NewTime(time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC))),
		}
		c.change(&b)
		after := cp.DeepCopy()
		after.Status.Backups = model.MergeBackups(nil, []etcdv1.EtcdBackup{b})
		if err := env.Client.Status().Patch(t.Context(), after, client.MergeFrom(cp)); (err == nil) != c.valid || err != nil && !apierrors.IsInvalid(err) {
			t.Errorf("%s: the API server answers %v, want success: %v", what, err, c.valid)
		}

		s := &scope{ControlPlane: &model.ControlPlane{Object: &controlplanev1.CapstanControlPlane{}}}
		s.client = fake.NewClientBuilder().WithScheme(env.Client.Scheme()).WithInterceptorFuncs(interceptor.Funcs{
			List: func(_ context.Context, _ client.WithWatch, list client.ObjectList, _ ...client.ListOption) error {
				list.(*etcdv1.EtcdBackupList).Items = []etcdv1.EtcdBackup{b}
				return nil
			},
		}).Build()
		found, err := (&backups{recorder: &recorder{}, workloads: &workloads{}}).readBackups(t.Context(), s)
		if err != nil || len(found) != 1 || (found[0].Status.Phase == etcdv1.BackupSucceeded) != c.valid || (found[0].Status.Message == "") != c.valid || (len(s.Object.Status.Backups) == 1) != c.valid {
			t.Errorf("%s: read %+v with the status %+v, want success: %v; %v", what, found, s.Object.Status.Backups, c.valid, err)
		}
	}
}

// TestBackupSecret: the workload cluster has the credentials of a store only as long as the store needs some.
func TestBackupSecret(t *testing.T) {
	r := newRotating(t)
	stores, s, key := &stores{&secrets{r.clients}}, &scope{client: r.workload}, client.ObjectKey{Namespace: etcdv1.BackupSecretNamespace, Name: etcdv1.BackupSecretName}
	for _, data := range []map[string][]byte{{etcdv1.S3AccessKeyID: []byte("me")}, {}, nil, nil} {
		if err := stores.bringSecret(t.Context(), s, etcdv1.BackupSecretName, data); err != nil {
			t.Fatal(err)
		}
		found := &corev1.Secret{}
		if err := r.workload.Get(t.Context(), key, found); apierrors.IsNotFound(err) != (data == nil) || len(found.Data) != len(data) {
			t.Errorf("with %v: %v, %v", data, found.Data, err)
		}
	}
}

// TestBackupBeforeUpgrade: an upgrade waits for a backup. If the store fails, the upgrade waits until the user disables the
// backup.
func TestBackupBeforeUpgrade(t *testing.T) {
	w, cp, _ := connected(t, func(cp *controlplanev1.CapstanControlPlane) {
		cp.Spec.Backup = controlplanev1.BackupSpec{Store: inDirectory()}
	})
	before := namesOfMachines(t, w)
	w.cluster.Change(cp, func() { cp.Spec.Version = "v1.36.4" })
	b := w.backupWith(etcdv1.BackupBeforeUpgrade, "v1.36.4")
	w.still("no Machine is replaced", func() bool { return len(machinesOf(t, w.cluster)) == 1 })
	w.ends(b, etcdv1.BackupFailed, "the disk is full")
	w.until("a condition reports it", func() bool {
		return w.cluster.Get(cp) == nil && testcluster.Has(cp, controlplanev1.BackupSucceededCondition, metav1.ConditionFalse, "the disk is full") &&
			testcluster.Has(cp, "RollingOut", metav1.ConditionTrue, "the backup before the upgrade to v1.36.4 is not there yet")
	})
	if now := namesOfMachines(t, w); len(now) != 1 || now[0] != before[0] {
		t.Errorf("%v became %v", before, now)
	}
	w.cluster.Change(cp, func() { cp.Spec.Backup.BeforeUpgrade = ptr.To(false) })
	w.until("the upgrade continues without a backup", func() bool {
		return len(w.made) == 2 && w.settled(cp, 1)() && cp.Status.Versions[0].Version == "v1.36.4"
	})

	w.cluster.Change(cp, func() { cp.Spec.Backup.BeforeUpgrade, cp.Spec.Version = nil, "v1.36.5" })
	w.ends(w.backupWith(etcdv1.BackupBeforeUpgrade, "v1.36.5"), etcdv1.BackupSucceeded, "")
	w.until("the upgrade continues after a backup", func() bool {
		return len(w.made) == 3 && w.settled(cp, 1)() && cp.Status.Versions[0].Version == "v1.36.5"
	})
}

// TestBackupRules checks the rules of the CRD and the webhook.
func TestBackupRules(t *testing.T) {
	type cp = controlplanev1.CapstanControlPlane
	backup := func(change func(*controlplanev1.BackupSpec)) func(*cp) {
		return func(o *cp) {
			o.Spec.Backup = controlplanev1.BackupSpec{Store: inDirectory()}
			change(&o.Spec.Backup)
		}
	}
	store := func(change func(*etcdv1.S3Store)) func(*cp) {
		return backup(func(b *controlplanev1.BackupSpec) { b.Store = s3(); change(&b.Store.S3) })
	}
	for name, c := range map[string]struct {
		change func(*cp)
		want   string
	}{
		"a directory":               {backup(func(*controlplanev1.BackupSpec) {}), ""},
		"s3":                        {store(func(*etcdv1.S3Store) {}), ""},
		"a schedule":                {backup(func(b *controlplanev1.BackupSpec) { b.Schedule = "*/5 * * * *" }), ""},
		"no store":                  {func(o *cp) { o.Spec.Backup.Schedule = "@daily" }, "spec.backup.store"},
		"two stores":                {backup(func(b *controlplanev1.BackupSpec) { b.Store.S3 = s3().S3 }), "exactly one store"},
		"a word as schedule":        {backup(func(b *controlplanev1.BackupSpec) { b.Schedule = "daily" }), "five fields"},
		"an hour of a long day":     {backup(func(b *controlplanev1.BackupSpec) { b.Schedule = "0 25 * * *" }), "is no schedule"},
		"seconds":                   {backup(func(b *controlplanev1.BackupSpec) { b.Schedule = "0 0 3 * * *" }), "five fields"},
		"nothing is kept":           {backup(func(b *controlplanev1.BackupSpec) { b.Retention = ptr.To[int32](0) }), "greater than or equal to 1"},
		"a relative path":           {backup(func(b *controlplanev1.BackupSpec) { b.Store.Directory.Path = "backups" }), "absolute path"},
		"a path that climbs":        {backup(func(b *controlplanev1.BackupSpec) { b.Store.Directory.Path = "/a/../etc" }), "absolute path"},
		"an endpoint without http":  {store(func(s *etcdv1.S3Store) { s.Endpoint = "s3.example.org" }), "http or https URL"},
		"an endpoint with a path":   {store(func(s *etcdv1.S3Store) { s.Endpoint = "https://s3.example.org/backups" }), "without a path"},
		"no credentials":            {store(func(s *etcdv1.S3Store) { s.CredentialsSecretRef.Name = "" }), "credentialsSecretRef"},
		"an authority, and none":    {store(func(s *etcdv1.S3Store) { s.InsecureSkipTLSVerify, s.CASecretRef.Name = ptr.To(true), "x" }), "cannot be used together"},
		"restore":                   {func(o *cp) { o.Spec.Restore = controlplanev1.RestoreSpec{Name: "etcd-1", Store: s3()} }, ""},
		"restore from nowhere":      {func(o *cp) { o.Spec.Restore.Name = "etcd-1" }, "restore requires a store"},
		"restore a path":            {func(o *cp) { o.Spec.Restore = controlplanev1.RestoreSpec{Name: "a/b", Store: s3()} }, "should match"},
		"restore into the config":   {func(o *cp) { o.Spec.Config.Restore = bootstrapSource() }, "config.restore is set by"},
		"restore from two":          {func(o *cp) { o.Spec.Restore = controlplanev1.RestoreSpec{Name: "a", Store: both()} }, "exactly one store"},
		"restore, an external etcd": {withExternalEtcd(func(o *cp) { o.Spec.Restore = controlplanev1.RestoreSpec{Name: "a", Store: s3()} }), "not possible with an external etcd"},
		"backup, an external etcd":  {withExternalEtcd(backup(func(*controlplanev1.BackupSpec) {})), "not possible with an external etcd"},
	} {
		t.Run(name, func(t *testing.T) {
			testenv.Refused(t, env.Client.Create(context.Background(), newControlPlane(t, c.change), client.DryRunAll), c.want)
		})
	}
}

func both() etcdv1.BackupStore {
	out := s3()
	out.Directory = inDirectory().Directory
	return out
}

func withExternalEtcd(change func(*controlplanev1.CapstanControlPlane)) func(*controlplanev1.CapstanControlPlane) {
	return func(o *controlplanev1.CapstanControlPlane) {
		change(o)
		o.Spec.Config.Cluster.Etcd.External.Endpoints = []string{"https://etcd:2379"}
	}
}

func bootstrapSource() bootstrapv1.RestoreSource {
	return bootstrapv1.RestoreSource{Name: "a", Folder: "b/c", Store: s3()}
}

// TestBackupNotAdmitted: if no backup can be requested, a condition contains the cause. Machines are still created and repaired.
func TestBackupNotAdmitted(t *testing.T) {
	w, cp, _ := connected(t, func(cp *controlplanev1.CapstanControlPlane) {
		cp.Spec.Backup = controlplanev1.BackupSpec{Store: inDirectory()}
	})
	refuseBackups(w)
	demand(w, cp, "one")
	w.until("a condition reports it", func() bool {
		return w.cluster.Get(cp) == nil && testcluster.Has(cp, controlplanev1.BackupSucceededCondition, metav1.ConditionFalse, "no backups today")
	})
	scaleTo(w, cp, 3)
	w.until("three", w.settled(cp, 3))
}

// refuseBackups makes the API server refuse EtcdBackups, as an admission webhook of a user can.
func refuseBackups(w *simulation) {
	w.t.Helper()
	ctx := context.Background()
	policy := &admissionregistrationv1.ValidatingAdmissionPolicy{
		ObjectMeta: metav1.ObjectMeta{Name: "no-backups"},
		Spec: admissionregistrationv1.ValidatingAdmissionPolicySpec{
			FailurePolicy: ptr.To(admissionregistrationv1.Fail),
			MatchConstraints: &admissionregistrationv1.MatchResources{ResourceRules: []admissionregistrationv1.NamedRuleWithOperations{{RuleWithOperations: admissionregistrationv1.RuleWithOperations{
				Operations: []admissionregistrationv1.OperationType{admissionregistrationv1.Create},
				Rule:       admissionregistrationv1.Rule{APIGroups: []string{etcdv1.GroupVersion.Group}, APIVersions: []string{"*"}, Resources: []string{"etcdbackups"}},
			}}}},
			Validations: []admissionregistrationv1.Validation{{Expression: "false", Message: "no backups today"}},
		},
	}
	binding := &admissionregistrationv1.ValidatingAdmissionPolicyBinding{
		ObjectMeta: policy.ObjectMeta,
		Spec:       admissionregistrationv1.ValidatingAdmissionPolicyBindingSpec{PolicyName: policy.Name, ValidationActions: []admissionregistrationv1.ValidationAction{admissionregistrationv1.Deny}},
	}
	for _, o := range []client.Object{policy, binding} {
		if err := env.Client.Create(ctx, o); err != nil {
			w.t.Fatal(err)
		}
		w.t.Cleanup(func() {
			if err := env.Client.Delete(ctx, o); err != nil {
				w.t.Error(err)
			}
		})
	}
	probe := &etcdv1.EtcdBackup{ObjectMeta: metav1.ObjectMeta{Name: "probe"}, Spec: etcdv1.EtcdBackupSpec{
		Member: "m", Trigger: etcdv1.BackupOnDemand, Request: "probe", Store: inDirectory(), Folder: "a/b", KubernetesVersion: "v1.36.3",
	}}
	expect.True(w.t, "the policy holds", func() bool {
		err := env.Client.Create(ctx, probe.DeepCopy(), client.DryRunAll)
		return err != nil && strings.Contains(err.Error(), "no backups today")
	})
}
