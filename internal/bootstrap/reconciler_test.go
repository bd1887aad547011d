package bootstrap

import (
	"context"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/cluster-api/util/secret"
	"sigs.k8s.io/controller-runtime/pkg/client"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/bootstrap/render"
	"capstan.dev/capstan/internal/node/cloudconfig"
	"capstan.dev/capstan/internal/node/nodeconfig"
	"capstan.dev/capstan/internal/reconciling"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/internal/testenv/testcluster"
)

var endpoint = clusterv1.APIEndpoint{Host: "10.200.0.1", Port: 6443}

// reconciled waits until a config was reconciled after the last change of its spec.
func reconciled(t *testing.T, cluster *testcluster.Cluster, config *bootstrapv1.CapstanConfig) {
	t.Helper()
	cluster.Becomes(t, config, "reconciled", func() bool { return config.Status.ObservedGeneration == config.Generation })
}

// authorities creates the Secrets of the control plane provider.
func authorities(t *testing.T, cluster *testcluster.Cluster) {
	t.Helper()
	certificates := Certificates(bootstrapv1.ClusterConfiguration{})
	if err := certificates.Generate(); err != nil {
		t.Fatal(err)
	}
	if err := certificates.SaveGenerated(context.Background(), env.Client, client.ObjectKeyFromObject(cluster.Cluster), cluster.OwnerRef()); err != nil {
		t.Fatal(err)
	}
	cluster.Create(&corev1.Secret{ObjectMeta: cluster.Meta("demo-encryption"), Type: clusterv1.ClusterSecretType,
		Data: map[string][]byte{"value": []byte(strings.Repeat("k", render.EncryptionKeySize))}})
}

// dataOf waits for the data Secret, checks its form (BC-02, BC-03), and parses it as a machine does.
func dataOf(t *testing.T, cluster *testcluster.Cluster, config *bootstrapv1.CapstanConfig) (map[string]cloudconfig.File, *nodeconfig.NodeConfiguration) {
	t.Helper()
	cluster.Becomes(t, config, "Ready", func() bool { return testcluster.Has(config, clusterv1.ReadyCondition, metav1.ConditionTrue, "") })
	pool := len(config.OwnerReferences) > 0 && config.OwnerReferences[0].Kind == "MachinePool"
	if (config.Status.DataSecretName != config.Name) != pool || !ptr.Deref(config.Status.Initialization.DataSecretCreated, false) || config.Status.ObservedGeneration != config.Generation {
		t.Errorf("BC-03: status %v", config.Status)
	}
	s := cluster.Secret(config.Status.DataSecretName)
	if s == nil || s.Labels[clusterv1.ClusterNameLabel] != "demo" || !metav1.IsControlledBy(s, config) || len(s.Data) != 1 || s.Type != clusterv1.ClusterSecretType {
		t.Fatalf("BC-02: secret %v", s)
	}
	return filesOf(t, s)
}

// filesOf reads bootstrap data, or the data of an update, as a machine reads it.
func filesOf(t *testing.T, s *corev1.Secret) (map[string]cloudconfig.File, *nodeconfig.NodeConfiguration) {
	t.Helper()
	parsed, err := cloudconfig.Parse(s.Data["value"], nil)
	if err != nil {
		t.Fatal(err)
	}
	files := map[string]cloudconfig.File{}
	for _, f := range parsed.Files {
		files[f.Path] = f
	}
	node, err := nodeconfig.Parse(files[nodeconfig.Path].Content)
	if err != nil {
		t.Fatal(err)
	}
	return files, node
}

// TestControlPlaneMachine (BC-02 to BC-04, CP-23): the data of a control plane machine.
// Row BC-03.
func TestControlPlaneMachine(t *testing.T) {
	cluster := testcluster.New(t, env, nil)
	_, config := cluster.Machine("cp", func(m *clusterv1.Machine) { m.Labels[clusterv1.MachineControlPlaneLabel] = "" }, func(c *bootstrapv1.CapstanConfig) {
		c.Spec.Role = bootstrapv1.RoleInit
		c.Spec.Cluster.PodNetwork = bootstrapv1.PodNetworkNone
	})
	cluster.Becomes(t, config, "waits for the endpoint", func() bool {
		return testcluster.Has(config, bootstrapv1.DataSecretAvailableCondition, metav1.ConditionFalse, "no spec.controlPlaneEndpoint")
	})
	cluster.SetEndpoint(endpoint)
	cluster.Becomes(t, config, "waits for the authorities", func() bool {
		return testcluster.Has(config, bootstrapv1.DataSecretAvailableCondition, metav1.ConditionFalse, "demo-ca does not exist")
	})
	authorities(t, cluster)
	files, node := dataOf(t, cluster, config)
	if node.Role != nodeconfig.RoleInit || node.Endpoint != "10.200.0.1:6443" || node.BootstrapToken != "" || node.Network.PodNetwork != "None" || node.Network.KubeProxy != "NFTables" {
		t.Errorf("node.yaml: %+v", node)
	}
	for path, mode := range map[string]uint32{
		"ca.crt": 0o644, "ca.key": 0o600, "etcd/ca.key": 0o600, "front-proxy-ca.key": 0o600, "sa.key": 0o600, "sa.pub": 0o644,
	} {
		if f, ok := files[nodeconfig.PKIDir+"/"+path]; !ok || uint32(f.Mode) != mode || len(f.Content) == 0 {
			t.Errorf("CP-23 %s: %v, mode %o", path, ok, f.Mode)
		}
	}
	if files[nodeconfig.EncryptionConfigPath].Mode != 0o600 || files[nodeconfig.Path].Mode != 0o600 {
		t.Error("CP-23: users other than root can read encryption.yaml or node.yaml")
	}
	if conditions.Get(config, bootstrapv1.BootstrapTokenAvailableCondition) != nil {
		t.Error("a control plane machine has a token")
	}
}

