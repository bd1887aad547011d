package controlplane

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	autoscalingv1 "k8s.io/api/autoscaling/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/certs"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/cluster-api/util/kubeconfig"
	"sigs.k8s.io/cluster-api/util/secret"
	"sigs.k8s.io/controller-runtime/pkg/client"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/controlplane/model"
	"capstan.dev/capstan/internal/testenv"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/internal/testenv/testcluster"
	"capstan.dev/capstan/internal/testenv/testmetrics"
)

var somewhere = clusterv1.APIEndpoint{Host: "127.0.0.1", Port: 1}

// reconciledAgain makes a harmless change of the spec, and waits for the reconcile that it causes.
func reconciledAgain(t *testing.T, cluster *testcluster.Cluster, cp *controlplanev1.CapstanControlPlane) {
	t.Helper()
	cluster.Change(cp, func() { cp.Spec.Remediation.MaxRetry = ptr.To(ptr.Deref(cp.Spec.Remediation.MaxRetry, 5) + 1) })
	cluster.Becomes(t, cp, "reconciled again", func() bool { return cp.Status.ObservedGeneration == cp.Generation })
}

func machinesOf(t *testing.T, cluster *testcluster.Cluster) []clusterv1.Machine {
	t.Helper()
	list := &clusterv1.MachineList{}
	if err := env.Client.List(context.Background(), list, client.InNamespace(cluster.Namespace), client.HasLabels{clusterv1.MachineControlPlaneLabel}); err != nil {
		t.Fatal(err)
	}
	return list.Items
}

// TestPreparesBeforeProvisioned: as soon as the infrastructure object has the endpoint, all objects up to the first Machine
// are created (CP-02, CP-03, CP-05, CP-06, CP-13, CP-15, CP-19, CP-23).
// Rows ALL-11, CP-09.
func TestPreparesBeforeProvisioned(t *testing.T) {
	cluster := testcluster.New(t, env, nil)
	cp := cluster.ControlPlane(func(cp *controlplanev1.CapstanControlPlane) {
		cp.Spec.Version = "1.36.3"
		cp.Finalizers = []string{formerFinalizer}
		cp.Spec.MachineTemplate.ObjectMeta = clusterv1.ObjectMeta{Labels: map[string]string{"team": "a"}, Annotations: map[string]string{"note": "b"}}
		cp.Spec.MachineTemplate.Spec.Deletion.NodeDrainTimeoutSeconds = ptr.To[int32](7)
		cp.Spec.MachineTemplate.Spec.ReadinessGates = []clusterv1.MachineReadinessGate{{ConditionType: "Special"}}
		cp.Spec.MachineTemplate.Spec.Taints = []clusterv1.MachineTaint{{Key: "k", Effect: corev1.TaintEffectNoSchedule, Propagation: clusterv1.MachineTaintPropagationAlways}}
		cp.Spec.Config.Cluster.DNS = bootstrapv1.DNSNone
	})
	cluster.Becomes(t, cp, "certificates without an endpoint (CP-15)", func() bool {
		return testcluster.Has(cp, controlplanev1.CertificatesAvailableCondition, metav1.ConditionTrue, "")
	})
	cluster.Becomes(t, cp, "waits for the endpoint (CP-02)", func() bool {
		return testcluster.Has(cp, controlplanev1.InitializedCondition, metav1.ConditionFalse, "endpoint is not known")
	})
	if len(machinesOf(t, cluster)) != 0 || cluster.Secret("demo-kubeconfig") != nil {
		t.Fatal("a Machine or a kubeconfig was created without an endpoint")
	}
	for _, name := range []string{"demo-ca", "demo-etcd", "demo-proxy", "demo-sa", "demo-encryption"} {
		checkSecret(t, cluster, cp, name)
	}

	cluster.SetInfraEndpoint(somewhere)
	cluster.Becomes(t, cp, "versions as soon as a Machine exists (CP-05)", func() bool {
		return len(cp.Status.Versions) == 1 && cp.Status.Versions[0].Version == "v1.36.3" &&
			ptr.Deref(cp.Status.Replicas, 0) == 1 && ptr.Deref(cp.Status.ReadyReplicas, 9) == 0
	})
	if *cp.Spec.Replicas != 1 || cp.Status.Selector == "" || cp.Status.ObservedGeneration != cp.Generation {
		t.Errorf("replicas %d, selector %q, observed %d of %d", *cp.Spec.Replicas, cp.Status.Selector, cp.Status.ObservedGeneration, cp.Generation)
	}
	expect.True(t, "the Machine owns its CapstanConfig and infrastructure machine", func() bool { return handedOver(t, cluster) })
	checkSecret(t, cluster, cp, "demo-kubeconfig")
	config, err := clientcmd.RESTConfigFromKubeConfig(cluster.Secret("demo-kubeconfig").Data["value"])
	if err != nil || config.Host != "https://127.0.0.1:1" {
		t.Errorf("kubeconfig: %v, %v", config, err)
	}
	machines := machinesOf(t, cluster)
	if len(machines) != 1 {
		t.Fatalf("%d Machines", len(machines))
	}
	checkMachine(t, cluster, cp, &machines[0])
	checkManifest(t, cluster, cp)
}

