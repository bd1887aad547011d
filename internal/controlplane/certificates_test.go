package controlplane

import (
	"cmp"
	"context"
	"crypto/ecdsa"
	"crypto/rsa"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/collections"
	"sigs.k8s.io/cluster-api/util/secret"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/bootstrap"
	"capstan.dev/capstan/internal/controlplane/model"
	"capstan.dev/capstan/internal/inplace"
	"capstan.dev/capstan/internal/pki"
	"capstan.dev/capstan/internal/testenv/testcluster"
)

// TestUncertified (CP-14, CP-15): a Secret with keys is missing. Machines can still be removed, changes still reach the other
// Machines, and the kubeconfig is still renewed. No Machine is created until the Secret exists again.
func TestUncertified(t *testing.T) {
	w, cp, _ := connected(t, nil)
	scaleTo(w, cp, 3)
	w.until("three", w.settled(cp, 3))
	lost := w.cluster.Secret("demo-etcd")
	if err := env.Client.Delete(context.Background(), lost); err != nil {
		t.Fatal(err)
	}
	w.until("a condition reports it", func() bool {
		return w.cluster.Get(cp) == nil && testcluster.Has(cp, controlplanev1.CertificatesAvailableCondition, metav1.ConditionFalse, "demo-etcd was deleted")
	})
	gone := namesOfMachines(t, w)[0]
	deleteMachine(t, w, gone)
	w.until("the Machine and its member are removed", func() bool { return w.member(gone) == nil && len(machinesOf(t, w.cluster)) == 2 })
	w.cluster.Change(cp, func() { cp.Spec.MachineTemplate.ObjectMeta.Labels = map[string]string{"new": "label"} })
	w.until("the label reaches the Machines", func() bool {
		for _, m := range machinesOf(t, w.cluster) {
			if m.Labels["new"] != "label" {
				return false
			}
		}
		return true
	})
	if err := env.Client.Delete(context.Background(), w.cluster.Secret("demo-kubeconfig")); err != nil {
		t.Fatal(err)
	}
	w.until("the kubeconfig is created again", func() bool { return w.cluster.Secret("demo-kubeconfig") != nil })
	w.still("no Machine is created", func() bool { return len(w.made) == 3 })
	if w.cluster.Get(cp) != nil || !testcluster.Has(cp, clusterv1.ScalingUpCondition, metav1.ConditionTrue, noCertificates) {
		t.Errorf("no condition contains the cause: %v", cp.Status.Conditions)
	}
	lost.ResourceVersion, lost.UID = "", ""
	w.cluster.Create(lost)
	w.until("three again", w.settled(cp, 3))
}

