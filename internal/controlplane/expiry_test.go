package controlplane

import (
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/certs"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/cluster-api/util/secret"
	"sigs.k8s.io/controller-runtime/pkg/client"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/controlplane/model"
	"capstan.dev/capstan/internal/pki"
)

// TestExpiry: if a certificate of a control plane is not renewed after two thirds of its life, a condition names the Secret or
// the machine that contains it.
func TestExpiry(t *testing.T) {
	key, err := pki.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	ca, err := pki.NewAuthority("demo", key, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	signed := func(left time.Duration) *rest.Config {
		made, _, err := ca.Issue(pki.Leaf{Usages: pki.Client}, 30*model.Day, time.Now().Add(left-30*model.Day))
		if err != nil {
			t.Fatal(err)
		}
		return &rest.Config{TLSClientConfig: rest.TLSClientConfig{CertData: pki.EncodeCert(made)}}
	}
	machine := func(left time.Duration) *model.Member {
		return &model.Member{Name: "m-0", CertificatesExpire: time.Now().Add(left)}
	}
	for name, c := range map[string]struct {
		access  *rest.Config
		etcd    *rest.Config
		machine *model.Member
		message string
	}{
		"fresh":              {signed(29 * model.Day), nil, machine(80 * model.Day), ""},
		"kubeconfig refused": {nil, nil, machine(80 * model.Day), ""},
		"kubeconfig":         {signed(5 * model.Day), nil, machine(80 * model.Day), "secret demo-kubeconfig expires on"},
		"machine":            {signed(29 * model.Day), nil, machine(20 * model.Day), "machine m-0 expires on"},
		"no machine's known": {signed(29 * model.Day), nil, &model.Member{Name: "m-0"}, ""},
		"external etcd":      {signed(29 * model.Day), signed(5 * model.Day), machine(80 * model.Day), "secret demo-apiserver-etcd-client expires on"},
	} {
		t.Run(name, func(t *testing.T) {
			cp := &controlplanev1.CapstanControlPlane{ObjectMeta: metav1.ObjectMeta{Namespace: "expiry", Name: "demo"}}
			cp.Spec.Config.Cluster.CertificateValidityDays = 90
			s := &scope{ControlPlane: &model.ControlPlane{Object: cp, Cluster: &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Name: "demo"}}, Now: time.Now()}, access: c.access}
			s.certificates = secret.Certificates{{Purpose: secret.ClusterCA, KeyPair: &certs.KeyPair{Cert: pki.EncodeCert(ca.Cert)}}}
			if c.etcd != nil {
				s.certificates = append(s.certificates, &secret.Certificate{Purpose: secret.APIServerEtcdClient, KeyPair: &certs.KeyPair{Cert: c.etcd.CertData}})
			}
			again := showExpiry(s, model.Fleet{Instances: []model.Instance{{Member: c.machine}}}.Members())
			got := conditions.Get(cp, infrav1.CertificatesExpiringCondition)
			if (got.Status == metav1.ConditionTrue) != (c.message != "") || !strings.Contains(got.Message, c.message) || again <= 0 {
				t.Errorf("got %v, again in %s", got, again)
			}
		})
	}
	forgetMetrics(client.ObjectKey{Namespace: "expiry", Name: "demo"})
}
