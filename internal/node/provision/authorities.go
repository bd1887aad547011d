package provision

import (
	"bytes"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"

	certificatesv1 "k8s.io/api/certificates/v1"
	"k8s.io/client-go/util/cert"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/node/initapi"
	"capstan.dev/capstan/internal/node/kube"
	"capstan.dev/capstan/internal/node/nodeconfig"
	"capstan.dev/capstan/internal/pki/certfiles"
)

const (
	// KubeletServing is the file with the kubelet's certificate for its clients, and the key.
	KubeletServing = kubeletPKIDir + "/kubelet-server-current.pem"
	// restarted is the record of this machine's restarts.
	restarted restartRecord = "/etc/capstan/authorities.pem"
)

// restartRecord is a file with the authorities that the services were last restarted with. Without it, a restart is due.
type restartRecord string

// require makes a restart due, before a certificate is replaced that services read only at their start: an agent that is killed after the
// replacement finds a certificate that needs no renewal.
func (r restartRecord) require() error { return atomicfile.Remove(string(r)) }

// due returns whether services have other authorities than the trusted ones, or an earlier certificate.
func (r restartRecord) due(trusted []byte) (bool, error) {
	applied, err := os.ReadFile(string(r))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return false, err
	}
	return !bytes.Equal(applied, trusted), nil
}

func (r restartRecord) done(trusted []byte) error { return certfiles.WriteFile(string(r), trusted) }

// Authorities makes a machine trust the certificate authorities in the annotations of its Node (docs/certificates.md).
// A worker replaces the authorities that it trusts. A control plane machine gets its files with the bootstrap data and
// is replaced when the authorities change. Here, only the certificates of its kubelet are renewed, because another
// machine's controller manager may have signed them.
type Authorities struct {
	Config   *nodeconfig.NodeConfiguration
	NodeName string
	Init     *initapi.Client
	Log      *slog.Logger
}

// AuthoritiesReport is the machine's report: the authorities that it trusts, and the authority that signed its kubelet's
// certificates.
type AuthoritiesReport struct {
	Trusted []string
	Kubelet string
}

// errElsewhere reports that the control plane machine has other authorities and is being replaced.
var errElsewhere = errors.New("this control plane machine has outdated certificate authorities and must be replaced")

// Challenge returns the challenge that the control plane provider must sign for this machine.
func (a *Authorities) Challenge() (string, error) { return machineTrust.challenge() }

// Follow applies the bundle if an authority that the machine trusts has signed it. It can be repeated at any time and
// skips completed steps.
func (a *Authorities) Follow(ctx context.Context, bundle []byte, signature string) (AuthoritiesReport, error) {
	if err := a.takeOver(bundle, signature); err != nil {
		return AuthoritiesReport{}, err
	}
	trusted, err := os.ReadFile(caFile) // The content is the same, but written by this machine.
	if err != nil {
		return AuthoritiesReport{}, err
	}
	authorities, err := cert.ParseCertsPEM(trusted)
	if err != nil {
		return AuthoritiesReport{}, fmt.Errorf("%s: %w", caFile, err)
	}
	if err := a.renewAll(ctx, authorities[0]); err != nil {
		return AuthoritiesReport{}, err
	}
	if err := a.restart(ctx, trusted); err != nil {
		return AuthoritiesReport{}, err
	}
	report := AuthoritiesReport{}
	for _, c := range authorities {
		report.Trusted = append(report.Trusted, nodeconfig.Fingerprint(c.Raw))
	}
	for _, path := range []string{kubeletCurrent, KubeletServing} {
		if !signedBy(path, authorities[0]) {
			return report, fmt.Errorf("%s is not signed by the certificate authority that signs", path)
		}
	}
	report.Kubelet = report.Trusted[0]
	return report, nil
}

// takeOver writes the bundle as the trusted authorities of a worker.
func (a *Authorities) takeOver(bundle []byte, signature string) error {
	if has, err := machineTrust.has(bundle); err != nil || has {
		return err
	}
	if a.Config.Role != nodeconfig.RoleWorker {
		return errElsewhere
	}
	return machineTrust.change(bundle, signature)
}

// signedBy returns whether an authority has signed the certificate in a file.
func signedBy(path string, authority *x509.Certificate) bool {
	certs, err := cert.CertsFromFile(path)
	return err == nil && certs[0].CheckSignatureFrom(authority) == nil
}

// renewAll renews the certificates that another authority has signed.
func (a *Authorities) renewAll(ctx context.Context, authority *x509.Certificate) error {
	for _, renew := range []func(context.Context, *x509.Certificate) error{a.renewKubeletClient, a.renewKubeletServing, a.renewClients} {
		if err := renew(ctx, authority); err != nil {
			return err
		}
	}
	return nil
}

