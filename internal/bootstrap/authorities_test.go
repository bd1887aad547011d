package bootstrap

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/cluster-api/util/secret"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/bootstrap/render"
	"capstan.dev/capstan/internal/node/nodeconfig"
	"capstan.dev/capstan/internal/reconciling"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/internal/testenv/testcluster"
)

// TestRotatedAuthority_CP15: an annotation lists the certificate authorities in the data. The data of a Machine never changes. The
// data of a pool gets the new authorities and keeps its name and token, because a pool creates machines at any time.
func TestRotatedAuthority_CP15(t *testing.T) {
	cluster, cp := withControlPlane(t)
	kubeconfigOf(t, cluster)
	answers(t, cluster, cp)
	_, ofPool := poolOf(cluster)
	_, ofMachine := cluster.Machine("worker", nil, nil)
	_, before := dataOf(t, cluster, ofPool)
	dataOf(t, cluster, ofMachine)

	ca := &corev1.Secret{}
	if err := env.Client.Get(context.Background(), client.ObjectKey{Namespace: cluster.Namespace, Name: secret.Name("demo", secret.ClusterCA)}, ca); err != nil {
		t.Fatal(err)
	}
	old, err := nodeconfig.Fingerprints(ca.Data[secret.TLSCrtDataName])
	if err != nil {
		t.Fatal(err)
	}
	named := func(config *bootstrapv1.CapstanConfig) string {
		return cluster.Secret(config.Status.DataSecretName).Annotations[bootstrapv1.AuthoritiesAnnotation]
	}
	for _, config := range []*bootstrapv1.CapstanConfig{ofPool, ofMachine} {
		if got := named(config); got != old[0] {
			t.Errorf("%s: %q, want %q", config.Name, got, old[0])
		}
	}

	next := Certificates(bootstrapv1.ClusterConfiguration{})
	if err := next.Generate(); err != nil {
		t.Fatal(err)
	}
	both := bytes.Join([][]byte{ca.Data[secret.TLSCrtDataName], next.GetByPurpose(secret.ClusterCA).KeyPair.Cert}, nil)
	change(t, ca, func() {
		ca.Data[secret.TLSCrtDataName] = both
		ca.Data[CrossCADataName] = []byte("signed by the one before")
	})
	names, err := nodeconfig.Fingerprints(both)
	if err != nil {
		t.Fatal(err)
	}
	want := strings.Join(names, ",")
	expect.True(t, "the data of the pool is updated", func() bool { return named(ofPool) == want })
	files, after := dataOf(t, cluster, ofPool)
	if !bytes.Equal(files[nodeconfig.PKIDir+"/ca.crt"].Content, both) || after.BootstrapToken != before.BootstrapToken {
		t.Error("the data has other authorities or another token")
	}
	if _, cross := files[nodeconfig.CrossCAPath]; cross {
		t.Error("a worker has the cross-signed certificate of an authority")
	}
	if got := named(ofMachine); got != old[0] {
		t.Errorf("the data of a Machine changed to %q", got)
	}
	_, ofControlPlane := cluster.Machine("cp", func(m *clusterv1.Machine) { m.Labels[clusterv1.MachineControlPlaneLabel] = "" }, func(c *bootstrapv1.CapstanConfig) {
		c.Spec.Role = bootstrapv1.RoleControlPlane
	})
	files, _ = dataOf(t, cluster, ofControlPlane)
	if string(files[nodeconfig.CrossCAPath].Content) != "signed by the one before" || named(ofControlPlane) != want {
		t.Errorf("a control plane machine: %q, %s", files[nodeconfig.CrossCAPath].Content, named(ofControlPlane))
	}
}

// poolScope returns the scope of the CapstanConfig of a machine pool, the certificate authority of its cluster, and a client.
func poolScope(t *testing.T) (*scope, *corev1.Secret, client.WithWatch) {
	t.Helper()
	cluster := &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "demo"}}
	cluster.Spec.ControlPlaneEndpoint = endpoint
	certificates := Certificates(bootstrapv1.ClusterConfiguration{})
	if err := certificates.Generate(); err != nil {
		t.Fatal(err)
	}
	ca := certificates.GetByPurpose(secret.ClusterCA).AsSecret(client.ObjectKeyFromObject(cluster), metav1.OwnerReference{Name: "demo", UID: "1"})
	config := &bootstrapv1.CapstanConfig{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "pool", UID: "2"}}
	s := &scope{config: config, owner: &owner{clusterName: "demo", version: "v1.36.3", pool: &clusterv1.MachinePool{}}, cluster: cluster, controlPlane: &controlplanev1.CapstanControlPlane{}}
	return s, ca, fake.NewClientBuilder().WithObjects(ca).Build()
}

