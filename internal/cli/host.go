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
	"capstan.dev/capstan/internal/host/joining"
)

func (a *app) hostCommand() *cobra.Command {
	return group("host", "Join hosts, and remove lost machines from them",
		append(a.boxHostCommands(), a.hostTokenCommand(), a.hostCredentialsCommand(), a.hostPruneCommand())...)
}

// hostOptions describe a CapstanHost and its credentials.
type hostOptions struct {
	name, address, dir, secretNamespace, failureDomain string
	dials                                              bool
	allowed                                            []string
	validity                                           time.Duration
}

func (a *app) hostCredentialsCommand() *cobra.Command {
	var o hostOptions
	c := &cobra.Command{
		Use: "credentials NAME", Short: "Create the certificates of this host, and print its CapstanHost and Secret",
		Long: `Create the certificates for capstand's TCP port, and print two manifests: the CapstanHost, and the Secret that
managers need to connect. The Secret contains a private key. Any client with this key has root access to this host.

On the host:               (umask 077 && capstan host credentials rack-1 --address 10.0.0.5:7443 >rack-1.yaml)
                           capstand --listen :7443 …
In the management cluster: kubectl apply -f rack-1.yaml

A host that the managers do not reach, for example behind NAT, dials them:

On the host:               (umask 077 && capstan host credentials rack-1 --dials >rack-1.yaml)
                           capstand --name rack-1 --dial MANAGER:PORT …

A second run creates new certificates, signed by the same authority. capstand uses them without a restart.`,
		Args: cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			o.name = args[0]
			objects, err := o.make(time.Now())
			if err != nil {
				return err
			}
			return a.printObjects(objects)
		},
	}
	f := c.Flags()
	f.StringVar(&o.address, "address", "", "address of capstand for managers, host:port")
	f.StringVar(&o.dir, "dir", "/var/lib/capstan/host/tls", "folder for the certificates: the folder tls in capstand's --root")
	f.StringVar(&o.secretNamespace, "secret-namespace", joining.DefaultNamespace, "namespace of the Secret; clusterctl move needs it in the namespace of the infrastructure provider")
	f.StringVar(&o.failureDomain, "failure-domain", "", "failure domain of the host (default: its name)")
	f.StringSliceVar(&o.allowed, "allow-namespace", nil, "namespace whose clusters can use the host; repeatable (default: all)")
	f.DurationVar(&o.validity, "valid-for", credentials.DefaultValidity, "validity of the certificates")
	f.BoolVar(&o.dials, "dials", false, "the host dials the managers, and has no address: connection FromHost")
	c.MarkFlagsOneRequired("address", "dials")
	c.MarkFlagsMutuallyExclusive("address", "dials")
	return c
}

// make creates the certificates and returns the manifests.
func (o hostOptions) make(now time.Time) ([]*unstructured.Unstructured, error) {
	server, err := o.server()
	if err != nil {
		return nil, err
	}
	if err := o.check(); err != nil {
		return nil, coded{err, exitUsage}
	}
	if err := os.MkdirAll(filepath.Dir(o.dir), 0o711); err != nil {
		return nil, fmt.Errorf("expected a folder for the certificates: %w; run the command with sudo, or set --dir", err)
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
	if o.dials {
		host.Spec.Connection = infrav1.HostConnectionFromHost
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

// check checks the values that the API of the management cluster would refuse later.
func (o hostOptions) check() error {
	if problems := validation.IsDNS1123Subdomain(o.name); len(problems) > 0 {
		return fmt.Errorf("expected a name of lower case letters, digits, dots and dashes, found %q: %s", o.name, problems[0])
	}
	for _, namespace := range append([]string{o.secretNamespace}, o.allowed...) {
		if problems := validation.IsDNS1123Label(namespace); len(problems) > 0 {
			return fmt.Errorf("expected names of namespaces for --secret-namespace and --allow-namespace, found %q: %s", namespace, problems[0])
		}
	}
	if o.validity < joining.MinValidity || o.validity > joining.MaxValidity {
		return fmt.Errorf("expected --valid-for from %s to %s, found %s", joining.MinValidity, joining.MaxValidity, o.validity)
	}
	return nil
}

// server is the name in the certificate: the part of the address without the port, or the name of a host that dials.
func (o hostOptions) server() (string, error) {
	if o.dials {
		return o.name, nil
	}
	server, port, err := net.SplitHostPort(o.address)
	if number, bad := strconv.Atoi(port); err != nil || bad != nil || server == "" || number < 1 || number > 65535 {
		return "", coded{fmt.Errorf("expected --address host:port, found %q", o.address), exitUsage}
	}
	return server, nil
}

// asUnstructured converts objects to manifests. It omits fields that only an API server sets.
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
