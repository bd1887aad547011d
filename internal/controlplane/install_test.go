package controlplane

import (
	"context"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/controller-runtime/pkg/client"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	etcdv1 "capstan.dev/capstan/api/etcd/v1beta2"
	"capstan.dev/capstan/internal/controlplane/model"
	"capstan.dev/capstan/internal/testenv/expect"
)

func initializedFor(age time.Duration) *controlplanev1.CapstanControlPlane {
	cp := &controlplanev1.CapstanControlPlane{ObjectMeta: metav1.ObjectMeta{UID: "x"}}
	conditions.Set(cp, metav1.Condition{
		Type: controlplanev1.InitializedCondition, Status: metav1.ConditionTrue, Reason: "Initialized", LastTransitionTime: metav1.NewTime(time.Now().Add(-age)),
	})
	return cp
}

// TestInstallDue: the provider installs nothing while the first machine of a cluster installs the same objects.
func TestInstallDue(t *testing.T) {
	if installDue(&controlplanev1.CapstanControlPlane{}, time.Now()) || installDue(initializedFor(time.Minute), time.Now()) || !installDue(initializedFor(time.Hour), time.Now()) {
		t.Error("an older cluster is not due")
	}
	starting := initializedFor(0)
	starting.Status.Conditions[0].Status = metav1.ConditionFalse
	if installDue(starting, time.Now().Add(time.Hour)) {
		t.Error("a cluster is due before its API server answers")
	}
}

// TestSilentCluster: no step sends a request to a cluster that has just not answered.
func TestSilentCluster(t *testing.T) {
	s := &scope{
		ControlPlane: &model.ControlPlane{Object: initializedFor(time.Hour), Workload: &model.Workload{Err: context.DeadlineExceeded}, Now: time.Now()},
		client:       struct{ client.Client }{}, // Each request panics.
	}
	s.Authority, s.Object.Spec.Manifests = &corev1.Secret{}, []controlplanev1.Manifest{{Name: "first"}}
	if err := runUntilStop(t.Context(), s, &result{}, (&workloads{}).reconcile, (&metricsServers{}).reconcile, (&userManifests{}).reconcile); err != nil {
		t.Error(err)
	}
}

// TestInstalled: a live cluster of an older Capstan gets the kinds and roles of this version, also after a user has deleted them.
// Current objects are not written again.
func TestInstalled(t *testing.T) {
	s := &scope{ControlPlane: &model.ControlPlane{Object: initializedFor(time.Hour), Workload: &model.Workload{}, Now: time.Now()}, client: env.Client}
	role := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "capstan:etcd-care"}}
	knows := func(resource string) bool {
		if err := env.Client.Get(t.Context(), client.ObjectKeyFromObject(role), role); err != nil {
			return false
		}
		for _, rule := range role.Rules {
			for _, r := range rule.Resources {
				if r == resource {
					return true
				}
			}
		}
		return false
	}
	older := func() {
		t.Helper()
		crd := &unstructured.Unstructured{}
		crd.SetAPIVersion("apiextensions.k8s.io/v1")
		crd.SetKind("CustomResourceDefinition")
		crd.SetName("etcdbackupchecks.etcd.capstan.dev")
		if err := env.Client.Delete(t.Context(), crd); err != nil {
			t.Fatal(err)
		}
		expect.True(t, "the kind is deleted", func() bool {
			return apierrors.IsNotFound(env.Client.Get(t.Context(), client.ObjectKeyFromObject(crd), crd))
		})
		if err := env.Client.Get(t.Context(), client.ObjectKeyFromObject(role), role); client.IgnoreNotFound(err) != nil {
			t.Fatal(err)
		} else if err == nil {
			before := role.DeepCopy()
			role.Rules = role.Rules[:1]
			if err := env.Client.Patch(t.Context(), role, client.MergeFrom(before)); err != nil {
				t.Fatal(err)
			}
		}
	}
	current := func(what string, r *workloads) {
		t.Helper()
		expect.True(t, what, func() bool {
			if _, err := r.reconcile(t.Context(), s); err != nil {
				t.Fatal(err)
			}
			return knows("etcdbackupchecks/status") && knows("etcdbackups") && env.Client.List(t.Context(), &etcdv1.EtcdBackupCheckList{}) == nil
		})
	}
	older()
	first := &workloads{}
	current("this Capstan brings them", first)
	if err := env.Client.Get(t.Context(), client.ObjectKey{Namespace: "kube-system", Name: "capstan:etcd-care"}, &rbacv1.Role{}); err != nil {
		t.Errorf("agents cannot read the credentials of a store: %v", err)
	}
	was := role.ResourceVersion
	current("another manager finds them", &workloads{})
	if role.ResourceVersion != was {
		t.Error("a current object was written again")
	}
	older()
	first.reinstall(s)
	current("a kind that the cluster does not know is brought again", first)
	older()
	s.Workload.Missing = true
	current("etcd's members are not told of", first)
}

