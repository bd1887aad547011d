package model

import (
	"errors"
	"slices"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	etcdv1 "capstan.dev/capstan/api/etcd/v1beta2"
)

// TestRestoreSteps: the next step after an interruption at any point. A Machine is a name, the restore that it belongs to, d if it
// is being deleted, o if it is outdated, and f if a MachineHealthCheck finds it unhealthy.
func TestRestoreSteps(t *testing.T) {
	for _, c := range []struct {
		what            string
		id, began, done string
		machines        string
		serves, refused bool
		initialized     bool
		want            RestoreStep
		gone            string
	}{
		{what: "nothing asked for", machines: "a", serves: true, want: RestoreNone},
		{what: "done", id: "x", done: "x", machines: "a:x b c", serves: true, want: RestoreNone},
		{what: "done, and not yet tidied up", id: "x", began: "x", done: "x", machines: "a", want: RestoreNone},
		{what: "asked for", id: "x", machines: "a b c", want: RestoreBegin},
		{what: "asked for while it serves", id: "x", machines: "a", serves: true, want: RestoreBegin},
		{what: "a new cluster", id: "x", want: RestoreBegin},
		{what: "another one after one that is done", id: "y", done: "x", machines: "a:x", want: RestoreBegin},
		{what: "another one while one is under way", id: "y", began: "x", machines: "a:x", want: RestoreBegin},
		{what: "Machines of before", id: "x", began: "x", machines: "a b c", want: RestoreRemove, gone: "abc"},
		{what: "Machines of before that serve", id: "x", began: "x", machines: "a b c", serves: true, want: RestoreRemove, gone: "abc"},
		{what: "Machines of before that go", id: "x", began: "x", machines: "a::d b::d", want: RestoreRemove, gone: "ab"},
		{what: "Machines of another restore", id: "y", began: "y", done: "x", machines: "a:x", want: RestoreRemove, gone: "a"},
		{what: "never one of each", id: "x", began: "x", machines: "a::d b:x", serves: true, want: RestoreRemove, gone: "a"},
		{what: "all are gone", id: "x", began: "x", want: RestoreCreate},
		{what: "the first starts", id: "x", began: "x", machines: "a:x", want: RestoreWait},
		{what: "somebody deletes the first", id: "x", began: "x", machines: "a:x:d", want: RestoreRemove, gone: "a"},
		{what: "the first can never work", id: "x", began: "x", machines: "a:x:o", want: RestoreRemove, gone: "a"},
		{what: "the first may work, and the kubeconfig is refused", id: "x", began: "x", machines: "a:x:o", refused: true, want: RestoreWait},
		{what: "the first is unhealthy", id: "x", began: "x", machines: "a:x:f", want: RestoreRemove, gone: "a"},
		{what: "the first is unhealthy, and the kubeconfig is refused", id: "x", began: "x", machines: "a:x:f", refused: true, want: RestoreWait},
		{what: "the first is unhealthy, in a cluster that has served", id: "x", began: "x", machines: "a:x:f", initialized: true, want: RestoreWait},
		{what: "the first works, and is unhealthy", id: "x", began: "x", machines: "a:x:f", serves: true, want: RestoreFinish},
		{what: "the first works", id: "x", began: "x", machines: "a:x", serves: true, want: RestoreFinish},
		{what: "the first works, and the spec has changed", id: "x", began: "x", machines: "a:x:o", serves: true, want: RestoreFinish},
	} {
		r := Restoration{id: c.id, began: c.began, done: c.done, Serves: c.serves, refused: c.refused, initialized: c.initialized, outdated: map[string][]string{}}
		for _, word := range strings.Fields(c.machines) {
			parts := append(strings.Split(word, ":"), "", "")
			m := &clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{Name: parts[0], Annotations: map[string]string{}}}
			if parts[1] != "" {
				m.Annotations[controlplanev1.RestoreAnnotation] = parts[1]
			}
			switch parts[2] {
			case "d":
				m.DeletionTimestamp = ptr.To(metav1.Now())
			case "o":
				r.outdated[parts[0]] = []string{"it is old"}
			case "f":
				m.Status.Conditions = []metav1.Condition{
					{Type: clusterv1.MachineHealthCheckSucceededCondition, Status: metav1.ConditionFalse},
					{Type: clusterv1.MachineOwnerRemediatedCondition, Status: metav1.ConditionFalse},
				}
			}
			r.machines = append(r.machines, m)
		}
		step, machines := r.Next()
		var gone []string
		for _, m := range machines {
			gone = append(gone, m.Name)
		}
		if step != c.want || step == RestoreRemove && strings.Join(gone, "") != c.gone {
			t.Errorf("%s: got %s %v, want %s %s", c.what, step, gone, c.want, c.gone)
		}
	}
}

