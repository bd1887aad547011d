//go:build linux

package cli

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	certificatesv1 "k8s.io/api/certificates/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	certificatesclient "k8s.io/client-go/kubernetes/typed/certificates/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/cert"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/embedded"
	"capstan.dev/capstan/internal/host/credentials"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/joining"
	"capstan.dev/capstan/internal/pki"
	"capstan.dev/capstan/internal/pki/certfiles"
	"capstan.dev/capstan/internal/version"
)

// joinOptions are the flags of `capstan host join`.
type joinOptions struct {
	server, token, tokenFile      string
	name, address, listen, tunnel string
	dial                          string
	failureDomain, dir, boxFolder string
	// defaults is the file with the options of the unit, unitDir is its --dir, and unitSocket its socket. systemd exists if systemd runs.
	defaults, unitDir, unitSocket, systemd string
}

func (a *app) hostJoinCommand() *cobra.Command {
	o := joinOptions{boxFolder: "/", defaults: "/etc/default/capstand", unitDir: "/var/lib/capstan/host/tls", unitSocket: unitSocket, systemd: systemdFolder}
	var timeout time.Duration
	hostname, _ := os.Hostname()
	c := &cobra.Command{
		Use: "join PLANE", Short: "Join this host to a management cluster",
		Long: `Join this host to a management cluster, with the command that 'capstan host token create' prints.

The command creates the key of this host, which never leaves it. The management cluster signs the certificate, creates the
CapstanHost, and connects to capstand at --address. With --dial, capstand connects to the manager instead, for a host that the
management cluster does not reach, for example behind NAT. With systemd, the command configures and starts capstand.service. Otherwise
it prints how to start capstand. If the command was interrupted, run it again with the same token.`,
		Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			ctx, cancel := withTimeout(c.Context(), timeout)
			defer cancel()
			o.server, o.name = args[0], cmp.Or(o.name, strings.ToLower(hostname))
			return a.join(ctx, o)
		},
	}
	f := c.Flags()
	f.StringVar(&o.token, "token", "", "token of 'capstan host token create'")
	f.StringVar(&o.tokenFile, "token-file", "", "file with the token, - for the standard input; other users of this box can see --token in the list of processes")
	f.StringVar(&o.name, "name", "", "name of the CapstanHost (default: the hostname)")
	f.StringVar(&o.address, "address", "", "address of capstand for the management cluster, host:port (default: --listen if it contains an IP address of this box, otherwise the address of this box towards PLANE, with the port of --listen)")
	f.StringVar(&o.tunnel, "tunnel-address", "", "IP address over which machines of clusters across hosts reach this host; "+joining.NoTunnel+": no such clusters (default: that of an existing CapstanHost, otherwise the address of this box towards PLANE; with --dial: "+joining.NoTunnel+")")
	f.StringVar(&o.listen, "listen", ":7443", "address, host:port, on which capstand listens")
	f.StringVar(&o.dial, "dial", "", "address, host:port, of a manager that capstand dials instead of listening: the manager's --host-listen-address as this host reaches it")
	f.StringVar(&o.failureDomain, "failure-domain", "", "failure domain of the host (default: that of an existing CapstanHost, otherwise that of the token, or the name)")
	f.StringVar(&o.dir, "dir", o.unitDir, "folder for the certificates: the folder tls in capstand's --root; with systemd, only the default, which capstand.service uses")
	f.DurationVar(&timeout, "timeout", 2*time.Minute, "time limit; 0 for none")
	c.MarkFlagsMutuallyExclusive("token", "token-file")
	c.MarkFlagsMutuallyExclusive("dial", "address")
	c.MarkFlagsMutuallyExclusive("dial", "listen")
	c.MarkFlagsOneRequired("token", "token-file")
	return c
}

