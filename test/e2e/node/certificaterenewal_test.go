//go:build e2e

package node

import (
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/util/cert"
	"k8s.io/client-go/util/keyutil"

	"capstan.dev/capstan/internal/node/nodeconfig"
	"capstan.dev/capstan/internal/pki"
	"capstan.dev/capstan/internal/pki/certfiles"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/test/e2e/harness"
)

// shortLife is the lifetime of the certificates to be renewed. Two thirds of it are already over, and the test ends long
// before the rest is over.
const shortLife = 10 * time.Minute

// fullLife is less than the remaining lifetime of a new certificate.
const fullLife = 360 * 24 * time.Hour

// testRenewal: certificates are renewed in place before they expire. All servers serve the new certificates without a
// restart. No old certificate is left on the disk. All components still work.
func testRenewal(t *testing.T, p *plane) {
	h := p.hosts["c"].with(t)
	before := h.until("ready", time.Minute, allReady)
	writer := p.other(t, "c").startWriter()
	dying := h.shortenCertificates()
	for _, port := range []string{"6443", "2379", "2380"} {
		harness.Wait(t, "port "+port+" serves the old certificate", time.Minute, func() error {
			if served := h.servedUntil(port); !served.Equal(dying) {
				return fmt.Errorf("port %s serves a certificate until %s, want %s", port, served, dying)
			}
			return nil
		})
	}
	_, err := h.exec("/opt/capstan/capstan-init", "service", "restart", "node-agent")
	expect.NoError(t, err)
	for _, port := range []string{"6443", "2379", "2380"} {
		harness.Wait(t, "port "+port+" serves a new certificate", time.Minute, func() error {
			if served := h.servedUntil(port); time.Until(served) < fullLife {
				return fmt.Errorf("port %s serves a certificate until %s", port, served)
			}
			return nil
		})
	}
	harness.Wait(t, "each certificate file is new", time.Minute, func() error {
		return h.eachLeaf(func(path, _ string) error {
			certs, err := cert.CertsFromFile(path)
			if err == nil && time.Until(certs[0].NotAfter) < fullLife {
				err = fmt.Errorf("%s expires %s", path, certs[0].NotAfter)
			}
			return err
		})
	})
	if left := time.Until(dying); left <= 0 {
		t.Errorf("renewed %s after the old ones expired", -left)
	}
	harness.Wait(t, "the EtcdMember reports the new certificates", time.Minute, func() error {
		members, err := h.etcdMembers()
		if err != nil {
			return err
		}
		if at := members["c"].Status.CertificatesExpire; at == nil || time.Until(at.Time) < fullLife {
			return fmt.Errorf("the EtcdMember's certificates expire %v", at)
		}
		return nil
	})
	p.other(t, "").untilMembers(time.Minute, p.names()...)
	h.mustKubectl("get", "nodes")
	writer.finish(t)
	after := h.until("ready", time.Minute, allReady)
	for _, service := range before.Services {
		if now := find(after, service.Name); now.PID != service.PID && service.Name != "node-agent" {
			t.Errorf("%s was restarted", service.Name)
		}
	}
	p.componentsWork(t, "c")
}