// TestFormerFinalizer: the deletion of a control plane with the finalizer of an earlier build completes.
func TestFormerFinalizer(t *testing.T) {
	cluster := testcluster.New(t, env, func(c *clusterv1.Cluster) { c.Spec.Paused = ptr.To(true) })
	cp := cluster.ControlPlane(func(cp *controlplanev1.CapstanControlPlane) { cp.Finalizers = []string{formerFinalizer} })
	if err := env.Client.Delete(context.Background(), cp); err != nil {
		t.Fatal(err)
	}
	cluster.Change(cluster.Cluster, func() { cluster.Cluster.Spec.Paused = ptr.To(false) })
	expect.True(t, "the object is removed", func() bool { return apierrors.IsNotFound(cluster.Get(cp)) })
}

// checkManifest checks that an applied manifest is stored unchanged, that a second application changes nothing and has no
// conflict, and that the manifest can replace the live object, which keeps the fields of controllers.
func checkManifest(t *testing.T, cluster *testcluster.Cluster, cp *controlplanev1.CapstanControlPlane) {
	t.Helper()
	ctx := context.Background()
	if err := cluster.Get(cp); err != nil || cp.Spec.Version != "v1.36.3" {
		t.Fatalf("CP-05: the version is %s, %v", cp.Spec.Version, err)
	}
	manifest := func() *unstructured.Unstructured {
		u := &unstructured.Unstructured{Object: map[string]any{"spec": map[string]any{
			"version":         "v1.36.3",
			"config":          map[string]any{"cluster": map[string]any{"dns": "None"}},
			"machineTemplate": map[string]any{"spec": map[string]any{"infrastructureRef": map[string]any{"apiGroup": "infrastructure.capstan.dev", "kind": "CapstanMachineTemplate", "name": "demo"}}},
		}}}
		u.SetGroupVersionKind(controlplanev1.GroupVersion.WithKind(controlplanev1.ControlPlaneKind))
		u.SetNamespace(cp.Namespace)
		u.SetName(cp.Name)
		return u
	}
	generation := int64(0)
	for range 3 {
		u := manifest()
		if err := env.Client.Apply(ctx, client.ApplyConfigurationFromUnstructured(u), client.FieldOwner("gitops")); err != nil {
			t.Fatalf("apply: %v", err)
		}
		if generation != 0 && u.GetGeneration() != generation {
			t.Errorf("the second application changed the generation from %d to %d", generation, u.GetGeneration())
		}
		generation = u.GetGeneration()
	}
	if err := cluster.Get(cp); err != nil {
		t.Fatal(err)
	}
	before := cp.DeepCopy()
	expect.True(t, "the manifest replaces the object", func() bool {
		u := manifest()
		if err := cluster.Get(cp); err != nil {
			t.Fatal(err)
		}
		u.SetResourceVersion(cp.ResourceVersion) // as kubectl replace does
		err := env.Client.Update(ctx, u)
		if err != nil && !apierrors.IsConflict(err) {
			t.Fatalf("replace: %v", err)
		}
		return err == nil
	})
	if err := cluster.Get(cp); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(cp.Finalizers, []string{controlplanev1.ControlPlaneFinalizer}) || !equality.Semantic.DeepEqual(cp.OwnerReferences, before.OwnerReferences) ||
		cp.Annotations[controlplanev1.FirstMachineAnnotation] == "" || cp.Annotations[controlplanev1.FirstMachineAnnotation] != before.Annotations[controlplanev1.FirstMachineAnnotation] {
		t.Errorf("metadata after the replacement %+v, before %+v", cp.ObjectMeta, before.ObjectMeta)
	}
	if *cp.Spec.Replicas != 1 || len(machinesOf(t, cluster)) != 1 {
		t.Errorf("replicas %d, Machines %d", *cp.Spec.Replicas, len(machinesOf(t, cluster)))
	}
}

// handedOver returns whether the first Machine owns its CapstanConfig and its infrastructure machine, as with core.
func handedOver(t *testing.T, cluster *testcluster.Cluster) bool {
	t.Helper()
	machines := machinesOf(t, cluster)
	if len(machines) == 0 {
		return false
	}
	m := &machines[0]
	config, infra := &bootstrapv1.CapstanConfig{ObjectMeta: cluster.Meta(m.Name)}, &infrav1.CapstanMachine{ObjectMeta: cluster.Meta(m.Name)}
	return cluster.Get(config) == nil && metav1.IsControlledBy(config, m) && cluster.Get(infra) == nil && metav1.IsControlledBy(infra, m)
}

func checkSecret(t *testing.T, cluster *testcluster.Cluster, cp *controlplanev1.CapstanControlPlane, name string) {
	t.Helper()
	s := cluster.Secret(name)
	if s == nil {
		t.Fatalf("the Secret %s does not exist", name)
	}
	if s.Type != clusterv1.ClusterSecretType || s.Labels[clusterv1.ClusterNameLabel] != "demo" || !metav1.IsControlledBy(s, cp) {
		t.Errorf("secret %s: type %s, labels %v, owners %v", name, s.Type, s.Labels, s.OwnerReferences)
	}
	if single := len(s.Data["value"]) > 0 && len(s.Data) == 1; single != (name == "demo-kubeconfig" || name == "demo-encryption") || !single && (len(s.Data["tls.crt"]) == 0 || len(s.Data["tls.key"]) == 0) {
		t.Errorf("secret %s has the keys %v", name, slices.Sorted(maps.Keys(s.Data)))
	}
}

