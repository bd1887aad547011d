//go:build linux

package cli

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	certificatesv1 "k8s.io/api/certificates/v1"
	"k8s.io/client-go/kubernetes/scheme"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/embedded"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/joining"
	"capstan.dev/capstan/internal/pki"
	"capstan.dev/capstan/internal/testenv/expect"
)

func TestWithOptions(t *testing.T) {
	options := []option{{"--listen", ":7443"}, {"--name", "a"}}
	for before, want := range map[string]string{
		"":                                "CAPSTAND_OPTIONS=\"--listen :7443 --name a\"\n",
		"# text\nCAPSTAND_OPTIONS=\"\"\n": "# text\nCAPSTAND_OPTIONS=\"--listen :7443 --name a\"\n",
		"CAPSTAND_OPTIONS='--reserve-memory 2Gi'\nX=1\n":            "CAPSTAND_OPTIONS=\"--reserve-memory 2Gi --listen :7443 --name a\"\nX=1\n",
		"CAPSTAND_OPTIONS=\"--listen=:9 --name b\"\n":               "CAPSTAND_OPTIONS=\"--listen=:9 --name b\"\n",
		"CAPSTAND_OPTIONS=\"--listen :7443 --name a\"\n":            "CAPSTAND_OPTIONS=\"--listen :7443 --name a\"\n",
		"#CAPSTAND_OPTIONS=\"--listen :1\"\n":                       "#CAPSTAND_OPTIONS=\"--listen :1\"\nCAPSTAND_OPTIONS=\"--listen :7443 --name a\"\n",
		"CAPSTAND_OPTIONS=\"--listen :9\"\n# --name in a comment\n": "CAPSTAND_OPTIONS=\"--listen :9 --name a\"\n# --name in a comment\n",
		"CAPSTAND_OPTIONS=\"--listen :9 \\\n --na\\\nme b\"\nX=1\n": "CAPSTAND_OPTIONS=\"--listen :9 --name b\"\nX=1\n",
		"CAPSTAND_OPTIONS=--listen=:9 \\":                           "CAPSTAND_OPTIONS=\"--listen=:9 --name a\"\n",
	} {
		got := withOptions(before, options)
		if got != want {
			t.Errorf("%q: got %q, want %q", before, got, want)
		}
		if again := withOptions(got, options); again != got {
			t.Errorf("a second run changes %q to %q", got, again)
		}
	}
}

// The file keeps its permissions, and stays behind a link.
func TestReplaceDefaults(t *testing.T) {
	dir := t.TempDir()
	file, link := filepath.Join(dir, "file"), filepath.Join(dir, "link")
	expect.NoError(t, errors.Join(os.WriteFile(file, nil, 0o600), os.Symlink("file", link)))
	expect.NoError(t, replaceDefaults(link, "", "X=1\n"))
	content, err := os.ReadFile(file)
	expect.NoError(t, err)
	info, err := os.Stat(file)
	expect.NoError(t, err)
	if to, err := os.Readlink(link); string(content) != "X=1\n" || info.Mode() != 0o600 || to != "file" {
		t.Errorf("%q with %s, the link leads to %q: %v", content, info.Mode(), to, err)
	}
	expect.NoError(t, replaceDefaults(filepath.Join(dir, "new"), "", "X=1\n"))
	if info, err = os.Stat(filepath.Join(dir, "new")); err != nil || info.Mode() != 0o644 {
		t.Errorf("a new file: %v, %v", info, err)
	}
}