// addAuthority begins a rotation: the cluster trusts a second authority.
func addAuthority(t *testing.T, c client.Client, ca *corev1.Secret) {
	t.Helper()
	next := Certificates(bootstrapv1.ClusterConfiguration{})
	if err := next.Generate(); err != nil {
		t.Fatal(err)
	}
	ca.Data[secret.TLSCrtDataName] = bytes.Join([][]byte{ca.Data[secret.TLSCrtDataName], next.GetByPurpose(secret.ClusterCA).KeyPair.Cert}, nil)
	if err := c.Update(t.Context(), ca); err != nil {
		t.Fatal(err)
	}
}

// TestAuthoritiesKeepTheToken_CP15: a cache can be from before the rotation of a pool's token. New authorities then wait for the event of the
// Secret, and do not bring the former token back.
func TestAuthoritiesKeepTheToken_CP15(t *testing.T) {
	s, ca, stored := poolScope(t)
	config := s.config
	r := &Reconciler{Options: reconciling.Options{SecretCachingClient: stored}, Client: stored}
	config.Status.DataSecretName = dataSecretName(s)
	read := func() (*corev1.Secret, string) {
		t.Helper()
		data := &corev1.Secret{}
		if err := stored.Get(t.Context(), client.ObjectKey{Namespace: "ns", Name: config.Status.DataSecretName}, data); err != nil {
			t.Fatal(err)
		}
		token, err := render.Token(data.Data[secret.KubeconfigDataName])
		if err != nil {
			t.Fatal(err)
		}
		return data, token
	}
	if _, err := r.dataSecret(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	cached, first := read()
	if err := r.rotate(t.Context(), s, first); err != nil {
		t.Fatal(err)
	}
	current, second := read()
	addAuthority(t, stored, ca)
	for _, existing := range []*corev1.Secret{cached, current} {
		version := existing.ResourceVersion
		if _, err := r.refreshAuthorities(t.Context(), s, existing); err != nil {
			t.Errorf("version %s: %v", version, err)
		}
		if _, token := read(); token != second || token == first {
			t.Errorf("version %s: the data has the token %s, want %s", version, token, second)
		}
	}
	if after, _ := read(); strings.Count(after.Annotations[bootstrapv1.AuthoritiesAnnotation], ",") != 1 {
		t.Errorf("the data names the authorities %q, want two", after.Annotations[bootstrapv1.AuthoritiesAnnotation])
	}
}

// TestPoolDataNeedsNoReference: the data of a pool stays available, and gets new certificate authorities, while a Secret that its config
// references cannot be read or is missing. Only new data needs the content of the Secret. Meanwhile, the former data gets the authorities, and
// its token is renewed.
func TestPoolDataNeedsNoReference(t *testing.T) {
	s, ca, stored := poolScope(t)
	s.config.Spec.Files = []bootstrapv1.File{{Path: "/etc/x", ContentFrom: bootstrapv1.ContentSource{Secret: bootstrapv1.SecretKeyReference{Name: "mine", Key: "x"}}}}
	mine := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "mine"}, Data: map[string][]byte{"x": []byte("content")}}
	if err := stored.Create(t.Context(), mine); err != nil {
		t.Fatal(err)
	}
	broken, authorities := false, ""
	r := &Reconciler{Options: reconciling.Options{SecretCachingClient: reconciling.Live(stored)}, Client: interceptor.NewClient(stored, interceptor.Funcs{
		Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, obj client.Object, opts ...client.GetOption) error {
			if broken && key.Name == "mine" {
				return errors.New("the API server does not answer")
			}
			return c.Get(ctx, key, obj, opts...)
		},
	})}
	remove := func() {
		broken = false
		if err := stored.Delete(t.Context(), mine); err != nil {
			t.Fatal(err)
		}
	}
	change := func(commands ...string) { s.config.Spec.PreCommands = commands }
	for _, step := range []struct {
		name   string
		before func()
		other  bool // other authorities than before
		waits  bool
		fails  bool
	}{
		{"the Secret can be read", func() {}, true, false, false},
		{"the Secret cannot be read", func() { broken = true }, false, false, false},
		{"new authorities", func() { addAuthority(t, stored, ca) }, true, false, false},
		{"another spec, the Secret cannot be read, and new authorities", func() { change("true"); addAuthority(t, stored, ca) }, true, true, true},
		{"the former spec, no Secret, and new authorities", func() { change(); remove(); addAuthority(t, stored, ca) }, true, false, false},
		{"another spec, and new authorities", func() { change("true"); addAuthority(t, stored, ca) }, true, true, false},
	} {
		step.before()
		s.data = nil
		conditions.Delete(s.config, bootstrapv1.BootstrapTokenAvailableCondition)
		_, err := r.reconcileNormal(t.Context(), s)
		if fails := err != nil; fails != step.fails || !conditions.Has(s.config, bootstrapv1.BootstrapTokenAvailableCondition) {
			t.Errorf("%s: %v, the conditions are %v", step.name, err, s.config.Status.Conditions)
		}
		data := &corev1.Secret{}
		if err := stored.Get(t.Context(), client.ObjectKey{Namespace: "ns", Name: s.config.Status.DataSecretName}, data); err != nil {
			t.Fatalf("%s: %v", step.name, err)
		}
		before := authorities
		authorities = data.Annotations[bootstrapv1.AuthoritiesAnnotation]
		if waits := conditions.IsFalse(s.config, bootstrapv1.DataSecretAvailableCondition); waits != step.waits || (authorities != before) != step.other || !bytes.Equal(s.data, data.Data["value"]) {
			t.Errorf("%s: the data waits: %v, the authorities are %s", step.name, waits, authorities)
		}
		files, _ := filesOf(t, data)
		if in, err := nodeconfig.Fingerprints(files[caPath].Content); err != nil || strings.Join(in, ",") != authorities {
			t.Errorf("%s: the data has the authorities %v, its annotation %s, %v", step.name, in, authorities, err)
		}
	}
}