func checkMachine(t *testing.T, cluster *testcluster.Cluster, cp *controlplanev1.CapstanControlPlane, m *clusterv1.Machine) {
	t.Helper()
	if value, ok := m.Labels[clusterv1.MachineControlPlaneLabel]; !ok || value != "" || m.Labels["team"] != "a" || m.Annotations["note"] != "b" {
		t.Errorf("CP-19, CP-06: labels %v, annotations %v", m.Labels, m.Annotations)
	}
	if !metav1.IsControlledBy(m, cp) || m.Spec.Version != "v1.36.3" || m.Spec.ClusterName != "demo" {
		t.Errorf("Machine: owners %v, spec %v", m.OwnerReferences, m.Spec)
	}
	if *m.Spec.Deletion.NodeDrainTimeoutSeconds != 7 || len(m.Spec.Taints) != 1 || m.Spec.ReadinessGates[2].ConditionType != "Special" {
		t.Errorf("CP-06: %v", m.Spec)
	}
	config := &bootstrapv1.CapstanConfig{}
	config.Namespace, config.Name = m.Namespace, m.Name
	infra := &infrav1.CapstanMachine{}
	infra.Namespace, infra.Name = m.Namespace, m.Name
	if err := cluster.Get(config); err != nil {
		t.Fatal(err)
	}
	if err := cluster.Get(infra); err != nil {
		t.Fatal(err)
	}
	if config.Spec.Role != bootstrapv1.RoleInit || config.Spec.Cluster.DNS != bootstrapv1.DNSNone {
		t.Errorf("CapstanConfig: %v", config.Spec)
	}
	for _, obj := range []client.Object{config, infra} {
		if obj.GetLabels()[clusterv1.ClusterNameLabel] != "demo" || len(obj.GetOwnerReferences()) != 1 || obj.GetOwnerReferences()[0].UID != m.UID || obj.GetOwnerReferences()[0].Controller == nil {
			t.Errorf("%T: labels %v, owners %v", obj, obj.GetLabels(), obj.GetOwnerReferences())
		}
	}
	template := &infrav1.CapstanMachineTemplate{}
	template.Namespace, template.Name = m.Namespace, "demo"
	if err := cluster.Get(template); err != nil || len(template.OwnerReferences) != 1 || template.OwnerReferences[0].Kind != "Cluster" {
		t.Errorf("ALL-11: the template's owners %v, %v", template.OwnerReferences, err)
	}
}

// unanswered returns a cluster with its first Machine. The endpoint does not answer yet.
func unanswered(t *testing.T, change func(*controlplanev1.CapstanControlPlane)) (*testcluster.Cluster, *controlplanev1.CapstanControlPlane, *testcluster.Endpoint) {
	t.Helper()
	cluster := testcluster.New(t, env, nil)
	cp := cluster.ControlPlane(change)
	endpoint := testcluster.NewEndpoint(t)
	cluster.SetInfraEndpoint(endpoint.APIEndpoint)
	expect.True(t, "the first Machine", func() bool { return len(machinesOf(t, cluster)) == 1 })
	return cluster, cp, endpoint
}

// started returns a cluster whose API server answers through its endpoint.
func started(t *testing.T, change func(*controlplanev1.CapstanControlPlane)) (*testcluster.Cluster, *controlplanev1.CapstanControlPlane, *testcluster.Endpoint) {
	t.Helper()
	cluster, cp, endpoint := unanswered(t, change)
	endpoint.Serve(t, cluster.Secret("demo-ca"), env.Config)
	cluster.Becomes(t, cp, "initialized after the API server answers (CP-09)", func() bool {
		return ptr.Deref(cp.Status.Initialization.ControlPlaneInitialized, false) && testcluster.Has(cp, controlplanev1.AvailableCondition, metav1.ConditionTrue, "")
	})
	return cluster, cp, endpoint
}

// connected returns a started cluster with a connection from core and from the provider, and the simulation of its machines.
func connected(t *testing.T, change func(*controlplanev1.CapstanControlPlane)) (*simulation, *controlplanev1.CapstanControlPlane, *testcluster.Endpoint) {
	t.Helper()
	cluster, cp, endpoint := started(t, change)
	w := newSimulation(t, cluster)
	cluster.SetEndpoint(endpoint.APIEndpoint)
	// As core does: the cluster cache connects as soon as the Cluster is initialized.
	cluster.ChangeStatus(cluster.Cluster, func() { cluster.Status.Initialization.ControlPlaneInitialized = ptr.To(true) })
	w.until("the machine is healthy", func() bool {
		machines := machinesOf(t, cluster)
		return len(machines) > 0 && conditions.IsTrue(&machines[0], controlplanev1.MachineEtcdMemberHealthyCondition)
	})
	return w, cp, endpoint
}

// TestNotInitialized: CP-09, a control plane is not initialized before its API server answers.
func TestNotInitialized(t *testing.T) {
	cluster, cp, endpoint := unanswered(t, nil)
	endpoint.Asked(t)
	expect.Consistently(t, "not initialized", func() bool {
		err := cluster.Get(cp)
		_, recorded := cp.Annotations[controlplanev1.InitializedAnnotation]
		return err == nil && !recorded && cp.Status.Initialization.ControlPlaneInitialized == nil
	})
}