// TestRestoreProblems: missing and unsuitable parts are found before any Machine is removed.
func TestRestoreProblems(t *testing.T) {
	key := func(name, sum string) etcdv1.BackupKey { return etcdv1.BackupKey{Name: name, SHA256: sum} }
	has := []etcdv1.BackupKey{key("ca", "1"), key("encryption", "2"), key("sa", "3")}
	for _, c := range []struct {
		what   string
		change func(*controlplanev1.CapstanControlPlane)
		anew   bool
		want   string
	}{
		{"a backup of its own", func(*controlplanev1.CapstanControlPlane) {}, false, ""},
		{"an unknown one", func(cp *controlplanev1.CapstanControlPlane) { cp.Spec.Restore.Name = "b" }, false, "status.backups has no b: copy the keys from b.json"},
		{"an unknown one, into a new cluster", func(cp *controlplanev1.CapstanControlPlane) { cp.Spec.Restore.Name = "b" }, true, ""},
		{"an unknown one with its keys", func(cp *controlplanev1.CapstanControlPlane) { cp.Spec.Restore.Name, cp.Spec.Restore.Keys = "b", has }, false, ""},
		{"one of another cluster", func(cp *controlplanev1.CapstanControlPlane) { cp.Spec.Restore.Folder = "other/demo" }, false, "status.backups has no a"},
		{"no store", func(cp *controlplanev1.CapstanControlPlane) { cp.Spec.Backup = controlplanev1.BackupSpec{} }, false, "there is no store"},
		{"a store of its own", func(cp *controlplanev1.CapstanControlPlane) {
			cp.Spec.Backup, cp.Spec.Restore.Store = controlplanev1.BackupSpec{}, directoryStore()
		}, false, ""},
		{"another encryption key", func(cp *controlplanev1.CapstanControlPlane) {
			cp.Status.Backups[0].Keys = []etcdv1.BackupKey{key("encryption", "x")}
		}, false, "it needs the key encryption with the SHA-256 x, and found 2"},
		{"another authority", func(cp *controlplanev1.CapstanControlPlane) {
			cp.Status.Backups[0].Keys = []etcdv1.BackupKey{key("ca", "x"), key("encryption", "2")}
		}, false, "it needs the key ca with the SHA-256 x, and found 1"},
		{"another authority, allowed", func(cp *controlplanev1.CapstanControlPlane) {
			cp.Status.Backups[0].Keys = []etcdv1.BackupKey{key("ca", "x"), key("encryption", "2")}
			cp.Spec.Restore.OtherAuthorities = ptr.To(true)
		}, false, ""},
		{"a version before", func(cp *controlplanev1.CapstanControlPlane) { cp.Status.Backups[0].KubernetesVersion = "v1.35.1" }, false, ""},
		{"a version long before", func(cp *controlplanev1.CapstanControlPlane) { cp.Status.Backups[0].KubernetesVersion = "v1.34.1" }, false, "it was made with Kubernetes v1.34.1"},
		{"a later version", func(cp *controlplanev1.CapstanControlPlane) { cp.Status.Backups[0].KubernetesVersion = "v1.37.0" }, false, "it was made with Kubernetes v1.37.0"},
	} {
		cp := &controlplanev1.CapstanControlPlane{}
		cp.Spec.Version, cp.Spec.Restore.Name, cp.Spec.Backup.Store = "v1.36.3", "a", directoryStore()
		cp.Status.Backups = []controlplanev1.BackupStatus{{Name: "a", Keys: slices.Clone(has), KubernetesVersion: "v1.36.3"}}
		c.change(cp)
		_, _, problems := RestoreSource(cp, "default/demo", has, !c.anew)
		if got := JoinReasons(problems); (got == "") != (c.want == "") || !strings.Contains(got, c.want) {
			t.Errorf("%s: got %q, want %q", c.what, got, c.want)
		}
	}
}

