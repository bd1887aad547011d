package cli

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/duration"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/credentials"
	"capstan.dev/capstan/internal/host/joining"
)

func (a *app) hostTokenCommand() *cobra.Command {
	c := group("token", "Create, list and revoke the tokens with which hosts join", a.hostTokenCreateCommand(), a.hostTokenListCommand(), a.hostTokenRevokeCommand())
	c.PersistentFlags().String(namespaceFlag, joining.DefaultNamespace, "namespace of the infrastructure provider")
	return c
}

const (
	namespaceFlag = "provider-namespace"
	// kubernetesMinTTL is the shortest life of a token that Kubernetes issues. Its Secret is deleted earlier.
	kubernetesMinTTL = 10 * time.Minute
)

// tokenOptions are the flags of `capstan host token create`.
type tokenOptions struct {
	terms  joining.Terms
	ttl    time.Duration
	server string
}

func (a *app) hostTokenCreateCommand() *cobra.Command {
	var o tokenOptions
	c := &cobra.Command{
		Use: "create", Short: "Create a token, and print the command that a host runs to join", Args: cobra.NoArgs,
		Long: `Create a token with which a host joins the management cluster, and print the command to run on the host.

The token can create certificate requests for hosts, and nothing else. It ends after --ttl, when its hosts have joined, or with
'capstan host token revoke'. The management cluster does not store it. Until a host has used it, anyone who has the token can join a
host: pass it on a safe way.

The command needs the right to create Secrets in the provider's namespace and tokens of its service account
` + infrav1.HostJoinServiceAccount + `.`,
		PreRunE: func(*cobra.Command, []string) error {
			if o.server == "" {
				return nil
			}
			return a.checkJoinServer(o.server)
		},
		RunE: func(c *cobra.Command, _ []string) error {
			if err := o.begin(time.Now()); err != nil {
				return err
			}
			m, err := a.management()
			if err != nil {
				return err
			}
			namespace, _ := c.Flags().GetString(namespaceFlag)
			server := cmp.Or(o.server, a.joinServer(m.config.Host))
			if err := a.checkJoinServer(server); err != nil {
				return err
			}
			t, name, err := createToken(c.Context(), m, namespace, o)
			if err != nil {
				return err
			}
			if a.structured() {
				return a.print(map[string]any{"name": name, "server": server, "token": t.String(), "expires": o.terms.Expires})
			}
			_, err = fmt.Fprintf(a.out, "capstan host join %s --token %s\n", server, t)
			fmt.Fprintf(a.errOut, "\nRun this command on the host as root within %s. To revoke the token: capstan host token revoke %s\n", o.ttl, name)
			return err
		},
	}
	f := c.Flags()
	f.DurationVar(&o.ttl, "ttl", joining.DefaultTTL, "time until the token ends, at most 24h")
	f.IntVar(&o.terms.Hosts, "hosts", 1, "number of hosts that can join with the token")
	f.StringVar(&o.terms.HostName, "name", "", "the only name that the host can have; with the name of an existing CapstanHost, this host can join again (default: any new name)")
	f.StringVar(&o.terms.FailureDomain, "failure-domain", "", "failure domain of the hosts (default: each host chooses)")
	f.StringToStringVar(&o.terms.Labels, "label", nil, "label key=value of the CapstanHosts; repeatable")
	f.StringSliceVar(&o.terms.AllowedNamespaces, "allow-namespace", nil, "namespace whose clusters can use the hosts; repeatable (default: all)")
	f.DurationVar(&o.terms.Validity.Duration, "valid-for", credentials.DefaultValidity, "validity of the certificates; they are renewed automatically")
	f.StringVar(&o.server, "server", "", "URL of the management API for the hosts (default: that of the kubeconfig, or of 'capstan up --api-address')")
	return c
}

// joinServer returns the URL of a management API for other boxes. A kubeconfig of the plane of this box has a loopback URL instead.
func (a *app) joinServer(configured string) string {
	if configured == a.localEndpoint() {
		return cmp.Or(a.localServer(), configured)
	}
	return configured
}

// checkJoinServer returns an error if other boxes cannot use the URL of the management API.
func (a *app) checkJoinServer(server string) error {
	u, err := url.Parse(server)
	if err != nil || u.Scheme != "https" || u.Hostname() == "" {
		return coded{fmt.Errorf("expected --server https://host:port, found %q", server), exitUsage}
	}
	if ip, err := netip.ParseAddr(u.Hostname()); err == nil && !ip.IsGlobalUnicast() || u.Hostname() == "localhost" {
		return coded{fmt.Errorf("expected an address of the management API that the host reaches, found %s: run `%s up --api-address %s` with an address of this box, or set --server",
			server, a.self(), net.JoinHostPort("ADDRESS", "7442")), exitUsage}
	}
	return nil
}

// begin sets the end of the token and checks its terms.
func (o *tokenOptions) begin(now time.Time) error {
	o.terms.Expires = metav1.NewTime(now.Add(o.ttl).Truncate(time.Second))
	if err := o.terms.Check(now.Truncate(time.Second)); err != nil {
		return coded{err, exitUsage}
	}
	return nil
}