// TestInitialized (CP-09, CP-10): initialized is set when the API server answers, and never unset. Available follows the answers.
// Row CP-18.
func TestInitialized(t *testing.T) {
	w, cp, endpoint := connected(t, nil)
	cluster := w.cluster
	for kind, status := range map[string]metav1.ConditionStatus{
		"Initialized": "True", "EtcdClusterHealthy": "True", "ControlPlaneComponentsHealthy": "True", "KubeconfigAvailable": "True",
		"RollingOut": "False", "ScalingUp": "False", "ScalingDown": "False", "Remediating": "False", "Deleting": "False", "Paused": "False",
		"MachinesUpToDate": "True", "CertificatesExpiring": "False",
	} {
		cluster.Becomes(t, cp, "CP-10 "+kind, func() bool { return testcluster.Has(cp, kind, status, "") })
	}
	cluster.Becomes(t, cp, "CP-03 upToDateReplicas", func() bool { return ptr.Deref(cp.Status.UpToDateReplicas, 0) == 1 })
	endpoint.Close()
	cluster.Change(cluster.Cluster, func() { cluster.Labels = map[string]string{"touched": "yes"} })
	cluster.Becomes(t, cp, "not available while the API server does not answer", func() bool {
		return testcluster.Has(cp, controlplanev1.AvailableCondition, metav1.ConditionFalse, "does not answer")
	})
	if !ptr.Deref(cp.Status.Initialization.ControlPlaneInitialized, false) {
		t.Error("CP-09: controlPlaneInitialized was unset")
	}
}

// TestSteadyState: the reconciler writes nothing if the control plane already matches its spec.
func TestSteadyState(t *testing.T) {
	w, cp, _ := connected(t, nil)
	cluster := w.cluster
	w.until("the control plane is settled", w.settled(cp, 1))
	cluster.Becomes(t, cp, "up to date", func() bool { return ptr.Deref(cp.Status.UpToDateReplicas, 0) == 1 })
	versions := func() string {
		var out strings.Builder
		_ = cluster.Get(cp)
		m := machinesOf(t, cluster)[0]
		fmt.Fprint(&out, cp.ResourceVersion, " ", m.ResourceVersion)
		for _, name := range []string{"demo-ca", "demo-etcd", "demo-proxy", "demo-sa", "demo-encryption", "demo-kubeconfig"} {
			fmt.Fprint(&out, " ", cluster.Secret(name).ResourceVersion)
		}
		return out.String()
	}
	before := expect.Rest(t, func() string { w.step(); return versions() })
	for i := range 3 {
		cluster.Change(cluster.Cluster, func() { cluster.Labels = map[string]string{"touched": strconv.Itoa(i)} })
	}
	w.still("no writes", func() bool { return versions() == before })
}

// TestUserAuthority (CP-15): a certificate authority of the user is used and not overwritten. A condition names a broken one, and
// no Machine is created until it is repaired.
func TestUserAuthority(t *testing.T) {
	ca := newCA(t)
	cluster := testcluster.New(t, env, nil)
	secret := &corev1.Secret{ObjectMeta: cluster.Meta("demo-ca"), Type: corev1.SecretTypeTLS, Data: map[string][]byte{"tls.crt": []byte("broken"), "tls.key": ca.Key}}
	cluster.Create(secret)
	cluster.SetInfraEndpoint(somewhere)
	cp := cluster.ControlPlane(nil)
	cluster.Becomes(t, cp, "CertificatesAvailable False", func() bool {
		return testcluster.Has(cp, controlplanev1.CertificatesAvailableCondition, metav1.ConditionFalse, "demo-ca is broken")
	})
	if len(machinesOf(t, cluster)) != 0 {
		t.Error("a Machine was created with a broken authority")
	}
	cluster.Change(secret, func() { secret.Data["tls.crt"] = ca.Cert })
	expect.True(t, "the first Machine", func() bool { return len(machinesOf(t, cluster)) == 1 })
	after := cluster.Secret("demo-ca")
	if !bytes.Equal(after.Data["tls.crt"], ca.Cert) || !bytes.Equal(after.Data["tls.key"], ca.Key) || len(after.OwnerReferences) != 0 {
		t.Error("the user's authority was changed")
	}
	config, err := clientcmd.RESTConfigFromKubeConfig(cluster.Secret("demo-kubeconfig").Data["value"])
	if err != nil || !bytes.Equal(config.CAData, ca.Cert) {
		t.Errorf("the user's authority did not sign the kubeconfig: %v", err)
	}
}

// TestLostSecrets: lost keys of an initialized cluster are not created again, because they would not match those on the machines.
func TestLostSecrets(t *testing.T) {
	cluster, cp, _ := started(t, nil)
	for _, name := range []string{"demo-etcd", "demo-encryption"} {
		lost := cluster.Secret(name)
		if err := env.Client.Delete(context.Background(), lost); err != nil {
			t.Fatal(err)
		}
		cluster.Becomes(t, cp, "a condition names the missing "+name, func() bool {
			return testcluster.Has(cp, controlplanev1.CertificatesAvailableCondition, metav1.ConditionFalse, name+" was deleted")
		})
		if cluster.Secret(name) != nil {
			t.Errorf("%s was created again", name)
		}
		lost.ResourceVersion, lost.UID = "", ""
		cluster.Create(lost)
		cluster.Becomes(t, cp, "the control plane continues with "+name, func() bool {
			return testcluster.Has(cp, controlplanev1.CertificatesAvailableCondition, metav1.ConditionTrue, "")
		})
	}
}