// The options of the administrator in the file of the unit are not silently preferred to those of a join.
func TestJoinConflictsWithDefaults(t *testing.T) {
	options := []option{{"--listen", ":7443"}, {"--name", "a"}}
	for content, conflict := range map[string]string{
		"": "",
		"CAPSTAND_OPTIONS=\"--reserve-memory 2Gi\"\n":                        "",
		"CAPSTAND_OPTIONS=\"--listen :7443 --name=a\"\n":                     "",
		"CAPSTAND_OPTIONS=\"--listen :9\"\n":                                 "--listen :9",
		"CAPSTAND_OPTIONS=\"--listen=:9\"\n":                                 "--listen :9",
		"CAPSTAND_OPTIONS=\"--listen :7443 --listen :9\"\n":                  "--listen :9",
		"CAPSTAND_OPTIONS=\"--name b --listen\"\n":                           "found --listen : run",
		"CAPSTAND_OPTIONS=\"--name b\"\n":                                    "--name b",
		"CAPSTAND_OPTIONS=\"\"\nCAPSTAND_OPTIONS=\"--listen :9\"\n":          "--listen :9",
		"CAPSTAND_OPTIONS=\"--listen :9\"\nCAPSTAND_OPTIONS=\"--name a\"\n":  "",
		"CAPSTAND_OPTIONS=\"--listen :1111\"\n":                              "", // of the former join
		"CAPSTAND_OPTIONS=\"--listen-backlog 5 --names b\"\n# --listen :9\n": "",
	} {
		dir, path := t.TempDir(), filepath.Join(t.TempDir(), "capstand")
		err := errors.Join(os.WriteFile(path, []byte(content), 0o600), joinRecord{Options: []option{{"--listen", ":1111"}}}.write(dir))
		if err != nil {
			t.Fatal(err)
		}
		for what, err := range map[string]error{"check": checkDefaults(dir, path, options), "configure": configure(dir, path, options)} {
			if (err == nil) != (conflict == "") || err != nil && (!strings.Contains(err.Error(), conflict) || exitCode(err) != exitUsage) {
				t.Errorf("%s with %q: %v", what, content, err)
			}
		}
		if after, err := os.ReadFile(path); err != nil || conflict != "" && string(after) != content {
			t.Errorf("the file with %q: %q, %v", content, after, err)
		}
	}
	if err := checkDefaults(t.TempDir(), filepath.Join(t.TempDir(), "missing"), options); err != nil {
		t.Error(err)
	}
}