// join lets this host join. Each step can be repeated after a crash: the key stays the same, and a token admits the same key
// again.
func (a *app) join(ctx context.Context, o joinOptions) error {
	if os.Geteuid() != 0 {
		return embedded.ErrNotRoot
	}
	t, err := o.readToken()
	if err != nil {
		return err
	}
	claims, err := t.Claims()
	if err != nil {
		return coded{err, exitUsage}
	}
	request, err := o.request()
	if err != nil {
		return coded{err, exitUsage}
	}
	if err := o.checkUnit(ctx); err != nil { // before the token is used
		return err
	}
	want := joined{Server: o.server, TokenID: claims.ID, Request: request}
	done, err := o.alreadyJoined(want, time.Now())
	if err != nil {
		return err
	}
	if !done {
		if expiry := time.Unix(claims.Expiry, 0); time.Now().After(expiry) {
			return fmt.Errorf("the token expired on %s, and the clock of this host shows %s: correct the clock if it is wrong, or create another token with `capstan host token create`",
				expiry.UTC().Format(time.RFC3339), time.Now().UTC().Format(time.RFC3339))
		}
		if err := a.certify(ctx, o, t, want); err != nil {
			return err
		}
	}
	return a.startJoined(ctx, o, request)
}

// checkUnit returns an error if capstand.service, which this join would configure and start, does not exist, or has other options or
// another folder.
func (o joinOptions) checkUnit(ctx context.Context) error {
	if !atomicfile.Exists(o.systemd) {
		return nil
	}
	if filepath.Clean(o.dir) != o.unitDir {
		return coded{fmt.Errorf("expected --dir %s, the folder of %s, which this command starts, found %s", o.unitDir, capstandUnit, o.dir), exitUsage}
	}
	state, err := unitState(ctx)
	if err != nil {
		return err
	}
	if state != "loaded" {
		return fmt.Errorf("expected the unit %s with the load state loaded, found %s: if it is not-found, install the package capstan, or the unit of the archive; if it is masked, run `systemctl unmask %s`. Then run the command again", capstandUnit, state, capstandUnit)
	}
	return checkDefaults(o.dir, o.defaults, o.unitOptions())
}

// readToken returns the token of the flags.
func (o joinOptions) readToken() (joining.Token, error) {
	text := o.token
	if o.tokenFile != "" {
		name := o.tokenFile
		if name == "-" {
			name = "/dev/stdin"
		}
		data, err := os.ReadFile(name)
		if err != nil {
			return joining.Token{}, missingFile(fmt.Errorf("expected a file with the token: %w", err))
		}
		text = string(data)
	}
	t, err := joining.ParseToken(text)
	if err != nil {
		err = coded{err, exitUsage}
	}
	return t, err
}

// request returns the properties of this host.
func (o joinOptions) request() (joining.Request, error) {
	u, err := url.Parse(o.server)
	if err != nil || u.Scheme != "https" || u.Hostname() == "" {
		return joining.Request{}, fmt.Errorf("expected PLANE as https://host:port, found %q", o.server)
	}
	listen, port, err := net.SplitHostPort(o.listen)
	if err != nil {
		return joining.Request{}, fmt.Errorf("expected --listen host:port, found %q", o.listen)
	}
	own, err := ownAddress(net.JoinHostPort(u.Hostname(), cmp.Or(u.Port(), "443")))
	at := reachable(listen, own)
	if o.address == "" && o.dial == "" && !at.IsValid() {
		return joining.Request{}, fmt.Errorf("expected a route to %s: %w; set --address", o.server, err)
	}
	address, tunnelSet := cmp.Or(o.address, net.JoinHostPort(at.String(), port)), o.tunnel != ""
	if o.dial != "" {
		// The hosts outside of its network do not reach its own address.
		address, o.tunnel = "", cmp.Or(o.tunnel, joining.NoTunnel)
		if _, _, err := net.SplitHostPort(o.dial); err != nil {
			return joining.Request{}, fmt.Errorf("expected --dial host:port, found %q", o.dial)
		}
	}
	r := joining.Request{
		Name: o.name, Address: address, Dials: o.dial != "", FailureDomain: o.failureDomain,
		BoxID: joining.BoxID(o.boxFolder), TunnelAddress: joining.Tunnel(o.tunnel, own), TunnelSet: tunnelSet, Version: version.Version,
		ProtocolVersion: hostpb.ProtocolVersion, MinimumManagerVersion: hostpb.MinimumManagerVersion,
	}
	return r, r.Check()
}