// TestEncryptionKey (CP-15): encryption that begins in an existing cluster gets a key. A lost key is not replaced if data may be
// encrypted with it.
func TestEncryptionKey(t *testing.T) {
	const none, box = bootstrapv1.EncryptionNone, bootstrapv1.EncryptionSecretBox
	for name, c := range map[string]struct {
		machines []bootstrapv1.EncryptionMode
		lost     bool // the CapstanConfig of the last Machine
		replaces bool // no updates in place
		made     bool
		problem  string
	}{
		"encryption begins":         {machines: []bootstrapv1.EncryptionMode{none}, made: true},
		"it begins in a rollout":    {machines: []bootstrapv1.EncryptionMode{none}, replaces: true, problem: "two steps"},
		"it begins with three":      {machines: []bootstrapv1.EncryptionMode{none, none, none}, problem: "two steps"},
		"a machine encrypts":        {machines: []bootstrapv1.EncryptionMode{none, box}},
		"by default":                {machines: []bootstrapv1.EncryptionMode{""}},
		"a machine is not known":    {machines: []bootstrapv1.EncryptionMode{none, none}, lost: true},
		"the Machines were deleted": {},
	} {
		t.Run(name, func(t *testing.T) {
			r, machines := newRotating(t), collections.Machines{}
			for n, mode := range c.machines {
				m := &clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: fmt.Sprint("m-", n)}}
				m.Spec.Bootstrap.ConfigRef.Name = m.Name
				machines.Insert(m)
				config := &bootstrapv1.CapstanConfig{ObjectMeta: m.ObjectMeta}
				config.Spec.Cluster.Encryption.Mode = mode
				if c.lost && n == len(c.machines)-1 {
					continue
				}
				if err := r.management.Create(t.Context(), config); err != nil {
					t.Fatal(err)
				}
			}
			cp := &controlplanev1.CapstanControlPlane{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "fresh", UID: "fresh"}}
			cp.Status.Initialization.ControlPlaneInitialized = ptr.To(true)
			cp.Spec.Replicas = ptr.To(int32(len(c.machines)))
			if !c.replaces {
				cp.Spec.Rollout.Strategy.InPlace = controlplanev1.InPlaceOnly
			}
			s := &scope{ControlPlane: &model.ControlPlane{
				Object: cp, Cluster: &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "fresh"}}, Machines: machines, Now: time.Now(),
			}}
			steps := &authorities{r.clients, &secrets{r.clients}}
			problem, err := steps.ensureEncryptionKey(t.Context(), s)
			want := cmp.Or(c.problem, "fresh-encryption was deleted")
			if err != nil || (problem == "") != c.made || !c.made && !strings.Contains(problem, want) {
				t.Fatalf("%q, %v", problem, err)
			}
			key, err := steps.getSecret(t.Context(), client.ObjectKey{Namespace: "ns", Name: "fresh-encryption"})
			if err != nil || (key != nil) != c.made {
				t.Errorf("the key: %v, %v", key, err)
			}
		})
	}
}

// TestExternalEtcdCertificates: a Machine is outdated when a certificate of an external etcd has changed since its bootstrap data.
func TestExternalEtcdCertificates(t *testing.T) {
	r, machine, ca := newRotating(t), &clusterv1.Machine{}, newCA(t)
	r.get(r.management, "ns", "a", machine)
	cp := &controlplanev1.CapstanControlPlane{}
	r.get(r.management, "ns", "cp", cp)
	cp.Spec.Config.Cluster.Etcd.External.Endpoints = []string{"https://etcd:2379"}
	write := func(name string, cert []byte) {
		t.Helper()
		given := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name}}
		if _, err := controllerutil.CreateOrPatch(t.Context(), r.management, given, func() error {
			given.Data = map[string][]byte{secret.TLSCrtDataName: cert}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
	}
	leaf, _ := leafOf(t, ca)
	write("demo-etcd", ca.Cert)
	write("demo-apiserver-etcd-client", leaf)
	reader := &machineReader{clients: r.clients, secrets: &secrets{r.clients}}
	look := func() (found string, outdated []string) {
		t.Helper()
		s := &scope{ControlPlane: &model.ControlPlane{
			Object: cp, Cluster: &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "demo"}},
			Machines: collections.FromMachines(machine), Outdated: map[string][]string{}, Changes: map[string][]inplace.Change{}, Now: time.Now(),
		}, certificates: bootstrap.Certificates(cp.Spec.Config.Cluster)}
		if err := errors.Join(reader.readCertificates(t.Context(), s), reader.findOtherCertificates(t.Context(), s)); err != nil {
			t.Fatal(err)
		}
		return s.etcdCertificates(), s.Outdated["a"]
	}
	made, outdated := look()
	if made == "" || len(outdated) > 0 {
		t.Errorf("data without a record: %q, %v", made, outdated)
	}
	data := &corev1.Secret{}
	r.change(r.management, "ns", "a", data, func() { data.Annotations = map[string]string{bootstrapv1.EtcdCertificatesAnnotation: made} })
	if _, outdated := look(); len(outdated) > 0 {
		t.Errorf("nothing has changed: %v", outdated)
	}
	renewed, _ := leafOf(t, ca)
	write("demo-apiserver-etcd-client", renewed)
	if _, outdated := look(); len(outdated) != 1 || !strings.Contains(outdated[0], "external etcd") {
		t.Errorf("a renewed client certificate: %v", outdated)
	}
	write("demo-apiserver-etcd-client", leaf)
	write("demo-etcd", append(append([]byte{}, ca.Cert...), newCA(t).Cert...))
	if _, outdated := look(); len(outdated) != 1 {
		t.Errorf("another authority of etcd: %v", outdated)
	}
	lose := func(name string) {
		t.Helper()
		if err := r.management.Delete(t.Context(), &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name}}); err != nil {
			t.Fatal(err)
		}
	}
	lose("a")
	machine.CreationTimestamp = metav1.Now()
	if _, outdated := look(); len(outdated) > 0 {
		t.Errorf("lost bootstrap data, and a client certificate that is older than the Machine: %v", outdated)
	}
	machine.CreationTimestamp = metav1.NewTime(time.Now().Add(-model.Day))
	if _, outdated := look(); len(outdated) != 1 {
		t.Errorf("lost bootstrap data, and a client certificate that is newer than the Machine: %v", outdated)
	}
	lose("demo-apiserver-etcd-client")
	if found, outdated := look(); found != "" || len(outdated) > 0 {
		t.Errorf("a lost client certificate: %q, %v", found, outdated)
	}
}