// TestRestoreID: the fields that distinguish two restores.
func TestRestoreID(t *testing.T) {
	ids := map[string]bool{}
	for _, r := range []controlplanev1.RestoreSpec{{Name: "a"}, {Name: "a", Attempt: "2"}, {Name: "a", Folder: "x/y"}, {Name: "b"}, {Name: "a", Folder: "x/y", Attempt: "2"}} {
		ids[r.ID()] = true
		other := r
		other.OtherAuthorities, other.Store = ptr.To(true), s3Store()
		if other.ID() != r.ID() {
			t.Errorf("%v is another one for how it is done", r)
		}
	}
	if len(ids) != 5 {
		t.Errorf("%v", ids)
	}
}

// TestStaleNodes: Nodes of missing Machines are removed. Nodes without annotations and Nodes of pools stay.
func TestStaleNodes(t *testing.T) {
	of := func(namespace, machine string) map[string]string {
		return map[string]string{clusterv1.ClusterNamespaceAnnotation: namespace, clusterv1.MachineAnnotation: machine}
	}
	got := StaleNodes(map[string]map[string]string{
		"new": nil, "worker": of("default", "worker"), "gone": of("default", "gone"), "before-a-move": of("other", "worker"), "pool": {clusterv1.ClusterNamespaceAnnotation: "default"},
	}, "default", map[string]bool{"worker": true})
	slices.Sort(got)
	if !slices.Equal(got, []string{"before-a-move", "gone"}) {
		t.Errorf("%v", got)
	}
}

// TestLostMachines: if the majority of machines does not run, etcd has lost its quorum, although no member answers.
// Row CP-10.
func TestLostMachines(t *testing.T) {
	for words, want := range map[string]string{"": "", "up": "", "down": "1 of 1", "up up down": "", "up down down": "2 of 3", "up new new": "", "up up down down": "2 of 4"} {
		f := Fleet{Stacked: true}
		for _, word := range strings.Fields(words) {
			m := &clusterv1.Machine{}
			if word != "new" {
				m.Status.NodeRef.Name = "node"
			}
			status := metav1.ConditionFalse
			if word == "up" {
				status = metav1.ConditionTrue
			}
			m.Status.Conditions = []metav1.Condition{{Type: clusterv1.InfrastructureReadyCondition, Status: status}}
			f.Instances = append(f.Instances, Instance{Machine: m})
		}
		if got := f.lostMachines(); (got == "") != (want == "") || !strings.Contains(got, want) {
			t.Errorf("%s: %q", words, got)
		}
		f.Stacked = false
		if got := f.lostMachines(); got != "" {
			t.Errorf("%s, an external etcd: %q", words, got)
		}
		unknown := EtcdHealth(f, &Readiness{Err: errors.New("no")}, true)
		f.Stacked, f.Unknown = true, "nobody can be asked"
		if c := EtcdHealth(f, &Readiness{Err: errors.New("no")}, true); (c.Reason == controlplanev1.QuorumLostReason) != (want != "") || unknown.Status != metav1.ConditionUnknown {
			t.Errorf("%s: %v", words, c)
		}
	}
}

func s3Store() etcdv1.BackupStore {
	return etcdv1.BackupStore{S3: etcdv1.S3Store{
		Endpoint: "https://s3.example.org", Bucket: "backups", CredentialsSecretRef: etcdv1.BackupSecretReference{Name: "store"},
	}}
}

func directoryStore() etcdv1.BackupStore {
	return etcdv1.BackupStore{Directory: etcdv1.DirectoryStore{Path: "/var/lib/capstan/backups"}}
}