// TestJoiningMachine (CP-01): the data of a joining control plane machine is created at once. The control plane provider creates
// the Machine when it can join, and the machine repeats its attempts.
func TestJoiningMachine(t *testing.T) {
	cluster := testcluster.New(t, env, nil)
	cluster.SetEndpoint(endpoint)
	authorities(t, cluster)
	_, config := cluster.Machine("cp-2", func(m *clusterv1.Machine) { m.Labels[clusterv1.MachineControlPlaneLabel] = "" }, func(c *bootstrapv1.CapstanConfig) {
		c.Spec.Role = bootstrapv1.RoleControlPlane
	})
	files, node := dataOf(t, cluster, config)
	if node.Role != nodeconfig.RoleControlPlane || node.Endpoint != "10.200.0.1:6443" || node.BootstrapToken != "" || node.ControlPlane == nil || !node.ControlPlane.Encryption {
		t.Errorf("node.yaml: %+v", node)
	}
	for _, path := range []string{nodeconfig.PKIDir + "/ca.key", nodeconfig.PKIDir + "/etcd/ca.key", nodeconfig.PKIDir + "/sa.key", nodeconfig.EncryptionConfigPath} {
		if f := files[path]; f.Mode != 0o600 || len(f.Content) == 0 {
			t.Errorf("CP-23 %s: mode %o, %d bytes", path, f.Mode, len(f.Content))
		}
	}
}

// withControlPlane returns a cluster with a CapstanControlPlane. The tests act as its provider.
func withControlPlane(t *testing.T) (*testcluster.Cluster, *controlplanev1.CapstanControlPlane) {
	t.Helper()
	cluster := testcluster.New(t, env, nil)
	cp := cluster.ControlPlane(func(cp *controlplanev1.CapstanControlPlane) { cp.Spec.Config.Cluster.DNS = bootstrapv1.DNSNone })
	authorities(t, cluster)
	return cluster, cp
}

// answers sets the state after core has copied the endpoint and the API server has answered. The test API server is also that of
// the workload cluster.
func answers(t *testing.T, cluster *testcluster.Cluster, cp *controlplanev1.CapstanControlPlane) {
	t.Helper()
	cluster.SetEndpoint(env.Endpoint())
	cluster.ChangeStatus(cp, func() { cp.Status.Initialization.ControlPlaneInitialized = ptr.To(true) })
}

// kubeconfigOf creates the kubeconfig Secret, with the test API server as the workload cluster.
func kubeconfigOf(t *testing.T, cluster *testcluster.Cluster) {
	t.Helper()
	cluster.Create(&corev1.Secret{ObjectMeta: cluster.Meta("demo-kubeconfig"), Type: clusterv1.ClusterSecretType, Data: map[string][]byte{"value": env.Kubeconfig}})
}

func tokenIn(t *testing.T, token string) *corev1.Secret {
	t.Helper()
	id, _, _ := strings.Cut(token, ".")
	s := &corev1.Secret{}
	if err := env.Client.Get(context.Background(), client.ObjectKey{Namespace: "kube-system", Name: "bootstrap-token-" + id}, s); err != nil {
		return nil
	}
	return s
}

