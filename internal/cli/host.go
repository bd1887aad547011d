package cli

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation"
	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/credentials"
)

func (a *app) hostCommand() *cobra.Command {
	return group("host", "Hosts of management clusters", a.hostCredentialsCommand(), a.hostPruneCommand())
}

// hostOptions are what a CapstanHost and its credentials are made from.
type hostOptions struct {
	name, address, dir, secretNamespace, failureDomain string
	allowed                                            []string
	validity                                           time.Duration
}

func (a *app) hostCredentialsCommand() *cobra.Command {
	var o hostOptions
	c := &cobra.Command{
		Use: "credentials NAME", Short: "Make the certificates of this host, and print the CapstanHost and its Secret",
		Long: `Make the certificates with which capstand serves over TCP, and print the manifests of the CapstanHost and of
the Secret with which managers reach it. They hold a private key that is as good as root on this host.

On the host:               capstan host credentials rack-1 --address 10.0.0.5:7443 >rack-1.yaml
                           capstand --listen :7443 …
In the management cluster: kubectl apply -f rack-1.yaml

Run again, it makes new certificates of the same authority; capstand takes them without a restart.`,
		Args: cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			o.name = args[0]
			objects, err := o.make(time.Now())
			if err != nil {
				return err
			}
			return printYAML(a.out, objects)
		},
	}
	f := c.Flags()
	f.StringVar(&o.address, "address", "", "where managers reach capstand, host:port")
	f.StringVar(&o.dir, "dir", "/var/lib/capstan/host/tls", "folder of the certificates: tls in capstand's --root")
	f.StringVar(&o.secretNamespace, "secret-namespace", "capstan-infrastructure-system", "namespace of the Secret; `clusterctl move` finds it in that of the infrastructure provider")
	f.StringVar(&o.failureDomain, "failure-domain", "", "what the host fails together with (default: its name)")
	f.StringSliceVar(&o.allowed, "allow-namespace", nil, "namespaces whose clusters may use the host (default: all)")
	f.DurationVar(&o.validity, "valid-for", credentials.DefaultValidity, "how long the certificates are valid")
	_ = c.MarkFlagRequired("address")
	return c
}

// make makes the certificates and returns the manifests.
func (o hostOptions) make(now time.Time) ([]*unstructured.Unstructured, error) {
	server, port, err := net.SplitHostPort(o.address)
	if number, bad := strconv.Atoi(port); err != nil || bad != nil || server == "" || number < 1 || number > 65535 {
		return nil, coded{fmt.Errorf("wanted --address host:port, found %q", o.address), exitUsage}
	}
	if problems := validation.IsDNS1123Subdomain(o.name); len(problems) > 0 {
		return nil, coded{fmt.Errorf("wanted a name of lower case letters, digits, dots and dashes, found %q: %s", o.name, problems[0]), exitUsage}
	}
	if err := os.MkdirAll(filepath.Dir(o.dir), 0o711); err != nil {
		return nil, err
	}
	c, err := credentials.Make(o.dir, []string{server}, o.validity, now)
	if err != nil {
		return nil, err
	}
	host := &infrav1.CapstanHost{
		TypeMeta:   metav1.TypeMeta{APIVersion: infrav1.GroupVersion.String(), Kind: "CapstanHost"},
		ObjectMeta: metav1.ObjectMeta{Name: o.name},
		Spec: infrav1.CapstanHostSpec{
			Address: o.address, FailureDomain: o.failureDomain,
			CredentialsRef: infrav1.SecretReference{Namespace: o.secretNamespace, Name: o.name + "-credentials"},
		},
	}
	if len(o.allowed) > 0 {
		host.Spec.AllowedNamespaces = &infrav1.AllowedNamespaces{Names: o.allowed}
	}
	secret := &corev1.Secret{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Secret"},
		ObjectMeta: metav1.ObjectMeta{Namespace: o.secretNamespace, Name: host.Spec.CredentialsRef.Name},
		Type:       corev1.SecretTypeTLS,
		Data:       c.Data(),
	}
	return asUnstructured(secret, host)
}

// asUnstructured leaves out what only a server writes.
func asUnstructured(objects ...client.Object) ([]*unstructured.Unstructured, error) {
	var out []*unstructured.Unstructured
	for _, o := range objects {
		content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(o)
		if err != nil {
			return nil, err
		}
		u := &unstructured.Unstructured{Object: content}
		unstructured.RemoveNestedField(content, "metadata", "creationTimestamp")
		unstructured.RemoveNestedField(content, "status")
		out = append(out, u)
	}
	return out, nil
}
