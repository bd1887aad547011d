package controlplane

import (
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/util/validation/field"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/certs"
	"sigs.k8s.io/cluster-api/util/secret"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/bootstrap"
	"capstan.dev/capstan/internal/controlplane/model"
	"capstan.dev/capstan/internal/kubeconfig"
	"capstan.dev/capstan/internal/pki"
)

func TestRenderName(t *testing.T) {
	for name, c := range map[string]struct{ template, controlPlane, want, err string }{
		"default":          {"", "cp", "cp-abcde", ""},
		"variables":        {"{{ .cluster.name }}-x-{{ .random }}", "cp", "cluster-x-abcde", ""},
		"too long":         {"", strings.Repeat("a", 70), strings.Repeat("a", 58) + "abcde", ""},
		"malformed":        {"{{ .random", "cp", "", "cannot be read"},
		"unknown variable": {"{{ .nobody }}-{{ .random }}", "cp", "", "only text and"},
		"no name":          {"A_{{ .random }}", "cp", "", "no name"},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := renderName(c.template, "cluster", c.controlPlane, "abcde")
			if got != c.want || (c.err == "") != (err == nil) || err != nil && !strings.Contains(err.Error(), c.err) {
				t.Errorf("got %q, %v", got, err)
			}
		})
	}
}

func newCA(t *testing.T) *certs.KeyPair {
	t.Helper()
	authorities := bootstrap.Certificates(bootstrapv1.ClusterConfiguration{})
	if err := authorities.Generate(); err != nil {
		t.Fatal(err)
	}
	return authorities.GetByPurpose(secret.ClusterCA).KeyPair
}

// TestKubeconfigRenewal (CP-14): by default, a kubeconfig is valid for a year and renewed after half of it.
func TestKubeconfigRenewal(t *testing.T) {
	ca, other, start := newCA(t), newCA(t), time.Now()
	here, there := clusterv1.APIEndpoint{Host: "10.0.0.1", Port: 6443}, clusterv1.APIEndpoint{Host: "10.0.0.2", Port: 6443}
	data, err := newKubeconfig("demo", "https://10.0.0.1:6443", ca, "", 100*model.Day, start)
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		endpoint clusterv1.APIEndpoint
		ca       *certs.KeyPair
		at       time.Time
		validity int
		good     bool
	}{
		"new":               {here, ca, start, 100, true},
		"just before half":  {here, ca, start.Add(49 * model.Day), 100, true},
		"past half":         {here, ca, start.Add(51 * model.Day), 100, false},
		"not valid yet":     {here, ca, start.Add(-model.Day), 100, false},
		"expired":           {here, ca, start.Add(101 * model.Day), 100, false},
		"another endpoint":  {there, ca, start, 100, false},
		"another authority": {here, other, start, 100, false},
		"a shorter spec":    {here, ca, start, 99, false},
		"a longer spec":     {here, ca, start, 101, true},
	} {
		t.Run(name, func(t *testing.T) {
			config, _ := kubeconfig.Load(data, c.endpoint)
			if got := kubeconfigGoodFor(config, c.ca.Cert, time.Duration(c.validity)*model.Day, 50*model.Day, c.at); (got > 0) != c.good {
				t.Errorf("got %s", got)
			}
		})
	}
	if kubeconfigGoodFor(nil, nil, model.Day, 0, start) != 0 {
		t.Error("a refused kubeconfig counts as valid")
	}
	for _, c := range []struct {
		spec                  controlplanev1.KubeconfigSpec
		validity, renewBefore time.Duration
	}{
		{controlplanev1.KubeconfigSpec{}, 365 * model.Day, 365 * model.Day / 2},
		{controlplanev1.KubeconfigSpec{ValidityDays: 30}, 30 * model.Day, 15 * model.Day},
		{controlplanev1.KubeconfigSpec{ValidityDays: 30, RenewBeforeDays: 10}, 30 * model.Day, 10 * model.Day},
	} {
		if v, r := kubeconfigTimes(c.spec); v != c.validity || r != c.renewBefore {
			t.Errorf("%v: got %s, %s", c.spec, v, r)
		}
	}
}

// TestKubeconfigEndsWithItsAuthority: a certificate cannot outlive its authority. In that case, not every reconcile renews it.
func TestKubeconfigEndsWithItsAuthority(t *testing.T) {
	ca, start := newCA(t), time.Now()
	data, err := newKubeconfig("demo", "https://a:1", ca, "", 100*365*model.Day, start)
	if err != nil {
		t.Fatal(err)
	}
	config, err := kubeconfig.Load(data, clusterv1.APIEndpoint{Host: "a", Port: 1})
	if err != nil {
		t.Fatal(err)
	}
	if got := kubeconfigGoodFor(config, ca.Cert, 100*365*model.Day, 50*365*model.Day, start); got == 0 {
		t.Error("each reconcile would renew the kubeconfig")
	}
	if got := kubeconfigGoodFor(config, ca.Cert, 365*model.Day, 50*365*model.Day, start); got != 0 {
		t.Error("a shorter validity in the spec waits for the end of the authority")
	}
}