// TestWorker (BC-01 to BC-06): the data is created from the Secrets of the control plane, before the Cluster has its endpoint. The
// token is valid as soon as the API server answers, and is removed after the node has joined.
func TestWorker(t *testing.T) {
	cluster, cp := withControlPlane(t)
	kubeconfigOf(t, cluster)
	machine, config := cluster.Machine("worker", nil, nil)
	files, node := dataOf(t, cluster, config)
	if node.Role != nodeconfig.RoleWorker || !strings.Contains(env.Config.Host, "//"+node.Endpoint) || node.Network.DNS != "None" || node.Network.PodNetwork != "Routes" {
		t.Errorf("node.yaml: %+v", node)
	}
	if len(node.Node.Taints) != 1 || node.Node.Taints[0] != "node.cluster.x-k8s.io/uninitialized:NoSchedule" {
		t.Errorf("BC-06: taints %v", node.Node.Taints)
	}
	for path := range files {
		if strings.HasSuffix(path, ".key") || strings.Contains(path, "etcd") || path == nodeconfig.EncryptionConfigPath {
			t.Errorf("CP-23: a worker has %s", path)
		}
	}
	cluster.Becomes(t, config, "the token waits", func() bool {
		return testcluster.Has(config, bootstrapv1.BootstrapTokenAvailableCondition, metav1.ConditionFalse, "not reachable")
	})
	answers(t, cluster, cp)
	cluster.Becomes(t, config, "the token works", func() bool {
		return testcluster.Has(config, bootstrapv1.BootstrapTokenAvailableCondition, metav1.ConditionTrue, "")
	})
	s := tokenIn(t, node.BootstrapToken)
	expires, err := time.Parse(time.RFC3339, string(s.Data["expiration"]))
	if err != nil || time.Until(expires) > TokenTTL || time.Until(expires) < TokenTTL/2 || s.Type != "bootstrap.kubernetes.io/token" {
		t.Errorf("token: type %s, expires %s, %v", s.Type, expires, err)
	}
	if string(s.Data["token-id"])+"."+string(s.Data["token-secret"]) != node.BootstrapToken || s.Data["usage-bootstrap-signing"] != nil {
		t.Error("the token differs, or it can be used for more than authentication")
	}
	if groups, ok := s.Data["auth-extra-groups"]; ok {
		t.Errorf("groups of the token: %s", groups)
	}
	// The node has joined.
	cluster.ChangeStatus(machine, func() { machine.Status.NodeRef.Name = "worker" })
	expect.True(t, "the token is removed", func() bool { return tokenIn(t, node.BootstrapToken) == nil })
	cluster.Becomes(t, config, "and it is said", func() bool {
		return conditions.GetReason(config, bootstrapv1.BootstrapTokenAvailableCondition) == bootstrapv1.BootstrapTokenRemovedReason
	})
}

// TestDropTokenAfterFailedRenewal: a condition with the status False does not prove that the workload cluster has no token.
func TestDropTokenAfterFailedRenewal(t *testing.T) {
	cluster, cp := withControlPlane(t)
	kubeconfigOf(t, cluster)
	answers(t, cluster, cp)
	token, err := newToken()
	expect.NoError(t, err)
	r := &Reconciler{Client: env.Client, Options: reconciling.Options{SecretCachingClient: env.Client}}
	s := &scope{cluster: cluster.Cluster, controlPlane: cp, config: &bootstrapv1.CapstanConfig{ObjectMeta: cluster.Meta("worker")}}
	expect.NoError(t, putToken(t.Context(), s, env.Client, token, nil, time.Now().Add(TokenTTL)))
	reconciling.SetCondition(s.config, bootstrapv1.BootstrapTokenAvailableCondition, metav1.ConditionFalse, bootstrapv1.BootstrapTokenWaitingReason, "")
	expect.NoError(t, r.dropToken(t.Context(), s, token))
	if tokenIn(t, token) != nil || !tokenRemoved(s.config) {
		t.Errorf("the token was not removed: %+v", s.config.Status.Conditions)
	}
}

// TestHostileKubeconfig: a condition names a kubeconfig that would run a program or has another server. It is not used.
func TestHostileKubeconfig(t *testing.T) {
	for field, spoil := range map[string][2]string{
		"user.exec":         {"token: .*", `exec: {apiVersion: client.authentication.k8s.io/v1, interactiveMode: Never, command: "false"}`},
		"cluster.proxy-url": {"server: ", "proxy-url: http://127.0.0.1:1\n    server: "},
		"cluster.server":    {"server: https://[^:]*", "server: https://localhost"},
	} {
		t.Run(field, func(t *testing.T) {
			cluster, cp := withControlPlane(t)
			kubeconfigOf(t, cluster)
			secret := cluster.Secret("demo-kubeconfig")
			good := secret.Data["value"]
			bad := regexp.MustCompile(spoil[0]).ReplaceAll(good, []byte(spoil[1]))
			cluster.Change(secret, func() { secret.Data["value"] = bad })
			answers(t, cluster, cp)
			_, config := cluster.Machine("worker", nil, nil)
			cluster.Becomes(t, config, "refused", func() bool {
				return testcluster.Has(config, bootstrapv1.BootstrapTokenAvailableCondition, metav1.ConditionFalse, "the kubeconfig is refused: "+field+":")
			})
			cluster.Change(secret, func() { secret.Data["value"] = good })
			cluster.Becomes(t, config, "used once it is repaired", func() bool {
				return testcluster.Has(config, bootstrapv1.BootstrapTokenAvailableCondition, metav1.ConditionTrue, "")
			})
		})
	}
}

// TestNextTokenStep: at half of its life, the token of a Machine is renewed and the token of a pool is replaced. A missing or
// unreadable token is written.
// Row BC-02.
func TestNextTokenStep(t *testing.T) {
	now := time.Now()
	const ttl = 20 * time.Minute
	expiring := func(in time.Duration) *corev1.Secret {
		return &corev1.Secret{Data: map[string][]byte{"expiration": []byte(now.Add(in).UTC().Format(time.RFC3339))}}
	}
	for name, c := range map[string]struct {
		existing        *corev1.Secret
		machine, pooled tokenStep
	}{
		"none": {nil, writeToken, writeToken}, "new": {expiring(ttl), keepToken, keepToken},
		"just before half": {expiring(ttl/2 + time.Minute), keepToken, keepToken}, "half": {expiring(ttl / 2), writeToken, rotateToken},
		"expired": {expiring(-time.Minute), writeToken, writeToken}, "garbage": {&corev1.Secret{}, writeToken, writeToken},
	} {
		t.Run(name, func(t *testing.T) {
			for pool, want := range map[bool]tokenStep{false: c.machine, true: c.pooled} {
				step, again := nextTokenStep(c.existing, pool, ttl, now)
				if step != want || again < 0 || again > ttl/2 || again == 0 && step != rotateToken {
					t.Errorf("pool %v: got %v, %s", pool, step, again)
				}
			}
		})
	}
}