// TestFormerBindingIsRemoved: clusters of a former version let kube-controller-manager approve the kubelet certificate of any
// node for any bootstrap token. This binding is removed. Renewals of kubelets are still approved.
func TestFormerBindingIsRemoved(t *testing.T) {
	former := &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "capstan:approve-kubelet-clients"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "system:certificates.k8s.io:certificatesigningrequests:nodeclient"},
		Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.GroupKind, Name: "system:bootstrappers"}},
	}
	if err := env.Client.Create(t.Context(), former); err != nil {
		t.Fatal(err)
	}
	s := &scope{ControlPlane: &model.ControlPlane{Object: initializedFor(time.Hour), Workload: &model.Workload{}, Now: time.Now()}, client: env.Client}
	for range 2 { // In the second pass, the binding is already removed.
		if _, err := (&workloads{}).reconcile(t.Context(), s); err != nil {
			t.Fatal(err)
		}
		bindings := &rbacv1.ClusterRoleBindingList{}
		if err := env.Client.List(t.Context(), bindings); err != nil {
			t.Fatal(err)
		}
		approved := map[string]bool{}
		for _, b := range bindings.Items {
			approved[b.RoleRef.Name] = true
		}
		const requests = "system:certificates.k8s.io:certificatesigningrequests:"
		if approved[requests+"nodeclient"] || !approved[requests+"selfnodeclient"] {
			t.Error("want kube-controller-manager to approve exactly the renewals of kubelets")
		}
	}
}

// TestLocalVolumesFollowTheSetting: a cluster that exists gets the StorageClass when a user sets localVolumes. None removes nothing.
func TestLocalVolumesFollowTheSetting(t *testing.T) {
	object := initializedFor(time.Hour)
	s := &scope{ControlPlane: &model.ControlPlane{Object: object, Workload: &model.Workload{}, Now: time.Now()}, client: env.Client}
	r := &workloads{}
	for _, c := range []struct {
		setting bootstrapv1.LocalVolumes
		want    string
	}{
		{"", "none"}, {bootstrapv1.LocalVolumesNone, "none"}, {bootstrapv1.LocalVolumesStorageClass, "false"},
		{bootstrapv1.LocalVolumesDefaultStorageClass, "true"}, {bootstrapv1.LocalVolumesNone, "true"},
	} {
		object.Spec.Config.Cluster.LocalVolumes = c.setting
		if _, err := r.reconcile(t.Context(), s); err != nil {
			t.Fatal(err)
		}
		class, got := &storagev1.StorageClass{}, "none"
		if err := env.Client.Get(t.Context(), client.ObjectKey{Name: "capstan-local"}, class); err == nil {
			got = class.Annotations["storageclass.kubernetes.io/is-default-class"]
		} else if !apierrors.IsNotFound(err) {
			t.Fatal(err)
		}
		if got != c.want {
			t.Errorf("localVolumes %q: the StorageClass is the default: %s, want %s", c.setting, got, c.want)
		}
	}
}