func (a *Authorities) renewKubeletClient(ctx context.Context, authority *x509.Certificate) error {
	return a.renewKubelet(ctx, authority, "kubelet-client", kube.Request{Signer: certificatesv1.KubeAPIServerClientKubeletSignerName})
}

// renewKubeletServing requests the names and addresses of the kubelet's own request.
func (a *Authorities) renewKubeletServing(ctx context.Context, authority *x509.Certificate) error {
	certs, err := cert.CertsFromFile(KubeletServing)
	if errors.Is(err, fs.ErrNotExist) {
		return errors.New("the kubelet has no serving certificate yet")
	}
	if err != nil {
		return err
	}
	return a.renewKubelet(ctx, authority, "kubelet-server", kube.Request{Signer: certificatesv1.KubeletServingSignerName, DNSNames: certs[0].DNSNames, IPs: certs[0].IPAddresses})
}

// renewKubelet renews a certificate of the kubelet with the kubelet's own credential, and stores it where the kubelet
// reads it at its start. The kubelet itself would wait until shortly before the old one expires.
func (a *Authorities) renewKubelet(ctx context.Context, authority *x509.Certificate, name string, r kube.Request) error {
	pair := kubeletPair{dir: kubeletPKIDir, name: name}
	if signedBy(pair.current(), authority) {
		return pair.forgetKey()
	}
	client, err := kube.NewClient(nodeconfig.KubeletKubeconfig)
	if err != nil {
		return err
	}
	r.Name, r.KeyFile = requestPrefix("capstan-"+name, authority), pair.nextKey()
	r.CommonName, r.Organization = nodeconfig.NodeUserPrefix+a.NodeName, []string{nodeconfig.NodesGroup}
	certificate, err := kube.RequestCertificate(ctx, client, r)
	if err != nil {
		return err
	}
	if issued, err := cert.ParseCertsPEM(certificate); err != nil || issued[0].CheckSignatureFrom(authority) != nil {
		return fmt.Errorf("the certificate authority that signed differs from the one in the annotation %s of this Node", nodeconfig.AuthoritiesAnnotation)
	}
	if err := pair.replace(certificate, restarted); err != nil {
		return err
	}
	a.Log.Info("Certificate of another authority replaced", "certificate", name)
	return pair.forgetKey()
}

// requestPrefix distinguishes requests for the same key under different authorities.
func requestPrefix(name string, authority *x509.Certificate) string {
	return name + "-" + nodeconfig.Fingerprint(authority.Raw)
}

// renewClients renews the certificates of kube-proxy and the node agent on a worker. A control plane machine signs its own.
func (a *Authorities) renewClients(ctx context.Context, authority *x509.Certificate) error {
	if a.Config.Role != nodeconfig.RoleWorker {
		return nil
	}
	for _, request := range clientRequests(a.Config, a.NodeName) {
		if signedBy(request.CertFile, authority) {
			continue
		}
		if err := restarted.require(); err != nil {
			return err
		}
		request.Request.Name = requestPrefix(request.Request.Name, authority)
		if err := request.renew(ctx); err != nil {
			return err
		}
		a.Log.Info("Certificate of another authority replaced", "user", request.CommonName)
	}
	return nil
}

func (a *Authorities) waitReady(ctx context.Context, service string) error {
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	return a.Init.WaitReady(ctx, service)
}

// restart restarts the services that read their authorities or certificates only at their start, and this agent last. Pods
// continue, and get the new authorities in their volumes when the kubelet starts.
func (a *Authorities) restart(ctx context.Context, trusted []byte) error {
	if due, err := restarted.due(trusted); err != nil || !due {
		return err
	}
	services := []string{"kubelet"}
	if a.Config.Role == nodeconfig.RoleWorker && a.Config.Network.KubeProxy == nodeconfig.KubeProxyNFTables {
		services = append(services, "kube-proxy")
	}
	for _, service := range services {
		if err := a.Init.Service(ctx, service, "restart"); err != nil {
			return err
		}
		if err := a.waitReady(ctx, service); err != nil {
			return err
		}
	}
	if err := restarted.done(trusted); err != nil {
		return err
	}
	if a.Config.Role != nodeconfig.RoleWorker {
		return nil
	}
	a.Log.Info("Certificate authorities changed: the agent restarts")
	if err := a.Init.Service(ctx, "node-agent", "restart"); err != nil {
		return err
	}
	<-ctx.Done() // PID 1 ends this process.
	return ctx.Err()
}