// TestTokenComesBack: a removed token, or one that expired while the provider was down, is valid again.
func TestTokenComesBack(t *testing.T) {
	cluster, cp := withControlPlane(t)
	kubeconfigOf(t, cluster)
	answers(t, cluster, cp)
	_, config := cluster.Machine("worker", nil, nil)
	_, node := dataOf(t, cluster, config)
	expect.True(t, "the token", func() bool { return tokenIn(t, node.BootstrapToken) != nil })
	s := tokenIn(t, node.BootstrapToken)
	before := s.DeepCopy()
	s.Data["expiration"] = []byte(time.Now().Add(time.Minute).UTC().Format(time.RFC3339))
	if err := env.Client.Patch(context.Background(), s, client.MergeFrom(before)); err != nil {
		t.Fatal(err)
	}
	cluster.Change(config, func() { config.Annotations = map[string]string{"touched": "yes"} })
	expect.True(t, "renewed", func() bool {
		s := tokenIn(t, node.BootstrapToken)
		if s == nil {
			return false
		}
		expires, err := time.Parse(time.RFC3339, string(s.Data["expiration"]))
		return err == nil && time.Until(expires) > TokenTTL/2
	})
}

// poolOf adds a MachinePool to the cluster, and the CapstanConfig that it owns.
func poolOf(cluster *testcluster.Cluster) (*clusterv1.MachinePool, *bootstrapv1.CapstanConfig) {
	pool := &clusterv1.MachinePool{ObjectMeta: cluster.Meta("pool")}
	pool.Spec.ClusterName = "demo"
	pool.Spec.Template.Spec = clusterv1.MachineSpec{ClusterName: "demo", Version: "v1.36.3",
		Bootstrap:         clusterv1.Bootstrap{ConfigRef: clusterv1.ContractVersionedObjectReference{APIGroup: bootstrapv1.GroupVersion.Group, Kind: "CapstanConfig", Name: "pool"}},
		InfrastructureRef: clusterv1.ContractVersionedObjectReference{APIGroup: "infrastructure.capstan.dev", Kind: "CapstanMachinePool", Name: "pool"},
	}
	cluster.Create(pool)
	config := &bootstrapv1.CapstanConfig{ObjectMeta: cluster.Meta("pool")}
	config.OwnerReferences = []metav1.OwnerReference{*metav1.NewControllerRef(pool, clusterv1.GroupVersion.WithKind("MachinePool"))}
	cluster.Create(config)
	return pool, config
}

// TestMachinePool (BC-04): the machines of a pool share the data, and its token is rotated.
// Row BC-02.
func TestMachinePool(t *testing.T) {
	cluster, cp := withControlPlane(t)
	kubeconfigOf(t, cluster)
	answers(t, cluster, cp)
	pool, config := poolOf(cluster)
	_, node := dataOf(t, cluster, config)
	expect.True(t, "the token", func() bool { return tokenIn(t, node.BootstrapToken) != nil })
	cluster.ChangeStatus(pool, func() { pool.Status.NodeRefs = []corev1.ObjectReference{{Name: "node"}} })
	rotates(t, cluster, config, node.BootstrapToken)

	// The specification of machines has changed. The data gets a new name, so that the pool replaces its machines.
	first := config.Status.DataSecretName
	renamed := func(what string, from string) {
		t.Helper()
		cluster.Becomes(t, config, what, func() bool {
			return config.Status.DataSecretName != from && testcluster.Has(config, clusterv1.ReadyCondition, metav1.ConditionTrue, "")
		})
	}
	change(t, config, func() { config.Spec.Files = []bootstrapv1.File{{Path: "/etc/motd", Content: "hello"}} })
	renamed("data for the new spec", first)
	second := config.Status.DataSecretName
	if cluster.Secret(first) == nil {
		t.Error("the former data is removed while the MachinePool still names it")
	}
	ownerComesBack(t, cluster, config)
	// ALL-11: the former data is also recognized without its owner reference. A Secret with a similar name is not.
	former, other := cluster.Secret(first), &corev1.Secret{ObjectMeta: cluster.Meta("pool-12345678"), Type: clusterv1.ClusterSecretType}
	change(t, former, func() { former.OwnerReferences = nil })
	cluster.Create(other)
	change(t, pool, func() { pool.Spec.Template.Spec.Bootstrap.DataSecretName = &second })
	expect.True(t, "the former data is removed after the MachinePool names the new data", func() bool { return cluster.Secret(first) == nil })
	if cluster.Secret(other.Name) == nil {
		t.Error("a Secret without tokens was taken for data of the pool")
	}
	change(t, pool, func() { pool.Spec.Template.Spec.Version = "v1.36.4" })
	renamed("data for the new version", second)
	if s := cluster.Secret(config.Status.DataSecretName); s.Annotations[bootstrapv1.KubernetesVersionAnnotation] != "v1.36.4" {
		t.Errorf("annotations %v", s.Annotations)
	}
	change(t, config, func() { config.Spec.Files = nil })
	renamed("data for the spec and version", config.Status.DataSecretName)
}