// A join with options that the file contradicts does not use its token: no server answers here.
func TestJoinChecksDefaultsFirst(t *testing.T) {
	newJoinedBox(t) // for its systemctl
	dir := t.TempDir()
	defaults := filepath.Join(dir, "capstand")
	if err := os.WriteFile(defaults, []byte("CAPSTAND_OPTIONS=\"--listen :9\"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	token := joining.Token{Bearer: "h." + base64.RawURLEncoding.EncodeToString([]byte(`{"jti":"t"}`)) + ".s"}
	o := joinOptions{
		server: "https://127.0.0.1:1", token: token.String(), name: "a", address: "10.0.0.5:9", listen: ":7443", tunnel: joining.NoTunnel,
		dir: filepath.Join(dir, "tls"), boxFolder: dir, defaults: defaults, unitDir: filepath.Join(dir, "tls"), systemd: dir,
	}
	if err := (&app{}).join(t.Context(), o); err == nil || !strings.Contains(err.Error(), "found --listen :9") {
		t.Error(err)
	}
	o.unitDir = filepath.Join(dir, "other")
	if err := (&app{}).join(t.Context(), o); err == nil || exitCode(err) != exitUsage || !strings.Contains(err.Error(), "expected --dir "+o.unitDir) {
		t.Errorf("a folder that the unit does not use: %v", err)
	}
	expired := joining.Token{Bearer: "h." + base64.RawURLEncoding.EncodeToString([]byte(`{"jti":"t","exp":1}`)) + ".s"}
	o.token, o.systemd = expired.String(), filepath.Join(dir, "missing")
	if err := (&app{}).join(t.Context(), o); err == nil || !strings.Contains(err.Error(), "the clock of this host shows "+time.Now().UTC().Format("2006-01-02T")) {
		t.Errorf("a token that the clock of this host calls expired: %v", err)
	}
	if atomicfile.Exists(o.dir) {
		t.Error("the join has begun")
	}
}

// A join without the unit that it would start does not use its token, and leaves no file.
func TestJoinChecksUnitFirst(t *testing.T) {
	b := newJoinedBox(t)
	token := joining.Token{Bearer: "h." + base64.RawURLEncoding.EncodeToString([]byte(`{"jti":"t","exp":9999999999}`)) + ".s"}
	o := joinOptions{
		server: "https://127.0.0.1:1", token: token.String(), name: "a", address: "10.0.0.5:9", listen: ":7443", tunnel: joining.NoTunnel,
		dir: b.o.dir, boxFolder: b.root, defaults: b.o.defaults, unitDir: b.o.dir, systemd: b.o.systemd,
	}
	for state, advice := range map[string]string{"not-found": "install the package capstan", "masked": "systemctl unmask capstand.service"} {
		b.systemctl("echo " + state)
		if err := b.app.join(t.Context(), o); err == nil || !strings.Contains(err.Error(), "found "+state) || !strings.Contains(err.Error(), advice) {
			t.Errorf("%s: %v", state, err)
		}
	}
	if atomicfile.Exists(o.dir) || atomicfile.Exists(o.defaults) {
		t.Error("the join has begun")
	}
}

// Without systemd, the join prints a command that works: no folder of PATH contains capstand.
func TestJoinWithoutSystemd(t *testing.T) {
	var out bytes.Buffer
	a := &app{out: &out, assets: t.TempDir()}
	o := joinOptions{server: "https://plane", name: "rack-1", listen: ":7443", dir: "/var/lib/capstan/host/tls", systemd: filepath.Join(a.assets, "missing")}
	if err := a.startJoined(t.Context(), o, joining.Request{Name: "rack-1"}); err != nil {
		t.Fatal(err)
	}
	want := a.assets + "/capstand --assets " + a.assets + " --root /var/lib/capstan/host --listen :7443 --name rack-1\n"
	if !strings.HasSuffix(out.String(), "\n"+want) {
		t.Errorf("expected the command %q, found %q", want, out.String())
	}
}

// A join succeeds when capstand answers, and not when systemd has started it.
func TestJoinWaitsForCapstand(t *testing.T) {
	b := newJoinedBox(t)
	socket := filepath.Join(t.TempDir(), "capstand.sock")
	o := joinOptions{server: "https://plane", name: "rack-1", listen: ":7443", dir: b.o.dir, defaults: b.o.defaults, systemd: b.o.systemd, unitSocket: socket}
	b.must(os.MkdirAll(o.dir, 0o700))
	silent, err := net.Listen("unix", socket) // does not answer
	b.must(err)
	ends, end := context.WithCancelCause(t.Context())
	go func() {
		if _, err := silent.Accept(); err == nil {
			end(context.DeadlineExceeded)
		}
	}()
	if err := b.app.startJoined(ends, o, joining.Request{Name: "rack-1"}); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "journalctl -u capstand") || strings.Contains(b.out.String(), "runs") {
		t.Errorf("without an answer: %v, %s", err, b.out.String())
	}
	b.must(silent.Close())
	server := grpc.NewServer()
	t.Cleanup(server.Stop)
	hostpb.RegisterHostServer(server, fakeHost{})
	listener, err := net.Listen("unix", socket)
	b.must(err)
	go func() { _ = server.Serve(listener) }()
	later, cancel := context.WithTimeout(t.Context(), expect.Patience)
	defer cancel()
	if err := b.app.startJoined(later, o, joining.Request{Name: "rack-1"}); err != nil || !strings.Contains(b.out.String(), "capstand.service runs") {
		t.Errorf("with an answer: %v, %s", err, b.out.String())
	}
}

// TestJoinServer: other boxes get another URL for the plane of this box than its kubeconfig has, and the same URL for each other plane.
func TestJoinServer(t *testing.T) {
	with := embedded.Layout{Root: t.TempDir()}
	if err := errors.Join(atomicfile.WriteJSON(with.State(), embedded.State{Settings: embedded.Settings{APIAddress: "10.0.0.1:6443"}}, 0o600), os.WriteFile(with.AdminKubeconfig(), []byte(twoContexts), 0o600)); err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		a                app
		configured, want string
	}{
		"the plane of this box":                      {app{root: with.Root}, "https://127.0.0.1:1", "https://10.0.0.1:6443"},
		"the plane of this box, by its kubeconfig":   {app{root: with.Root, kubeconfig: with.AdminKubeconfig()}, "https://127.0.0.1:1", "https://10.0.0.1:6443"},
		"a plane without an address for other boxes": {app{root: t.TempDir()}, "https://127.0.0.1:1", "https://127.0.0.1:1"},
		"another plane, by $KUBECONFIG":              {app{root: with.Root}, "https://api.example:6443", "https://api.example:6443"},
		"another plane, by --context":                {app{root: with.Root, context: "c"}, "https://api.example:6443", "https://api.example:6443"},
	} {
		if got := test.a.joinServer(test.configured); got != test.want {
			t.Errorf("%s: %q, want %q", name, got, test.want)
		}
	}
}