// TestKubeconfig (CP-13, CP-14): the kubeconfig is created again after a change of the endpoint or its deletion. A kubeconfig of
// a user is not changed.
func TestKubeconfig(t *testing.T) {
	cluster := testcluster.New(t, env, nil)
	cluster.SetInfraEndpoint(somewhere)
	cluster.ControlPlane(func(cp *controlplanev1.CapstanControlPlane) { cp.Spec.Kubeconfig.ValidityDays = 10 })
	server := func() string {
		s := cluster.Secret("demo-kubeconfig")
		if s == nil {
			return ""
		}
		config, err := clientcmd.RESTConfigFromKubeConfig(s.Data["value"])
		if err != nil {
			return err.Error()
		}
		return config.Host
	}
	expect.True(t, "a kubeconfig", func() bool { return server() == "https://127.0.0.1:1" })
	if again, err := kubeconfig.NeedsClientCertRotation(cluster.Secret("demo-kubeconfig"), 11*model.Day); err != nil || !again {
		t.Errorf("CP-14: valid for more than ten days: %v", err)
	}
	cluster.SetEndpoint(clusterv1.APIEndpoint{Host: "127.0.0.1", Port: 2})
	expect.True(t, "another endpoint", func() bool { return server() == "https://127.0.0.1:2" })
	if err := env.Client.Delete(context.Background(), cluster.Secret("demo-kubeconfig")); err != nil {
		t.Fatal(err)
	}
	expect.True(t, "the deleted kubeconfig exists again", func() bool { return server() == "https://127.0.0.1:2" })

	foreign := testcluster.New(t, env, nil)
	mine := &corev1.Secret{ObjectMeta: foreign.Meta("demo-kubeconfig"), Type: corev1.SecretTypeOpaque, Data: cluster.Secret("demo-kubeconfig").Data}
	foreign.Create(mine)
	foreign.SetInfraEndpoint(clusterv1.APIEndpoint{Host: "127.0.0.1", Port: 2})
	foreign.ControlPlane(nil)
	expect.True(t, "the first Machine", func() bool { return len(machinesOf(t, foreign)) == 1 })
	if after := foreign.Secret("demo-kubeconfig"); after.ResourceVersion != mine.ResourceVersion {
		t.Error("the user's kubeconfig was changed")
	}
}

// TestOldKubeconfig_CP14: the control plane replaces its kubeconfig when half of the year is over, and not before.
func TestOldKubeconfig_CP14(t *testing.T) {
	cluster := testcluster.New(t, env, nil)
	cluster.SetInfraEndpoint(somewhere)
	cluster.ControlPlane(nil)
	expect.True(t, "the first Machine", func() bool { return len(machinesOf(t, cluster)) == 1 })
	authority, stored := cluster.Secret("demo-ca"), cluster.Secret("demo-kubeconfig")
	makeOld := func(days int) string {
		ca := &certs.KeyPair{Cert: authority.Data[secret.TLSCrtDataName], Key: authority.Data[secret.TLSKeyDataName]}
		data, err := newKubeconfig("demo", "https://"+somewhere.String(), ca, "", 365*model.Day, time.Now().Add(-time.Duration(days)*model.Day))
		if err != nil {
			t.Fatal(err)
		}
		cluster.Change(stored, func() { stored.Data[secret.KubeconfigDataName] = data })
		return string(data)
	}
	replaced := func(data string) bool {
		return string(cluster.Secret("demo-kubeconfig").Data[secret.KubeconfigDataName]) != data
	}
	young := makeOld(180)
	expect.Consistently(t, "the kubeconfig of 180 days stays", func() bool { return !replaced(young) })
	old := makeOld(185)
	expect.True(t, "the kubeconfig of 185 days is replaced", func() bool { return replaced(old) })
	if again, err := kubeconfig.NeedsClientCertRotation(cluster.Secret("demo-kubeconfig"), 364*model.Day); err != nil || again {
		t.Errorf("the new certificate is not valid for a year: %v", err)
	}
}

// TestCrash: the manager is killed after it has created a CapstanConfig. The next manager creates the other objects with the same
// name.
func TestCrash(t *testing.T) {
	cluster := testcluster.New(t, env, nil)
	cp := cluster.ControlPlane(nil)
	left := desiredConfig(&scope{ControlPlane: &model.ControlPlane{Object: cp, Cluster: cluster.Cluster}}, "demo-left1", bootstrapv1.RoleInit)
	cluster.Create(left)
	staleControlPlane := desiredConfig(&scope{ControlPlane: &model.ControlPlane{Object: cp, Cluster: cluster.Cluster}}, "demo-stale", bootstrapv1.RoleInit)
	staleControlPlane.Spec.PreCommands = []string{"echo of another spec"}
	cluster.Create(staleControlPlane)
	cluster.SetInfraEndpoint(somewhere)
	expect.True(t, "the first Machine", func() bool { return len(machinesOf(t, cluster)) == 1 })
	cluster.Becomes(t, cp, "the reconciler counts the Machine", func() bool { return ptr.Deref(cp.Status.Replicas, 0) > 0 })
	reconciledAgain(t, cluster, cp)
	configs := &bootstrapv1.CapstanConfigList{}
	if err := env.Client.List(context.Background(), configs, client.InNamespace(cluster.Namespace)); err != nil {
		t.Fatal(err)
	}
	if machines := machinesOf(t, cluster); len(machines) != 1 || machines[0].Name != "demo-left1" || len(configs.Items) != 1 {
		t.Errorf("want one Machine and one config, found %d, %d", len(machines), len(configs.Items))
	}
}