// ownerComesBack (ALL-11): data gets a lost owner reference back, and one of another API version is corrected.
func ownerComesBack(t *testing.T, cluster *testcluster.Cluster, config *bootstrapv1.CapstanConfig) {
	t.Helper()
	want := []metav1.OwnerReference{controllerRef(config)}
	for _, version := range []string{"", "bootstrap.capstan.dev/v1beta1", "bootstrap.capstan.dev/v1beta3"} {
		data := cluster.Secret(config.Status.DataSecretName)
		change(t, data, func() {
			if version == "" {
				data.OwnerReferences = nil
				return
			}
			data.OwnerReferences[0].APIVersion, data.OwnerReferences[0].UID = version, "of-before-the-restore"
		})
		expect.True(t, "the owner after "+version, func() bool {
			return equality.Semantic.DeepEqual(cluster.Secret(data.Name).OwnerReferences, want)
		})
	}
}

// rotates: at half of its life, the token of a pool is replaced, and the name of the data stays. The former token expires later, and
// the data still names it for the approver of certificates.
func rotates(t *testing.T, cluster *testcluster.Cluster, config *bootstrapv1.CapstanConfig, former string) {
	t.Helper()
	name := config.Status.DataSecretName
	half := tokenIn(t, former)
	before := half.DeepCopy()
	half.Data["expiration"] = []byte(time.Now().Add(bootstrapv1.PoolTokenTTL / 2).UTC().Format(time.RFC3339))
	if err := env.Client.Patch(context.Background(), half, client.MergeFrom(before)); err != nil {
		t.Fatal(err)
	}
	cluster.Change(config, func() { config.Annotations = map[string]string{"touched": "yes"} })
	var token string
	expect.True(t, "another token", func() bool {
		_, node := dataOf(t, cluster, config)
		token = node.BootstrapToken
		return token != former && tokenIn(t, token) != nil
	})
	expect.Consistently(t, "there is no third token", func() bool {
		_, node := dataOf(t, cluster, config)
		return node.BootstrapToken == token
	})
	ids, old := cluster.Secret(name).Annotations[bootstrapv1.TokenIDsAnnotation], tokenIn(t, former)
	if ids != tokenID(token)+","+tokenID(former) || config.Status.DataSecretName != name {
		t.Errorf("the data %s, formerly %s, names the tokens %s", config.Status.DataSecretName, name, ids)
	}
	if old == nil || remaining(old, time.Now()) > bootstrapv1.PoolTokenTTL/2 {
		t.Errorf("the former token is removed or renewed: %v", old)
	}
}

// change patches an object.
func change(t *testing.T, o client.Object, apply func()) {
	t.Helper()
	if err := env.Client.Get(context.Background(), client.ObjectKeyFromObject(o), o); err != nil {
		t.Fatal(err)
	}
	before := o.DeepCopyObject().(client.Object)
	apply()
	if err := env.Client.Patch(context.Background(), o, client.MergeFrom(before)); err != nil {
		t.Fatal(err)
	}
}

// TestForeignControlPlane: workers of a cluster with another kind of control plane wait until it is initialized. The data configures
// no network, because the other provider does.
func TestForeignControlPlane(t *testing.T) {
	cluster := testcluster.New(t, env, func(c *clusterv1.Cluster) {
		c.Spec.ControlPlaneRef = clusterv1.ContractVersionedObjectReference{APIGroup: "controlplane.cluster.x-k8s.io", Kind: "KubeadmControlPlane", Name: "demo"}
	})
	kubeconfigOf(t, cluster)
	cluster.SetEndpoint(env.Endpoint())
	authorities(t, cluster)
	_, config := cluster.Machine("worker", nil, nil)
	cluster.Becomes(t, config, "waits", func() bool {
		return testcluster.Has(config, bootstrapv1.DataSecretAvailableCondition, metav1.ConditionFalse, "not initialized")
	})
	cluster.ChangeStatus(cluster.Cluster, func() {
		cluster.Status.Initialization.ControlPlaneInitialized = ptr.To(true)
		cluster.Status.Initialization.InfrastructureProvisioned = ptr.To(true)
	})
	_, node := dataOf(t, cluster, config)
	expect.True(t, "the token", func() bool { return tokenIn(t, node.BootstrapToken) != nil })
	if groups := string(tokenIn(t, node.BootstrapToken).Data["auth-extra-groups"]); groups != kubeadmGroup {
		t.Errorf("groups of the token: %q", groups)
	}
	if node.Network.PodNetwork != "None" || node.Network.KubeProxy != "None" || node.Network.DNS != "None" {
		t.Errorf("network: %+v", node.Network)
	}
}