func TestCheckJoinServer(t *testing.T) {
	for server, ok := range map[string]bool{
		"https://10.9.9.9:1": true, "https://api.example:6443": true,
		"http://10.9.9.9:1": false, "https://127.0.0.1:6443": false, "https://localhost:6443": false, "https://": false, "foo": false,
	} {
		if err := (&app{}).checkJoinServer(server); (err == nil) != ok || err != nil && exitCode(err) != exitUsage {
			t.Errorf("%s: %v", server, err)
		}
	}
}

func TestJoinRequest(t *testing.T) {
	for name, test := range map[string]struct {
		o    joinOptions
		want string // the address; empty is an error
	}{
		"set":                   {joinOptions{server: "https://10.0.0.1:6443", name: "a", address: "10.0.0.5:9", listen: ":7443"}, "10.0.0.5:9"},
		"a bad dial":            {joinOptions{server: "https://10.0.0.1", name: "a", dial: "plane.example", listen: ":7443"}, ""},
		"a bad tunnel":          {joinOptions{server: "https://10.0.0.1", name: "a", address: "10.0.0.5:9", listen: ":7443", tunnel: "127.0.0.1"}, ""},
		"no plane":              {joinOptions{server: "10.0.0.1:6443", name: "a", address: "10.0.0.5:9", listen: ":7443"}, ""},
		"no listen":             {joinOptions{server: "https://10.0.0.1", name: "a", address: "10.0.0.5:9", listen: "7443"}, ""},
		"a bad name":            {joinOptions{server: "https://10.0.0.1", name: "A_", address: "10.0.0.5:9", listen: ":7443"}, ""},
		"loopback":              {joinOptions{server: "https://127.0.0.1:6443", name: "a", listen: ":7443"}, ""},
		"listens on an address": {joinOptions{server: "https://127.0.0.1:6443", name: "a", listen: "10.1.0.5:8443"}, "10.1.0.5:8443"},
		"listens on IPv6":       {joinOptions{server: "https://127.0.0.1:6443", name: "a", listen: "[fd00::5]:8443"}, "[fd00::5]:8443"},
		"listens, and set":      {joinOptions{server: "https://127.0.0.1:6443", name: "a", address: "10.0.0.5:9", listen: "10.1.0.5:8443"}, "10.0.0.5:9"},
		"listens everywhere":    {joinOptions{server: "https://127.0.0.1:6443", name: "a", listen: "0.0.0.0:8443"}, ""},
		"listens on loopback":   {joinOptions{server: "https://127.0.0.1:6443", name: "a", listen: "127.0.0.1:8443"}, ""},
		"loopback, chosen":      {joinOptions{server: "https://10.0.0.1", name: "a", address: "127.0.0.1:7443", listen: ":7443"}, ""},
	} {
		r, err := test.o.request()
		if err == nil && (r.ProtocolVersion != hostpb.ProtocolVersion || r.MinimumManagerVersion != hostpb.MinimumManagerVersion) {
			t.Errorf("%s: %+v does not tell the versions of the protocol", name, r)
		}
		if r.Address != test.want && err == nil || (err == nil) != (test.want != "") {
			t.Errorf("%s: %+v, %v", name, r, err)
		}
	}
}