// TestLostMachine: a control plane without its last machine is not created again as an empty cluster.
func TestLostMachine(t *testing.T) {
	cluster, cp, _ := started(t, nil)
	machine := machinesOf(t, cluster)[0]
	if err := env.Client.Delete(context.Background(), &machine); err != nil {
		t.Fatal(err)
	}
	cluster.Change(&machine, func() { machine.Finalizers = nil }) // A forced removal: its member does not leave etcd.
	cluster.Becomes(t, cp, "a condition reports it", func() bool {
		return testcluster.Has(cp, controlplanev1.AvailableCondition, metav1.ConditionFalse, "all control plane machines and the cluster")
	})
	reconciledAgain(t, cluster, cp)
	if machines := machinesOf(t, cluster); len(machines) != 0 {
		t.Errorf("the reconciler created %s", machines[0].Name)
	}
}

// TestDelete (CP-10): the order of a deletion is workers, control plane machines, control plane object.
func TestDelete(t *testing.T) {
	cluster, cp, _ := started(t, nil)
	worker := &clusterv1.Machine{ObjectMeta: cluster.Meta("worker"), Spec: machinesOf(t, cluster)[0].Spec}
	cluster.Create(worker)
	etcdQuorum.WithLabelValues(cp.Namespace, cp.Name).Set(0)
	backupDue.WithLabelValues(cp.Namespace, cp.Name).Set(1)
	if err := env.Client.Delete(context.Background(), cp); err != nil {
		t.Fatal(err)
	}
	cluster.Becomes(t, cp, "waits for the worker", func() bool {
		return testcluster.Has(cp, clusterv1.DeletingCondition, metav1.ConditionTrue, "1 worker")
	})
	for _, name := range []string{"capstan_control_plane_etcd_quorum", "capstan_control_plane_backup_due_timestamp_seconds"} {
		if left := testmetrics.Gather(t, name, map[string]string{"namespace": cp.Namespace}); len(left) != 0 {
			t.Errorf("nobody sets %s any more, and it is %v", name, left)
		}
	}
	if m := machinesOf(t, cluster); len(m) != 1 || !m[0].DeletionTimestamp.IsZero() {
		t.Error("the control plane machine was deleted before the worker")
	}
	// The worker has a finalizer, as usual, so its deletion causes two events.
	cluster.Change(worker, func() { worker.Finalizers = []string{"test/finalizer"} })
	if err := env.Client.Delete(context.Background(), worker); err != nil {
		t.Fatal(err)
	}
	cluster.Change(worker, func() { worker.Finalizers = nil })
	newSimulation(t, cluster).until("everything is gone, and no hook keeps it", func() bool { return len(machinesOf(t, cluster)) == 0 && cluster.Get(cp) != nil })
}

// TestPaused (ALL-08, CP-10, CP-22): while the Cluster is paused, nothing is changed or deleted, and a condition shows the pause.
func TestPaused(t *testing.T) {
	cluster := testcluster.New(t, env, func(c *clusterv1.Cluster) { c.Spec.Paused = ptr.To(true) })
	cluster.SetInfraEndpoint(somewhere)
	cp := cluster.ControlPlane(nil)
	cluster.Becomes(t, cp, "Paused", func() bool {
		return testcluster.Has(cp, clusterv1.PausedCondition, metav1.ConditionTrue, "spec.paused")
	})
	if cluster.Secret("demo-ca") != nil || len(cp.Finalizers) != 0 {
		t.Error("the reconciler changed objects of a paused Cluster")
	}
	cluster.Change(cluster.Cluster, func() { cluster.Spec.Paused = ptr.To(false) })
	expect.True(t, "the control plane continues", func() bool { return len(machinesOf(t, cluster)) == 1 })
	cluster.Change(cp, func() { cp.Annotations = map[string]string{clusterv1.PausedAnnotation: ""} })
	cluster.Becomes(t, cp, "paused by annotation", func() bool { return testcluster.Has(cp, clusterv1.PausedCondition, metav1.ConditionTrue, "annotation") })
	if err := env.Client.Delete(context.Background(), cp); err != nil {
		t.Fatal(err)
	}
	cluster.Becomes(t, cp, "the deletion was seen", func() bool { return testenv.PausedDeletion(cp) })
	expect.Consistently(t, "not deleted", func() bool { return len(machinesOf(t, cluster)) == 1 && cluster.Get(cp) == nil })
}