// TestNoOwner (BC-04): the provider does nothing without a Machine or without its Cluster.
func TestNoOwner(t *testing.T) {
	cluster, _ := withControlPlane(t)
	cluster.SetEndpoint(endpoint)
	alone := &bootstrapv1.CapstanConfig{ObjectMeta: cluster.Meta("alone")}
	cluster.Create(alone)
	_, stray := cluster.Machine("stray", func(m *clusterv1.Machine) { m.Spec.ClusterName = "nobody" }, nil)
	_, config := cluster.Machine("worker", nil, nil)
	dataOf(t, cluster, config) // The provider has seen all three.
	for _, c := range []*bootstrapv1.CapstanConfig{alone, stray} {
		if err := cluster.Get(c); err != nil || len(c.Status.Conditions) > 0 || cluster.Secret(c.Name) != nil {
			t.Errorf("the provider changed %s: %v, %v", c.Name, err, c.Status.Conditions)
		}
	}
}

// TestExistingSecret (BC-02, BC-04, ALL-17): existing data is kept, and gets its owner reference and its label back. Deleted data is created again. A
// Secret of another owner is not changed, and a condition reports it.
func TestExistingSecret(t *testing.T) {
	cluster, _ := withControlPlane(t)
	cluster.SetEndpoint(endpoint)
	restored := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: cluster.Namespace, Name: "worker"}, Type: clusterv1.ClusterSecretType, Data: map[string][]byte{"value": []byte("#cloud-config\n{}\n")}}
	cluster.Create(restored)
	machine, config := cluster.Machine("worker", nil, nil)
	cluster.Becomes(t, config, "Ready", func() bool { return testcluster.Has(config, clusterv1.ReadyCondition, metav1.ConditionTrue, "") })
	if s := cluster.Secret("worker"); string(s.Data["value"]) != "#cloud-config\n{}\n" || !metav1.IsControlledBy(s, config) || s.Labels[clusterv1.ClusterNameLabel] != cluster.Name {
		t.Errorf("the existing data was replaced, or lacks its owner or label: %v, %v", s.OwnerReferences, s.Labels)
	}
	cluster.Change(config, func() { config.Spec.PreCommands = []string{"changed"} })
	reconciled(t, cluster, config)
	if s := cluster.Secret("worker"); string(s.Data["value"]) != "#cloud-config\n{}\n" {
		t.Errorf("the data was replaced: %s", s.Data["value"])
	}
	if err := env.Client.Delete(context.Background(), restored); err != nil {
		t.Fatal(err)
	}
	expect.True(t, "created again", func() bool {
		s := cluster.Secret("worker")
		return s != nil && strings.Contains(string(s.Data["value"]), "changed")
	})
	expect.True(t, "a condition reports it", func() bool {
		list := &eventsv1.EventList{}
		return env.Client.List(context.Background(), list, client.InNamespace(config.Namespace)) == nil &&
			slices.ContainsFunc(list.Items, func(e eventsv1.Event) bool { return e.Reason == "DataSecretRecreated" && e.Regarding.Name == "worker" })
	})

	// ALL-17: the data of a started machine is not created again, because its spec can have changed.
	cluster.ChangeStatus(machine, func() { machine.Status.Initialization.InfrastructureProvisioned = ptr.To(true) })
	cluster.Change(config, func() { config.Spec.PreCommands = []string{"changed again"} })
	if err := env.Client.Delete(context.Background(), cluster.Secret("worker")); err != nil {
		t.Fatal(err)
	}
	cluster.Becomes(t, config, "used", func() bool {
		return conditions.GetReason(config, bootstrapv1.DataSecretAvailableCondition) == bootstrapv1.DataSecretUsedReason &&
			testcluster.Has(config, clusterv1.ReadyCondition, metav1.ConditionTrue, "not created again") && config.Status.DataSecretName == "worker"
	})
	cluster.Change(config, func() { config.Spec.PreCommands = []string{"changed a third time"} })
	reconciled(t, cluster, config)
	if cluster.Secret("worker") != nil {
		t.Error("the data was created again")
	}

	theirs := &corev1.Secret{ObjectMeta: cluster.Meta("busy"), Data: map[string][]byte{"value": []byte("theirs")}}
	cluster.Create(theirs)
	_, busy := cluster.Machine("busy", nil, nil)
	cluster.Becomes(t, busy, "said", func() bool {
		return testcluster.Has(busy, bootstrapv1.DataSecretAvailableCondition, metav1.ConditionFalse, "has the name that the bootstrap data needs")
	})
	if s := cluster.Secret("busy"); s.ResourceVersion != theirs.ResourceVersion {
		t.Error("the Secret of another owner was changed")
	}
}

