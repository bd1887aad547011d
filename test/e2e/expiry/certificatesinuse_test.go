//go:build e2e && expiry

package expiry

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"capstan.dev/capstan/internal/kubeconfig"
	"capstan.dev/capstan/internal/pki"
	"capstan.dev/capstan/internal/testenv/expect"
)

// inUse contains certificates by the place where they were found.
type inUse map[string]*x509.Certificate

// noneExpired reads the certificates in use from disks, Secrets and sockets. Each leaf is valid and has the short
// lifetime.
func (r *run) noneExpired() {
	t := r.t
	found := inUse{}
	for _, dir := range []string{filepath.Join(plane.Root, "pki"), r.hostDir} {
		expect.NoError(t, found.files(dir))
	}
	disks, err := filepath.Glob(filepath.Join(plane.Root, "hosts/*/machines/*/rootfs"))
	expect.NoError(t, err)
	for _, disk := range disks {
		expect.NoError(t, found.files(filepath.Join(disk, "etc/kubernetes/pki")))
		current, err := filepath.Glob(filepath.Join(disk, "var/lib/kubelet/pki/*-current.pem"))
		expect.NoError(t, err)
		for _, link := range current {
			target, err := os.Readlink(link) // An absolute path is below the machine's root.
			expect.NoError(t, err)
			found.file(filepath.Join(filepath.Dir(link), filepath.Base(target)))
		}
	}
	expect.NoError(t, found.secrets(r))
	found.sockets(r)

	short := 0
	for place, c := range found {
		if c.IsCA {
			continue
		}
		short++
		if !pki.ValidAt(c, time.Now()) {
			t.Errorf("%s: valid from %s until %s", place, c.NotBefore, c.NotAfter)
		}
		if life := c.NotAfter.Sub(c.NotBefore); life > r.life+pki.Backdate+time.Minute {
			t.Errorf("%s: a lifetime of %s, want at most %s", place, life, r.life+pki.Backdate)
		}
	}
	for _, want := range []string{
		"etcd/server.crt", "kube-apiserver/server.crt", "manager/tls.crt", "capi-core-manager/tls.crt", "admin/client.crt", // the plane
		"kubernetes/pki/apiserver.crt", "pki/etcd/peer.crt", "clients/kube-proxy.crt", "clients/node-agent.crt", "kubelet-client-", "kubelet-server-",
		"secret far-credentials", "secret short-kubeconfig", "tls/server.crt", ":10250", ":2379", ":6443",
	} {
		if !slices.ContainsFunc(found.places(), func(place string) bool { return strings.Contains(place, want) }) {
			t.Errorf("found no certificate of %s in %d places: %s", want, len(found), strings.Join(found.places(), "\n"))
		}
	}
	t.Logf("%d leaf certificates in use, %d places", short, len(found))
}

func (u inUse) places() []string {
	var out []string
	for place := range u {
		out = append(out, place)
	}
	slices.Sort(out)
	return out
}

func (u inUse) file(path string) {
	if c, err := pki.ReadCert(path); err == nil {
		u[path] = c
	}
}

func (u inUse) files(dir string) error {
	return filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err == nil && !entry.IsDir() && strings.HasSuffix(path, ".crt") {
			u.file(path)
		}
		return err
	})
}

// secrets reads the Secrets of the management cluster that contain a client certificate.
func (u inUse) secrets(r *run) error {
	list := &corev1.SecretList{}
	if err := plane.Client.List(r.t.Context(), list); err != nil {
		return err
	}
	for _, s := range list.Items {
		for key, value := range s.Data {
			place := "secret " + s.Name + " " + key
			if c, err := pki.ParseCert(value); err == nil {
				u[place] = c
			}
		}
		if value := s.Data["value"]; strings.HasSuffix(s.Name, "-kubeconfig") {
			endpoint, err := r.endpoint()
			if err != nil {
				return err
			}
			config, err := kubeconfig.Load(value, endpoint)
			if err != nil {
				return err
			}
			if u["secret "+s.Name], err = pki.ParseCert(config.CertData); err != nil {
				return err
			}
		}
	}
	return nil
}

func (r *run) endpoint() (clusterv1.APIEndpoint, error) {
	cluster := &clusterv1.Cluster{}
	err := plane.Client.Get(r.t.Context(), client.ObjectKey{Namespace: r.Namespace, Name: r.Name}, cluster)
	return cluster.Spec.ControlPlaneEndpoint, err
}

// sockets reads the certificates of the TCP servers of the plane and the cluster on this host, and of those in machines.
func (u inUse) sockets(r *run) {
	var addresses []string
	for _, m := range r.Machines(r.t) {
		for _, port := range []string{"10250", "2379", "2380", "6443"} {
			addresses = append(addresses, net.JoinHostPort(m.Spec.Network.Addresses[0].Address, port))
		}
	}
	addresses = append(addresses, listening(r)...)
	pool := x509.NewCertPool()
	for _, c := range u {
		if c.IsCA {
			pool.AddCert(c)
		}
	}
	for _, address := range addresses {
		chain := handshake(r.t.Context(), address)
		if len(chain) == 0 {
			continue
		}
		// Only certificates of other authorities are omitted. Expired ones are included.
		inside := chain[0].NotBefore.Add(time.Second)
		if _, err := chain[0].Verify(x509.VerifyOptions{Roots: pool, CurrentTime: inside, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}}); err == nil {
			u[address] = chain[0]
		}
	}
}

// listening returns the TCP ports on 127.0.0.1 and on all addresses that a process serves.
func listening(r *run) []string {
	var out []string
	data, err := os.ReadFile("/proc/net/tcp")
	expect.NoError(r.t, err)
	for line := range strings.Lines(string(data)) {
		fields := strings.Fields(line)
		if len(fields) < 4 || fields[3] != "0A" {
			continue
		}
		address, port, _ := strings.Cut(fields[1], ":")
		if number, err := strconv.ParseUint(port, 16, 16); err == nil && (address == "0100007F" || address == "00000000") {
			out = append(out, net.JoinHostPort("127.0.0.1", strconv.FormatUint(number, 10)))
		}
	}
	return out
}

// handshake returns the certificates that a server presents. The server does so before it refuses a client without a
// certificate.
func handshake(ctx context.Context, address string) []*x509.Certificate {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	var chain []*x509.Certificate
	dialer := tls.Dialer{Config: &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2", "http/1.1"}, VerifyConnection: func(s tls.ConnectionState) error {
		chain = s.PeerCertificates
		return nil
	}}}
	if conn, err := dialer.DialContext(ctx, "tcp", address); err == nil {
		_ = conn.Close()
	}
	return chain
}