// componentsWork checks that the controller manager and the scheduler of a machine work, and that its API server reaches
// the kubelet. Each uses its own client certificate. The test stops the components of the other machines meanwhile,
// because only leaders work.
func (p *plane) componentsWork(t *testing.T, name string) {
	h := p.hosts[name].with(t)
	leaders := []string{"kube-controller-manager", "kube-scheduler"}
	for other := range p.hosts {
		for _, service := range leaders {
			if other != name {
				_, err := p.hosts[other].exec("/opt/capstan/capstan-init", "service", "stop", service)
				expect.NoError(t, err)
				t.Cleanup(func() {
					_, err := p.hosts[other].exec("/opt/capstan/capstan-init", "service", "start", service)
					expect.NoError(t, err)
				})
			}
		}
	}
	for _, service := range leaders {
		harness.Wait(t, service+" of "+name+" leads", time.Minute, func() error {
			holder, err := h.kubectl("get", "lease", "-n", "kube-system", service, "-o", "jsonpath={.spec.holderIdentity}")
			if err == nil && !strings.HasPrefix(holder, name+"_") {
				err = fmt.Errorf("%s is the leader", holder)
			}
			return err
		})
	}
	h.mustKubectl("create", "namespace", "renewed")
	harness.Wait(t, "the service account of the namespace", time.Minute, func() error {
		_, err := h.kubectl("get", "serviceaccount", "-n", "renewed", "default")
		return err
	})
	h.apply(`apiVersion: v1
kind: Pod
metadata: {name: renewed, namespace: renewed}
spec:
  tolerations: [{operator: Exists}]
  terminationGracePeriodSeconds: 0
  containers: [{name: pause, image: "registry.capstan.dev/pause:v1"}]
`)
	harness.Wait(t, "the pod has a Node", time.Minute, func() error {
		node, err := h.kubectl("get", "pod", "-n", "renewed", "renewed", "-o", "jsonpath={.spec.nodeName}")
		if err == nil && node == "" {
			err = errors.New("the pod has no Node")
		}
		return err
	})
	// No controller approves the requests of kubelets in this test.
	harness.Wait(t, "the requests of the kubelets are approved", time.Minute, func() error {
		requests, err := h.kubectl("get", "csr", "-o", "name")
		if err != nil {
			return err
		}
		for _, request := range strings.Fields(requests) {
			if _, err := h.kubectl("certificate", "approve", request); err != nil {
				return err
			}
		}
		_, err = h.kubectl("get", "--raw", "/api/v1/nodes/"+name+"/proxy/healthz")
		return err
	})
	h.mustKubectl("delete", "namespace", "renewed", "--wait=false")
}

// shortenCertificates signs all leaf certificates of the machine again, so that their renewal is due.
func (h *host) shortenCertificates() time.Time {
	h.t.Helper()
	until := time.Now().Add(shortLife).UTC().Truncate(time.Second)
	expect.NoError(h.t, h.eachLeaf(func(path, authority string) error { return resign(path, authority, until) }))
	return until
}

// eachLeaf calls do with the file of each leaf certificate of the machine, and with the file of its authority without
// the extension.
func (h *host) eachLeaf(do func(path, authority string) error) error {
	dir := filepath.Join(h.root, nodeconfig.PKIDir)
	return filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := entry.Name()
		if entry.IsDir() || !strings.HasSuffix(name, ".crt") || strings.HasSuffix(name, "ca.crt") {
			return nil
		}
		authority := "ca"
		switch {
		case strings.Contains(path, "/etcd/"), name == "apiserver-etcd-client.crt":
			authority = "etcd/ca"
		case strings.HasPrefix(name, "front-proxy"):
			authority = "front-proxy-ca"
		}
		return do(path, filepath.Join(dir, authority))
	})
}

func resign(path, authority string, until time.Time) error {
	old, err := cert.CertsFromFile(path)
	if err != nil {
		return err
	}
	ca, err := cert.CertsFromFile(authority + ".crt")
	if err != nil {
		return err
	}
	data, err := os.ReadFile(authority + ".key")
	if err != nil {
		return err
	}
	key, err := keyutil.ParsePrivateKeyPEM(data)
	if err != nil {
		return err
	}
	template := *old[0]
	template.NotBefore, template.NotAfter = time.Now().Add(-time.Hour), until
	if template.SerialNumber, err = rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 100)); err != nil {
		return err
	}
	der, err := x509.CreateCertificate(rand.Reader, &template, ca[0], old[0].PublicKey, key)
	if err != nil {
		return err
	}
	made, err := x509.ParseCertificate(der)
	if err != nil {
		return err
	}
	return certfiles.WriteFile(path, pki.EncodeCert(made))
}

// servedUntil returns the end of the certificate that a server of the machine presents.
func (h *host) servedUntil(port string) time.Time {
	h.t.Helper()
	var conn net.Conn
	var err error
	h.inside(h.bridge, func() { conn, err = net.DialTimeout("tcp", h.ip+":"+port, 5*time.Second) })
	expect.NoError(h.t, err)
	defer conn.Close()
	client := tls.Client(conn, &tls.Config{InsecureSkipVerify: true}) // The test only reads the certificate. etcd requires a client certificate before it presents its own.
	_ = client.SetDeadline(time.Now().Add(5 * time.Second))
	_ = client.Handshake()
	certs := client.ConnectionState().PeerCertificates
	if len(certs) == 0 {
		return time.Time{}
	}
	return certs[0].NotAfter
}