// A listener on all addresses, or on one that no other box reaches, has the own address of the box.
func TestReachable(t *testing.T) {
	own := netip.MustParseAddr("192.0.2.7")
	for listen, want := range map[string]string{
		"10.1.0.5": "10.1.0.5", "fd00::5": "fd00::5",
		"": "192.0.2.7", "0.0.0.0": "192.0.2.7", "::": "192.0.2.7", "127.0.0.1": "192.0.2.7", "::1": "192.0.2.7", "224.0.0.1": "192.0.2.7", "fe80::1%eth0": "192.0.2.7", "box.example": "192.0.2.7",
	} {
		if got := reachable(listen, own); got.String() != want {
			t.Errorf("%q: %s, want %s", listen, got, want)
		}
	}
}

// A host that dials has no address, and a tunnel address only if the administrator sets it.
func TestJoinRequestDials(t *testing.T) {
	o := joinOptions{server: "https://10.0.0.1:6443", name: "a", dial: "plane.example:7444", listen: ":7443"}
	r, err := o.request()
	if err != nil || !r.Dials || r.Address != "" || r.TunnelAddress != "" || r.TunnelSet {
		t.Errorf("%+v, %v", r, err)
	}
	o.tunnel = "203.0.113.5"
	if r, err := o.request(); err != nil || r.TunnelAddress != o.tunnel || !r.TunnelSet {
		t.Errorf("%+v, %v", r, err)
	}
}

// signer is a management API that signs each request of a host with its own authority.
type signer struct {
	*httptest.Server

	authority pki.Authority
	hosts     chan joining.Request // that asked for a certificate
}

func newSigner(t *testing.T) *signer {
	t.Helper()
	key, err := pki.NewKey()
	expect.NoError(t, err)
	authority, err := pki.NewAuthority("test", key, time.Now())
	expect.NoError(t, err)
	s := &signer{authority: authority, hosts: make(chan joining.Request, 1)}
	s.Server = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		csr := &certificatesv1.CertificateSigningRequest{}
		body, err1 := io.ReadAll(r.Body)
		_, kind, err2 := scheme.Codecs.UniversalDeserializer().Decode(body, nil, csr)
		properties, err3 := joining.ParseRequest(csr.Annotations[infrav1.HostJoinAnnotation])
		request, err4 := pki.DecodeRequest(csr.Spec.Request)
		if err := errors.Join(err1, err2, err3, err4); err != nil {
			t.Error(err)
			return
		}
		made, err := authority.Sign(pki.Leaf{CommonName: "capstand", Usages: pki.Server}, request.PublicKey, time.Hour, time.Now())
		if err != nil {
			t.Error(err)
			return
		}
		s.hosts <- properties
		csr.SetGroupVersionKind(*kind)
		csr.Status.Certificate = append(pki.EncodeCert(made), pki.EncodeCert(authority.Cert)...)
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(csr)
	}))
	return s
}

// serves begins to serve with a certificate of the authority for a name, made at some time for an hour.
func (s *signer) serves(t *testing.T, name string, at time.Time) {
	t.Helper()
	leaf := pki.Leaf{CommonName: "api", Usages: pki.Server}.For(name)
	made, key, err := s.authority.Issue(leaf, time.Hour, at)
	expect.NoError(t, err)
	s.TLS = &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{{Certificate: [][]byte{made.Raw}, PrivateKey: key}}}
	s.StartTLS()
	t.Cleanup(s.Close)
}

func (s *signer) token() joining.Token { return joining.Token{CA: pki.EncodeCert(s.authority.Cert)} }

