package cli

import (
	"bytes"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/credentials"
)

// The command prints a CapstanHost with credentials that match capstand's own files.
func TestHostCredentials(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "host", "tls")
	var out bytes.Buffer
	c := (&app{out: &out}).command()
	c.SetArgs([]string{"host", "credentials", "rack-1", "--address", "[fd00::5]:7443", "--dir", dir, "--allow-namespace", "a,b", "--failure-domain", "row-2"})
	if err := c.Execute(); err != nil {
		t.Fatal(err)
	}
	documents := strings.Split(strings.TrimPrefix(out.String(), "---\n"), "---\napiVersion: infra")
	if len(documents) != 2 {
		t.Fatalf("printed %d documents", len(documents))
	}
	secret, host := &corev1.Secret{}, &infrav1.CapstanHost{}
	if err := yaml.UnmarshalStrict([]byte(documents[0]), secret); err != nil {
		t.Fatal(err)
	}
	if err := yaml.UnmarshalStrict([]byte("apiVersion: infra"+documents[1]), host); err != nil {
		t.Fatal(err)
	}
	if host.Spec.CredentialsRef.Name != secret.Name || host.Spec.CredentialsRef.Namespace != secret.Namespace ||
		host.Spec.Address != "[fd00::5]:7443" || host.Spec.FailureDomain != "row-2" || len(host.Spec.AllowedNamespaces.Names) != 2 {
		t.Errorf("host: %+v", host.Spec)
	}
	client, err := credentials.FromSecret(secret.Data)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := client.Transport(time.Now(), nil); err != nil {
		t.Error(err)
	}
	if _, err := credentials.In(dir).Config("h2", nil); err != nil {
		t.Error(err)
	}
}

// A host that dials has a certificate for its name, and no address.
func TestHostCredentialsOfDialling(t *testing.T) {
	dir := t.TempDir()
	objects, err := hostOptions{name: "rack-1", dials: true, dir: dir, secretNamespace: "ns", validity: time.Hour}.make(time.Now())
	if err != nil {
		t.Fatal(err)
	}
	spec, _ := objects[1].Object["spec"].(map[string]any)
	if spec["connection"] != "FromHost" || spec["address"] != nil || spec["credentialsRef"] == nil {
		t.Errorf("host: %+v", spec)
	}
	if _, err := credentials.In(dir).DialConfig("rack-1"); err != nil {
		t.Error(err)
	}
}

func TestHostCredentialsAreRefused(t *testing.T) {
	for want, changes := range map[string][]func(*hostOptions){
		"expected --address host:port": {
			func(o *hostOptions) { o.address = "10.0.0.5" }, func(o *hostOptions) { o.address = ":7443" },
			func(o *hostOptions) { o.address = "x:0" }, func(o *hostOptions) { o.address = "x:http" },
		},
		"expected a name of":           {func(o *hostOptions) { o.name = "A_B" }, func(o *hostOptions) { o.name = "" }},
		"expected names of namespaces": {func(o *hostOptions) { o.secretNamespace = "" }, func(o *hostOptions) { o.allowed = []string{"a", "b c"} }},
		"expected --valid-for from":    {func(o *hostOptions) { o.validity = time.Second }, func(o *hostOptions) { o.validity = 1 << 62 }},
	} {
		for _, change := range changes {
			o := hostOptions{name: "a", address: "x:1", secretNamespace: "ns", allowed: []string{"a"}, validity: time.Hour, dir: t.TempDir()}
			change(&o)
			if _, err := o.make(time.Now()); exitCode(err) != exitUsage || !strings.Contains(err.Error(), want) {
				t.Errorf("expected %q for %+v, found %v", want, o, err)
			}
		}
	}
}