// TestReferences: a condition names the missing Secret or key of a reference, and the data is created when it exists.
func TestReferences(t *testing.T) {
	cluster, _ := withControlPlane(t)
	cluster.SetEndpoint(endpoint)
	_, config := cluster.Machine("worker", nil, func(c *bootstrapv1.CapstanConfig) {
		c.Spec.Files = []bootstrapv1.File{{Path: "/etc/x", ContentFrom: bootstrapv1.ContentSource{Secret: bootstrapv1.SecretKeyReference{Name: "mine", Key: "x"}}}}
	})
	cluster.Becomes(t, config, "the secret is missed", func() bool {
		return testcluster.Has(config, bootstrapv1.DataSecretAvailableCondition, metav1.ConditionFalse, "the Secret mine does not exist")
	})
	mine := &corev1.Secret{ObjectMeta: cluster.Meta("mine"), Data: map[string][]byte{"y": []byte("hunter2")}}
	cluster.Create(mine)
	cluster.Becomes(t, config, "the key is missed", func() bool {
		return testcluster.Has(config, bootstrapv1.DataSecretAvailableCondition, metav1.ConditionFalse, `has no key "x"`)
	})
	cluster.Change(mine, func() { mine.Data["x"] = []byte("content") })
	files, _ := dataOf(t, cluster, config)
	if string(files["/etc/x"].Content) != "content" || files["/etc/x"].Mode != 0o600 {
		t.Errorf("got %v", files["/etc/x"])
	}
}

// TestConfigMapReferences: the same for ConfigMaps. All users of the machine can read such a file.
func TestConfigMapReferences(t *testing.T) {
	cluster, _ := withControlPlane(t)
	cluster.SetEndpoint(endpoint)
	from := func(key string) bootstrapv1.ContentSource {
		return bootstrapv1.ContentSource{ConfigMap: bootstrapv1.ConfigMapKeyReference{Name: "mine", Key: key}}
	}
	_, config := cluster.Machine("worker", nil, func(c *bootstrapv1.CapstanConfig) {
		c.Spec.Files = []bootstrapv1.File{{Path: "/etc/x", ContentFrom: from("x")}, {Path: "/etc/y", ContentFrom: from("y")}}
	})
	cluster.Becomes(t, config, "the ConfigMap is missed", func() bool {
		return testcluster.Has(config, bootstrapv1.DataSecretAvailableCondition, metav1.ConditionFalse, "the ConfigMap mine does not exist")
	})
	mine := &corev1.ConfigMap{ObjectMeta: cluster.Meta("mine"), Data: map[string]string{"x": "text"}}
	cluster.Create(mine)
	cluster.Becomes(t, config, "the key is missed", func() bool {
		return testcluster.Has(config, bootstrapv1.DataSecretAvailableCondition, metav1.ConditionFalse, `the ConfigMap mine has no key "y"`)
	})
	cluster.Change(mine, func() { mine.BinaryData = map[string][]byte{"y": {0xff}} })
	files, _ := dataOf(t, cluster, config)
	if string(files["/etc/x"].Content) != "text" || files["/etc/x"].Mode != 0o644 || string(files["/etc/y"].Content) != "\xff" {
		t.Errorf("got %v and %v", files["/etc/x"], files["/etc/y"])
	}
}

// TestInvalid: a condition reports a spec that cannot be rendered.
func TestInvalid(t *testing.T) {
	for name, c := range map[string]struct {
		cluster func(*clusterv1.Cluster)
		machine func(*clusterv1.Machine)
		config  func(*bootstrapv1.CapstanConfig)
		want    string
	}{
		"a malformed version": {machine: func(m *clusterv1.Machine) { m.Spec.Version = "latest" }, want: "is not a Kubernetes version"},
		"a role that contradicts the Machine": {machine: func(m *clusterv1.Machine) { m.Labels[clusterv1.MachineControlPlaneLabel] = "" },
			config: func(c *bootstrapv1.CapstanConfig) { c.Spec.Role = bootstrapv1.RoleWorker }, want: "has the label"},
		"a control plane machine without a role": {machine: func(m *clusterv1.Machine) { m.Labels[clusterv1.MachineControlPlaneLabel] = "" }, want: "spec.role is empty"},
		"cluster settings on a worker":           {config: func(c *bootstrapv1.CapstanConfig) { c.Spec.Cluster.DNS = bootstrapv1.DNSNone }, want: "is for control plane machines"},
		"overlapping networks": {cluster: func(c *clusterv1.Cluster) {
			c.Spec.ClusterNetwork.Pods.CIDRBlocks, c.Spec.ClusterNetwork.Services.CIDRBlocks = []string{"10.0.0.0/8"}, []string{"10.1.0.0/16"}
		}, want: "overlap"},
		"an endpoint in the pod network": {cluster: func(c *clusterv1.Cluster) { c.Spec.ClusterNetwork.Pods.CIDRBlocks = []string{"10.200.0.0/16"} }, want: "lies in the cluster's own network"},
		"a Secret with another encoding": {config: func(c *bootstrapv1.CapstanConfig) {
			f := bootstrapv1.File{Path: "/etc/x", Encoding: bootstrapv1.EncodingGzip}
			f.ContentFrom.Secret = bootstrapv1.SecretKeyReference{Name: "demo-ca", Key: "tls.crt"}
			c.Spec.Files = []bootstrapv1.File{f}
		}, want: "spec.files[0]: content: is not gzip"},
	} {
		t.Run(name, func(t *testing.T) {
			cluster := testcluster.New(t, env, c.cluster)
			cluster.ControlPlane(nil)
			authorities(t, cluster)
			cluster.SetEndpoint(endpoint)
			_, config := cluster.Machine("machine", c.machine, c.config)
			cluster.Becomes(t, config, "said", func() bool {
				return testcluster.Has(config, clusterv1.ReadyCondition, metav1.ConditionFalse, c.want) &&
					conditions.GetReason(config, bootstrapv1.DataSecretAvailableCondition) == bootstrapv1.InvalidConfigReason
			})
			if cluster.Secret("machine") != nil {
				t.Error("data was created from an invalid spec")
			}
		})
	}
}