// TestUserKubeconfigExpires (CP-14): messages name the expiry of a user's certificate, before and after it.
func TestUserKubeconfigExpires(t *testing.T) {
	cert, _ := leafOf(t, newCA(t))
	access := &rest.Config{TLSClientConfig: rest.TLSClientConfig{CertData: cert}}
	note, again, err := userKubeconfig(access, "demo-kubeconfig", time.Now())
	if err != nil || again <= 0 || again > model.Day || !strings.Contains(note, "expires at") {
		t.Errorf("%s, %q, %v", again, note, err)
	}
	if _, _, err := userKubeconfig(access, "demo-kubeconfig", time.Now().Add(2*model.Day)); err == nil || !strings.Contains(err.Error(), "has expired at") {
		t.Errorf("got %v", err)
	}
	access.CertData = nil
	if note, _, err := userKubeconfig(access, "demo-kubeconfig", time.Now()); err != nil || !strings.Contains(note, "no client certificate") {
		t.Errorf("%q, %v", note, err)
	}
}

// TestKeysAndLifetimes (CP-15): encryptionAlgorithm is that of all keys that the provider creates, and caCertificateValidityDays is the lifetime
// of the authority that it can rotate. A rotation has both as well.
func TestKeysAndLifetimes(t *testing.T) {
	for name, c := range map[string]struct {
		algorithm bootstrapv1.EncryptionAlgorithm
		days      int32
		key       string
		life      time.Duration
	}{
		"defaults": {key: "ECDSA 256", life: 3650 * model.Day},
		"P-384":    {algorithm: "ECDSA-P384", days: 800, key: "ECDSA 384", life: 800 * model.Day},
		"RSA":      {algorithm: "RSA-2048", days: 7300, key: "RSA 2048", life: 7300 * model.Day},
	} {
		t.Run(name, func(t *testing.T) {
			r, cp := newRotating(t), &controlplanev1.CapstanControlPlane{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "fresh", UID: "fresh"}}
			cp.Spec.Config.Cluster.EncryptionAlgorithm, cp.Spec.Config.Cluster.CACertificateValidityDays = c.algorithm, c.days
			s := &scope{ControlPlane: &model.ControlPlane{
				Object: cp, Cluster: &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "fresh"}}, Now: time.Now(),
			}, endpoint: clusterv1.APIEndpoint{Host: "10.0.0.1", Port: 6443}}
			if problems, err := (&authorities{r.clients, &secrets{r.clients}}).ensureCertificates(t.Context(), s); err != nil || len(problems) > 0 {
				t.Fatal(problems, err)
			}
			if _, _, err := (&kubeconfigs{r.clients, &secrets{r.clients}}).ensureKubeconfig(t.Context(), s); err != nil {
				t.Fatal(err)
			}
			if got := kindOfKey(t, s.access.KeyData); got != c.key {
				t.Errorf("the kubeconfig has the key %s", got)
			}
			for suffix, life := range map[string]time.Duration{"ca": c.life, "etcd": 3650 * model.Day, "proxy": 3650 * model.Day, "sa": 0} {
				stored := &corev1.Secret{}
				r.get(r.management, "ns", "fresh-"+suffix, stored)
				if got := kindOfKey(t, stored.Data[secret.TLSKeyDataName]); got != c.key {
					t.Errorf("%s has the key %s, want %s", suffix, got, c.key)
				}
				if suffix != "sa" {
					checkLife(t, suffix, stored.Data[secret.TLSCrtDataName], life)
				}
			}
			next := map[string][]byte{}
			if err := beginRotation(next, cp.Spec, time.Now()); err != nil {
				t.Fatal(err)
			}
			checkLife(t, "the next authority", next[model.NextCertName], c.life)
			if got := kindOfKey(t, next[model.NextKeyName]); got != c.key {
				t.Errorf("the next authority has the key %s", got)
			}
		})
	}
}