// reachable returns the IP address at which other boxes reach a capstand that listens on a host: this one if it is an address of
// the network, otherwise the own address of the box.
func reachable(listen string, own netip.Addr) netip.Addr {
	if ip, err := netip.ParseAddr(listen); err == nil && ip.IsGlobalUnicast() {
		return ip
	}
	return own
}

// ownAddress returns the address of this box for its connections to a server.
func ownAddress(server string) (netip.Addr, error) {
	conn, err := net.Dial("udp", server) // It sends nothing: it only shows the route.
	if err != nil {
		return netip.Addr{}, err
	}
	defer conn.Close()
	own, err := netip.ParseAddrPort(conn.LocalAddr().String())
	return own.Addr(), err
}

// alreadyJoined reports whether the host has the certificate of this join. A host with other certificates is an error.
func (o joinOptions) alreadyJoined(want joined, now time.Time) (bool, error) {
	if atomicfile.Exists(filepath.Join(o.dir, "ca.key")) {
		return false, fmt.Errorf("expected a host without credentials in %s, found those of `capstan host credentials`: a management cluster uses this host already. To join instead, delete its CapstanHost, and remove the folder", o.dir)
	}
	have, err := readJoinRecord(o.dir)
	if err != nil || have == nil || have.Unfinished {
		return false, err
	}
	// A management cluster can have got another URL: it knows whether this is its host.
	if have.Server != want.Server && have.Request.Name != want.Request.Name {
		return false, fmt.Errorf("expected a host that has not joined, found CapstanHost %s of %s: if PLANE is its new URL, set --name %s; otherwise leave that management cluster first with `capstan host leave`",
			have.Request.Name, have.Server, have.Request.Name)
	}
	made, err := pki.ReadCert(credentials.In(o.dir).Cert)
	return err == nil && have.joined == want && pki.ValidAt(made, now), nil
}

// certify gets the certificate of the host's key, and stores it.
func (a *app) certify(ctx context.Context, o joinOptions, t joining.Token, want joined) error {
	if err := errors.Join(os.MkdirAll(filepath.Dir(o.dir), 0o711), os.MkdirAll(o.dir, 0o700), os.Chmod(o.dir, 0o700)); err != nil {
		return err
	}
	if err := beginJoin(o.dir, want); err != nil {
		return err
	}
	files := credentials.In(o.dir)
	key, err := certfiles.EnsureKey(files.Key)
	if err != nil {
		return err
	}
	a.step("The key of this host is in %s", files.Key)
	host, err := want.Request.Host()
	if err != nil {
		return err
	}
	leaf := pki.Leaf{CommonName: want.Request.Name}.For(host)
	der, err := pki.NewRequest(leaf, key)
	if err != nil {
		return err
	}
	properties := want.Request
	if properties.Returns, err = joinedElsewhere(o.dir, o.server); err != nil {
		return err
	}
	chain, err := a.request(ctx, o.server, t, properties, pki.EncodeRequest(der))
	if err != nil {
		return err
	}
	made, authority, err := splitChain(chain)
	if err != nil {
		return err
	}
	if !pki.HasKey(made, key) {
		return errors.New("expected a certificate for the key of this host, found one for another key: check PLANE")
	}
	if err := errors.Join(certfiles.WriteFile(files.ClientCA, pki.EncodeCert(authority)), certfiles.WriteFile(files.Cert, pki.EncodeCert(made))); err != nil {
		return err
	}
	a.step("The certificate is in %s, valid until %s", files.Cert, made.NotAfter.UTC().Format(time.RFC3339))
	return finishJoin(o.dir, want)
}