// TestBrokenAuthority: a condition names a broken authority and does not quote its content.
func TestBrokenAuthority(t *testing.T) {
	cluster := testcluster.New(t, env, nil)
	cluster.ControlPlane(nil)
	cluster.SetEndpoint(endpoint)
	ca := &corev1.Secret{ObjectMeta: cluster.Meta(secret.Name("demo", secret.ClusterCA)), Type: clusterv1.ClusterSecretType, Data: map[string][]byte{"other": []byte("hunter2")}}
	cluster.Create(ca)
	_, config := cluster.Machine("worker", nil, nil)
	cluster.Becomes(t, config, "said", func() bool {
		return testcluster.Has(config, bootstrapv1.DataSecretAvailableCondition, metav1.ConditionFalse, "certificate")
	})
	if strings.Contains(fmt.Sprint(config.Status), "hunter2") {
		t.Error("the condition quotes the content")
	}
}

// TestPaused (ALL-08).
func TestPaused(t *testing.T) {
	cluster, _ := withControlPlane(t)
	cluster.SetEndpoint(endpoint)
	cluster.Change(cluster.Cluster, func() { cluster.Spec.Paused = ptr.To(true) })
	_, config := cluster.Machine("worker", nil, nil)
	cluster.Becomes(t, config, "Paused", func() bool {
		return testcluster.Has(config, clusterv1.PausedCondition, metav1.ConditionTrue, "spec.paused")
	})
	if cluster.Secret("worker") != nil {
		t.Error("data was created while the cluster was paused")
	}
	cluster.Change(cluster.Cluster, func() { cluster.Spec.Paused = ptr.To(false) })
	dataOf(t, cluster, config)
}

// TestSteadyState: the reconciler writes nothing if the objects match the spec. Each write starts a reconcile, so it would never stop to write.
func TestSteadyState(t *testing.T) {
	cluster, _ := withControlPlane(t)
	cluster.SetEndpoint(endpoint)
	_, config := cluster.Machine("worker", nil, nil)
	dataOf(t, cluster, config)
	cluster.Becomes(t, config, "the token waits", func() bool { return conditions.Has(config, bootstrapv1.BootstrapTokenAvailableCondition) })
	data := cluster.Secret("worker").ResourceVersion
	cluster.Change(config, func() { config.Spec.PreCommands = []string{"changed"} })
	reconciled(t, cluster, config)
	settled := config.ResourceVersion
	expect.Consistently(t, "no writes", func() bool {
		return cluster.Get(config) == nil && config.ResourceVersion == settled && cluster.Secret("worker").ResourceVersion == data
	})
}

// TestMayBegin: exactly one machine gets the data that initializes a cluster.
func TestMayBegin(t *testing.T) {
	const first, other = `{"name":"a"}`, `{"name":"b"}`
	initialized := map[string]string{controlplanev1.InitializedAnnotation: "true"}
	for name, c := range map[string]struct {
		role   bootstrapv1.Role
		first  string
		more   map[string]string
		joined bool
		says   string
	}{
		"the first":                 {bootstrapv1.RoleInit, first, nil, false, ""},
		"another one":               {bootstrapv1.RoleInit, other, nil, false, "the Machine b starts"},
		"too late":                  {bootstrapv1.RoleInit, first, initialized, false, "has already started"},
		"its data was deleted":      {bootstrapv1.RoleInit, first, initialized, true, ""},
		"of an older Capstan":       {bootstrapv1.RoleInit, "", initialized, false, ""},
		"of a restored cluster":     {bootstrapv1.RoleInit, `{"name":"a","restore":"r"}`, initialized, false, ""},
		"the restore is done":       {bootstrapv1.RoleInit, `{"name":"a","restore":"r"}`, map[string]string{controlplanev1.RestoredAnnotation: "r"}, false, "has already started"},
		"a machine that only joins": {bootstrapv1.RoleControlPlane, other, initialized, false, ""},
		"garbage in the annotation": {bootstrapv1.RoleInit, "garbage", nil, false, ""},
	} {
		t.Run(name, func(t *testing.T) {
			s := &scope{config: &bootstrapv1.CapstanConfig{ObjectMeta: metav1.ObjectMeta{Name: "a"}}, owner: &owner{joined: c.joined}, controlPlane: &controlplanev1.CapstanControlPlane{}}
			s.config.Spec.Role = c.role
			s.controlPlane.Annotations = map[string]string{controlplanev1.FirstMachineAnnotation: c.first}
			for k, v := range c.more {
				s.controlPlane.Annotations[k] = v
			}
			err := mayBegin(s)
			if (err == nil) != (c.says == "") || err != nil && !strings.Contains(err.Error(), c.says) {
				t.Errorf("got %v, want %q", err, c.says)
			}
		})
	}
}