// createToken creates the Secret with the terms, and a token that is bound to it.
func createToken(ctx context.Context, m *management, namespace string, o tokenOptions) (joining.Token, string, error) {
	ca, err := authorities(m.config)
	if err != nil {
		return joining.Token{}, "", err
	}
	data, err := json.Marshal(o.terms)
	if err != nil {
		return joining.Token{}, "", err
	}
	secret := &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, GenerateName: "host-token-", Labels: map[string]string{infrav1.HostTokenLabel: ""}},
		Type:       joining.SecretType, Data: map[string][]byte{joining.KeyTerms: data},
	}
	if err := m.client.Create(ctx, secret); err != nil {
		return joining.Token{}, "", err
	}
	t, err := m.issue(ctx, secret, o.ttl)
	if err != nil {
		_ = m.client.Delete(context.WithoutCancel(ctx), secret)
		return joining.Token{}, "", err
	}
	t.CA = ca
	return t, secret.Name, nil
}

// issue requests the token, and records its id.
func (m *management) issue(ctx context.Context, secret *corev1.Secret, ttl time.Duration) (joining.Token, error) {
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: secret.Namespace, Name: infrav1.HostJoinServiceAccount}}
	request := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{
		ExpirationSeconds: ptr.To(int64(max(ttl, kubernetesMinTTL).Seconds())),
		BoundObjectRef:    &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Secret", Name: secret.Name, UID: secret.UID},
	}}
	if err := m.client.SubResource("token").Create(ctx, account, request); apierrors.IsNotFound(err) {
		return joining.Token{}, coded{fmt.Errorf("there is no service account %s/%s: upgrade the infrastructure provider, or set --%s", account.Namespace, account.Name, namespaceFlag), exitNotFound}
	} else if err != nil {
		return joining.Token{}, err
	}
	t := joining.Token{Bearer: request.Status.Token}
	claims, err := t.Claims()
	if err != nil {
		return joining.Token{}, err
	}
	before := secret.DeepCopy()
	secret.Data[joining.KeyID] = []byte(claims.ID)
	return t, m.client.Patch(ctx, secret, client.MergeFrom(before))
}

// authorities returns the certificate authorities of the management API, or nothing for those of the system.
func authorities(config *rest.Config) ([]byte, error) {
	if config.Insecure {
		return nil, fmt.Errorf("expected a kubeconfig with certificate-authority-data, found insecure-skip-tls-verify: a host must recognize the management API")
	}
	if len(config.CAData) > 0 || config.CAFile == "" {
		return config.CAData, nil
	}
	return os.ReadFile(config.CAFile)
}

func (a *app) hostTokenListCommand() *cobra.Command {
	return &cobra.Command{
		Use: "list", Short: "List the tokens that have not ended", Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			m, err := a.management()
			if err != nil {
				return err
			}
			namespace, _ := c.Flags().GetString(namespaceFlag)
			secrets := &corev1.SecretList{}
			if err := m.client.List(c.Context(), secrets, client.InNamespace(namespace), client.HasLabels{infrav1.HostTokenLabel}); err != nil {
				return err
			}
			return a.printTokens(listed(secrets.Items), time.Now())
		},
	}
}

// listedToken is a token in the output of `capstan host token list`.
type listedToken struct {
	Name  string        `json:"name"`
	Terms joining.Terms `json:"terms"`
	// Joined are the names of the hosts that used the token.
	Joined []string `json:"joined"`
}

func listed(secrets []corev1.Secret) []listedToken {
	out := []listedToken{}
	for i := range secrets {
		t, uses := listedToken{Name: secrets[i].Name, Joined: []string{}}, joining.Uses{}
		if json.Unmarshal(secrets[i].Data[joining.KeyTerms], &t.Terms) != nil {
			continue
		}
		_ = json.Unmarshal(secrets[i].Data[joining.KeyHosts], &uses) // absent before the first use
		for _, name := range uses {
			t.Joined = append(t.Joined, cmp.Or(name, "(deleted)"))
		}
		slices.Sort(t.Joined)
		out = append(out, t)
	}
	return out
}

func (a *app) printTokens(tokens []listedToken, now time.Time) error {
	if a.structured() {
		return a.print(tokens)
	}
	w := tabwriter.NewWriter(a.out, 0, 8, 2, ' ', 0)
	fmt.Fprintln(w, "NAME\tEXPIRES IN\tHOST NAME\tHOSTS\tJOINED")
	for _, t := range tokens {
		fmt.Fprintf(w, "%s\t%s\t%s\t%d\t%s\n", t.Name, duration.HumanDuration(t.Terms.Expires.Sub(now)), cmp.Or(t.Terms.HostName, "any"), t.Terms.Hosts, strings.Join(t.Joined, ","))
	}
	return w.Flush()
}

func (a *app) hostTokenRevokeCommand() *cobra.Command {
	return &cobra.Command{
		Use: "revoke NAME", Short: "Revoke a token: no further host can join with it", Args: cobra.ExactArgs(1),
		ValidArgsFunction: a.completeTokens(),
		Long:              "Revoke a token. Hosts that have joined with it stay: delete their CapstanHosts to remove them.",
		RunE: func(c *cobra.Command, args []string) error {
			m, err := a.management()
			if err != nil {
				return err
			}
			namespace, _ := c.Flags().GetString(namespaceFlag)
			secret := &corev1.Secret{}
			key := client.ObjectKey{Namespace: namespace, Name: args[0]}
			err = m.client.Get(c.Context(), key, secret)
			if _, isToken := secret.Labels[infrav1.HostTokenLabel]; apierrors.IsNotFound(err) || err == nil && !isToken {
				return coded{fmt.Errorf("there is no token %s: `capstan host token list` lists all", args[0]), exitNotFound}
			} else if err != nil {
				return err
			}
			if err := m.client.Delete(c.Context(), secret); client.IgnoreNotFound(err) != nil {
				return err
			}
			_, err = fmt.Fprintf(a.out, "Token %s is revoked\n", args[0])
			return err
		},
	}
}
