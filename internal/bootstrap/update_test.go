package bootstrap

import (
	"context"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	"capstan.dev/capstan/internal/node/nodeconfig"
	"capstan.dev/capstan/internal/testenv"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/internal/testenv/testcluster"
)

// setUpdating sets or removes Cluster API's annotation of an update in progress.
func setUpdating(o metav1.Object, on bool) {
	annotations := o.GetAnnotations()
	if annotations == nil {
		annotations = map[string]string{}
	}
	delete(annotations, clusterv1.UpdateInProgressAnnotation)
	if on {
		annotations[clusterv1.UpdateInProgressAnnotation] = ""
	}
	o.SetAnnotations(annotations)
}

// Row ALL-17: an update in place has its own data without the parts that a machine uses only once. The bootstrap data stays. The
// update data follows the specification and the version, needs no Secret of the other parts, and is removed with the annotation.
func TestUpdateData_ALL17(t *testing.T) {
	cluster, _ := withControlPlane(t)
	cluster.SetEndpoint(endpoint)
	once := &corev1.Secret{ObjectMeta: cluster.Meta("once"), Data: map[string][]byte{"x": []byte("once")}}
	cluster.Create(once)
	machine, config := cluster.Machine("worker", func(m *clusterv1.Machine) { m.Spec.Version = "v1.35.4" }, func(c *bootstrapv1.CapstanConfig) {
		c.Spec.Files = []bootstrapv1.File{{Path: "/etc/once", ContentFrom: bootstrapv1.ContentSource{Secret: bootstrapv1.SecretKeyReference{Name: "once", Key: "x"}}}, {Path: "/etc/again", Content: "first", Repeatable: ptr.To(true)}}
		c.Spec.PreCommands = []string{"echo once"}
		c.Spec.UpdateCommands = []string{"echo again"}
	})
	dataOf(t, cluster, config)
	before := string(cluster.Secret("worker").Data["value"])
	for _, unused := range []*corev1.Secret{once, cluster.Secret("demo-ca")} {
		if err := env.Client.Delete(t.Context(), unused); err != nil {
			t.Fatal(err)
		}
	}

	// A machine that has not started needs no update data.
	cluster.Change(config, func() { setUpdating(config, true); config.Spec.Files[1].Content = "old" })
	reconciled(t, cluster, config)
	if cluster.Secret("worker-update") != nil {
		t.Error("there is update data before the start")
	}
	cluster.ChangeStatus(machine, func() { machine.Status.Initialization.InfrastructureProvisioned = ptr.To(true) })
	cluster.Becomes(t, config, "update data", func() bool {
		return testcluster.Has(config, bootstrapv1.UpdateDataAvailableCondition, metav1.ConditionTrue, "") && config.Status.Update.DataSecretName == "worker-update"
	})
	s := cluster.Secret("worker-update")
	if s == nil || s.Type != clusterv1.ClusterSecretType || s.Labels[clusterv1.ClusterNameLabel] != "demo" || !metav1.IsControlledBy(s, config) ||
		s.Annotations[bootstrapv1.UpdateIDAnnotation] != config.Status.Update.ID {
		t.Fatalf("secret %+v of %+v", s, config.Status.Update)
	}
	files, node := filesOf(t, s)
	if _, once := files["/etc/once"]; once || string(files["/etc/again"].Content) != "old" {
		t.Errorf("files %v", files)
	}
	for path := range files {
		if strings.HasPrefix(path, nodeconfig.PKIDir) {
			t.Errorf("the update data has the authority %s", path)
		}
	}
	text := string(s.Data["value"])
	if node.BootstrapToken != "" || node.KubernetesVersion != "v1.35.4" || strings.Contains(text, "echo once") || strings.Contains(text, "node up\n") ||
		strings.Index(text, "echo again") < strings.Index(text, "capstan-init node update") {
		t.Errorf("node %+v, data:\n%s", node, text)
	}

	first := config.Status.Update.ID
	cluster.Change(config, func() { config.Spec.Files[1].Content = "new" })
	cluster.Becomes(t, config, "data of the new spec", func() bool {
		return config.Status.Update.ID != first && config.Status.Update.ObservedGeneration == config.Generation
	})
	second := config.Status.Update.ID
	cluster.Change(machine, func() { machine.Spec.Version = "v1.36.3" })
	cluster.Becomes(t, config, "data of the new version", func() bool {
		return config.Status.Update.ID != second && config.Status.Update.KubernetesVersion == "v1.36.3"
	})
	if files, node := filesOf(t, cluster.Secret("worker-update")); string(files["/etc/again"].Content) != "new" || node.KubernetesVersion != "v1.36.3" {
		t.Errorf("node %+v, files %v", node, files)
	}
	if string(cluster.Secret("worker").Data["value"]) != before {
		t.Error("the bootstrap data changed")
	}

	third := config.Status.Update.ID
	cluster.Change(config, func() { setUpdating(config, false) })
	cluster.Becomes(t, config, "no data without an update", func() bool {
		return cluster.Secret("worker-update") == nil && config.Status.Update.DataSecretName == "" && config.Status.Update.ID == third &&
			conditions.Get(config, bootstrapv1.UpdateDataAvailableCondition) == nil
	})
	forgotten(cluster, config, "worker-update")
	cluster.Becomes(t, config, "no data that the status does not name", func() bool { return cluster.Secret("worker-update") == nil })
}