// TestInvalid: conditions name invalid input, and the reconciler continues after the input is corrected.
func TestInvalid(t *testing.T) {
	for name, c := range map[string]struct {
		pods, services []string
		want           string
	}{
		"overlap":   {[]string{"10.0.0.0/8"}, []string{"10.96.0.0/16"}, "overlap"},
		"malformed": {[]string{"10.1.2.3/16"}, nil, "is not a network"},
	} {
		t.Run(name, func(t *testing.T) {
			cluster := testcluster.New(t, env, func(cl *clusterv1.Cluster) {
				cl.Spec.ClusterNetwork.Pods.CIDRBlocks, cl.Spec.ClusterNetwork.Services.CIDRBlocks = c.pods, c.services
			})
			cluster.SetInfraEndpoint(somewhere)
			cp := cluster.ControlPlane(nil)
			cluster.Becomes(t, cp, "Available False", func() bool {
				return testcluster.Has(cp, controlplanev1.AvailableCondition, metav1.ConditionFalse, c.want) &&
					conditions.GetReason(cp, controlplanev1.AvailableCondition) == controlplanev1.InvalidConfigurationReason
			})
			cluster.Change(cluster.Cluster, func() { cluster.Spec.ClusterNetwork = clusterv1.ClusterNetwork{} })
			expect.True(t, "the control plane continues", func() bool { return len(machinesOf(t, cluster)) == 1 })
		})
	}
}

// TestInvalidWhileRunning: an invalid setting of a running cluster is reported, and no Machine is created. Deleted Machines still go, and
// everything continues after the setting is corrected.
func TestInvalidWhileRunning(t *testing.T) {
	w, cp, _ := connected(t, func(cp *controlplanev1.CapstanControlPlane) { cp.Spec.Replicas = ptr.To[int32](3) })
	w.until("three", w.settled(cp, 3))
	w.cluster.Change(w.cluster.Cluster, func() {
		network := &w.cluster.Spec.ClusterNetwork
		network.Pods.CIDRBlocks, network.Services.CIDRBlocks = []string{"10.0.0.0/8"}, []string{"10.96.0.0/16"}
	})
	w.until("Available names the setting", func() bool {
		return w.cluster.Get(cp) == nil && testcluster.Has(cp, clusterv1.AvailableCondition, metav1.ConditionFalse, "overlap") &&
			conditions.GetReason(cp, clusterv1.AvailableCondition) == controlplanev1.InvalidConfigurationReason
	})
	deleteMachine(t, w, namesOfMachines(t, w)[0])
	w.until("the deleted Machine goes", func() bool { return len(machinesOf(t, w.cluster)) == 2 && w.voting() == 2 })
	w.until("a condition says why it is not replaced", func() bool {
		return w.cluster.Get(cp) == nil && testcluster.Has(cp, clusterv1.ScalingUpCondition, metav1.ConditionTrue, "overlap")
	})
	w.still("none is created", func() bool { return len(w.made) == 3 })
	w.cluster.Change(w.cluster.Cluster, func() { w.cluster.Spec.ClusterNetwork = clusterv1.ClusterNetwork{} })
	w.until("the Machine is replaced", func() bool {
		return w.settled(cp, 3)() && testcluster.Has(cp, clusterv1.ReadyCondition, metav1.ConditionTrue, "")
	})
}

// TestOnlyMachineWhileInvalid: the only Machine is not repaired while the spec is invalid, because it could not be replaced. It is repaired
// after the correction.
func TestOnlyMachineWhileInvalid(t *testing.T) {
	w, cp, _ := connected(t, nil)
	w.until("one", w.settled(cp, 1))
	w.cluster.Change(w.cluster.Cluster, func() {
		network := &w.cluster.Spec.ClusterNetwork
		network.Pods.CIDRBlocks, network.Services.CIDRBlocks = []string{"10.0.0.0/8"}, []string{"10.96.0.0/16"}
	})
	w.until("Available names the setting", func() bool {
		return w.cluster.Get(cp) == nil && testcluster.Has(cp, clusterv1.AvailableCondition, metav1.ConditionFalse, "overlap")
	})
	only := machinesOf(t, w.cluster)[0]
	unhealthy(w, &only)
	w.until("a condition says why it is not repaired", func() bool {
		return w.cluster.Get(cp) == nil && testcluster.Has(cp, clusterv1.RemediatingCondition, metav1.ConditionTrue, "no other one can be created") && w.cluster.Get(&only) == nil && only.DeletionTimestamp.IsZero()
	})
	w.cluster.Change(w.cluster.Cluster, func() { w.cluster.Spec.ClusterNetwork = clusterv1.ClusterNetwork{} })
	w.until("the Machine is replaced", func() bool { return len(w.made) == 2 && w.settled(cp, 1)() })
}

// TestMissingTemplate: a condition names the missing template, and its creation causes a reconcile.
func TestMissingTemplate(t *testing.T) {
	cluster := testcluster.New(t, env, nil)
	cluster.SetInfraEndpoint(somewhere)
	cp := cluster.ControlPlane(func(cp *controlplanev1.CapstanControlPlane) {
		cp.Spec.MachineTemplate.Spec.InfrastructureRef.Name = "later"
	})
	cluster.Becomes(t, cp, "a condition reports it", func() bool {
		return testcluster.Has(cp, clusterv1.ScalingUpCondition, metav1.ConditionTrue, "CapstanMachineTemplate later does not exist")
	})
	cluster.MachineTemplate("later")
	expect.True(t, "the control plane continues", func() bool { return len(machinesOf(t, cluster)) == 1 })
}

