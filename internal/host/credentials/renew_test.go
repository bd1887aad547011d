package credentials_test

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"k8s.io/client-go/util/cert"

	"capstan.dev/capstan/internal/host/credentials"
	"capstan.dev/capstan/internal/host/hostpb"
)

// The host renews its certificate after two thirds of its lifetime. The new one has the same names and the same lifetime.
func TestServerRenews(t *testing.T) {
	dir := t.TempDir()
	made := time.Now()
	issue(t, dir, 30*time.Hour, made, "127.0.0.1", "rack-1.example.org")
	server := credentials.In(dir)
	read := func() (names string, until time.Time) {
		t.Helper()
		certs, err := cert.CertsFromFile(server.Cert)
		if err != nil {
			t.Fatal(err)
		}
		return strings.Join(certs[0].DNSNames, ",") + "," + certs[0].IPAddresses[0].String(), certs[0].NotAfter
	}
	_, first := read()
	for _, c := range []struct{ at, until time.Duration }{{19 * time.Hour, 30 * time.Hour}, {21 * time.Hour, 51 * time.Hour}, {200 * time.Hour, 230 * time.Hour}} {
		next, err := server.Renew(made.Add(c.at))
		if err != nil {
			t.Fatal(err)
		}
		names, until := read()
		if names != "rack-1.example.org,127.0.0.1" || until.Sub(first.Add(c.until-30*time.Hour)).Abs() > time.Second || !next.Before(until) {
			t.Errorf("after %s: certificate for %s until %s, next check %s", c.at, names, until, next)
		}
	}
	if err := os.Remove(filepath.Join(dir, "ca.key")); err != nil {
		t.Fatal(err)
	}
	if _, err := server.Renew(made.Add(1000 * time.Hour)); err == nil || !strings.Contains(err.Error(), "ca.key") {
		t.Errorf("without the authority's key: %v", err)
	}
	if next, err := server.Renew(made); err != nil || !next.After(made) {
		t.Errorf("without the authority's key, and not due: %s, %v", next, err)
	}
	server.Cert = filepath.Join(t.TempDir(), "own.crt")
	if _, err := server.Renew(made); err == nil {
		t.Error("a certificate of the user was renewed")
	}
}

// The host ignores the name in a client's request. The new certificate has a manager's name, another key and the lifetime of
// the current one. It is accepted. A caller without a certificate gets none.
func TestClientRenews(t *testing.T) {
	dir := t.TempDir()
	client := issue(t, dir, 2*time.Hour, time.Now().Add(-90*time.Minute), "127.0.0.1")
	files := credentials.In(dir)
	service := &credentials.Service{Server: files}
	dial := func(authenticate bool, use grpc.DialOption) hostpb.CredentialsClient {
		t.Helper()
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		transport := insecure.NewCredentials()
		if authenticate {
			transport = credentials.Handshaken()
			if l, err = files.Listen(l, func(err error) { t.Error(err) }); err != nil {
				t.Fatal(err)
			}
		}
		server := grpc.NewServer(grpc.Creds(transport))
		hostpb.RegisterCredentialsServer(server, service)
		go func() { _ = server.Serve(l) }()
		t.Cleanup(server.Stop)
		conn, err := grpc.NewClient(l.Addr().String(), use)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close() })
		return hostpb.NewCredentialsClient(conn)
	}
	own, err := client.Transport(time.Now(), nil)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	host := dial(true, grpc.WithTransportCredentials(own))
	renewed, err := client.Renew(ctx, host)
	if err != nil {
		t.Fatal(err)
	}
	made := renewed.Certificate()
	if left := time.Until(made.NotAfter); made.Subject.CommonName != credentials.ClientName || left < 119*time.Minute || left > 2*time.Hour {
		t.Errorf("%s for %s", made.Subject.CommonName, left)
	}
	again, err := renewed.Transport(time.Now(), nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := renewed.Renew(ctx, dial(true, grpc.WithTransportCredentials(again))); err != nil {
		t.Errorf("the renewed certificate does not work: %v", err)
	}
	if _, err := host.RenewClient(ctx, &hostpb.RenewClientRequest{Request: []byte("x")}); status.Code(err) != codes.InvalidArgument {
		t.Errorf("garbage: %v", err)
	}
	socket := dial(false, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if _, err := client.Renew(ctx, socket); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("without TLS: %v", err)
	}
	if err := os.Remove(filepath.Join(dir, "ca.key")); err != nil {
		t.Fatal(err)
	}
	if _, err := client.Renew(ctx, host); status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "make new credentials") {
		t.Errorf("without the authority's key: %v", err)
	}
}