// TestCheckCertificate (CP-15): messages name broken authorities and do not quote their content.
func TestCheckCertificate(t *testing.T) {
	authorities := bootstrap.Certificates(bootstrapv1.ClusterConfiguration{})
	if err := authorities.Generate(); err != nil {
		t.Fatal(err)
	}
	ca, sa, other := authorities.GetByPurpose(secret.ClusterCA), authorities.GetByPurpose(secret.ServiceAccount), newCA(t)
	leaf, key := leafOf(t, ca.KeyPair)
	for name, c := range map[string]struct {
		purpose   secret.Purpose
		cert, key []byte
		at        time.Time
		want      string
	}{
		"good":                      {secret.ClusterCA, ca.KeyPair.Cert, ca.KeyPair.Key, time.Now(), ""},
		"another's key":             {secret.ClusterCA, ca.KeyPair.Cert, other.Key, time.Now(), "broken"},
		"no key":                    {secret.ClusterCA, ca.KeyPair.Cert, nil, time.Now(), "broken"},
		"garbage":                   {secret.EtcdCA, []byte("hunter2"), []byte("hunter2"), time.Now(), "broken"},
		"not an authority":          {secret.FrontProxyCA, leaf, key, time.Now(), "not one of a certificate authority"},
		"expired":                   {secret.ClusterCA, ca.KeyPair.Cert, ca.KeyPair.Key, time.Now().Add(11 * 365 * model.Day), "expired"},
		"service account":           {secret.ServiceAccount, sa.KeyPair.Cert, sa.KeyPair.Key, time.Now(), ""},
		"service account, two keys": {secret.ServiceAccount, sa.KeyPair.Cert, ca.KeyPair.Key, time.Now(), "public key"},
		"service account, garbage":  {secret.ServiceAccount, []byte("hunter2"), sa.KeyPair.Key, time.Now(), "public key"},
	} {
		t.Run(name, func(t *testing.T) {
			got := checkCertificate("demo-x", &secret.Certificate{Purpose: c.purpose, KeyPair: &certs.KeyPair{Cert: c.cert, Key: c.key}}, c.at)
			if (got == "") != (c.want == "") || !strings.Contains(got, c.want) || strings.Contains(got, "hunter2") {
				t.Errorf("got %q, want %q", got, c.want)
			}
		})
	}
}

func leafOf(t *testing.T, ca *certs.KeyPair) (cert, key []byte) {
	t.Helper()
	authority, err := pki.ParseAuthority(ca.Cert, ca.Key)
	if err != nil {
		t.Fatal(err)
	}
	made, signer, err := authority.Issue(pki.Leaf{Usages: pki.Client}, model.Day, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	if key, err = pki.EncodeKey(signer); err != nil {
		t.Fatal(err)
	}
	return pki.EncodeCert(made), key
}

func TestFailedChecks(t *testing.T) {
	body := "[+]ping ok\n[-]etcd failed: reason withheld\n[-]poststarthook/rbac/bootstrap-roles failed: not finished\nreadyz check failed\n"
	if got := strings.Join(failedChecks(body, 500), ","); got != "etcd,poststarthook/rbac/bootstrap-roles" {
		t.Errorf("got %s", got)
	}
	if got := strings.Join(failedChecks("unauthorized", 401), ","); got != "HTTP status 401" {
		t.Errorf("got %s", got)
	}
}

// TestVersionChange (CP-05): one minor at a time.
func TestVersionChange(t *testing.T) {
	for name, c := range map[string]struct {
		from, to, want string
	}{
		"same": {"v1.36.3", "v1.36.3", ""}, "patch": {"v1.36.3", "v1.36.4", ""}, "patch back": {"v1.36.3", "v1.36.2", ""},
		"minor": {"v1.36.3", "v1.37.0", ""}, "two minors": {"v1.36.3", "v1.38.0", "one minor"},
		"back": {"v1.36.3", "v1.35.9", "cannot go back"}, "major": {"v1.36.3", "v2.0.0", "one minor"},
	} {
		t.Run(name, func(t *testing.T) {
			errs := validateVersionChange(c.from, c.to, field.NewPath("spec", "version"))
			if (len(errs) == 0) != (c.want == "") || c.want != "" && !strings.Contains(errs.ToAggregate().Error(), c.want) {
				t.Errorf("got %v", errs)
			}
		})
	}
}