// TestFailureDomain (CP-16): Machines are in failure domains for control planes only.
func TestFailureDomain(t *testing.T) {
	cluster := testcluster.New(t, env, nil)
	cluster.ChangeStatus(cluster.Cluster, func() {
		cluster.Status.FailureDomains = []clusterv1.FailureDomain{{Name: "a", ControlPlane: ptr.To(false)}, {Name: "b", ControlPlane: ptr.To(true)}}
	})
	cluster.SetInfraEndpoint(somewhere)
	cluster.ControlPlane(nil)
	expect.True(t, "the Machine is in domain b", func() bool {
		m := machinesOf(t, cluster)
		return len(m) == 1 && m[0].Spec.FailureDomain == "b"
	})
}

// TestScale (CP-04): the scale subresource works, and refuses invalid numbers of replicas.
func TestScale(t *testing.T) {
	cluster := testcluster.New(t, env, nil)
	cluster.SetInfraEndpoint(somewhere)
	cp := cluster.ControlPlane(nil)
	cluster.Becomes(t, cp, "a Machine", func() bool { return ptr.Deref(cp.Status.Replicas, 0) == 1 })
	scale := &autoscalingv1.Scale{}
	if err := env.Client.SubResource("scale").Get(context.Background(), cp, scale); err != nil {
		t.Fatal(err)
	}
	if scale.Spec.Replicas != 1 || scale.Status.Replicas != 1 || scale.Status.Selector != cp.Status.Selector {
		t.Errorf("scale: %v", scale)
	}
	for _, n := range []int32{2, 0} {
		scale.Spec.Replicas = n
		if err := env.Client.SubResource("scale").Update(context.Background(), cp, client.WithSubResourceBody(scale)); err == nil {
			t.Errorf("the scale subresource accepted %d replicas", n)
		}
	}
	expect.True(t, "scaled to 3", func() bool {
		if err := env.Client.SubResource("scale").Get(context.Background(), cp, scale); err != nil {
			return false
		}
		scale.Spec.Replicas = 3
		return env.Client.SubResource("scale").Update(context.Background(), cp, client.WithSubResourceBody(scale)) == nil
	})
}

// TestCertificateRequests sends requests of machines to a real API server and checks the answers.
func TestCertificateRequests(t *testing.T) {
	cluster, _, endpoint := started(t, nil)
	// The names are unique, because the workload clusters of all tests have the same API server.
	node := "node-" + cluster.Namespace
	machine := machinesOf(t, cluster)[0]
	cluster.ChangeStatus(&machine, func() {
		machine.Status.Addresses = clusterv1.MachineAddresses{{Type: clusterv1.MachineHostName, Address: node}, {Type: clusterv1.MachineInternalIP, Address: "10.200.0.3"}}
	})
	cluster.SetEndpoint(endpoint.APIEndpoint)
	// As core does: the cluster cache connects as soon as the Cluster is initialized.
	cluster.ChangeStatus(cluster.Cluster, func() { cluster.Status.Initialization.ControlPlaneInitialized = ptr.To(true) })
	// The bootstrap data of the Machine contains the id of the token.
	cluster.Create(&corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: cluster.Namespace, Name: node, Labels: map[string]string{clusterv1.ClusterNameLabel: cluster.Name},
			Annotations: map[string]string{bootstrapv1.TokenIDsAnnotation: "abcdef"},
		},
		Type: clusterv1.ClusterSecretType, Data: map[string][]byte{"value": []byte("x")},
	})
	before := machine.DeepCopy()
	machine.Spec.Bootstrap.DataSecretName = ptr.To(node)
	if err := env.Client.Patch(t.Context(), &machine, client.MergeFrom(before)); err != nil {
		t.Fatal(err)
	}
	kubelet := rest.ImpersonationConfig{UserName: "system:node:" + node, Groups: []string{"system:nodes", "system:authenticated"}}
	token := rest.ImpersonationConfig{UserName: "system:bootstrap:abcdef", Groups: []string{"system:bootstrappers", "system:authenticated"}}
	good := ask(t, kubelet, certificatesv1.KubeletServingSignerName, request{cn: kubelet.UserName, o: "system:nodes", dns: node, ip: "10.200.0.3", usage: certificatesv1.UsageServerAuth})
	bad := ask(t, kubelet, certificatesv1.KubeletServingSignerName, request{cn: kubelet.UserName, o: "system:nodes", dns: "elsewhere", ip: "10.200.0.3", usage: certificatesv1.UsageServerAuth})
	agent := ask(t, token, certificatesv1.KubeAPIServerClientSignerName, request{cn: "capstan:node-agent:" + node, o: "capstan:node-agents", usage: certificatesv1.UsageClientAuth})
	other := ask(t, token, certificatesv1.KubeAPIServerClientSignerName, request{cn: "alice", usage: certificatesv1.UsageClientAuth})

	expect.True(t, "approved", func() bool { return answer(t, good) == "Approved" && answer(t, agent) == "Approved" })
	expect.True(t, "denied", func() bool { return answer(t, bad) == "Denied" })
	later := ask(t, kubelet, certificatesv1.KubeletServingSignerName, request{cn: kubelet.UserName, o: "system:nodes", dns: node, ip: "10.200.0.3", usage: certificatesv1.UsageServerAuth})
	expect.True(t, "a later request is approved", func() bool { return answer(t, later) == "Approved" })
	if found := answer(t, other); found != "" {
		t.Errorf("the request of another kind of client was %s", found)
	}
}