// TestFormerAuthoritiesAreReported_CP15: the data of a pool stays available while its certificate authorities cannot be replaced. A condition
// reports the cause, also while the pool waits for other data. No event may report the Secret of a user, so it is tried again.
func TestFormerAuthoritiesAreReported_CP15(t *testing.T) {
	s, ca, stored := poolScope(t)
	r := &Reconciler{Options: reconciling.Options{SecretCachingClient: stored}, Client: stored}
	for _, step := range []struct {
		name   string
		before func() error
		status metav1.ConditionStatus
		want   string // empty: no message
	}{
		{"new", func() error { return nil }, metav1.ConditionTrue, ""},
		{"no authority", func() error { return stored.Delete(t.Context(), ca) }, metav1.ConditionTrue, "cannot be replaced: the Secret demo-ca does not exist"},
		{"another, invalid spec", func() error { s.config.Spec.Role = bootstrapv1.RoleInit; return nil }, metav1.ConditionFalse, "cannot be replaced: the Secret demo-ca does not exist"},
	} {
		if err := step.before(); err != nil {
			t.Fatal(err)
		}
		result, err := r.reconcileData(t.Context(), s)
		c := conditions.Get(s.config, bootstrapv1.DataSecretAvailableCondition)
		if err != nil || len(s.data) == 0 || c.Status != step.status || (c.Message == "") != (step.want == "") || !strings.Contains(c.Message, step.want) {
			t.Errorf("%s: %v, %d bytes, %v", step.name, err, len(s.data), c)
		}
		if again := result.RequeueAfter == missingSecretRetry; again != (step.want != "") {
			t.Errorf("%s: %v", step.name, result)
		}
	}
}

// TestExternalEtcdAnnotation: an annotation lists the certificates of an external etcd in the data of a control plane machine.
func TestExternalEtcdAnnotation(t *testing.T) {
	cluster := testcluster.New(t, env, nil)
	authorities(t, cluster)
	authority := cluster.Secret("demo-etcd")
	leaf := &corev1.Secret{ObjectMeta: cluster.Meta("demo-apiserver-etcd-client"), Data: cluster.Secret("demo-proxy").Data} // any certificate
	cluster.Create(leaf)
	cluster.SetEndpoint(endpoint)
	machine := func(name string, external bool) string {
		_, config := cluster.Machine(name, func(m *clusterv1.Machine) { m.Labels[clusterv1.MachineControlPlaneLabel] = "" }, func(c *bootstrapv1.CapstanConfig) {
			c.Spec.Role = bootstrapv1.RoleInit
			if external {
				c.Spec.Cluster.Etcd.External.Endpoints = []string{"https://etcd.example.org:2379"}
			}
		})
		dataOf(t, cluster, config)
		return cluster.Secret(config.Status.DataSecretName).Annotations[bootstrapv1.EtcdCertificatesAnnotation]
	}
	want := EtcdFingerprints(authority.Data[secret.TLSCrtDataName], leaf.Data[secret.TLSCrtDataName])
	if got := machine("a", true); got != want || strings.Count(want, ",") != 1 {
		t.Errorf("%q, want %q", got, want)
	}
	if got := machine("b", false); got != "" {
		t.Errorf("with an etcd of its own: %q", got)
	}
}