// A host joins its management cluster again at another URL. It says that it returns, so that no other management cluster takes it over.
func TestJoinAtAnotherURL(t *testing.T) {
	s := newSigner(t)
	s.serves(t, "127.0.0.1", time.Now())
	a, dir := &app{out: io.Discard, errOut: io.Discard}, t.TempDir()
	for i, join := range []struct {
		server  string
		returns bool
	}{{s.URL, false}, {s.URL + "/", true}, {s.URL + "/", false}} {
		want := joined{Server: join.server, TokenID: fmt.Sprint(i), Request: joining.Request{Name: "rack-1", Address: "10.0.0.5:7443"}}
		if err := a.certify(t.Context(), joinOptions{server: join.server, dir: dir}, s.token(), want); err != nil {
			t.Fatal(err)
		}
		if host := <-s.hosts; host.Returns != join.returns {
			t.Errorf("join %d: the request %+v", i, host)
		}
		if record, err := readJoinRecord(dir); err != nil || record.joined != want {
			t.Errorf("join %d: the record %+v, %v", i, record, err)
		}
	}
}

// A wrong clock and a wrong name are not reported as another server, and another server is. None of them gets the token.
func TestJoinDoesNotTrustTheServer(t *testing.T) {
	now := time.Now()
	for name, test := range map[string]struct {
		name    string
		made    time.Time
		foreign bool
		want    string
	}{
		"the clock of the host is slow":             {"127.0.0.1", now.Add(2 * time.Hour), false, "and the clock of this host shows"},
		"another name":                              {"api.example", now, false, "expected a certificate of the management API for 127.0.0.1, found one for api.example: use one of these names in PLANE"},
		"another authority":                         {"127.0.0.1", now, true, "is not the management API of the token"},
		"another authority, and another name":       {"api.example", now, true, "is not the management API of the token"},
		"another authority, and the clock is wrong": {"127.0.0.1", now.Add(2 * time.Hour), true, "is not the management API of the token"},
	} {
		s := newSigner(t)
		s.serves(t, test.name, test.made)
		token := s.token()
		if test.foreign {
			token = newSigner(t).token()
		}
		if _, err := (&app{}).request(t.Context(), s.URL, token, joining.Request{Name: "rack-1"}, nil); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v", name, err)
		}
		if len(s.hosts) > 0 {
			t.Errorf("%s: the server got a request", name)
		}
	}
}

// A host that belongs to another management cluster, or has credentials that its administrator made, is not taken over.
func TestAlreadyJoined(t *testing.T) {
	want := joined{Server: "https://a", TokenID: "t", Request: joining.Request{Name: "a", Address: "10.0.0.5:7443"}}
	write := func(t *testing.T, dir string, v any) {
		t.Helper()
		if err := atomicfile.WriteJSON(filepath.Join(dir, joinedFile), v, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for name, test := range map[string]struct {
		prepare func(t *testing.T, dir string)
		refused string
	}{
		"a bare host": {func(*testing.T, string) {}, ""},
		"another token, or interrupted": {func(t *testing.T, dir string) {
			write(t, dir, joined{Server: "https://a", TokenID: "old"})
		}, ""},
		"no certificate":  {func(t *testing.T, dir string) { write(t, dir, want) }, ""},
		"another cluster": {func(t *testing.T, dir string) { write(t, dir, joined{Server: "https://b"}) }, "found CapstanHost  of https://b"},
		"another URL":     {func(t *testing.T, dir string) { write(t, dir, joined{Server: "https://b", Request: want.Request}) }, ""},
		"own credentials": {func(t *testing.T, dir string) {
			if err := os.WriteFile(filepath.Join(dir, "ca.key"), nil, 0o600); err != nil {
				t.Fatal(err)
			}
		}, "capstan host credentials"},
	} {
		dir := t.TempDir()
		test.prepare(t, dir)
		done, err := joinOptions{dir: dir}.alreadyJoined(want, time.Now())
		if done || (err == nil) != (test.refused == "") || err != nil && !strings.Contains(err.Error(), test.refused) {
			t.Errorf("%s: %v, %v", name, done, err)
		}
	}
}