// forgotten creates update data that the status does not name: the manager was killed in between.
func forgotten(cluster *testcluster.Cluster, config *bootstrapv1.CapstanConfig, name string) {
	s := &corev1.Secret{ObjectMeta: cluster.Meta(name), Type: clusterv1.ClusterSecretType}
	s.Annotations = map[string]string{bootstrapv1.UpdateIDAnnotation: "x"}
	s.OwnerReferences = []metav1.OwnerReference{controllerRef(config)}
	cluster.Create(s)
}

// TestUpdateDataOfAnother: a Secret that another object has created stays, and the condition names it.
func TestUpdateDataOfAnother(t *testing.T) {
	cluster, _ := withControlPlane(t)
	cluster.SetEndpoint(endpoint)
	theirs := &corev1.Secret{ObjectMeta: cluster.Meta("worker-update"), Type: clusterv1.ClusterSecretType, Data: map[string][]byte{"value": []byte("theirs")}}
	cluster.Create(theirs)
	machine, config := cluster.Machine("worker", nil, nil)
	cluster.ChangeStatus(machine, func() { machine.Status.Initialization.InfrastructureProvisioned = ptr.To(true) })
	cluster.Change(config, func() { setUpdating(config, true) })
	cluster.Becomes(t, config, "refused", func() bool {
		return testcluster.Has(config, bootstrapv1.UpdateDataAvailableCondition, metav1.ConditionFalse, "delete or rename it")
	})
	if s := cluster.Secret("worker-update"); string(s.Data["value"]) != "theirs" || len(s.OwnerReferences) != 0 {
		t.Errorf("changed: %+v", s)
	}
	if err := env.Client.Delete(context.Background(), theirs); err != nil {
		t.Fatal(err)
	}
	cluster.Becomes(t, config, "then created", func() bool {
		return testcluster.Has(config, bootstrapv1.UpdateDataAvailableCondition, metav1.ConditionTrue, "")
	})
}

// TestUpdateDataOfPool: the data of a pool belongs to one spec and one version, and the pool's bootstrap data stays.
func TestUpdateDataOfPool(t *testing.T) {
	cluster, _ := withControlPlane(t)
	cluster.SetEndpoint(endpoint)
	pool, config := poolOf(cluster)
	dataOf(t, cluster, config)
	cluster.Change(pool, func() { setUpdating(pool, true) })
	cluster.Becomes(t, config, "update data", func() bool {
		return config.Status.Update.DataSecretName == bootstrapv1.UpdateSecretName(config.Status.DataSecretName)
	})
	old, former := config.Status.Update.DataSecretName, config.Status.DataSecretName
	forgotten(cluster, config, "forgotten")
	cluster.Change(pool, func() {
		pool.Spec.Template.Spec.Version = "v1.36.4"
		pool.Spec.Template.Spec.Bootstrap.DataSecretName = ptr.To(config.Status.DataSecretName)
	})
	cluster.Becomes(t, config, "update data of the new version", func() bool {
		return config.Status.Update.KubernetesVersion == "v1.36.4" && config.Status.Update.DataSecretName != old &&
			cluster.Secret(config.Status.Update.DataSecretName) != nil && cluster.Secret(old) == nil && cluster.Secret("forgotten") == nil
	})
	// The pool's former bootstrap data is deleted, and the update data stays.
	cluster.Change(pool, func() { pool.Spec.Template.Spec.Bootstrap.DataSecretName = ptr.To(config.Status.DataSecretName) })
	data := cluster.Secret(config.Status.Update.DataSecretName)
	expect.True(t, "the former bootstrap data is deleted", func() bool { return cluster.Secret(former) == nil })
	expect.Consistently(t, "the update data stays", func() bool {
		now := cluster.Secret(data.Name)
		return now != nil && now.UID == data.UID
	})
	forgotten(cluster, config, "forgotten")
	cluster.Change(pool, func() { setUpdating(pool, false) })
	cluster.Becomes(t, config, "no data without an update", func() bool { return cluster.Secret(data.Name) == nil && cluster.Secret("forgotten") == nil })
}

// Row ALL-17: during an update, admission accepts changes that can be made in place, and refuses others.
func TestUpdateAdmission_ALL17(t *testing.T) {
	cluster, _ := withControlPlane(t)
	cluster.SetEndpoint(endpoint)
	_, config := cluster.Machine("worker", nil, nil)
	dataOf(t, cluster, config)
	cluster.Change(config, func() {
		setUpdating(config, true)
		config.Spec.Kubelet.ExtraArgs = []bootstrapv1.Arg{{Name: "v", Value: "2"}}
	})
	for field, change := range map[string]func(){
		"node.name":   func() { config.Spec.Node.Name = "another" },
		"preCommands": func() { config.Spec.PreCommands = []string{"echo"} },
		"role":        func() { config.Spec.Role = bootstrapv1.RoleInit },
	} {
		err := testenv.Change(context.Background(), env.Client, config, func(*bootstrapv1.CapstanConfig) { change() })
		if err == nil || !strings.Contains(err.Error(), field) {
			t.Errorf("%s: %v", field, err)
		}
	}
}