// splitChain returns the certificate of a host and that of its authority, after a check of the signature.
func splitChain(data []byte) (leaf, authority *x509.Certificate, err error) {
	chain, err := cert.ParseCertsPEM(data)
	if err != nil || len(chain) != 2 {
		return nil, nil, fmt.Errorf("expected the certificates of this host and of its authority, found %d: the signer is not of Capstan's infrastructure provider", len(chain))
	}
	if err := chain[0].CheckSignatureFrom(chain[1]); err != nil {
		return nil, nil, err
	}
	return chain[0], chain[1], nil
}

// request creates the CertificateSigningRequest, and waits for the certificate of the host and that of its authority.
func (a *app) request(ctx context.Context, server string, t joining.Token, r joining.Request, request []byte) ([]byte, error) {
	api, err := certificatesclient.NewForConfig(&rest.Config{
		Host: server, BearerToken: t.Bearer, TLSClientConfig: rest.TLSClientConfig{CAData: t.CA}, Timeout: 30 * time.Second,
	})
	if err != nil {
		return nil, err
	}
	csr, err := api.CertificateSigningRequests().Create(ctx, &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "capstan-host-", Annotations: map[string]string{infrav1.HostJoinAnnotation: r.Encode()}},
		Spec: certificatesv1.CertificateSigningRequestSpec{
			Request: request, SignerName: infrav1.HostSignerName,
			Usages: []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageServerAuth},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		return nil, refusedBy(server, t.CA, err)
	}
	a.step("The management cluster has the certificate request %s", csr.Name)
	for name := csr.Name; ; {
		for _, c := range csr.Status.Conditions {
			if c.Type == certificatesv1.CertificateDenied || c.Type == certificatesv1.CertificateFailed {
				return nil, fmt.Errorf("the management cluster refused this host: %s", c.Message)
			}
		}
		if len(csr.Status.Certificate) > 0 {
			return csr.Status.Certificate, nil
		}
		// The token may read requests and not watch them: a watch would show those of other hosts.
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("no decision about the certificate request %s: check that the infrastructure provider runs, and run the command again: %w", name, context.Cause(ctx))
		case <-time.After(300 * time.Millisecond):
		}
		if csr, err = api.CertificateSigningRequests().Get(ctx, name, metav1.GetOptions{}); err != nil {
			return nil, refusedBy(server, t.CA, err)
		}
	}
}

// refusedBy explains an error of the management API. ca are the authorities of the token.
func refusedBy(server string, ca []byte, err error) error {
	var untrusted *tls.CertificateVerificationError
	var invalid x509.CertificateInvalidError
	var misnamed x509.HostnameError
	switch {
	case apierrors.IsUnauthorized(err):
		return fmt.Errorf("the management API at %s does not accept the token: it has expired or was revoked, or is of another management cluster. Create another one with `capstan host token create`", server)
	case !errors.As(err, &untrusted):
		return err
	case !issuedBy(ca, untrusted.UnverifiedCertificates): // An impostor can show any name and time.
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired:
		return fmt.Errorf("the certificate of the management API at %s is valid from %s to %s, and the clock of this host shows %s: correct the clock if it is wrong, or renew the certificate",
			server, invalid.Cert.NotBefore.UTC().Format(time.RFC3339), invalid.Cert.NotAfter.UTC().Format(time.RFC3339), time.Now().UTC().Format(time.RFC3339))
	case errors.As(err, &misnamed):
		names := misnamed.Certificate.DNSNames
		for _, ip := range misnamed.Certificate.IPAddresses {
			names = append(names, ip.String())
		}
		return fmt.Errorf("expected a certificate of the management API for %s, found one for %s: use one of these names in PLANE", misnamed.Host, strings.Join(names, ", "))
	}
	return fmt.Errorf("the server at %s is not the management API of the token: %w", server, err)
}