// TestRenewalWithStaleCache (CP-14): the renewal does not overwrite a kubeconfig with which the user has replaced that of Capstan, also while the
// cache still has the former Secret.
func TestRenewalWithStaleCache(t *testing.T) {
	r := newRotating(t)
	s := r.scope()
	s.Now, s.endpoint, s.signer = time.Now(), somewhere, newCA(t)
	if _, _, err := (&kubeconfigs{r.clients, &secrets{r.clients}}).ensureKubeconfig(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	own := &corev1.Secret{}
	r.get(r.management, "ns", "demo-kubeconfig", own)
	stale := &clients{Client: r.management, SecretClient: fake.NewClientBuilder().WithObjects(own).Build()}
	mine := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "demo-kubeconfig"}}
	if err := errors.Join(r.management.Delete(t.Context(), own), r.management.Create(t.Context(), mine)); err != nil {
		t.Fatal(err)
	}
	r.change(r.management, "ns", "demo-kubeconfig", mine, func() { mine.Data = map[string][]byte{"value": []byte("mine")} })

	s.Object.Spec.Kubeconfig.ValidityDays = 1
	if _, _, err := (&kubeconfigs{stale, &secrets{stale}}).ensureKubeconfig(t.Context(), s); !apierrors.IsConflict(err) {
		t.Errorf("the renewal returned %v, want a conflict", err)
	}
	r.get(r.management, "ns", "demo-kubeconfig", mine)
	if got := string(mine.Data["value"]); got != "mine" {
		t.Errorf("the user's kubeconfig became %s", got)
	}
}

func kindOfKey(t *testing.T, data []byte) string {
	t.Helper()
	key, err := pki.ParseKey(data)
	if err != nil {
		t.Fatal(err)
	}
	switch key := key.(type) {
	case *ecdsa.PrivateKey:
		return fmt.Sprint("ECDSA ", key.Params().BitSize)
	case *rsa.PrivateKey:
		return fmt.Sprint("RSA ", key.N.BitLen())
	}
	return fmt.Sprintf("%T", key)
}

func checkLife(t *testing.T, what string, data []byte, want time.Duration) {
	t.Helper()
	c, err := pki.ParseCert(data)
	if err != nil {
		t.Fatal(err)
	}
	if got := pki.Validity(c).Round(time.Hour); got != want {
		t.Errorf("%s is valid for %s, want %s", what, got, want)
	}
}