// issuedBy reports whether the authorities have issued the certificate of a server, for any time and name. Without authorities, those of
// the host's system count.
func issuedBy(ca []byte, chain []*x509.Certificate) bool {
	options := x509.VerifyOptions{Intermediates: x509.NewCertPool(), CurrentTime: chain[0].NotBefore}
	for _, c := range chain[1:] {
		options.Intermediates.AddCert(c)
	}
	var err error
	if len(ca) > 0 {
		options.Roots, err = cert.NewPoolFromBytes(ca)
	}
	if err == nil {
		_, err = chain[0].Verify(options)
	}
	return err == nil
}

// unitOptions are the options of capstand for the join.
func (o joinOptions) unitOptions() []option {
	if o.dial != "" {
		return []option{{"--dial", o.dial}, {"--name", o.name}}
	}
	return []option{{"--listen", o.listen}, {"--name", o.name}}
}

// startJoined configures capstand and starts it, if systemd runs.
func (a *app) startJoined(ctx context.Context, o joinOptions, r joining.Request) error {
	where := "address " + r.Address
	if r.Dials {
		where = "and dials " + o.dial
	}
	next := fmt.Sprintf("This host has joined %s as CapstanHost %s, %s.", o.server, r.Name, where)
	if !atomicfile.Exists(o.systemd) {
		assets, err := a.assetsDir()
		if err != nil {
			return err
		}
		_, err = fmt.Fprintf(a.out, "%s\nsystemd does not run here. Start capstand:\n%s --assets %s --root %s %s\n", next, assets.Capstand(), assets.Dir, filepath.Dir(o.dir), strings.Join(arguments(o.unitOptions()), " "))
		return err
	}
	if err := configure(o.dir, o.defaults, o.unitOptions()); err != nil {
		return err
	}
	for _, verb := range []string{"enable", "restart"} {
		if _, err := systemctl(ctx, verb); err != nil {
			return fmt.Errorf("%w; remove the cause, and run the command again", err)
		}
	}
	if err := awaitUnit(ctx, o.unitSocket); err != nil {
		return err
	}
	_, err := fmt.Fprintf(a.out, "%s\ncapstand.service runs. Check the connection in the management cluster: kubectl get capstanhost %s\n", next, r.Name)
	return err
}

// awaitUnit waits until capstand answers at its socket: systemd reports a unit as started before capstand has read its options.
func awaitUnit(ctx context.Context, socket string) error {
	conn, err := embedded.DialHost(socket)
	if err != nil {
		return err
	}
	defer conn.Close()
	if _, err := hostpb.NewHostClient(conn).ListMachines(ctx, &hostpb.ListMachinesRequest{}, grpc.WaitForReady(true)); err != nil {
		return fmt.Errorf("expected an answer from %s at %s, found none: read the cause with `journalctl -u capstand`, remove it, and run the command again: %w", capstandUnit, socket, cmp.Or(context.Cause(ctx), err))
	}
	return nil
}

const (
	// systemdFolder exists if systemd runs: see sd_booted(3).
	systemdFolder = "/run/systemd/system"
	// capstandUnit is the unit of the package, which a join enables and starts.
	capstandUnit = "capstand.service"
)

// systemctl calls the service manager for the unit of capstand.
func systemctl(ctx context.Context, args ...string) (string, error) {
	args = append(args, capstandUnit)
	out, err := exec.CommandContext(ctx, "systemctl", args...).CombinedOutput()
	text := strings.TrimSpace(string(out))
	if err != nil {
		return "", fmt.Errorf("systemctl %s: %w: %s", strings.Join(args, " "), err, text)
	}
	return text, nil
}

// unitState returns the load state of the unit, for example loaded, masked, or not-found.
func unitState(ctx context.Context) (string, error) {
	return systemctl(ctx, "show", "--property=LoadState", "--value")
}
